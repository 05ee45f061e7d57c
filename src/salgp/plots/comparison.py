"""Methods side by side: scores with intervals, risk-coverage curves, and the confusion matrix behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from salgp.metrics import Interval, RiskCoverage
from salgp.metrics.checks import ArrayLike, IntArray, as_numbers
from salgp.plots.reliability import CYCLE, annotate_cells, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confusion_counts", "confusion_matrix", "method_comparison", "risk_coverage_curves"]


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
    ax.plot(
        value,
        place,
        linestyle="none",
        marker="o",
        markersize=6,
        color=colour,
        markeredgecolor="black",
        markeredgewidth=0.6,
    )
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
        ax.plot(
            curve.coverage,
            curve.risk,
            color=colour,
            linestyle=dash,
            linewidth=1.8,
            label=f"{name} (area {curve.area:.3f})",
        )
    ax.set(
        xlabel="coverage (share of samples accepted)",
        ylabel="error rate among accepted",
        xlim=(0, 1),
        ylim=(0, None),
    )
    ax.legend(loc="best", fontsize="small")
    return ax


def confusion_counts(labels: ArrayLike, predicted: ArrayLike, n_classes: int) -> IntArray:
    """Samples by true (rows) and predicted (columns) class; the last row and column are "unknown" (-1).

    Args:
        labels: ``(n,)`` true classes.
        predicted: ``(n,)`` predicted classes; -1 where the sample was rejected as unknown.
        n_classes: number c of known classes.

    Returns:
        ``(c + 1, c + 1)`` counts.

    Example:
        >>> confusion_counts([0, 1, -1], [0, 0, 1], 2)
        array([[1, 0, 0],
               [1, 0, 0],
               [0, 1, 0]])
    """
    y = as_numbers(labels, "labels").astype(np.int64)
    p = as_numbers(predicted, "predicted", len(y)).astype(np.int64)
    for what, x in (("label", y), ("prediction", p)):
        if x.min() < -1 or x.max() >= n_classes:
            raise ValueError(
                f"{what} {x.min() if x.min() < -1 else x.max()} is out of range: expected -1..{n_classes - 1}"
            )
    place = np.where(y < 0, n_classes, y) * (n_classes + 1) + np.where(p < 0, n_classes, p)
    return np.bincount(place, minlength=(n_classes + 1) ** 2).reshape(n_classes + 1, n_classes + 1)


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
    counts = confusion_counts(labels, predicted, len(class_names))
    names = [*class_names, "unknown"]
    rows, columns = (list(range(len(names) - (counts.sum(axis=axis)[-1] == 0))) for axis in (1, 0))
    counts = counts[np.ix_(rows, columns)]
    totals = counts.sum(axis=1)
    share = counts / np.maximum(totals, 1)[:, None]
    ax = new_axes(ax, 2.2 + 0.55 * len(columns), 1.4 + 0.5 * len(rows))
    image = ax.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    annotate_cells(ax, share, [[f"{x:.2f}" if x > 0 else "" for x in row] for row in share], image)
    ax.set_xticks(columns, [names[j] for j in columns], rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(rows, [f"{names[i]} ({totals[i]})" for i in rows])
    ax.set(xlabel="predicted class", ylabel="true class (samples)")
    ax.figure.colorbar(image, ax=ax, label="share of the true class")
    return ax
