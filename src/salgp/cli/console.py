"""Output of every command: results to stdout, everything else to stderr, one sentence for a mistake.

`add_command` turns a plain function into a command with the options all commands share. `salgp.cli.main`
makes what it raises one line on stderr.
"""

from __future__ import annotations

import inspect
import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from salgp.extras import EXTRAS, hint
from salgp.progress import Advance, progress_bar, visible

if TYPE_CHECKING:
    from salgp.metrics import Comparison

__all__ = ["Console", "UsageError", "add_command", "pasteable"]

FAILURE, USAGE, INTERRUPTED = 1, 2, 130
STOPPED = "stopped; nothing was left half-written"


class UsageError(ValueError):
    """The command line itself is wrong: an unknown method, an impossible combination of options."""


class Terminal(rich.console.Console):
    """Prints names of classes, files and layers as they are: no markup, no emoji, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed, alone or in a table, comes through here."""
        return super().render_str(visible(text), **options)


def pasteable(*words: object) -> str:
    """A command to paste into a shell, every word quoted where it must be.

    Example:
        >>> pasteable("salgp", "info", "TEST.$(touch x)")
        "salgp info 'TEST.$(touch x)'"
    """
    return shlex.join(map(str, words))


@dataclass(frozen=True)
class Console:
    """Output of one command.

    Args:
        json: print the result as one JSON object.
        quiet: print nothing but the result of ``--json``.
        debug: let errors show their traceback.

    Example:
        >>> Console(json=True).finish({"n": 3})
        {"n": 3}
    """

    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False

    def finish(self, value: Mapping[str, Any], *shown: Any) -> None:
        """End with a result: ``value`` for machines, or ``shown`` for people."""
        if self.json:
            print(json.dumps(_plain(value), allow_nan=False))
        elif not self.quiet:
            for part in shown:
                Terminal(soft_wrap=isinstance(part, str)).print(part)

    def say(self, text: str) -> None:
        """Tell on stderr what is going on."""
        if not self.quiet and not self.json:
            Terminal(stderr=True).print(text, soft_wrap=True)

    @property
    def shows_progress(self) -> bool:
        """Is a terminal there, and are messages wanted?"""
        return Terminal(stderr=True).is_terminal and not (self.quiet or self.json)

    @contextmanager
    def warnings_as_notes(self, about: str = "") -> Iterator[None]:
        """Show the library's own warnings as a line each; those of others only with ``--debug``."""

        def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            if category.__module__.startswith("salgp") or self.debug:
                self.say(f"note: {about}{one_line(str(message))}")

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = show
            yield

    def progress(self, description: str, total: float | None = None) -> AbstractContextManager[Advance]:
        """A progress bar with the time left (without a total, the time passed); yields ``advance``."""
        wanted = None if self.shows_progress else False
        return progress_bar(description, total, wanted, patience=0, console=Terminal(stderr=True))


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Register ``function(console, ...)`` as a command with ``--json``, ``--quiet`` and ``--debug``.

    Its help is its docstring, with the lines below ``Example:`` last. A parameter whose type is a dataclass
    stands for a group of options, one for each of its fields.
    """
    own = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, Any] = {key: p.annotation for key, p in own.items() if is_dataclass(p.annotation)}

    def run(**arguments: Any) -> None:
        for key, group in groups.items():
            arguments[key] = group(**{f.name: arguments.pop(f.name) for f in fields(group)})
        try:
            with arguments["console"].warnings_as_notes():
                function(**arguments)
        except KeyboardInterrupt as error:
            raise typer.Exit(complain(STOPPED, INTERRUPTED)) from error

    taken = _options(own.values())
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in taken}
    app.command(name or function.__name__, **_help(function))(run)


def _options(own: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """Every option on its own; those that all commands share stand below."""
    last = sorted(own, key=lambda p: p.name == "console")
    return [p.replace(kind=p.KEYWORD_ONLY) for group in last for p in _expanded(group)]


def _expanded(option: inspect.Parameter) -> Iterable[inspect.Parameter]:
    """The options of a group, or the one itself."""
    grouped = is_dataclass(option.annotation)
    if not grouped:
        return [option]
    return inspect.signature(option.annotation, eval_str=True).parameters.values()


def _help(function: Callable[..., None]) -> dict[str, Any]:
    """Help of a command from the docstring of its function; an example may take several lines."""
    text, _, examples = str(inspect.getdoc(function)).partition("\n\nExample:\n")
    paragraphs = list(map(one_line, text.split("\n\n")))
    lines = map(one_line, examples.split("salgp ")[1:])
    epilog = "\n\n".join(f"Example:  salgp {line}" for line in lines)
    whole = "\n\n".join(paragraphs)
    return {"help": whole, "short_help": paragraphs[0], "epilog": epilog}


def one_line(text: str) -> str:
    """The text with single spaces for line breaks and indentation."""
    return " ".join(text.split())


def complain(text: str, code: int) -> int:
    """Print one line on stderr and return the exit code."""
    line = Text.assemble(("salgp:", "bold red"), f" {visible(text)}")
    Terminal(stderr=True).print(line, soft_wrap=True)
    return code


def sentence(error: BaseException) -> str:
    """One line that says what went wrong.

    Example:
        >>> sentence(KeyError("no calibrator called 'x'"))
        "no calibrator called 'x'"
        >>> sentence(OSError(28, "No space left on device", "out.json"))
        'out.json: No space left on device'
    """
    text = one_line(_message(error))
    if text and isinstance(error, _EXPECTED):
        return text
    return f"{type(error).__name__}: {text or 'no message'} (--debug shows where)"


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return hint(error.name)
    return str(error)


_EXPECTED = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, MemoryError)


def _plain(value: Any) -> Any:
    """JSON-ready: numbers without a value become null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | None) else str(value)


def score_table(comparison: Comparison, title: str) -> Table:
    """One row per method; the best of each column in bold, and the mean error bar last.

    Calibration changes no label, so the accuracy of all methods is one number and stands below the table.
    """
    from salgp.metrics import METRICS

    rows = comparison.as_dict()
    shown = [metric for metric in METRICS.values() if metric.heading and metric.name != "accuracy"]
    accuracy = next(iter(rows.values()))["accuracy"]
    caption = f"accuracy {accuracy:.3f} for every method; {_CAPTION}"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    table.add_column("method", no_wrap=True)
    headings = [metric.heading + _ARROWS[metric.larger_is_better] for metric in shown]
    for heading in (*headings, "± std"):
        table.add_column(heading, justify="right", no_wrap=True)
    ordered = [metric.name for metric in shown if metric.larger_is_better is not None]
    best = {name: _best(comparison, name) for name in ordered}
    for name, scores in rows.items():
        cells = [_cell(scores[metric.name], best.get(metric.name) == name) for metric in shown]
        variance = scores["mean_variance"]
        table.add_row(name, *cells, _cell(None if variance is None else variance**0.5))
    return table


_ARROWS = {None: "", True: "↑", False: "↓"}
_COLUMNS = "conf.: mean confidence; NLLc: of being correct; AUROC: of spotting errors"
_CAPTION = f"{_COLUMNS}; ↓ small is good, ↑ large is good"


def _best(comparison: Comparison, metric: str) -> str | None:
    """The best method, where there are several and they differ."""
    values = {scores[metric] for scores in comparison.as_dict().values()}
    return comparison.best(metric) if len(values - {None}) > 1 else None


def _cell(value: float | None, best: bool = False) -> Text:
    return Text("-" if value is None else f"{value:.3f}", style="bold green" if best else "")
