"""Canvas and axes to draw inline SVG on; figures are in `salgp.report.figures` and `salgp.monitor.page`.

They follow the page's colours in the dark, and print well. Needs `markupsafe`, which comes with the extra
``salgp[report]``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

__all__ = ["Canvas", "Frame", "without_control_characters"]

Pairs = Iterable[tuple[float, float]]
Ticks = Iterable[tuple[float, str]]

_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def without_control_characters(page: str) -> str:
    """Text with every control character, bidirectional override and lone surrogate made visible as U+FFFD.

    HTML escaping leaves them as they are: they could reverse what a reader sees, or not be encoded at all.

    Example:
        >>> without_control_characters("cat\\u202egod") == "cat\\ufffdgod"
        True
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", page)


@dataclass(frozen=True, eq=False)
class Canvas:
    """Collects SVG elements; all text is escaped.

    Example:
        >>> canvas = Canvas(10, 10, "a <dot>")
        >>> canvas.add("circle", cx=5, cy=5, r=2)
        >>> "&lt;dot&gt;" in canvas.markup()
        True
    """

    width: float
    height: float
    description: str
    css: str = ""
    _parts: list[Markup] = field(default_factory=list, init=False)

    def add(self, tag: str, content: str = "", **attributes: object) -> None:
        """One element; ``css`` is its class, underscores in names are hyphens, numbers are rounded."""
        pairs = map(_attribute, attributes, attributes.values())
        element = Markup("<{0}{1}>{2}</{0}>")
        joined = Markup("").join(pairs)
        self._parts.append(element.format(tag, joined, content))

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str, **more: Any) -> None:
        """A straight line."""
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, css=css, **more)

    def rect(self, x: float, y: float, width: float, height: float, css: str, title: str = "") -> None:
        """A rectangle, with a text shown when the pointer rests on it."""
        self.add("rect", _title(title), x=x, y=y, width=max(width, 0), height=max(height, 0), css=css)

    def text(
        self, x: float, y: float, content: str, css: str = "tick", anchor: str = "middle", **more: Any
    ) -> None:
        """A line of text."""
        self.add("text", content, x=x, y=y, css=css, text_anchor=anchor, **more)

    def markup(self) -> Markup:
        """The whole figure."""
        size = f"0 0 {self.width} {self.height}"
        head = Markup('<svg viewBox="{}" role="img" aria-label="{}" class="{}">')
        parts = head.format(size, self.description, self.css), *self._parts
        return Markup("").join(parts) + Markup("</svg>")


@dataclass(frozen=True, eq=False)
class Frame:
    """Axes: from data to pixels.

    Args:
        canvas: to draw on.
        left: edge in pixels.
        upper: edge in pixels.
        width: in pixels.
        height: in pixels.
        high: value at the upper edge.
        low: value at the lower edge.
    """

    canvas: Canvas
    left: float
    upper: float
    width: float
    height: float
    high: float = 1.0
    low: float = 0.0

    def x(self, share: float) -> float:
        """Pixel of a share of the width."""
        return self.left + share * self.width

    def y(self, value: float) -> float:
        """Pixel of a value, kept inside the frame."""
        inside = min(max(value, self.low), self.high)
        span = max(self.high - self.low, 1e-9)
        return self.upper + self.height * (self.high - inside) / span

    def curve(self, pairs: Pairs, css: str) -> None:
        """A line through pairs of share and value."""
        self._draw("polyline", pairs, css)

    def area(self, pairs: Pairs, css: str) -> None:
        """What a line through pairs of share and value encloses."""
        self._draw("polygon", pairs, css)

    def _draw(self, tag: str, pairs: Pairs, css: str) -> None:
        points = " ".join(f"{self.x(share):.1f},{self.y(value):.1f}" for share, value in pairs)
        self.canvas.add(tag, points=points, css=css)

    def dot(self, share: float, value: float, r: float, css: str, title: str = "", **more: Any) -> None:
        """A dot, with a text shown when the pointer rests on it."""
        self.canvas.add("circle", _title(title), cx=self.x(share), cy=self.y(value), r=r, css=css, **more)

    def across(self, value: float, **look: Any) -> None:
        """A line across the frame at a value."""
        y, right = self.y(value), self.left + self.width
        self.canvas.line(self.left, y, right, y, **look)

    def y_axis(self, ticks: Ticks, label: str | None = None) -> None:
        """Grid lines with their texts, and the name of the axis."""
        for value, text in ticks:
            self.across(value, css="grid")
            y = self.y(value) + 4
            self.canvas.text(self.left - 6, y, text, anchor="end")
        if label is not None:
            middle = self.upper + self.height / 2
            self.canvas.text(14, middle, label, "axis side", transform=f"rotate(-90 14 {middle:.0f})")

    def x_axis(self, ticks: Ticks, label: str | None = None) -> None:
        """Texts at shares of the width, and the name of the axis."""
        canvas, lower = self.canvas, self.upper + self.height
        for share, text in ticks:
            anchor = "start" if share < 0.1 else "end" if share > 0.9 else "middle"
            x = self.x(share)
            canvas.text(x, lower + 20, text, "tick below", anchor)
        if label is not None:
            canvas.text(self.x(0.5), lower + 40, label, "axis below")


def _title(text: str) -> str:
    return Markup("<title>{}</title>").format(text) if text else ""


def _attribute(name: str, value: object) -> Markup:
    name = name.replace("css", "class").replace("_", "-")
    if isinstance(value, float):
        value = f"{value:.1f}".removesuffix(".0")
    return Markup(' {}="{}"').format(name, value)
