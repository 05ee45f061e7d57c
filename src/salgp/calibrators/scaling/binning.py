"""The share of correct samples in each bin of the confidence: histogram binning.

Reference: Zadrozny and Elkan, Obtaining calibrated probability estimates, ICML 2001.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.calibrators.scaling.toplabel import from_top_label, top_label
from salgp.features import Features
from salgp.prediction import Prediction

__all__ = ["HistogramBinning"]


class HistogramBinning(Calibrator):
    """Replace the confidence by the share of correct calibration samples in its bin.

    A bin with ``k`` correct of ``m`` samples gets ``(k + smoothing * centre) / (m + smoothing)``: an empty
    bin keeps its centre, and no bin is exactly 0 or 1 unless ``smoothing`` is 0. Confidences of exactly 0 and
    1 belong to the first and the last bin.

    Args:
        n_bins: number of bins.
        binning: ``"width"`` for bins of equal width on [0, 1], ``"mass"`` for bins of equal numbers of
            samples.
        smoothing: pseudo-samples at the bin's centre.

    Attributes:
        edges_: ``(n_bins + 1,)`` bin edges from 0 to 1; a bin holds its lower edge.
        values_: ``(n_bins,)`` calibrated confidence of each bin.

    Example:
        >>> f = Features(torch.tensor([[3.0, 0.0]]).repeat(9, 1))
        >>> histogram = HistogramBinning(n_bins=1).fit(f, [0] * 7 + [1] * 2)
        >>> histogram.values_  # (7 + 0.5) / (9 + 1)
        tensor([0.7500], dtype=torch.float64)
    """

    name: ClassVar[str] = "histogram"
    gives_confidence_only: ClassVar[bool] = True

    def __init__(
        self, n_bins: int = 15, binning: Literal["width", "mass"] = "width", smoothing: float = 1.0
    ) -> None:
        self.n_bins = n_bins
        self.binning = binning
        self.smoothing = smoothing

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if self.n_bins < 1:
            raise ValueError(f"n_bins must be at least 1, got {self.n_bins}")
        if self.smoothing < 0:
            raise ValueError(f"smoothing must not be negative, got {self.smoothing}")
        top = top_label(features)
        score = top.confidence.double()
        edges = self._edges(score)
        bins = _bin_of(score, edges)
        hits = torch.bincount(bins, (top.label == labels).double(), minlength=self.n_bins)
        size = torch.bincount(bins, minlength=self.n_bins)
        centre = (edges[1:] + edges[:-1]) / 2
        values = (hits + self.smoothing * centre) / (size + self.smoothing)
        self.edges_, self.values_ = edges.cpu(), torch.where(size + self.smoothing > 0, values, centre).cpu()

    def _edges(self, score: Tensor) -> Tensor:
        edges = torch.linspace(0, 1, self.n_bins + 1, dtype=score.dtype, device=score.device)
        if self.binning == "width":
            return edges
        if self.binning != "mass":
            raise ValueError(f"binning must be 'width' or 'mass', got {self.binning!r}")
        inner = score.sort().values[(edges[1:-1] * len(score)).long()]  # equal counts, up to ties
        return torch.cat([edges[:1], inner, edges[-1:]])

    def _predict(self, features: Features) -> Prediction:
        score = top_label(features).confidence.double()
        bins = _bin_of(score, self.edges_.to(score.device))
        return from_top_label(features, self.values_.to(score.device)[bins], self.rest_temperature_)


def _bin_of(score: Tensor, edges: Tensor) -> Tensor:
    """Bin number of each score; the outer bins reach beyond their edges."""
    return torch.searchsorted(edges[1:-1].contiguous(), score, right=True)
