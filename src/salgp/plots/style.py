"""Colours, hatches and empty figures shared by all plots.

The colours are told apart by colour-blind readers, and every distinction is also one of hatch, marker or
dash, so that a grey print loses nothing. Figures are made without pyplot: no global state, nothing to close.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from salgp.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "CYCLE", "GREY", "RED", "annotate_cells", "new_axes", "new_figure"]

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


def annotate_cells(ax: Axes, values: np.ndarray, texts: list[list[str]], image: Any) -> None:
    """Write a text into every cell of a heat map, dark on light cells and light on dark ones."""
    red, green, blue = np.moveaxis(image.cmap(image.norm(values))[..., :3], -1, 0)
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
    size = float(np.clip(80 / max(values.shape), 5, 10))
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            ax.text(
                j, i, text, ha="center", va="center", fontsize=size, color="white" if dark[i, j] else "black"
            )
