"""The last weeks of a monitor as one HTML page: no other file, no request, everything escaped."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from salgp.estimate.accuracy import Estimate
from salgp.io import refuse_foreign, write_whole
from salgp.monitor.records import Record, Settings
from salgp.monitor.rules import Status, expected, measured, with_late_labels
from salgp.svg import Canvas, Frame, without_control_characters

__all__ = []

WEEKS = 8
_SIZE, _BOX = (560, 236), (66, 14, 484, 186)


def write_page(
    path: str | os.PathLike[str], settings: Settings, status: Status, log: Sequence[Record], title: str
) -> Path:
    """Write `render_page` to a file; refused where something else than such a page is there."""
    refuse_foreign(path, "monitor page")
    text = render_page(settings, status, log, title)
    return write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def render_page(settings: Settings, status: Status, log: Sequence[Record], title: str) -> str:
    """The page as a string of HTML."""
    recent = _recent(with_late_labels(log))
    limit = math.log10(2 / status.false_alarm)
    names = settings.class_names or range(settings.n_classes)
    rows = [_row(settings, record) for record in recent]
    environment = Environment(autoescape=True)
    environment.filters.update(minute=_minute, figure=_figure)
    template = files("salgp.monitor").joinpath("page.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        title=title,
        status=status,
        settings=settings,
        tone="poor" if status.alarm and status.matters else "fair" if status.alarm else "good",
        classes=[(str(names[shift.label]), shift) for shift in status.classes[:10]],
        accuracy=_accuracy(settings, rows),
        evidence=_evidence(recent, limit),
        limit=limit,
        alarms=_first_alarms(log),
        rows=rows[:-15:-1],
        labelled=any(record.labelled for record in log),
        n_shown=sum(record.n > 0 for record in recent),
        first=recent[0].time if recent else "",
        last=recent[-1].time if recent else "",
    )
    return without_control_characters(page.replace(" %", "\N{NO-BREAK SPACE}%"))


Row = tuple[Record, Estimate | None, Estimate | None]
"""A record with its expected and its measured accuracy, where it has them."""


def _row(settings: Settings, record: Record) -> Row:
    found = expected(settings, [record]) if record.n else None
    return record, found, measured([record], settings.level)


def _recent(log: Sequence[Record]) -> list[Record]:
    oldest = max(map(_when, log), default=datetime.max) - timedelta(weeks=WEEKS)
    return [record for record in log if _when(record) >= oldest]


def _when(record: Record) -> datetime:
    return datetime.fromisoformat(record.time).replace(tzinfo=None)


def _minute(time: str) -> str:
    """A time for display.

    Example:
        >>> _minute("2026-11-18T04:09:44+00:00"), _minute("2026-11-18T04:09:44")
        ('2026-11-18 04:09 UTC', '2026-11-18 04:09')
    """
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M %Z}".strip()


def _figure(value: float, form: str) -> str:
    """A number with a minus sign instead of a hyphen."""
    return format(value, form).replace("-", "\N{MINUS SIGN}")


def _first_alarms(log: Sequence[Record]) -> list[tuple[str, Record]]:
    """The record at which each alarm was raised."""
    raised = {name: record for record in reversed(log) for name in record.alarm}
    return sorted(raised.items(), key=lambda alarm: alarm[1].number)


def _accuracy(settings: Settings, rows: Sequence[Row]) -> Markup:
    """Expected accuracy of every batch with its interval, measured accuracy as dots, the reference dashed."""
    ends = [found.lower for _, *both in rows for found in both if found]
    lowest = min([*ends, settings.reference])
    low = math.floor(10 * lowest) / 10
    step = next(step for step in (0.05, 0.1, 0.2) if 1 - low <= 5 * step + 1e-9)
    n_steps = int((1 - low) / step + 1e-9)
    records = [record for record, *_ in rows]
    canvas, frame = _chart(records, "Expected and measured accuracy of every batch", 1.0, low)
    frame.y_axis((1 - k * step, f"{100 * (1 - k * step):.0f} %") for k in range(n_steps + 1))
    drawn = [(_place(i, len(rows)), found) for i, (_, found, _) in enumerate(rows) if found]
    upper, lower = [(x, e.upper) for x, e in drawn], [(x, e.lower) for x, e in reversed(drawn)]
    frame.curve(upper + lower, "band", "polygon")
    frame.across(settings.reference, "reference")
    frame.curve(((x, found.value) for x, found in drawn), "line")
    for i, row in enumerate(rows):
        _dots(frame, _place(i, len(rows)), row)
    return canvas.markup()


def _dots(frame: Frame, share: float, row: Row) -> None:
    record, found, labels = row
    words = f"{record.name}, {_minute(record.time)}: expected {found}, measured {labels or 'nothing'}"
    if found:
        frame.dot(share, found.value, 3, "expected", words)
    if labels:
        frame.dot(share, labels.value, 4.5, "dot", words)


def _evidence(recent: Sequence[Record], limit: float) -> Markup:
    """Evidence for both alarms, and the limit at which they are raised."""
    shift = [record.shift / math.log(10) for record in recent]
    accuracy = [record.accuracy / math.log(10) for record in recent]
    most = max(shift + accuracy, default=0.0)
    low, high = -3, max(limit + 1, min(most, 3 * limit))
    canvas, frame = _chart(recent, "Evidence for each alarm, as powers of ten", high, low)
    step = math.ceil((high - low) / 6)
    frame.y_axis((mark, _figure(mark, "d")) for mark in range(low, math.floor(high) + 1, step))
    frame.across(limit, "limit")
    n = len(recent)
    places = [_place(i, n) for i in range(n)]
    for css, values in (("line", shift), ("second", accuracy)):
        frame.curve(zip(places, values, strict=True), css)
    return canvas.markup()


def _chart(records: Sequence[Record], description: str, high: float, low: float) -> tuple[Canvas, Frame]:
    """A canvas with the dates of some records below."""
    canvas = Canvas(*_SIZE, description)
    frame = Frame(canvas, _BOX, high, low)
    n, times = len(records), list(map(_when, records))
    form = "%b %d" if len({time.date() for time in times}) > 1 else "%H:%M"
    shown = sorted({round(k * (n - 1) / 3) for k in range(4)}) if n else []
    frame.x_axis((_place(i, n), times[i].strftime(form)) for i in shown)
    return canvas, frame


def _place(i: int, n: int) -> float:
    """Share of the width at which record ``i`` of ``n`` is drawn."""
    return (i + 0.5) / max(n, 1)
