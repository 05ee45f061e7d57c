"""The ``salgp`` command: calibrated confidences for a network and its data, without a line of Python.

Every command is a thin call of the Python API, in a module of its own. Heavy parts of the library are
imported by the commands that need them, so that ``salgp --help`` is quick. Other packages add commands: an
entry point of the group ``salgp.commands`` names a function that takes the `typer.Typer` and adds some.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

try:
    import typer
except ModuleNotFoundError as error:  # pragma: no cover
    raise SystemExit('salgp: the command line needs typer and rich; pip install "salgp[cli]"') from error

from salgp.cli import (
    apply,
    calibrate,
    compare,
    console,
    decide,
    demo,
    export,
    extract,
    fit,
    info,
    monitor,
    report,
    score,
)
from salgp.cli.console import UsageError, add_command, complain, one_line, sentence

__all__ = ["add_plugins", "app", "main"]

COMMANDS: tuple[Callable[..., None], ...] = (
    *(calibrate.calibrate, extract.extract, fit.fit),
    *(apply.apply, apply.evaluate, apply.explain, compare.compare, report.report),
    *(decide.decide, decide.sets, score.score, demo.demo, monitor.monitor, export.export, info.info),
)
"""In the order of the help."""
GROUP = "salgp.commands"
"""Entry points of this group name commands of other packages."""
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Whatever follows the name of a command that cannot be loaded."""

app = typer.Typer(
    name="salgp",
    help="Calibrated confidences for trained classifiers, with error bars and the layers behind each change.",
    epilog="Start with:  salgp demo",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; give its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    Example:
        >>> main(["--version"])
        salgp 0.2.0
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for word in words:
        if not _is_text(word):
            why = f"{word!r} is not text in UTF-8; rename the file, or mend the line"
            return complain(why, console.USAGE)
    try:
        code = app(args=words or ["--help"], prog_name="salgp", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return complain(console.STOPPED, console.INTERRUPTED)
    except _CLICK_ERROR as error:
        return complain(_usage(error), int(error.exit_code))  # type: ignore[attr-defined]
    except Exception as error:
        if "--debug" in words:
            raise
        return complain(sentence(error), console.USAGE if isinstance(error, UsageError) else console.FAILURE)
    return int(code or 0) if words else console.USAGE


def add_plugins(app: typer.Typer) -> None:
    """Add the commands of other packages; one that cannot be loaded says so when it is called."""
    for point in entry_points(group=GROUP):
        try:
            point.load()(app)
        except Exception as error:  # whatever another package does wrong must not stop our own commands
            _add_unloadable(app, point, sentence(error))


def _add_unloadable(app: typer.Typer, point: EntryPoint, reason: str) -> None:
    why = f"the command {point.name} of {point.value} cannot be loaded: {reason}"

    @app.command(point.name, help="Cannot be loaded.", context_settings=ANYTHING)
    def refuse() -> None:
        raise typer.Exit(complain(why, console.FAILURE))


def _is_text(text: str) -> bool:
    """Can libraries that open files by their names in UTF-8 open this one?"""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _version(wanted: bool) -> None:
    if wanted:
        import salgp

        print(f"salgp {salgp.__version__}")
        raise typer.Exit


_VERSION = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")
_CLICK_ERROR: type[Exception] = {k.__name__: k for k in typer.BadParameter.__mro__}["ClickException"]


@app.callback()
def _options(version: bool = _VERSION) -> None:
    pass


def _usage(error: Exception) -> str:
    where = getattr(getattr(error, "ctx", None), "command_path", "salgp")
    message = one_line(error.format_message())  # type: ignore[attr-defined]
    return f"{message.rstrip('.')}; see {where} --help"


for _command in COMMANDS:
    add_command(app, _command)
add_plugins(app)
