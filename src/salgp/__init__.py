"""Confidences that can be trusted, an error bar on each, and the layer that caused each correction.

`calibrate` takes a trained PyTorch classifier and a labelled calibration set and returns the same classifier
with calibrated confidences. `extract`, `SALGP` and `Prediction` are the steps it is made of.
Names are loaded on first use, so that ``import salgp`` costs little more than ``import torch``.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_WHERE = {
    "CalibratedClassifier": "classifier",
    "CalibratedOutputs": "outputs",
    "Features": "features",
    "FormatError": "io",
    "LayerEvidence": "calibrators.evidence.calibrator",
    "LayerTerms": "prediction",
    "Monitor": "monitor.monitor",
    "Prediction": "prediction",
    "Reader": "network.reader",
    "ResidualGP": "calibrators.gp.salgp",
    "SALGP": "calibrators.gp.salgp",
    "calibrate": "classifier",
    "calibrate_outputs": "outputs",
    "evaluate": "metrics",
    "extract": "network.extract",
    "load": "classifier",
    "load_features": "features",
}
_SUBMODULES = (
    "calibrators",
    "decide",
    "estimate",
    "export",
    "files",
    "gp",
    "metrics",
    "monitor",
    "onnx",
    "plots",
    "report",
    "sets",
    "sklearn",
    "store",
    "text",
)

__all__ = sorted([*_WHERE, *_SUBMODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"salgp.{_WHERE[name]}"), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"salgp.{name}")
    else:
        raise AttributeError(f"module 'salgp' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
