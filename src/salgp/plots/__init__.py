"""Plots that compute first and then draw: on the axes given, or on a new figure of their own.

All return the axes and leave matplotlib's settings alone; ``axes.figure.savefig(...)`` writes a file.
"""

from __future__ import annotations

from salgp.plots.comparison import confusion_matrix, method_comparison, risk_coverage_curves
from salgp.plots.correction import layer_profile, residual_fit
from salgp.plots.reliability import reliability_diagram

__all__ = [
    "confusion_matrix",
    "layer_profile",
    "method_comparison",
    "reliability_diagram",
    "residual_fit",
    "risk_coverage_curves",
]
