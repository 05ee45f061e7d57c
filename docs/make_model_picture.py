"""Draw the model of layer evidence: ``python docs/make_model_picture.py`` writes ``docs/img/model.png``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent / "img" / "model.png"
BOXES = {
    "layers": (0.2, 2.6, 2.0, 1.5, "layers $x_1 \\ldots x_L$\nof the network", "0.92"),
    "logits": (0.2, 0.6, 2.0, 1.1, "logits $z$", "0.92"),
    "evidence": (3.0, 2.6, 2.5, 1.5, "agreement $A_l$\nnovelty $N_l$\n(distance to classes)", "1.0"),
    "t": (3.0, 0.6, 2.5, 1.1, "tempered\nlog-odds $t$", "1.0"),
    "in domain": (6.3, 2.9, 2.5, 1.1, "expert in domain\n$f_{in}$", "1.0"),
    "shift": (6.3, 0.6, 2.5, 1.1, "expert under shift\n$f_{shift}$", "1.0"),
    "window": (6.3, 5.0, 2.5, 1.1, "window of $n \\geq 1$\nsamples: statistics", "0.92"),
    "k": (9.6, 5.0, 2.3, 1.1, "shift weight\n$0 \\leq k \\leq 1$", "1.0"),
    "f": (
        9.6,
        1.6,
        2.3,
        1.6,
        "$f_{in} + k\\,(f_{shift} - f_{in})$\n$-\\; k\\,v\\,r_y$\n$/\\;\\sqrt{1+\\cdots}$",
        "1.0",
    ),
    "p": (12.7, 1.75, 1.9, 1.3, "confidence\n$\\sigma(f)$", "0.80"),
}
"""Left, bottom, width, height, text, grey."""
ARROWS = [
    ("layers", "evidence"),
    ("logits", "t"),
    ("evidence", "in domain"),
    ("evidence", "shift"),
    ("t", "in domain"),
    ("t", "shift"),
    ("evidence", "window"),
    ("window", "k"),
    ("k", "f"),
    ("in domain", "f"),
    ("shift", "f"),
    ("f", "p"),
]


def main(path: Path = HERE) -> Path:
    """Write the picture."""
    figure, ax = plt.subplots(figsize=(11, 4.8))
    for left, bottom, width, height, text, grey in BOXES.values():
        ax.add_patch(plt.Rectangle((left, bottom), width, height, facecolor=grey, edgecolor="black", lw=1.2))
        ax.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=9.5)
    for start, end in ARROWS:
        _arrow(ax, BOXES[start], BOXES[end])
    ax.text(7.55, 2.72, "fitted to calibration samples", ha="center", va="top", fontsize=8.5, style="italic")
    ax.text(7.55, 0.42, "fitted to augmented samples", ha="center", va="top", fontsize=8.5, style="italic")
    ax.set(xlim=(0, 14.8), ylim=(0, 6.4))
    ax.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path


def _arrow(ax: Any, start: tuple[Any, ...], end: tuple[Any, ...]) -> None:
    """From the right side of one box to the left of the next, or downwards where they share a column."""
    tail = (start[0] + start[2], start[1] + start[3] / 2)
    head = (end[0], end[1] + end[3] / 2)
    if abs(start[0] - end[0]) < 0.1:
        tail, head = (start[0] + start[2] / 2, start[1]), (end[0] + end[2] / 2, end[1] + end[3])
    ax.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.2})


if __name__ == "__main__":
    main()
