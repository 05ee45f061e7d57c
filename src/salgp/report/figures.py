"""Figures as small inline SVG: they follow the page's colours in the dark, print well, and say in words what
they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from salgp.metrics import accuracy_band, reliability_bins
from salgp.report.keeping import Keep
from salgp.report.summary import LayerShare, Scored

__all__ = ["Canvas", "Frame", "interval_bar", "layer_profile", "reliability", "risk_coverage"]

N_BINS = 10


class Canvas:
    """Collects SVG elements; all text is escaped.

    Example:
        >>> canvas = Canvas(10, 10, "a <dot>")
        >>> canvas.add("circle", cx=5, cy=5, r=2)
        >>> "&lt;dot&gt;" in canvas.markup()
        True
    """

    def __init__(self, width: float, height: float, description: str, css: str = "") -> None:
        self._head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="{}">').format(
            width, height, description, css
        )
        self._parts: list[Markup] = []

    def add(self, tag: str, content: str | None = None, **attributes: object) -> None:
        """One element; ``css`` is its class, underscores in names are hyphens, numbers are rounded."""
        names = {"css": "class"}
        pairs = [
            Markup(' {}="{}"').format(names.get(k, k.replace("_", "-")), _round(v))
            for k, v in attributes.items()
            if v is not None
        ]
        body = Markup("") if content is None else escape(content)
        self._parts.append(
            Markup("<{tag}{attributes}>{body}</{tag}>").format(
                tag=Markup(tag), attributes=Markup("").join(pairs), body=body
            )
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str, **more: Any) -> None:
        """A straight line."""
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, css=css, **more)

    def rect(
        self, x: float, y: float, width: float, height: float, css: str, title: str | None = None
    ) -> None:
        """A rectangle, with words shown when the pointer rests on it."""
        shape = Markup("<title>{}</title>").format(title) if title else None
        self.add("rect", shape, x=x, y=y, width=max(width, 0), height=max(height, 0), css=css)

    def text(
        self, x: float, y: float, content: str, css: str = "tick", anchor: str = "middle", **more: Any
    ) -> None:
        """A line of text."""
        self.add("text", content, x=x, y=y, css=css, text_anchor=anchor, **more)

    def markup(self) -> Markup:
        """The whole figure."""
        return Markup("").join([self._head, *self._parts, Markup("</svg>")])


class Frame:
    """Axes: from data to pixels."""

    def __init__(self, canvas: Canvas, box: tuple[float, float, float, float], top: float = 1.0) -> None:
        self.canvas, (self.left, self.upper, self.width, self.height), self.top = canvas, box, top

    def x(self, value: float) -> float:
        """Pixel of a share between 0 and 1."""
        return self.left + value * self.width

    def y(self, value: float) -> float:
        """Pixel of a value between 0 and ``top``."""
        return self.upper + self.height * (1 - value / self.top)

    def axes(self, x_label: str, y_label: str, ticks: Sequence[float]) -> None:
        """Grid lines, tick labels in per cent, and axis labels."""
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            self.canvas.text(
                self.x(share), self.upper + self.height + 18, f"{100 * share:.0f} %", "tick below"
            )
        for value in ticks:
            self.canvas.line(self.left, self.y(value), self.left + self.width, self.y(value), "grid")
            self.canvas.text(self.left - 6, self.y(value) + 4, f"{100 * value:.3g} %", anchor="end")
        self.canvas.text(self.left + self.width / 2, self.upper + self.height + 40, x_label, "axis below")
        middle = self.upper + self.height / 2
        self.canvas.text(14, middle, y_label, "axis side", transform=f"rotate(-90 14 {middle:.0f})")


def reliability(side: Scored, name: str) -> Markup:
    """Reliability diagram: how often right, by stated confidence; the gap to the diagonal is hatched."""
    bins = reliability_bins(side.confidence, side.correct, N_BINS)
    words = (
        f"Reliability diagram, {name}: mean gap between stated confidence and how often it is "
        f"right {100 * side.ece:.1f} points."
    )
    canvas = Canvas(420, 326, words, "plot")
    frame = Frame(canvas, (62, 12, 332, 216))
    frame.axes("stated confidence", "how often it is right", (0, 0.25, 0.5, 0.75, 1))
    lower, upper = accuracy_band(bins)
    for b in np.flatnonzero(bins.count):
        _bin(
            frame,
            bins.edges[b : b + 2].tolist(),
            float(bins.confidence[b]),
            (float(bins.accuracy[b]), float(lower[b]), float(upper[b])),
            int(bins.count[b]),
            float(bins.share[b]),
        )
    canvas.line(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "diagonal")
    tallest = float(bins.share.max())
    for b in np.flatnonzero(bins.count):
        height = 38 * float(bins.share[b]) / tallest
        canvas.rect(
            frame.x(bins.edges[b]) + 3,
            322 - height,
            frame.width / N_BINS - 6,
            height,
            "count",
            f"{int(bins.count[b]):,} predictions",
        )
    canvas.text(58, 320, "number", anchor="end")
    return canvas.markup()


def risk_coverage(before: Scored, after: Scored, keep: Keep, ticks: Sequence[float]) -> tuple[Markup, Frame]:
    """Error rate among the kept predictions, by the share kept, with a mark at the acceptable error."""
    words = (
        "Error rate among the predictions kept, by the share kept, surest first; the calibrated "
        "curve is solid, the network's own dashed."
    )
    canvas = Canvas(640, 226, words, "plot wide")
    frame = Frame(canvas, (66, 12, 542, 160), ticks[-1])
    frame.axes("share of predictions kept (the surest ones)", "wrong among them", ticks)
    for side, css in ((before, "curve before"), (after, "curve after")):
        canvas.add("path", d=_path(frame, side.curve.coverage, side.curve.risk), css=css)
    n = len(after.correct)
    _hover(frame, after)
    canvas.line(
        frame.left, frame.y(keep.error), frame.left + frame.width, frame.y(keep.error), "limit", id="limit"
    )
    canvas.add(
        "circle", cx=frame.x(keep.before / n), cy=frame.y(keep.error), r=6, css="dot before", id="dot-before"
    )
    canvas.add(
        "circle", cx=frame.x(keep.after / n), cy=frame.y(keep.error), r=6, css="dot after", id="dot-after"
    )
    return canvas.markup(), frame


def layer_profile(shares: Sequence[LayerShare]) -> Markup:
    """One bar per term: mean correction downwards (left) and upwards (right), in points."""
    largest = max((share.size for share in shares), default=0.0) or 1.0
    words = (
        "Mean correction by term: "
        + ", ".join(f"{share.name} {100 * share.size:.1f}" for share in shares)
        + " points."
    )
    names = [_short(share.name) for share in shares]
    left = 20 + 10 * max(map(len, names), default=0)
    canvas = Canvas(left + 390, 30 * len(shares) + 8, words, "plot wide")
    for i, (name, share) in enumerate(zip(names, shares, strict=True)):
        y, scale = 30 * i + 4, 310 / largest
        canvas.text(left - 10, y + 18, name, "layer", "end")
        canvas.rect(
            left,
            y + 3,
            share.lowers * scale,
            20,
            "lowers",
            f"{share.name}: lowers by {100 * share.lowers:.1f} points on average",
        )
        canvas.rect(
            left + share.lowers * scale,
            y + 3,
            share.raises * scale,
            20,
            "raises",
            f"{share.name}: raises by {100 * share.raises:.1f} points on average",
        )
        canvas.text(left + 6 + share.size * scale, y + 18, f"{100 * share.size:.1f}", "tick", "start")
    return canvas.markup()


def interval_bar(before: float, after: float, lower: float | None, upper: float | None) -> Markup:
    """A row of the table: confidence before (hollow) and after (filled), with the interval."""
    interval = (
        "" if lower is None or upper is None else f", 90 % interval {100 * lower:.0f} to {100 * upper:.0f} %"
    )
    canvas = Canvas(120, 18, f"from {100 * before:.0f} % to {100 * after:.0f} %{interval}", "mini")
    canvas.line(4, 9, 116, 9, "grid")
    if lower is not None and upper is not None:
        canvas.rect(4 + 112 * lower, 6, 112 * (upper - lower), 6, "interval")
    canvas.add("circle", cx=4 + 112 * before, cy=9, r=4, css="hollow")
    canvas.add("circle", cx=4 + 112 * after, cy=9, r=4, css="filled")
    return canvas.markup()


def _bin(
    frame: Frame,
    edges: Sequence[float],
    stated: float,
    accuracy: tuple[float, float, float],
    count: int,
    share: float,
) -> None:
    """One bar: how often right, the gap to what was stated, and the error bar of the former."""
    right, least, most = accuracy
    words = (
        f"{count:,} predictions say {100 * stated:.0f} % and are right {100 * right:.0f} % "
        f"({100 * least:.0f} to {100 * most:.0f} %)"
    )
    faint = " faint" if share < 0.01 else ""
    x, width = frame.x(edges[0]) + 3, frame.width * (edges[1] - edges[0]) - 6
    frame.canvas.rect(x, frame.y(right), width, frame.y(0) - frame.y(right), f"right{faint}", words)
    high, low = max(stated, right), min(stated, right)
    frame.canvas.rect(
        x,
        frame.y(high),
        width,
        frame.y(low) - frame.y(high),
        f"gap {'over' if stated > right else 'under'}{faint}",
        words,
    )
    middle = x + width / 2
    frame.canvas.line(middle, frame.y(least), middle, frame.y(most), f"bar{faint}")
    for end in (least, most):
        frame.canvas.line(middle - 4, frame.y(end), middle + 4, frame.y(end), f"bar{faint}")


def _hover(frame: Frame, side: Scored, n_points: int = 40) -> None:
    """Invisible points along a curve that say their values when the pointer rests on them."""
    n = len(side.curve.risk)
    for i in np.unique(np.linspace(0, n - 1, min(n_points, n)).astype(int)):
        kept, wrong = float(side.curve.coverage[i]), float(side.curve.risk[i])
        words = f"of the surest {100 * kept:.0f} %, {100 * wrong:.2g} % are wrong"
        x, y = frame.x(kept), frame.y(min(wrong, frame.top))
        title = Markup("<title>{}</title>").format(words)
        frame.canvas.add("circle", title, cx=x, cy=y, r=9, css="hover")


def _path(frame: Frame, coverage: np.ndarray, risk: np.ndarray, n_points: int = 400) -> str:
    """A curve of at most ``n_points`` points, drawn only where it is inside the frame."""
    pick = np.unique(np.linspace(0, len(coverage) - 1, min(n_points, len(coverage))).astype(int))
    pairs = [f"{frame.x(float(coverage[i])):.1f} {frame.y(min(float(risk[i]), frame.top)):.1f}" for i in pick]
    return "M" + "L".join(pairs)


def _short(name: str, length: int = 23) -> str:
    return name if len(name) <= length else "…" + name[1 - length :]


def _round(value: object) -> object:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
