"""A fitted calibrator as two files: its arguments and learned values as JSON, its arrays as safetensors.

Checksums tell that the bytes are those that were written (`salgp.storage.folders`). Here it is checked that
the values make sense: the numbers of classes and features can be held, a temperature is positive, and
two made-up samples get probabilities.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from salgp.features import Features
from salgp.storage import (
    FormatError,
    check_kind,
    pack,
    read_json,
    read_tensors,
    reading,
    unpack,
    write_json,
    write_tensors,
)

if TYPE_CHECKING:
    from salgp.calibrators.base import Calibrator

__all__ = ["KIND", "read_calibrator", "write_calibrator"]

KIND = "salgp-calibrator"
FORMAT_VERSION = 2
LARGEST = 10_000_000
"""Most classes and features per sample that a file may announce."""


def write_calibrator(calibrator: Calibrator, folder: Path) -> None:
    """Put the two files of a fitted calibrator into a folder that is being written."""
    tensors: dict[str, Tensor] = {}
    learned = {k: v for k, v in vars(calibrator).items() if k.endswith("_") and not k.startswith("_")}
    header = {
        "format": KIND,
        "format_version": FORMAT_VERSION,
        "calibrator": calibrator.name,
        "state": pack(learned, tensors),
        "config": pack(calibrator.get_params(deep=False), tensors, "config"),
    }
    write_tensors(folder / "calibrator.safetensors", tensors, {"format": KIND})
    write_json(folder / "calibrator.json", header)


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
    from salgp.calibrators import get

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
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(2, c, generator=numbers)
    layers = {name: torch.randn(2, d, generator=numbers) for name, d in widths.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = calibrator.predict(Features(logits, layers))
    rows = found.probs.double().sum(dim=1)
    if not bool(torch.isfinite(found.confidence).all()) or float((rows - 1).abs().max()) > 1e-3:
        raise FormatError("it predicts no probabilities")
