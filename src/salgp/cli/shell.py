"""How every command speaks: results to stdout, everything else to stderr, one sentence and an exit code for a
mistake.

`command` turns a plain function into a command with the options all commands share. What it raises becomes
one line on stderr and exit code 1; a wrong command line gives 2; Ctrl-C gives 130, as shells expect.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from salgp.extras import EXTRAS, hint
from salgp.progress import progress_bar

__all__ = [
    "FAILURE",
    "INTERRUPTED",
    "USAGE",
    "Commands",
    "Shell",
    "UsageError",
    "command",
    "complain",
    "did_you_mean",
    "sentence",
]

FAILURE, USAGE, INTERRUPTED = 1, 2, 130
F = TypeVar("F", bound=Callable[..., Any])
Advance = Callable[..., None]


class UsageError(ValueError):
    """The command line itself is wrong: an unknown method, an impossible combination of options."""


class Terminal(Console):
    """Where text meets the terminal: names of classes, files and layers are printed, never obeyed.

    Square brackets are no markup, ``:smile:`` is no picture, and control characters become visible.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed, alone or in a table, comes through here."""
        return super().render_str(visible(text), **options)


def visible(text: str) -> str:
    """The text with its control characters spelt out.

    Example:
        >>> visible("red\\x1b[31m")
        'red\\\\x1b[31m'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else _spelt(c) for c in text)


@dataclass(frozen=True)
class Shell:
    """What a command uses to speak.

    Args:
        json: print the result as one JSON object.
        quiet: print nothing but the result of ``--json``.
        debug: let errors show their traceback.

    Example:
        >>> Shell(json=True).finish({"n": 3})
        {"n": 3}
    """

    json: bool = False
    quiet: bool = False
    debug: bool = False

    def finish(self, value: Mapping[str, Any], *shown: RenderableType) -> None:
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
    def is_watched(self) -> bool:
        """Does somebody look at a terminal, and wants to be told?"""
        return Terminal(stderr=True).is_terminal and not (self.quiet or self.json)

    @contextmanager
    def notes_about(self, name: str) -> Iterator[None]:
        """Warnings of the library that come up inside are said with the name of what they are about."""
        with _own_warnings(self, f"{name}: "):
            yield

    @contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Advance]:
        """A progress bar with the time left (or, without a total, the time passed); yields ``advance(steps,
        description)``.
        """
        wanted = None if self.is_watched else False
        console = Terminal(stderr=True)
        with progress_bar(visible(description), total, wanted, patience=0, console=console) as bar:

            def advance(steps: float = 1, description: str | None = None) -> None:
                bar(steps, None if description is None else visible(description))

            yield advance


def command(app: typer.Typer, name: str, *examples: str) -> Callable[[F], F]:
    """Register ``function(shell, ...)`` as a command with ``--json``, ``--quiet``, ``--debug`` and examples
    in its help.
    """

    def decorate(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        own = [
            p.replace(kind=p.KEYWORD_ONLY, annotation=_plain_flag(p.name, hints[p.name]))
            for p in inspect.signature(function).parameters.values()
            if p.name != "shell"
        ]

        def run(**arguments: Any) -> None:
            shell = Shell(**{key: arguments.pop(key) for key in _COMMON})
            code = guard(shell, function, arguments)
            if code:
                raise typer.Exit(code)

        common = [
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_plain_flag(key, kind)
            )
            for key, kind in _COMMON.items()
        ]
        run.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *common]}
        app.command(
            name,
            cls=_Command,
            help=_paragraphs(inspect.getdoc(function)),
            epilog="\n\n".join(f"Example:  {example}" for example in examples),
            no_args_is_help=False,
        )(run)
        return function

    return decorate


class _Command(TyperCommand):
    """A command whose help names flags without a type."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = NO_TYPE
        return option


class Commands(TyperGroup):
    """A group of commands whose help names flags without a type."""

    def get_params(self, ctx: Any) -> Any:
        options = super().get_params(ctx)
        for option in options:
            if getattr(option, "is_flag", False) or option.name in COMPLETION:
                option.metavar = NO_TYPE
        return options


NO_TYPE = " "
"""Stands where the help would show ``<bool>``."""
COMPLETION = ("install_completion", "show_completion")


def _plain_flag(name: str, kind: Any) -> Any:
    """A flag is its name and nothing more: no ``<bool>``, no ``--no-...``."""
    option = next((x for x in getattr(kind, "__metadata__", ()) if isinstance(x, OptionInfo)), None)
    if option is None or kind.__origin__ is not bool:
        return kind
    flag = copy.copy(option)
    flag.metavar = NO_TYPE
    if not option.param_decls and not isinstance(option.default, str):  # there typer keeps a first name
        flag.param_decls = (f"--{name.replace('_', '-')}",)
    return Annotated[bool, flag]


def guard(shell: Shell, function: Callable[..., Any], arguments: Mapping[str, Any]) -> int:
    """Run a command; give its exit code, having complained where that is not 0."""
    try:
        with _own_warnings(shell):
            function(shell, **arguments)
    except typer.Exit as error:
        return int(error.exit_code)
    except KeyboardInterrupt:
        return complain("stopped; nothing was left half-written", INTERRUPTED)
    except Exception as error:
        if shell.debug:
            raise
        return complain(sentence(error), USAGE if isinstance(error, UsageError) else FAILURE)
    return 0


def complain(text: str, code: int) -> int:
    """Print one line on stderr and return the exit code."""
    Terminal(stderr=True).print(Text.assemble(("salgp:", "bold red"), f" {visible(text)}"), soft_wrap=True)
    return code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to put into a message, or nothing where no known name is close.

    Example:
        >>> did_you_mean("temprature", ["temperature", "platt"])
        "did you mean 'temperature'? "
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def sentence(error: BaseException) -> str:
    """One line that says what went wrong.

    Example:
        >>> sentence(KeyError("no calibrator called 'x'"))
        "no calibrator called 'x'"
        >>> sentence(OSError(28, "No space left on device", "out.json"))
        'out.json: No space left on device'
    """
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
    elif isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        text = hint(error.name)
    else:
        text = str(error)
    text = " ".join(text.split())
    expected = isinstance(
        error, OSError | ValueError | KeyError | TypeError | RuntimeError | ImportError | MemoryError
    )
    return (
        text if expected and text else f"{type(error).__name__}: {text or 'no message'} (--debug shows where)"
    )


_COMMON: dict[str, Any] = {
    "json": Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
}


def _paragraphs(text: str | None) -> str:
    """Each paragraph on one line: the terminal decides where lines end."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


@contextmanager
def _own_warnings(shell: Shell, about: str = "") -> Iterator[None]:
    """Show the library's own warnings as a line each; those of others only with ``--debug``."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.startswith("salgp") or shell.debug:
            shell.say(f"note: {about}{' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


def _plain(value: Any) -> Any:
    """JSON-ready: numbers without a value become null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
