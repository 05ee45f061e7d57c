"""Tables that salgp writes: Parquet or CSV by the suffix, without cells that a spreadsheet would run."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from salgp.io.files import write_whole

__all__ = ["SUFFIXES", "harmless", "write_table"]

SUFFIXES = (".csv", ".parquet")
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a spreadsheet takes for the beginning of a formula, wide signs of Asian scripts among them."""


def write_table(
    path: str | os.PathLike[str], columns: Mapping[str, NDArray[Any]], signature: bytes | None = None
) -> Path:
    """Write columns of equal length as Parquet, signed in its metadata, or as CSV, by the suffix."""
    path = Path(path)
    if path.suffix == ".csv":
        return write_whole(path, lambda part: _write_csv(part, columns))
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: expected a name that ends in .csv or .parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns, metadata=None if signature is None else {b"format": signature})
    return write_whole(path, lambda part: pq.write_table(table, str(part)))


def harmless(cell: Any) -> Any:
    """The cell, with a quotation mark before text that a spreadsheet would take for a formula.

    Example:
        >>> harmless("=1+1"), harmless("cat"), harmless(-0.5)
        ("'=1+1", 'cat', -0.5)
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell


def _write_csv(part: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(harmless, columns))
        rows = zip(*(x.tolist() for x in columns.values()), strict=True)
        writer.writerows([harmless(cell) for cell in row] for row in rows)
