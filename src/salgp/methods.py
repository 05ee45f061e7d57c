"""The names of all calibrators, without importing any of them.

The command line refuses and completes names by this table before PyTorch is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["CLASSES", "GROUP", "entry_points"]

GROUP = "salgp.calibrators"
"""Entry points of this group name calibrators of other packages."""

CLASSES = {
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
"""Short name -> module.Class inside `salgp.calibrators`; modules are imported on first use."""


def entry_points() -> dict[str, EntryPoint]:
    """Calibrators that other installed packages announce, by name.

    Example:
        >>> "temperature" in entry_points()  # one of our own
        False
    """
    from importlib import metadata  # takes longer than the rest of a help text

    return {point.name: point for point in metadata.entry_points(group=GROUP)}
