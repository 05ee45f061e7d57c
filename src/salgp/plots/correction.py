"""What the Gaussian process learned: the residual it fits, each layer's part in it, and how layers relate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from salgp.metrics.checks import ArrayLike, FloatArray, as_numbers
from salgp.plots.reliability import BLUE, CYCLE, RED, annotate_cells, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from salgp.prediction import LayerTerms

__all__ = ["LayerShares", "coregionalisation", "layer_profile", "layer_shares", "residual_fit"]


@dataclass(frozen=True, eq=False)
class LayerShares:
    """Each layer's share of the whole; every row sums to 1.

    Args:
        names: layer names, length L.
        correction: ``(L,)`` share of the mean absolute correction.
        variance: ``(L,)`` share of the mean posterior variance, or None.
        weight: ``(L,)`` share of the learned weights, or None.
    """

    names: tuple[str, ...]
    correction: FloatArray
    variance: FloatArray | None
    weight: FloatArray | None


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
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small", frameon=False)
    return ax


def layer_shares(terms: LayerTerms, weights: ArrayLike | None = None) -> LayerShares:
    """Share of correction, variance and weight of each layer.

    Args:
        terms: per-layer corrections of a prediction.
        weights: ``(L,)`` learned non-negative weights, such as the layers' kernel variances.

    Returns:
        The shares.

    Example:
        >>> import torch
        >>> from salgp import LayerTerms
        >>> layer_shares(LayerTerms(("a", "b"), torch.tensor([[0.1, -0.3]]))).correction.round(2)
        array([0.25, 0.75])
    """
    correction = np.abs(terms.mean.detach().cpu().double().numpy()).mean(axis=0)
    variance = None if terms.std is None else (terms.std.detach().cpu().double().numpy() ** 2).mean(axis=0)
    weight = None if weights is None else as_numbers(weights, "weights", len(terms.names))
    return LayerShares(
        terms.names,
        _normalised(correction),
        *(None if x is None else _normalised(x) for x in (variance, weight)),
    )


def layer_profile(terms: LayerTerms, weights: ArrayLike | None = None, ax: Axes | None = None) -> Axes:
    """Bars by layer: share of the learned weight, of the correction, and of the variance.

    Args:
        terms: per-layer corrections of a prediction.
        weights: ``(L,)`` learned weights, left out where there are none.
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
    shares = layer_shares(terms, weights)
    series = {"weight": shares.weight, "correction": shares.correction, "variance": shares.variance}
    shown = {name: values for name, values in series.items() if values is not None}
    ax = new_axes(ax, 5.0, 1.2 + 0.22 * len(shares.names) * len(shown))
    place, height = np.arange(len(shares.names)), 0.8 / len(shown)
    for k, (name, values) in enumerate(shown.items()):
        colour, _, _, hatch = CYCLE[k]
        ax.barh(
            place + (k - (len(shown) - 1) / 2) * height,
            values,
            height,
            color=colour,
            edgecolor="white",
            hatch=hatch,
            label=f"share of {name}",
        )
    ax.set(xlabel="share", xlim=(0, None), ylim=(len(place) - 0.5, -0.5))
    ax.set_yticks(place, shares.names)
    ax.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), fontsize="small", frameon=False
    )
    return ax


def coregionalisation(B: ArrayLike, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Heat map of the learned layer covariance B, with its values.

    Args:
        B: ``(L, L)`` symmetric matrix.
        names: layer names; 1..L by default.
        ax: axes to draw on; a new figure by default.

    Returns:
        The axes.

    Example:
        >>> coregionalisation([[1.0, 0.2], [0.2, 0.5]], ["conv1", "conv2"]).get_title()
        'layer covariance B'
    """
    values = np.asarray(B.detach().cpu() if isinstance(B, Tensor) else B, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(f"B must be a square matrix (L, L), got shape {values.shape}")
    n = len(values)
    labels = [str(k + 1) for k in range(n)] if names is None else list(names)
    if len(labels) != n:
        raise ValueError(f"expected {n} layer names, one per row of B, got {len(labels)}")
    ax = new_axes(ax, 1.6 + 0.75 * n, 1.2 + 0.65 * n)
    limit = float(np.abs(values).max()) or 1.0
    signed = bool((values < 0).any())
    image = ax.imshow(
        values, cmap="cividis", vmin=-limit if signed else 0.0, vmax=limit
    )  # lightness rises with the value: grey will do
    annotate_cells(ax, values, [[f"{x:.2g}" for x in row] for row in values], image)
    ax.set_xticks(range(n), labels, rotation=45 if max(map(len, labels)) > 4 else 0)
    ax.set_yticks(range(n), labels)
    ax.set_title("layer covariance B", fontsize="medium")
    ax.figure.colorbar(image, ax=ax, shrink=0.85)
    return ax


def _normalised(values: FloatArray) -> FloatArray:
    total = values.sum()
    return np.asarray(values / total) if total > 0 else np.zeros_like(values)
