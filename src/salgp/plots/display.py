"""Plots straight from a prediction, in the manner of scikit-learn's displays: compute once, draw anywhere.

``ReliabilityDisplay.from_prediction(prediction, labels)`` computes and draws; the numbers stay in the object,
and ``display.plot(...)`` draws them again elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from salgp.metrics import (
    ReliabilityBins,
    RiskCoverage,
    accuracy_band,
    arrays_of,
    ece,
    reliability_bins,
    risk_coverage,
)
from salgp.metrics.checks import ArrayLike
from salgp.plots.comparison import risk_coverage_curves
from salgp.plots.reliability import draw_reliability, new_axes
from salgp.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ReliabilityDisplay", "RiskCoverageDisplay"]


@dataclass
class ReliabilityDisplay:
    """How often predictions are right, by their confidence, with an interval on every bar.

    Args:
        bins: confidence and accuracy by bin.
        ece: mean gap between the two.
        name: of the method, for the title.

    Attributes:
        ax_: the axes drawn on last.

    Example:
        >>> import torch
        >>> from salgp import Features
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> display = ReliabilityDisplay.from_prediction(Prediction.from_probs(f, f.probs), [0, 1, 1])
        >>> display.ax_.get_xlabel(), round(display.ece, 2)
        ('confidence', 0.19)
    """

    bins: ReliabilityBins
    ece: float
    name: str = ""
    ax_: Any = field(default=None, init=False, repr=False)

    @classmethod
    def from_prediction(
        cls,
        prediction: Prediction,
        labels: ArrayLike,
        *,
        n_bins: int = 15,
        name: str = "",
        ax: Axes | None = None,
    ) -> Self:
        """Compute from a prediction and the true classes, and draw."""
        correct = _correct(prediction, labels)
        bins = reliability_bins(prediction.confidence, correct, n_bins)
        return cls(bins, ece(prediction.confidence, correct, n_bins), name).plot(ax)

    def plot(self, ax: Axes | None = None, *, level: float = 0.9) -> Self:
        """Draw on ``ax``, or on a new figure, with exact intervals of this level."""
        self.ax_ = draw_reliability(new_axes(ax), self.bins, accuracy_band(self.bins, level))
        self.ax_.set_title(f"{self.name}: gap {self.ece:.3f}" if self.name else f"gap {self.ece:.3f}")
        return self


@dataclass
class RiskCoverageDisplay:
    """Error rate among the predictions kept, by the share kept, surest first.

    Args:
        curve: of `salgp.metrics.risk_coverage`.
        name: of the method, for the legend.

    Attributes:
        ax_: the axes drawn on last.

    Example:
        >>> import torch
        >>> from salgp import Features
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> p = Prediction.from_probs(f, f.probs)
        >>> RiskCoverageDisplay.from_prediction(p, [0, 1, 1], name="raw").ax_.get_ylabel()
        'error rate among accepted'
    """

    curve: RiskCoverage
    name: str = "prediction"
    ax_: Any = field(default=None, init=False, repr=False)

    @classmethod
    def from_prediction(
        cls,
        prediction: Prediction,
        labels: ArrayLike,
        *,
        name: str = "prediction",
        ax: Axes | None = None,
    ) -> Self:
        """Compute from a prediction and the true classes, and draw."""
        return cls(risk_coverage(prediction.confidence, _correct(prediction, labels)), name).plot(ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw on ``ax``, or on a new figure."""
        self.ax_ = risk_coverage_curves({self.name: self.curve}, ax)
        return self


def _correct(prediction: Prediction, labels: ArrayLike) -> Any:
    return arrays_of(prediction, labels)["correct"]
