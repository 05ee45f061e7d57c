"""Plots by matplotlib that compute first and then draw: on the axes given, or on a new figure of their own.

All return the axes and leave matplotlib's settings alone; ``axes.figure.savefig(...)`` writes a file. The
colours are told apart by colour-blind readers, and every distinction is also one of hatch, marker or dash, so
that a grey print loses nothing. Figures are made without pyplot: no global state, nothing to close.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from salgp.extras import require
from salgp.metrics import ReliabilityBins, RiskCoverage, accuracy_band, reliability_bins
from salgp.metrics.metric import ArrayLike, FloatArray, as_numbers, to_double

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from salgp.prediction import LayerTerms

__all__ = ["CYCLE", "layer_profile", "new_figure", "reliability_diagram", "risk_coverage_curves"]

BLUE, RED, GREY = "#4477AA", "#CC3311", "#777777"
CYCLE = (
    ("#0072B2", "-", "o", ""),
    ("#D55E00", "--", "s", "//"),
    ("#009E73", "-.", "^", ".."),
    ("#CC79A7", ":", "D", "xx"),
    ("#E69F00", (0, (5, 1, 1, 1, 1, 1)), "v", "\\\\"),
    ("#56B4E9", (0, (8, 3)), "P", "++"),
    ("#000000", (0, (1, 1)), "X", "--"),
)
"""Colour, dash, marker and hatch of the k-th line, point or bar of a plot."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of the given size in inches, laid out so that labels never overlap."""
    require("matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_axes(ax: Axes | None, height: float = 3.6) -> Axes:
    """The axes given, or those of a new figure."""
    return new_figure(5.0, height).add_subplot() if ax is None else ax


_FAINT_RED = "#F3C4B8"
DOTS = (0, (1, 1.6))
UNIT = (0, 1)
Look = dict[str, Any]


def reliability_diagram(
    confidence: ArrayLike,
    correct: ArrayLike,
    n_bins: int = 15,
    *,
    figure: Figure | SubFigure | None = None,
    axes: tuple[Axes, Axes] | None = None,
    band: float | None = None,
    title: str = "",
) -> tuple[Axes, Axes]:
    """Upper panel: share of samples by confidence; lower panel: observed accuracy (blue) and its gap to the
    confidence (red).

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        n_bins: number of equal-width bins.
        figure: figure or subfigure to draw into; a new one by default.
        axes: upper and lower axes to draw on, instead of a figure.
        band: level of an exact interval on each accuracy, e.g. 0.9; none by default.
        title: above the upper panel.

    Returns:
        The upper and the lower axes.

    Example:
        >>> upper, lower = reliability_diagram([0.6, 0.9, 0.95], [0, 1, 1], n_bins=5)
        >>> lower.get_xlabel()
        'confidence'
    """
    bins = reliability_bins(confidence, correct, n_bins)
    if axes is None:
        where = new_figure(4.0, 4.6) if figure is None else figure
        axes = where.subplots(2, 1, sharex=True, height_ratios=[1, 2.2])
    upper, lower = axes
    _draw_shares(upper, bins)
    _draw_accuracy(lower, bins)
    if band is not None:
        _draw_intervals(lower, bins, band)
    lower.legend(loc="upper left", fontsize="small", framealpha=0.9)
    upper.set_title(title, fontsize="medium")
    return upper, lower


def _draw_shares(ax: Axes, bins: ReliabilityBins) -> None:
    """Share of samples per bin, with dotted lines at mean accuracy and mean confidence."""
    look = Look(align="edge", color="0.85", edgecolor="0.3", linewidth=0.6)
    left, width = bins.edges[:-1], np.diff(bins.edges)
    ax.bar(left, bins.share, width, **look)
    _draw_mean(ax, bins, "accuracy", color=BLUE, linestyle=":", linewidth=1.6)
    _draw_mean(ax, bins, "confidence", color=RED, linestyle=DOTS, linewidth=3.6)
    top = min(1.0, 1.15 * float(bins.share.max()))
    ax.set(ylabel="share of\nsamples", xlim=UNIT, ylim=(0, top))
    ax.legend(loc="upper left", fontsize="small", framealpha=0.9)


def _draw_mean(ax: Axes, bins: ReliabilityBins, what: str, **look: Any) -> None:
    mean = float(np.nansum(bins.share * getattr(bins, what)))
    ax.axvline(mean, label=f"mean {what} {mean:.3f}", **look)


def _draw_accuracy(ax: Axes, bins: ReliabilityBins) -> None:
    """Accuracy by bin, the gap to the mean confidence, and the diagonal."""
    some = bins.count > 0
    columns = bins.edges[:-1], np.diff(bins.edges), bins.accuracy, bins.gap
    left, width, accuracy, gap = (column[some] for column in columns)
    look = Look(align="edge", color=BLUE, edgecolor="black", linewidth=0.6)
    ax.bar(left, accuracy, width, label="observed accuracy", **look)
    look = {"align": "edge", "facecolor": _FAINT_RED, "edgecolor": RED, "linewidth": 0.8}
    for kind, hatch, here in (("over", "///", gap > 0), ("under", "\\\\\\", gap < 0)):
        if here.any():
            bars = [column[here] for column in (left, gap, width, accuracy)]
            ax.bar(*bars, hatch=hatch, label=f"gap: {kind}confident", **look)
    ax.hlines(accuracy, left, left + width, color="black", linewidth=1.8)
    look = Look(linestyle="--", color=GREY, linewidth=1.2, label="perfectly calibrated")
    ax.plot(UNIT, UNIT, **look)
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=UNIT, ylim=UNIT)


def _draw_intervals(ax: Axes, bins: ReliabilityBins, level: float) -> None:
    """Exact interval of the accuracy of every bin."""
    some = bins.count > 0
    middle = (bins.edges[:-1] + bins.edges[1:]) / 2
    error = abs(np.stack(accuracy_band(bins, level)) - bins.accuracy)
    look = Look(fmt="none", ecolor="black", elinewidth=1.2, capsize=2.5)
    x, y = middle[some], bins.accuracy[some]
    ax.errorbar(x, y, error[:, some], label="exact interval", **look)


def risk_coverage_curves(curves: Mapping[str, RiskCoverage], ax: Axes | None = None) -> Axes:
    """Error rate among accepted samples against the share accepted, one curve per method.

    Args:
        curves: method name to its curve from `salgp.metrics.risk_coverage`.
        ax: axes to draw on; a new figure by default.

    Returns:
        The axes.

    Example:
        >>> from salgp.metrics import risk_coverage
        >>> risk_coverage_curves({"raw": risk_coverage([0.9, 0.8], [1, 0])}).get_ylabel()
        'error rate among accepted'
    """
    if not curves:
        raise ValueError("nothing to draw: the mapping of curves is empty")
    ax = new_axes(ax)
    for k, (name, curve) in enumerate(curves.items()):
        colour, dash, _, _ = CYCLE[k % len(CYCLE)]
        name = f"{name} (area {curve.area:.3f})"
        look = Look(color=colour, linestyle=dash, linewidth=1.8, label=name)
        ax.plot(curve.coverage, curve.risk, **look)
    ax.set(xlabel="coverage (share of samples accepted)", xlim=(0, 1))
    ax.set(ylabel="error rate among accepted", ylim=(0, None))
    ax.legend(loc="best", fontsize="small")
    return ax


def layer_profile(terms: LayerTerms, weights: ArrayLike | None = None, ax: Axes | None = None) -> Axes:
    """Bars by layer: share of the learned weight, of the mean absolute correction, and of the mean variance.

    Args:
        terms: per-layer corrections of a prediction.
        weights: ``(L,)`` learned non-negative weights, such as kernel variances; by default left out.
        ax: axes to draw on; a new figure by default.

    Returns:
        The axes.

    Example:
        >>> import torch
        >>> from salgp import LayerTerms
        >>> ax = layer_profile(LayerTerms(("conv1", "conv2"), torch.tensor([[0.1, -0.3]])))
        >>> [t.get_text() for t in ax.get_yticklabels()]
        ['conv1', 'conv2']
    """
    series = _of_layers(terms, weights)
    n, height = len(terms.names), 0.8 / len(series)
    ax = new_axes(ax, 1.2 + 0.22 * n * len(series))
    above = (len(series) - 1) / 2 * height
    place = np.arange(n) - above
    for k, (name, values) in enumerate(series.items()):
        colour, _, _, hatch = CYCLE[k]
        share = values / (values.sum() or 1.0)
        look = Look(color=colour, edgecolor="white", hatch=hatch, label=f"share of {name}")
        ax.barh(place + k * height, share, height, **look)
    ax.set(xlabel="share", xlim=(0, None), ylim=(n - 0.5, -0.5))
    ax.set_yticks(range(n), terms.names)
    look = Look(bbox_to_anchor=(0.5, 1.0), fontsize="small", frameon=False)
    ax.legend(loc="lower center", ncols=len(series), **look)
    return ax


def _of_layers(terms: LayerTerms, weights: ArrayLike | None) -> dict[str, FloatArray]:
    """Weight, mean absolute correction and mean variance ``(L,)``, where there are any."""
    found = {}
    if weights is not None:
        found["weight"] = as_numbers(weights, "weights", len(terms.names))
    found["correction"] = abs(to_double(terms.mean)).mean(0)
    if terms.std is not None:
        found["variance"] = (to_double(terms.std) ** 2).mean(0)
    return found
