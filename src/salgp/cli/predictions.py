"""Predictions as files: safetensors, Parquet or CSV, by the suffix; one row per sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.marks import PREDICTION_TABLE

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.prediction import Prediction

__all__ = ["PREDICTION_FORMAT", "TABLES", "check_suffix", "harmless", "write_prediction", "write_table"]

PREDICTION_FORMAT = "salgp-prediction"
TABLES = (".parquet", ".csv")
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a spreadsheet takes for the beginning of a formula, wide signs of Asian scripts among them."""


def write_prediction(
    path: Path, prediction: Prediction, before: Tensor, classes: Sequence[str] | None = None
) -> Path:
    """Write one row per sample: label, confidence, its error bar, and the network's own confidence.

    Where the classes have names, a table has them too: in a column ``class``, and in ``probs.NAME``.
    """
    if path.suffix == ".safetensors":
        return _write_tensors(path, prediction, before)
    check_suffix(path, ".safetensors", *TABLES)
    return write_table(path, _columns(prediction, before, classes), PREDICTION_TABLE)


def check_suffix(path: Path, *suffixes: str) -> None:
    """Refuse a name with any other suffix than these.

    Example:
        >>> check_suffix(Path("a.txt"), ".csv", ".parquet")
        Traceback (most recent call last):
        ...
        ValueError: a.txt: expected a name that ends in .csv or .parquet
    """
    if path.suffix not in suffixes:
        *others, last = suffixes
        raise ValueError(f"{path}: expected a name that ends in {', '.join(others)} or {last}")


def write_table(path: Path, columns: Mapping[str, Any], mark: bytes | None = None) -> Path:
    """Write columns of equal length as Parquet, marked in its metadata, or as CSV, by the suffix."""
    from salgp.storage import write_whole

    if path.suffix == ".csv":
        return write_whole(path, lambda part: _write_csv(part, columns))
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns, metadata=None if mark is None else {b"format": mark})
    return write_whole(path, lambda part: pq.write_table(table, str(part)))


def harmless(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: text that begins like one gets an apostrophe.

    Example:
        >>> harmless("=1+1"), harmless("cat"), harmless(-0.5)
        ("'=1+1", 'cat', -0.5)
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell


def _columns(prediction: Prediction, before: Tensor, classes: Sequence[str] | None) -> dict[str, Any]:
    """One column per figure; the class probabilities become one column each."""
    import numpy as np

    arrays = prediction.numpy()
    columns = {k: x for k, x in arrays.items() if x.ndim == 1}
    named = classes is not None and len(set(classes)) == arrays["probs"].shape[1]
    names = list(classes) if classes is not None and named else range(arrays["probs"].shape[1])
    if named:
        columns = {"label": columns.pop("label"), "class": np.array(names)[arrays["label"]], **columns}
    columns["network_confidence"] = before.cpu().numpy()
    terms = prediction.layers
    if terms is not None:
        columns |= {
            f"correction.{name}": terms.mean[:, j].cpu().numpy() for j, name in enumerate(terms.names)
        }
    return columns | {f"probs.{name}": arrays["probs"][:, j] for j, name in enumerate(names)}


def _write_csv(part: Path, columns: Mapping[str, Any]) -> None:
    import csv

    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(harmless, columns))
        rows = zip(*(x.tolist() for x in columns.values()), strict=True)
        writer.writerows([harmless(cell) for cell in row] for row in rows)


def _write_tensors(path: Path, prediction: Prediction, before: Tensor) -> Path:
    import torch

    from salgp.storage import write_tensors

    tensors = {k: torch.as_tensor(x) for k, x in prediction.numpy().items()} | {"network_confidence": before}
    terms = prediction.layers
    if terms is not None:
        tensors |= {"layers.mean": terms.mean} | ({} if terms.std is None else {"layers.std": terms.std})
    names = "[]" if terms is None else json.dumps(terms.names)
    return write_tensors(path, tensors, {"format": PREDICTION_FORMAT, "format_version": "1", "layers": names})
