"""The ``salgp`` command: from a network and its data to confidences that can be trusted, without a line of
Python.

Heavy parts of the library are imported by the commands that need them, so that ``salgp --help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    import typer
except ModuleNotFoundError as error:  # pragma: no cover
    raise SystemExit('salgp: the command line needs typer and rich; pip install "salgp[cli]"') from error

from salgp.cli import (
    applying,
    comparing,
    demonstrating,
    describing,
    exporting,
    extracting,
    fitting,
    monitoring,
    reporting,
    scoring,
    studying,
    whole,
)
from salgp.cli.shell import INTERRUPTED, USAGE, Commands, complain

__all__ = ["app", "main"]

app = typer.Typer(
    name="salgp",
    cls=Commands,
    help="Confidences that can be trusted, an error bar on each, and the layer that caused each correction.",
    epilog="Start with:  salgp demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; give its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    Example:
        >>> main(["--version"])
        salgp 0.2.0
        0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    unreadable = [text for text in given if not _is_text(text)]
    if unreadable:
        return complain(f"{unreadable[0]!r} is not text in UTF-8; rename the file, or mend the line", USAGE)
    try:
        code = app(args=given, prog_name="salgp", standalone_mode=False)
    except KeyboardInterrupt:
        return complain("stopped", INTERRUPTED)
    except _CLICK_ERROR as error:
        code = int(error.exit_code)  # type: ignore[attr-defined]
        return complain(_usage(error), code) if given else code  # without arguments, the help has been shown
    return int(code or 0) if given else USAGE  # older versions of click show the help and give 0


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


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


_CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "salgp"
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    return f"{message.rstrip('.')}; see {where} --help"


for _part in (
    whole,
    extracting,
    fitting,
    applying,
    comparing,
    reporting,
    scoring,
    demonstrating,
    monitoring,
    exporting,
    describing,
    studying,
):
    _part.register(app)
