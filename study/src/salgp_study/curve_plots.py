"""Multi-band light curves and the distributions of their fluxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from salgp.metrics.metric import ArrayLike, FloatArray, as_numbers
from salgp.plots import CYCLE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

__all__ = ["flux_density", "flux_distributions", "light_curves"]


def light_curves(
    objects: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]],
    bands: Sequence[str],
    figure: Figure | SubFigure | None = None,
) -> np.ndarray:
    """Flux with error bars against time: a row per band, a column per object.

    Args:
        objects: title to ``(time, band, flux, flux_error)``, each ``(n,)``; band is an index into ``bands``.
        bands: names of the bands.
        figure: figure or subfigure to draw into; a new one by default.

    Returns:
        The axes, ``(bands, objects)``.

    Example:
        >>> light_curves({"one": ([0.0, 1.0], [0, 1], [3.0, 4.0], [0.1, 0.2])}, ["g", "r"]).shape
        (2, 1)
    """
    if not objects:
        raise ValueError("nothing to draw: the mapping of objects is empty")
    where = new_figure(1.2 + 2.3 * len(objects), 0.9 + 1.05 * len(bands)) if figure is None else figure
    axes: np.ndarray = where.subplots(len(bands), len(objects), sharex="col", squeeze=False)
    for j, (title, columns) in enumerate(objects.items()):
        time = as_numbers(columns[0], "time")
        band, flux, error = (
            as_numbers(x, what, len(time))
            for x, what in zip(columns[1:], ("band", "flux", "flux_error"), strict=True)
        )
        for i, ax in enumerate(axes[:, j]):
            colour, _, marker, _ = CYCLE[i % len(CYCLE)]
            here = band == i
            ax.axhline(0, color="0.8", linewidth=0.8)
            ax.errorbar(
                time[here], flux[here], error[here], fmt=marker, color=colour, markersize=3, elinewidth=0.9
            )
            ax.tick_params(labelsize="small")
        axes[0, j].set_title(title, fontsize="medium")
        axes[-1, j].set_xlabel("time (days)")
    for name, ax in zip(bands, axes[:, 0], strict=True):
        ax.set_ylabel(f"{name} flux")
    return axes


def flux_density(flux: ArrayLike, n_points: int = 200) -> tuple[FloatArray, FloatArray]:
    """Density of fluxes between their 0.1 % and 99.9 % quantiles, by a Gaussian kernel on a fine histogram.

    Args:
        flux: ``(n,)``.
        n_points: points of the grid.

    Returns:
        Grid and density, ``(n_points,)`` each; the bandwidth is Silverman's.

    Example:
        >>> grid, density = flux_density(np.linspace(0, 1, 500))
        >>> abs(float(np.trapezoid(density, grid)) - 1) < 0.15
        True
    """
    from scipy.ndimage import gaussian_filter1d

    x = as_numbers(flux, "flux")
    low, high = np.quantile(x, [0.001, 0.999])
    if high <= low:
        low, high = low - 0.5, high + 0.5
    counts, edges = np.histogram(x, n_points, (low, high))
    step = edges[1] - edges[0]
    quartiles = np.quantile(x, [0.25, 0.75])
    spread = min(x.std(), float(np.diff(quartiles)[0]) / 1.34) or step
    density = gaussian_filter1d(
        counts / (len(x) * step), max(0.9 * spread * len(x) ** -0.2 / step, 0.5), mode="constant"
    )
    return (edges[:-1] + edges[1:]) / 2, density


def flux_distributions(
    flux: ArrayLike,
    band: ArrayLike,
    bands: Sequence[str],
    label: str = "flux",
    figure: Figure | SubFigure | None = None,
) -> np.ndarray:
    """Density of flux, or of its error, in each band on a logarithmic scale that shows the tails.

    Args:
        flux: ``(n,)`` fluxes or flux errors.
        band: ``(n,)`` index into ``bands``.
        bands: names of the bands.
        label: axis label.
        figure: figure or subfigure to draw into; a new one by default.

    Returns:
        The axes, one per band.

    Example:
        >>> flux_distributions(np.arange(20.0), np.arange(20) % 2, ["g", "r"]).shape
        (2,)
    """
    x = as_numbers(flux, "flux")
    index = as_numbers(band, "band", len(x))
    columns = 2 if len(bands) in (2, 4) else min(3, len(bands))
    rows = -(-len(bands) // columns)
    where = new_figure(0.8 + 2.3 * columns, 0.5 + 1.8 * rows) if figure is None else figure
    axes: np.ndarray = where.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    densities = {k: flux_density(x[index == k]) for k in range(len(bands)) if (index == k).any()}
    floor = min(
        (0.5 / ((index == k).sum() * np.ptp(grid)) for k, (grid, _) in densities.items()), default=1.0
    )  # half a sample in all
    for k, (name, ax) in enumerate(zip(bands, axes, strict=False)):
        colour = CYCLE[k % len(CYCLE)][0]
        grid, density = densities.get(k, (np.zeros(0), np.zeros(0)))
        ax.fill_between(grid, np.maximum(density, floor), floor, color=colour, alpha=0.35, linewidth=0)
        ax.plot(grid, np.maximum(density, floor), color=colour, linewidth=1.4)
        ax.set_title(name, fontsize="medium")
        ax.set_yscale("log")
        ax.set_ylim(bottom=floor)
        ax.tick_params(labelsize="small")
    for ax in axes[len(bands) :]:
        ax.set_visible(False)
    for ax in axes[len(bands) - columns : len(bands)]:
        ax.set_xlabel(label)
    for ax in axes[::columns]:
        ax.set_ylabel("density")
    return axes[: len(bands)]
