"""The last weeks of a monitor as one HTML page: no other file, no request, everything escaped."""

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
Log = Sequence[Record]
_SIZE, _BOX = (560, 236), (66, 14, 484, 186)


def write_page(
    path: str | os.PathLike[str], settings: Settings, status: Status, log: Log, title: str
) -> Path:
    """Write `render_page` to a file; refused where something else than such a page is there."""
    refuse_foreign(path, "monitor page")
    text = render_page(settings, status, log, title)
    return write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def render_page(settings: Settings, status: Status, log: Log, title: str) -> str:
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


def _recent(log: Log) -> list[Record]:
    newest = max(map(_when, log), default=datetime.max)
    oldest = newest - timedelta(weeks=WEEKS)
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


def _first_alarms(log: Log) -> list[tuple[str, Record]]:
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
    marks = [1 - k * step for k in range(n_steps + 1)]
    frame.y_axis((mark, f"{100 * mark:.0f} %") for mark in marks)
    places = _places(len(rows))
    placed = list(zip(places, rows, strict=True))
    drawn = [(x, found) for x, (_, found, _) in placed if found]
    upper = [(x, found.upper) for x, found in drawn]
    lower = [(x, found.lower) for x, found in reversed(drawn)]
    frame.area(upper + lower, "band")
    frame.across(settings.reference, css="reference")
    frame.curve([(x, found.value) for x, found in drawn], "line")
    for x, row in placed:
        _dots(frame, x, row)
    return canvas.markup()


def _dots(frame: Frame, share: float, row: Row) -> None:
    record, found, labels = row
    words = f"{record.name}, {_minute(record.time)}: expected {found}, measured {labels or 'nothing'}"
    if found:
        frame.dot(share, found.value, 3, "expected", words)
    if labels:
        frame.dot(share, labels.value, 4.5, "dot", words)


def _evidence(recent: Log, limit: float) -> Markup:
    """Evidence for both alarms, and the limit at which they are raised."""
    shift = [record.shift / math.log(10) for record in recent]
    accuracy = [record.accuracy / math.log(10) for record in recent]
    most = max(shift + accuracy, default=0.0)
    low = -3
    high = max(limit + 1, min(most, 3 * limit))
    canvas, frame = _chart(recent, "Evidence for each alarm, as powers of ten", high, low)
    step = math.ceil((high - low) / 6)
    marks = range(low, math.floor(high) + 1, step)
    frame.y_axis((mark, _figure(mark, "d")) for mark in marks)
    frame.across(limit, css="limit")
    places = _places(len(recent))
    for css, values in (("line", shift), ("second", accuracy)):
        frame.curve(zip(places, values, strict=True), css)
    return canvas.markup()


def _chart(records: Log, description: str, high: float, low: float) -> tuple[Canvas, Frame]:
    """A canvas with the dates of some records below."""
    canvas = Canvas(*_SIZE, description)
    frame = Frame(canvas, *_BOX, high, low)
    n, times = len(records), list(map(_when, records))
    places = _places(n)
    form = "%b %d" if len({time.date() for time in times}) > 1 else "%H:%M"
    shown = sorted({round(k * (n - 1) / 3) for k in range(4)}) if n else []
    frame.x_axis((places[i], times[i].strftime(form)) for i in shown)
    return canvas, frame


def _places(n: int) -> list[float]:
    """Shares of the width at which ``n`` records are drawn."""
    return [(i + 0.5) / n for i in range(n)]
