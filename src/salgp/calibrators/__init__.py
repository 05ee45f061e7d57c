"""All calibrators behind one contract, looked up by name.

Each is a thin estimator in its own file; `get` builds one by name, `names` lists them with a line each.
"""

from __future__ import annotations

import importlib
from typing import Any

from salgp.calibrators.base import Calibrator, load_calibrator

__all__ = ["Calibrator", "get", "load_calibrator", "names"]

_WHERE = {
    "uncalibrated": "baselines.scaling.Uncalibrated",
    "temperature": "baselines.scaling.TemperatureScaling",
    "perturbed-temperature": "baselines.scaling.PerturbedTemperatureScaling",
    "ensemble-temperature": "baselines.scaling.EnsembleTemperatureScaling",
    "vector": "baselines.multiclass.VectorScaling",
    "matrix": "baselines.multiclass.MatrixScaling",
    "dirichlet": "baselines.multiclass.DirichletCalibration",
    "platt": "baselines.sigmoid.PlattScaling",
    "beta": "baselines.sigmoid.BetaCalibration",
    "isotonic": "baselines.isotonic.IsotonicRegression",
    "histogram": "baselines.binning.HistogramBinning",
    "bbq": "baselines.bbq.BBQ",
    "latent-gp": "baselines.latent_gp.GPCalibration",
    "deep-gp": "baselines.deep.DeepGPCalibrator",
    "density-aware": "baselines.density.DensityAwareCalibration",
    "trust-score": "baselines.trust.TrustScore",
    "deep-knn": "baselines.trust.DeepKNN",
    "residual-gp": "layerwise.residual.ResidualGP",
    "layer-evidence": "evidence.calibrator.LayerEvidence",
    "sal-gp": "layerwise.salgp.SALGP",
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
    module, _, cls = _WHERE[name].rpartition(".")
    found: type[Calibrator] = getattr(importlib.import_module(f"salgp.calibrators.{module}"), cls)
    return found


def __getattr__(attribute: str) -> Any:
    for path in _WHERE.values():
        if path.endswith(f".{attribute}"):
            return getattr(importlib.import_module(f"salgp.calibrators.{path.rpartition('.')[0]}"), attribute)
    raise AttributeError(f"module 'salgp.calibrators' has no attribute {attribute!r}")
