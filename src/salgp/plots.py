"""Plots that compute first and then draw: on the axes given, or on a new figure of their own.

All return the axes and leave matplotlib's settings alone; ``axes.figure.savefig(...)`` writes a file. The
colours are told apart by colour-blind readers, and every distinction is also one of hatch, marker or dash, so
that a grey print loses nothing. Figures are made without pyplot: no global state, nothing to close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from salgp.extras import require
from salgp.labels import as_labels
from salgp.metrics import Interval, ReliabilityBins, RiskCoverage, accuracy_band, reliability_bins
from salgp.metrics.checks import ArrayLike, as_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from salgp.prediction import LayerTerms

__all__ = [
    "CYCLE",
    "confusion_matrix",
    "layer_profile",
    "method_comparison",
    "new_figure",
    "reliability_diagram",
    "residual_fit",
    "risk_coverage_curves",
]

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


def new_axes(ax: Axes | None, width: float = 5.0, height: float = 3.6) -> Axes:
    """The axes given, or those of a new figure."""
    return new_figure(width, height).add_subplot() if ax is None else ax


_FAINT_RED = "#F3C4B8"


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
    width = np.diff(bins.edges)
    ax.bar(bins.edges[:-1], bins.share, width, align="edge", color="0.85", edgecolor="0.3", linewidth=0.6)
    lines = (
        ("accuracy", bins.accuracy, BLUE, ":", 1.6),
        ("confidence", bins.confidence, RED, (0, (1, 1.6)), 3.6),
    )
    for what, values, colour, dash, thickness in lines:
        mean = float(np.nansum(bins.share * values))
        label = f"mean {what} {mean:.3f}"
        ax.axvline(mean, linestyle=dash, linewidth=thickness, color=colour, label=label)
    ax.set(ylabel="share of\nsamples", xlim=(0, 1), ylim=(0, min(1.0, 1.15 * float(bins.share.max()))))
    ax.legend(loc="upper left", fontsize="small", framealpha=0.9)


def _draw_accuracy(ax: Axes, bins: ReliabilityBins) -> None:
    """Accuracy by bin, the gap to the mean confidence, and the diagonal."""
    some = bins.count > 0
    left, width = bins.edges[:-1][some], np.diff(bins.edges)[some]
    accuracy, gap = bins.accuracy[some], bins.gap[some]
    look: dict[str, Any] = {"align": "edge", "color": BLUE, "edgecolor": "black", "linewidth": 0.6}
    ax.bar(left, accuracy, width, label="observed accuracy", **look)
    look = {"align": "edge", "facecolor": _FAINT_RED, "edgecolor": RED, "linewidth": 0.8}
    for kind, hatch, here in (("overconfident", "///", gap > 0), ("underconfident", "\\\\\\", gap < 0)):
        if here.any():
            bars = left[here], gap[here], width[here], accuracy[here]
            ax.bar(*bars, hatch=hatch, label=f"gap: {kind}", **look)
    ax.hlines(accuracy, left, left + width, color="black", linewidth=1.8)
    ax.plot([0, 1], [0, 1], linestyle="--", color=GREY, linewidth=1.2, label="perfectly calibrated")
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))


def _draw_intervals(ax: Axes, bins: ReliabilityBins, level: float) -> None:
    """Exact interval of the accuracy of every bin."""
    some = bins.count > 0
    middle = ((bins.edges[:-1] + bins.edges[1:]) / 2)[some]
    error = np.abs(np.stack(accuracy_band(bins, level)) - bins.accuracy)[:, some]
    look: dict[str, Any] = {"fmt": "none", "ecolor": "black", "elinewidth": 1.2, "capsize": 2.5}
    ax.errorbar(middle, bins.accuracy[some], error, label="exact interval", **look)


def method_comparison(
    values: Mapping[str, Interval | float], score: str = "ECE", ax: Axes | None = None, *, sort: bool = True
) -> Axes:
    """Dot plot of one score by method, with bootstrap intervals where given.

    Args:
        values: method name to its score, as a number or with its interval from `salgp.metrics.bootstrap`.
        score: axis label.
        ax: axes to draw on; a new figure by default.
        sort: smallest on top; otherwise in the order given.

    Returns:
        The axes.

    Example:
        >>> ax = method_comparison({"raw": 0.12, "temperature": 0.04})
        >>> [t.get_text() for t in ax.get_yticklabels()]
        ['temperature', 'raw']
    """
    if not values:
        raise ValueError("nothing to compare: the mapping of values is empty")
    ends = {
        name: (v.value, v.lower, v.upper) if isinstance(v, Interval) else (v, v, v)
        for name, v in values.items()
    }
    names = sorted(ends, key=lambda name: ends[name][0]) if sort else list(ends)
    ax = new_axes(ax, 5.0, 1.0 + 0.32 * len(names))
    place = np.arange(len(names))
    value, lower, upper = np.array([ends[name] for name in names]).T
    colour = CYCLE[0][0]
    ax.hlines(place, lower, upper, color=colour, linewidth=2.2)
    ax.plot(value, place, "o", color=colour, markeredgecolor="black", markeredgewidth=0.6)
    ax.set_yticks(place, names)
    ax.set(xlabel=score, ylim=(len(names) - 0.5, -0.5))
    ax.grid(axis="x", color="0.88")
    ax.set_axisbelow(True)
    return ax


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
        ax.plot(curve.coverage, curve.risk, color=colour, linestyle=dash, linewidth=1.8, label=name)
    ax.set(xlabel="coverage (share of samples accepted)", xlim=(0, 1))
    ax.set(ylabel="error rate among accepted", ylim=(0, None))
    ax.legend(loc="best", fontsize="small")
    return ax


def confusion_matrix(
    labels: ArrayLike, predicted: ArrayLike, class_names: Sequence[str], ax: Axes | None = None
) -> Axes:
    """Confusion matrix with the row share in each cell; "unknown" appears where there are such samples.

    Args:
        labels: ``(n,)`` true classes; -1 for a class the network does not know.
        predicted: ``(n,)`` predicted classes; -1 where the sample was rejected as unknown.
        class_names: names of the known classes.
        ax: axes to draw on; a new figure by default.

    Returns:
        The axes.

    Example:
        >>> ax = confusion_matrix([0, 1, -1], [0, 0, 1], ["cat", "dog"])
        >>> [t.get_text() for t in ax.get_yticklabels()]
        ['cat (1)', 'dog (1)', 'unknown (1)']
    """
    from sklearn.metrics import confusion_matrix as count

    c = len(class_names)
    y = as_labels(labels, len(labels), c).cpu().numpy()
    p = as_labels(predicted, len(y), c).cpu().numpy()
    counts = count(y, p, labels=[*range(c), -1])
    names = [*class_names, "unknown"]
    rows, columns = (list(range(c + bool((x < 0).any()))) for x in (y, p))
    totals = counts.sum(axis=1)[rows]
    share = counts[np.ix_(rows, columns)] / np.maximum(totals, 1)[:, None]
    ax = new_axes(ax, 2.2 + 0.55 * len(columns), 1.4 + 0.5 * len(rows))
    image = ax.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    size = float(np.clip(80 / max(share.shape), 5, 10))
    for (i, j), value in np.ndenumerate(share):
        colour = "white" if value > 0.55 else "black"
        ax.text(j, i, f"{value:.2f}" if value else "", ha="center", va="center", fontsize=size, color=colour)
    ax.set_xticks(columns, [names[j] for j in columns], rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(rows, [f"{names[i]} ({totals[i]})" for i in rows])
    ax.set(xlabel="predicted class", ylabel="true class (samples)")
    ax.figure.colorbar(image, ax=ax, label="share of the true class")
    return ax


def residual_fit(residual: ArrayLike, mean: ArrayLike, std: ArrayLike, ax: Axes | None = None) -> Axes:
    """True residuals against the fitted correction with its 2-sigma band, samples sorted by the fitted mean.

    Args:
        residual: ``(n,)`` correct minus confidence.
        mean: ``(n,)`` fitted correction.
        std: ``(n,)`` its standard deviation.
        ax: axes to draw on; a new figure by default.

    Returns:
        The axes.

    Example:
        >>> residual_fit([0.1, -0.8], [0.0, -0.4], [0.1, 0.2]).get_ylabel()
        'residual'
    """
    m = as_numbers(mean, "mean")
    r, s = as_numbers(residual, "residual", len(m)), as_numbers(std, "std", len(m))
    order = np.argsort(m, kind="stable")
    rank, m, r, s = np.arange(len(m)), m[order], r[order], s[order]
    ax = new_axes(ax)
    ax.fill_between(rank, m - 2 * s, m + 2 * s, color=BLUE, alpha=0.25, linewidth=0, label="mean ± 2 std")
    ax.scatter(
        rank, r, s=9, marker="x", color=RED, linewidths=0.8, label="true residual", rasterized=len(m) > 2000
    )
    ax.plot(rank, m, color="black", linewidth=1.6, label="GP mean")
    ax.axhline(0, color="0.5", linewidth=0.6)
    ax.set(xlabel="samples, sorted by GP mean", ylabel="residual", xlim=(-0.5, len(m) - 0.5))
    ax.legend(ncols=3, **_LEGEND_ABOVE)
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
    correction = terms.mean.detach().cpu().double().numpy()
    series = {"correction": np.abs(correction).mean(axis=0)}
    if weights is not None:
        series = {"weight": as_numbers(weights, "weights", len(terms.names)), **series}
    if terms.std is not None:
        series["variance"] = (terms.std.detach().cpu().double().numpy() ** 2).mean(axis=0)
    n, height = len(terms.names), 0.8 / len(series)
    ax = new_axes(ax, 5.0, 1.2 + 0.22 * n * len(series))
    place = np.arange(n) - (len(series) - 1) / 2 * height
    for k, (name, values) in enumerate(series.items()):
        colour, _, _, hatch = CYCLE[k]
        look: dict[str, Any] = {"color": colour, "edgecolor": "white", "hatch": hatch}
        ax.barh(place + k * height, values / (values.sum() or 1.0), height, label=f"share of {name}", **look)
    ax.set(xlabel="share", xlim=(0, None), ylim=(n - 0.5, -0.5))
    ax.set_yticks(range(n), terms.names)
    ax.legend(ncols=len(series), **_LEGEND_ABOVE)
    return ax


_LEGEND_ABOVE: dict[str, Any] = {
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1.0),
    "fontsize": "small",
    "frameon": False,
}
