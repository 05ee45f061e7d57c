"""Methods side by side: scores with intervals, risk-coverage curves; and what is taken for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from salgp.labels import as_labels
from salgp.metrics import Interval, RiskCoverage
from salgp.metrics.checks import ArrayLike
from salgp.plots.reliability import CYCLE, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confusion_matrix", "method_comparison", "risk_coverage_curves"]


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
