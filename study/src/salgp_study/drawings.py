"""Pictures of the data and of the method: radar chips, light curves, flux distributions, and the flow of
SAL-GP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from salgp.plots import new_figure
from salgp_study.curve_plots import flux_distributions, light_curves
from salgp_study.lightcurves import LightCurves
from salgp_study.mstar import Chips

__all__ = ["draw_architectures", "draw_chips", "draw_flow", "draw_flux_distributions", "draw_lightcurve_grid"]

BANDS = "ugrizy"


def draw_chips(chips: Chips) -> Any:
    """An overview of the targets, as the paper has it: a column per class, a chip of each depression angle.

    Optical photographs are not part of the data. The picture on top comes nearest to one: the first chip with
    its speckle taken out, on a scale of decibels, so that vehicle, shadow and ground are three shades.

    Returns:
        The matplotlib figure.
    """
    angles = sorted({int(a) for a in chips.depression})
    figure = new_figure(1.15 * len(chips.class_names), 1.25 * (1 + len(angles)))
    axes = figure.subplots(1 + len(angles), len(chips.class_names), squeeze=False)
    for k, name in enumerate(chips.class_names):
        mine = (chips.label == k).nonzero()[:, 0]
        axes[0, k].imshow(_without_speckle(chips.x[mine[0]]), cmap="gray")
        axes[0, k].set_title(name, fontsize=8)
        for ax, angle in zip(axes[1:, k], angles, strict=True):
            rows = mine[chips.depression[mine] == angle]
            if len(rows):
                chip = chips.x[rows[0]]
                ax.imshow(chip.numpy(), cmap="gray", vmin=0, vmax=float(chip.quantile(0.998)))
    for ax, text in zip(axes[:, 0], ("no speckle", *(f"{a} degrees" for a in angles)), strict=True):
        ax.set_ylabel(text, fontsize=8)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[], frame_on=False)
    return figure


def draw_lightcurve_grid(curves: LightCurves, rows: Sequence[int] = (0, 1, 2), bands: str = BANDS) -> Any:
    """Light curves with error bars: a column per object, a row per passband."""
    figure = new_figure(3.2 * len(rows), 1.3 * len(bands))
    titles = {i: f"object {int(curves.object_id[i])}, class {curves.target[i]}" for i in rows}
    light_curves({titles[i]: _points(curves, [i]) for i in rows}, list(bands), figure)
    return figure


def draw_flux_distributions(curves: LightCurves, quantity: str = "flux", bands: str = BANDS) -> Any:
    """Distribution of fluxes or of their errors per passband, on a logarithmic scale.

    Args:
        curves: of as many objects as there are.
        quantity: ``"flux"`` or ``"flux error"``.
        bands: names of the passbands.
    """
    figure = new_figure(8, 4.5)
    parts = [_points(curves, range(k, min(k + 2000, len(curves)))) for k in range(0, len(curves), 2000)]
    _, band, flux, error = (np.concatenate(column) for column in zip(*parts, strict=True))
    flux_distributions({"flux": flux, "flux error": error}[quantity], band, list(bands), quantity, figure)
    return figure


def draw_flow() -> Any:
    """The flow of the method: network, pooled layers, stacked rows, structured kernel, corrected
    confidence.
    """
    figure = new_figure(11, 3.8)
    ax = figure.subplots()
    ax.set(xlim=(0, 12.6), ylim=(-0.4, 6))
    ax.set_axis_off()
    _box(ax, 0.6, 3, "input", 0.9)
    for k in range(5):
        y = 5.2 - 1.1 * k
        _box(ax, 2.2, y, f"layer {k + 1}", 1.2)
        _box(ax, 4.2, y, f"pooled $f^{{({k + 1})}}$", 1.4)
        _arrow(ax, (2.85, y), (3.45, y))
        _arrow(ax, (4.95, y), (5.6, 3))
    _arrow(ax, (1.1, 3), (1.55, 5.0))
    for k in range(4):
        _arrow(ax, (2.2, 4.95 - 1.1 * k), (2.2, 4.4 - 1.1 * k))
    _box(ax, 6.4, 3, "rows $[f^{(l)}, s, l]$\ntarget $r = correct - s$", 1.6, 1.2)
    _box(ax, 4.2, 0, "softmax, confidence $s$", 1.9)
    _arrow(ax, (2.2, 0.45), (3.2, 0.05))
    _arrow(ax, (5.2, 0.1), (5.9, 2.35))
    _box(
        ax,
        8.8,
        3,
        "Gaussian process\n$k_{feat} + k_{conf} + B_{ll'}$ (ML)\n$k_{global} + [l = l'] k_{layer}$ (HL)",
        2.3,
        1.4,
    )
    _arrow(ax, (7.25, 3), (7.6, 3))
    _box(ax, 11.5, 4.3, "global $G$:\n$s$ + mean, variance", 1.9, 1.0)
    _box(ax, 11.5, 1.7, "layers $L_1..L_5$:\neach its own correction", 1.9, 1.0)
    _arrow(ax, (10.0, 3.3), (10.5, 4.2))
    _arrow(ax, (10.0, 2.7), (10.5, 1.8))
    return figure


def draw_architectures() -> Any:
    """The four ways to group the residual process: with or without classes, with or without layers."""
    figure = new_figure(8, 5)
    axes = figure.subplots(2, 2)
    panels = [
        ("class-agnostic, global", ["$f$"], []),
        ("class-agnostic, layer-wise", ["$f$"], ["$g_{L1}$", "$g_{L2}$", "$g_{L3}$"]),
        ("class-specific, global", ["$f$"], ["$g_{c=1}$", "$g_{c=2}$", "$g_{c=3}$"]),
        (
            "class-specific, layer-wise",
            ["$f$", "$g_{L1}$", "$g_{L2}$"],
            ["$h_{1,1}$", "$h_{1,2}$", "$h_{2,1}$", "$h_{2,2}$"],
        ),
    ]
    for ax, (title, upper, lower) in zip(axes.flat, panels, strict=True):
        _tree(ax, title, upper, lower)
    return figure


def _without_speckle(chip: Tensor) -> Any:
    """A chip in decibels, after a median and a mean over a few pixels."""
    from scipy.ndimage import gaussian_filter, median_filter

    decibels = 20.0 * np.log10(chip.double().numpy() + 4e-3)
    smooth = gaussian_filter(median_filter(decibels, 5), 1.0)
    return smooth.clip(*np.quantile(smooth, [0.002, 0.998]))


def _points(curves: LightCurves, rows: Sequence[int]) -> tuple[Any, Any, Any, Any]:
    """Time in days, band, flux and flux error of all observations of some objects, in the units of
    the file.
    """
    x = curves.curves[list(rows)].numpy()
    who, band, step = np.nonzero(x[..., 3])
    time, flux, error, _ = x[who, band, step].T
    scale = 10.0 ** curves.meta[list(rows), -1].numpy()[who]
    return 100 * time, band, scale * np.sinh(flux), scale * np.sinh(error)


def _box(ax: Any, x: float, y: float, text: str, width: float, height: float = 0.6) -> None:
    from matplotlib.patches import FancyBboxPatch

    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0.05",
            fc="#eef3f8",
            ec="#335577",
        )
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=9)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": "#335577"})


def _tree(ax: Any, title: str, upper: Sequence[str], lower: Sequence[str]) -> None:
    ax.set(xlim=(0, 10), ylim=(0, 6))
    ax.set_axis_off()
    ax.set_title(title, fontsize=9)
    _box(ax, 5, 5, f"{upper[0]}  (shared)", 2.6)
    middle = {name: 10 * (k + 0.5) / len(upper[1:]) for k, name in enumerate(upper[1:])}
    for name, x in middle.items():
        _box(ax, x, 3, name, 1.8)
        _arrow(ax, (5, 4.6), (x, 3.4))
    for k, name in enumerate(lower):
        x = 10 * (k + 0.5) / len(lower)
        parent = (list(middle.values())[2 * k // len(lower)], 2.6) if middle else (5, 4.6)
        _box(ax, x, 1, name, 1.6)
        _arrow(ax, parent, (x, 1.4))
