"""A saved calibrator read back, and checked.

The file's checksum tells that the bytes are those that were written. Here it is checked that the values make
sense: the numbers of classes and features can be held, a temperature is positive, and two made-up samples get
probabilities.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from salgp.calibrators.base import FILE, FORMAT_VERSION, KIND, Calibrator, is_learned
from salgp.calibrators.registry import get
from salgp.features import Features
from salgp.io import FormatError, read_value, reading
from salgp.io.files import AnyPath

__all__ = ["load_parts", "read_parts"]

LARGEST = 10_000_000
"""Most classes and features per sample that a file may announce."""


def load_calibrator(folder: AnyPath) -> Calibrator:
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
    return load_parts(folder)[0]


def load_parts(folder: AnyPath) -> tuple[Calibrator, dict[str, Any]]:
    """The calibrator in a folder, and what was saved with it, both of one version of the file."""
    found = read_parts(folder)
    with reading(Path(folder) / FILE, "a whole calibrator"):
        calibrator = calibrator_from(found)
        _check_values(calibrator)
    return calibrator, found


def read_parts(folder: AnyPath) -> dict[str, Any]:
    """Contents of a calibrator's file, by name."""
    path = Path(folder) / FILE
    if not path.exists():
        raise FileNotFoundError(f"{folder}: no {FILE} here; expected a folder written by Calibrator.save")
    found = read_value(path, KIND, FORMAT_VERSION, _register)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected the parts of a calibrator, got a {type(found).__name__}")
    return found


def calibrator_from(value: Mapping[str, Any]) -> Calibrator:
    """Inverse of `salgp.calibrators.base.calibrator_value`."""
    missing = [key for key in ("calibrator", "config", "state") if key not in value]
    if missing:
        raise FormatError(f"no {missing[0]!r}")
    calibrator = get(value["calibrator"], **value["config"])
    for key, learned in value["state"].items():
        if not is_learned(key):
            raise FormatError(f"{key[:80]!r} is not a learned attribute")
        setattr(calibrator, key, learned)
    return calibrator


def _register(packed: Any) -> None:
    """Import the modules of a packed calibrator, which make the types of what it learned known."""
    get(dict(packed["$dict"][:1])["calibrator"])


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
    zeros = calibrator.zero_logits_
    if zeros is not None and (zeros.shape != (c,) or not zeros.isfinite().all()):
        raise FormatError(f"logits of zeros of shape {tuple(zeros.shape)}, expected {c} finite numbers")
    _check_prediction(calibrator, c, widths)


def _check_prediction(calibrator: Calibrator, n_classes: int, widths: Mapping[str, int]) -> None:
    """Refuse a calibrator that gives two made-up samples no probabilities."""
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(2, n_classes, generator=numbers)
    layers = {name: torch.randn(2, width, generator=numbers) for name, width in widths.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = calibrator.predict(Features(logits, layers))
    rows = found.probs.double().sum(dim=1)
    if not found.confidence.isfinite().all() or (rows - 1).abs().max() > 1e-3:
        raise FormatError("it predicts no probabilities")
