"""The one progress bar: of reading a network, of a store, of the command line."""

import importlib.util
import sys
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol

from salgp.extras import require

__all__ = ["Advance", "progress_bar", "steps_in", "visible"]

PAUSE = 10.0
"""Seconds between two lines where there is no terminal."""


class Advance(Protocol):
    """``advance(steps, title)``: so many steps are done, and the rest has this title (None: the same)."""

    def __call__(self, steps: float = 1, title: str | None = None) -> None: ...


@contextmanager
def progress_bar(
    title: str,
    total: float | None,
    wanted: bool | None = None,
    *,
    done: float = 0,
    unit: str = "",
    patience: float = 1.0,
    console: Any = None,
) -> Iterator[Advance]:
    """A bar with the time left, or without a total the time passed, on stderr; where there is no terminal, a
    line now and then.

    Args:
        title: what is being done; printed as it is, without control characters.
        total: number of steps, None where unknown.
        wanted: True shows the bar and False nothing; None the bar on a terminal and in notebooks, and lines
            elsewhere.
        done: steps that were done before.
        unit: of the steps, to show a rate; none is shown without.
        patience: seconds before it appears; none where it is ``wanted``.
        console: rich's, by default one of stderr.

    Example:
        >>> with progress_bar("counting", 3, wanted=False) as advance:
        ...     for _ in range(3):
        ...         advance()
    """
    bar = _rich_bar(wanted, total, console)
    if bar is None:
        yield (lambda steps=1, title=None: None) if wanted is False else _Lines(title, total, done)
        return
    task = bar.add_task(visible(title), total=total, completed=done, rate="")
    begin = time.monotonic()

    def advance(steps: float = 1, title: str | None = None) -> None:
        bar.update(task, advance=steps, description=title and visible(title))
        if unit:
            bar.update(task, rate=f"{bar.tasks[0].speed or 0:,.0f} {unit}/s")
        if not bar.live.is_started and time.monotonic() - begin > patience:
            bar.start()

    try:
        if wanted or patience == 0:
            bar.start()
        yield advance
    finally:
        bar.stop()


def visible(text: str) -> str:
    """The text with its control characters spelt out.

    Example:
        >>> visible("red\\x1b[31m")
        'red\\\\x1b[31m'
    """
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


class _Lines:
    """Prints what is done, how far it is and how long it still takes, every `PAUSE` seconds at most."""

    def __init__(self, title: str, total: float | None, done: float = 0) -> None:
        self._title, self._total = title, total
        self._done = self._before = done
        self._begin = self._said = time.monotonic()

    def __call__(self, steps: float = 1, title: str | None = None) -> None:
        self._done += steps
        self._title = title or self._title
        now = time.monotonic()
        if now - self._said >= PAUSE:
            self._said = now
            print(visible(self._line(now - self._begin)), file=sys.stderr, flush=True)

    def _line(self, passed: float) -> str:
        if self._total is None:
            return f"{self._title}: {self._done:,.0f} after {_duration(passed)}"
        left = passed * max(self._total - self._done, 0) / max(self._done - self._before, 1e-9)
        return f"{self._title}: {self._done:,.0f} of {self._total:,.0f}, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    """Seconds in words.

    Example:
        >>> _duration(42), _duration(400)
        ('42 s', '7 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def steps_in(loader: Any) -> int | None:
    """How many batches a loader will yield, or None where it cannot tell.

    Every `torch.utils.data.DataLoader` has a length, but one over an iterable data set raises when asked.

    Example:
        >>> steps_in([1, 2]), steps_in(iter([1, 2]))
        (2, None)
    """
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _rich_bar(wanted: bool | None, total: float | None, console: Any) -> Any:
    """The bar, or None where it is not to be seen."""
    if wanted:
        require("rich")
    if wanted is False or importlib.util.find_spec("rich") is None:
        return None
    from rich import progress
    from rich.console import Console

    console = console or Console(stderr=True)
    if wanted is None and not (console.is_terminal or console.is_jupyter):
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}", markup=False),
        progress.TimeElapsedColumn() if total is None else progress.TimeRemainingColumn(compact=True),
        console=console,
        transient=wanted is None,
    )
