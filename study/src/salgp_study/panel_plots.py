"""Plots of the paper's panels: the fitted correction beside the true residuals, and the confusion matrix.

They compute first and then draw on the axes given, and return them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from salgp.labels import as_labels
from salgp.metrics.metric import ArrayLike, as_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confusion_matrix", "residual_fit"]

BLUE, RED = "#4477AA", "#CC3311"


def confusion_matrix(labels: ArrayLike, predicted: ArrayLike, class_names: Sequence[str], ax: Axes) -> Axes:
    """Confusion matrix with the row share in each cell; "unknown" appears where there are such samples.

    Args:
        labels: ``(n,)`` true classes; -1 for a class the network does not know.
        predicted: ``(n,)`` predicted classes; -1 where the sample was rejected as unknown.
        class_names: names of the known classes.
        ax: axes to draw on.

    Returns:
        The axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = confusion_matrix([0, 1, -1], [0, 0, 1], ["cat", "dog"], Figure().subplots())
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


def residual_fit(residual: ArrayLike, mean: ArrayLike, std: ArrayLike, ax: Axes) -> Axes:
    """True residuals against the fitted correction with its 2-sigma band, samples sorted by the fitted mean.

    Args:
        residual: ``(n,)`` correct minus confidence.
        mean: ``(n,)`` fitted correction.
        std: ``(n,)`` its standard deviation.
        ax: axes to draw on.

    Returns:
        The axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> residual_fit([0.1, -0.8], [0.0, -0.4], [0.1, 0.2], Figure().subplots()).get_ylabel()
        'residual'
    """
    m = as_numbers(mean, "mean")
    r, s = as_numbers(residual, "residual", len(m)), as_numbers(std, "std", len(m))
    order = np.argsort(m, kind="stable")
    rank, m, r, s = np.arange(len(m)), m[order], r[order], s[order]
    ax.fill_between(rank, m - 2 * s, m + 2 * s, color=BLUE, alpha=0.25, linewidth=0, label="mean ± 2 std")
    ax.scatter(
        rank, r, s=9, marker="x", color=RED, linewidths=0.8, label="true residual", rasterized=len(m) > 2000
    )
    ax.plot(rank, m, color="black", linewidth=1.6, label="GP mean")
    ax.axhline(0, color="0.5", linewidth=0.6)
    ax.set(xlabel="samples, sorted by GP mean", ylabel="residual", xlim=(-0.5, len(m) - 0.5))
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small", frameon=False)
    return ax
