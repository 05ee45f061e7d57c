"""All calibrators behind one contract, looked up by name.

Each is a thin estimator in its own file; `get` builds one by name, `names` lists them with a line each.
"""

from __future__ import annotations

import importlib
from typing import Any

from salgp.calibrators.base import Calibrator, load_calibrator

__all__ = ["Calibrator", "get", "load_calibrator", "names"]

_WHERE = {
    "uncalibrated": "scaling.Uncalibrated",
    "temperature": "scaling.TemperatureScaling",
    "perturbed-temperature": "scaling.PerturbedTemperatureScaling",
    "ensemble-temperature": "scaling.EnsembleTemperatureScaling",
    "vector": "multiclass.VectorScaling",
    "matrix": "multiclass.MatrixScaling",
    "dirichlet": "multiclass.DirichletCalibration",
    "platt": "sigmoid.PlattScaling",
    "beta": "sigmoid.BetaCalibration",
    "isotonic": "isotonic.IsotonicRegression",
    "histogram": "binning.HistogramBinning",
    "bbq": "bbq.BBQ",
    "latent-gp": "latent_gp.GPCalibration",
    "deep-gp": "deep.DeepGPCalibrator",
    "density-aware": "density.DensityAwareCalibration",
    "trust-score": "trust.TrustScore",
    "deep-knn": "trust.DeepKNN",
    "residual-gp": "residual_gp.ResidualGP",
    "layer-evidence": "evidence.LayerEvidence",
    "sal-gp": "layerwise.SALGP",
}
"""Short name -> module.Class inside this package; modules are imported on first use."""


def get(name: str, **arguments: Any) -> Calibrator:
    """Build the calibrator called ``name``.

    Example:
        >>> get("temperature")
        TemperatureScaling()
    """
    if name not in _WHERE:
        raise KeyError(f"no calibrator called {name!r}; known: {', '.join(sorted(_WHERE))}")
    return _load(name)(**arguments)


def names() -> dict[str, str]:
    """Every calibrator's name and the first line of its description.

    Example:
        >>> "temperature" in names()
        True
    """
    return {name: (_load(name).__doc__ or "").strip().splitlines()[0] for name in _WHERE}


def _load(name: str) -> type[Calibrator]:
    module, _, cls = _WHERE[name].partition(".")
    found: type[Calibrator] = getattr(importlib.import_module(f"salgp.calibrators.{module}"), cls)
    return found


def __getattr__(attribute: str) -> Any:
    for path in _WHERE.values():
        if path.endswith(f".{attribute}"):
            return getattr(importlib.import_module(f"salgp.calibrators.{path.partition('.')[0]}"), attribute)
    raise AttributeError(f"module 'salgp.calibrators' has no attribute {attribute!r}")
