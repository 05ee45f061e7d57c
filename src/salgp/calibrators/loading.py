"""A saved calibrator read back, and checked.

Checksums tell that the bytes are those that were written (`salgp.storage.folders`). Here it is checked that
the values make sense: the numbers of classes and features can be held, a temperature is positive, and
two made-up samples get probabilities.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.calibrators.registry import get
from salgp.calibrators.saving import FORMAT_VERSION, KIND
from salgp.features import Features
from salgp.storage import FormatError, check_kind, read_folder, read_json, read_tensors, reading, unpack

__all__ = ["load_calibrator", "read_calibrator"]

LARGEST = 10_000_000
"""Most classes and features per sample that a file may announce."""


def load_calibrator(folder: str | os.PathLike[str]) -> Calibrator:
    """Read a calibrator written by `Calibrator.save`; it predicts bit for bit the same.

    Example:
        >>> import tempfile, torch, salgp
        >>> f = salgp.Features(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
        >>> labels = torch.arange(50) % 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = salgp.calibrators.get("temperature").fit(f, labels)
        ...     loaded = salgp.load(saved.save(folder))
        >>> bool((saved.predict(f).probs == loaded.predict(f).probs).all())
        True
    """
    if not (Path(folder) / "calibrator.json").is_file():
        raise FileNotFoundError(
            f"{folder}: no calibrator.json here; expected a folder written by Calibrator.save"
        )
    return read_folder(folder, KIND, read_calibrator)


def read_calibrator(folder: Path) -> Calibrator:
    """The calibrator that `write_calibrator` put into a folder whose checksums were compared."""
    path = folder / "calibrator.json"
    header = read_json(path)
    if not isinstance(header, dict):
        raise FormatError(f"{path}: expected a JSON object of {KIND!r}, got a {type(header).__name__}")
    check_kind(path, header, KIND, FORMAT_VERSION)
    tensors, _ = read_tensors(folder / "calibrator.safetensors")
    with reading(path, "a whole calibrator"):
        calibrator = _build(header, tensors)
        _check_values(calibrator)
    return calibrator


def _build(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Calibrator:
    missing = [key for key in ("calibrator", "config", "state") if key not in header]
    if missing:
        raise FormatError(f"no {missing[0]!r}")
    calibrator = get(header["calibrator"], **unpack(header["config"], tensors))
    for key, value in unpack(header["state"], tensors).items():
        if not key.endswith("_") or key.startswith("_"):
            raise FormatError(f"{key[:80]!r} is no learned attribute")
        setattr(calibrator, key, value)
    return calibrator


def _check_values(calibrator: Calibrator) -> None:
    """Refuse learned values that no fit gives: the calibrator must give probabilities for any input."""
    calibrator._check_fitted()
    c, widths = calibrator.n_classes_, calibrator.layer_widths_
    counts = [c, *widths.values()]
    if not all(type(count) is int and count >= 0 for count in counts) or not 2 <= sum(counts) <= LARGEST:
        raise FormatError(f"{c!r} classes and layers of width {widths!r}, expected up to {LARGEST} numbers")
    temperature = vars(calibrator).get("temperature_", 1.0)
    if not 0.0 < float(temperature) < math.inf:
        raise FormatError(f"a temperature of {temperature}, expected a positive number")
    zeros = calibrator.zeros_
    if zeros is not None and (zeros.shape != (c,) or not bool(torch.isfinite(zeros).all())):
        raise FormatError(f"logits of zeros of shape {tuple(zeros.shape)}, expected {c} finite numbers")
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(2, c, generator=numbers)
    layers = {name: torch.randn(2, d, generator=numbers) for name, d in widths.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = calibrator.predict(Features(logits, layers))
    rows = found.probs.double().sum(dim=1)
    if not bool(torch.isfinite(found.confidence).all()) or float((rows - 1).abs().max()) > 1e-3:
        raise FormatError("it predicts no probabilities")
