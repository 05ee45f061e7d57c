"""The last weeks of a monitor as one HTML page: no other file, no request, everything escaped.

Drawings are SVG made of numbers only; every word that comes from data goes through the template, which
escapes it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from salgp.extras import require
from salgp.monitor.records import Record
from salgp.storage import refuse_foreign, write_whole

__all__ = ["render_page", "write_page"]

WEEKS = 8
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 860, 220, 46, 26


class Watched(Protocol):
    """What the page needs of a monitor."""

    settings: Any

    @property
    def log(self) -> Sequence[Record]:
        """All that was recorded."""

    def status(self) -> Any:
        """Where things stand."""

    def estimate_of(self, record: Record) -> Any:
        """The accuracy to expect of a batch."""


def write_page(path: str | os.PathLike[str], monitor: Watched, title: str) -> Path:
    """Write `render_page` to a file; refused where something else than such a page is there."""
    refuse_foreign(path, "monitor page")
    text = render_page(monitor, title)

    def write(part: Path) -> None:
        part.write_text(text, encoding="utf-8")

    return write_whole(path, write)


def render_page(monitor: Watched, title: str) -> str:
    """The page as a string of HTML."""
    require("jinja2")
    from jinja2 import Environment
    from markupsafe import Markup

    status = monitor.status()
    recent = _recent(monitor.log)
    limit = math.log10(2 / status.false_alarm)
    fed = [record for record in recent if record.n]
    environment = Environment(autoescape=True)
    environment.filters.update(minute=_minute, figure=_figure)
    template = environment.from_string(
        files("salgp.monitor").joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.render(
        title=title,
        status=status,
        settings=monitor.settings,
        tone="poor" if status.alarm and status.matters else "fair" if status.alarm else "good",
        classes=[(_name(monitor, move.label), move) for move in status.classes[:10]],
        moves=[(move, round(100 * abs(move.effect))) for move in status.moves],
        accuracy=Markup(_accuracy(monitor, fed)),
        money=Markup(_money(recent, limit)),
        limit=limit,
        alarms=_alarms(monitor.log),
        rows=[(record, monitor.estimate_of(record)) for record in reversed(fed[-14:])],
        first=recent[0].time if recent else "",
        last=recent[-1].time if recent else "",
        n_shown=len(fed),
        labelled=any(record.labelled for record in monitor.log),
    )


def _recent(log: Sequence[Record]) -> list[Record]:
    if not log:
        return []
    newest = _when(log[-1])
    return [record for record in log if newest - _when(record) <= timedelta(weeks=WEEKS)]


def _when(record: Record) -> datetime:
    return datetime.fromisoformat(record.time).replace(tzinfo=None)


def _minute(time: str) -> str:
    """A time for people.

    Example:
        >>> _minute("2026-11-18T04:09:44+00:00"), _minute("2026-11-18T04:09:44")
        ('2026-11-18 04:09 UTC', '2026-11-18 04:09')
    """
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M %Z}".strip()


def _figure(value: float, form: str) -> str:
    """A number with a minus sign instead of a hyphen."""
    return format(value, form).replace("-", "\N{MINUS SIGN}")


def _alarms(log: Sequence[Record]) -> list[tuple[str, Record]]:
    """The batch at which each alarm was raised."""
    raised: dict[str, Record] = {}
    for record in log:
        for name in record.alarm:
            raised.setdefault(name, record)
    return list(raised.items())


def _name(monitor: Watched, label: int) -> str:
    names = monitor.settings.class_names
    return str(label) if names is None else names[label]


def _accuracy(monitor: Watched, fed: Sequence[Record]) -> str:
    """Expected accuracy of every batch with its interval, measured accuracy as dots, home as a line."""
    found = [monitor.estimate_of(record) for record in fed]
    measured = {i: record.right / record.labelled for i, record in enumerate(fed) if record.labelled}
    lowest = min([*(e.lower for e in found), *measured.values(), monitor.settings.home])
    low, high = math.floor(10 * lowest) / 10, 1.0

    def at(i: int, value: float) -> str:
        return _point(i, value, len(found), low, high)

    upper = [at(i, estimate.upper) for i, estimate in enumerate(found)]
    lower = [at(i, estimate.lower) for i, estimate in enumerate(found)]
    band = [*upper, *reversed(lower)]
    line = [at(i, estimate.value) for i, estimate in enumerate(found)]
    dots = [at(i, share) for i, share in measured.items()]
    home = _y(monitor.settings.home, low, high)
    step = next(step for step in (0.05, 0.1, 0.2) if high - low <= 5 * step + 1e-9)
    marks = [high - k * step for k in range(int((high - low) / step + 1e-9) + 1)]
    inside = [
        *_grid(marks, low, high, lambda v: f"{100 * v:.0f} %"),
        f'<polygon class="band" points="{" ".join(band)}"/>',
        f'<line class="home" x1="{_LEFT}" x2="{_WIDTH}" y1="{home:.1f}" y2="{home:.1f}"/>',
        f'<polyline class="line" points="{" ".join(line)}"/>',
        *(f'<circle class="dot" r="3.5" cx="{x}" cy="{y}"/>' for x, y in (p.split(",") for p in dots)),
    ]
    return _svg(inside, "Expected accuracy of every batch, with its interval")


def _money(recent: Sequence[Record], limit: float) -> str:
    """Evidence against "nothing changed" and "as right as promised", and where an alarm is raised."""
    ten = math.log(10)
    series = {"line": [r.shift / ten for r in recent], "second": [r.promise / ten for r in recent]}
    low = -3.0
    high = max([limit + 1, *(min(v, 3 * limit) for values in series.values() for v in values)])
    where = _y(limit, low, high)
    inside = [
        *_grid(range(math.ceil(low), math.floor(high) + 1), low, high, lambda v: _figure(v, ".0f")),
        f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH}" y1="{where:.1f}" y2="{where:.1f}"/>',
    ]
    for name, values in series.items():
        points = [_point(i, min(max(v, low), high), len(values), low, high) for i, v in enumerate(values)]
        inside.append(f'<polyline class="{name}" points="{" ".join(points)}"/>')
    return _svg(inside, "Evidence of a change, as powers of ten")


def _grid(values: Any, low: float, high: float, text: Any) -> list[str]:
    marks = []
    for value in values:
        y = _y(value, low, high)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text(value)}</text>'
        )
    return marks


def _point(i: int, value: float, n: int, low: float, high: float) -> str:
    x = _LEFT + (_WIDTH - _LEFT - 10) * (i + 0.5) / max(n, 1)
    return f"{x:.1f},{_y(value, low, high):.1f}"


def _y(value: float, low: float, high: float) -> float:
    return 10 + (_HEIGHT - _BOTTOM - 10) * (high - value) / max(high - low, 1e-9)


def _svg(inside: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(inside)}</svg>'
