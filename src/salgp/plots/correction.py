"""What a correction does: the residual it fits, and each layer's part in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from salgp.metrics.checks import ArrayLike, as_numbers
from salgp.plots.reliability import BLUE, CYCLE, RED, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from salgp.prediction import LayerTerms

__all__ = ["layer_profile", "residual_fit"]


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
