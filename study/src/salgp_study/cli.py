"""``salgp study``: the paper's study on real data, resumable, with tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from salgp.cli.console import Console, UsageError, add_command, pasteable
from salgp.cli.options import Engine

__all__ = ["register"]

Folder = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the records; a stopped study continues there.")
]
Records = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of the records, as given to `salgp study run --out`.")
]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the real data. Default: the environment variable SALGP_DATA.")
]
FitOn = Annotated[
    str | None,
    typer.Option(help="Fit calibrators on train, validation or both; the preset's choice by default."),
]
Tasks = Annotated[
    int | None, typer.Option(help="Tasks at once on Ray. Default: as many as it has cores for.")
]


def register(app: typer.Typer) -> None:
    """Add ``salgp study`` and its commands to ``app``."""
    what = "Reproduce the paper's study: list, run, table, figures."
    study = typer.Typer(help=what, no_args_is_help=True, rich_markup_mode=None)
    add_command(study, list_, "list")
    for function in (run, table, figures):
        add_command(study, function)
    app.add_typer(study, name="study")


def list_(console: Console) -> None:
    """List the studies and presets.

    Example:
        salgp study list
    """
    from salgp_study.presets import PRESETS, list_studies

    shown = Table("study", "what it is", title=f"presets: {', '.join(PRESETS)}", title_justify="left")
    for name, what in list_studies().items():
        shown.add_row(name, what)
    console.finish({"studies": list_studies(), "presets": list(PRESETS)}, shown)


def run(
    console: Console,
    name: Annotated[str, typer.Argument(help="A study of `salgp study list`, or all.")],
    preset: Annotated[str, typer.Option(help="smoke (seconds), cpu (hours) or paper.")] = "cpu",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    out: Folder = Path("study"),
    data: Data = None,
    fit_on: FitOn = None,
    engine: Engine = "local",
    workers: Tasks = None,
) -> None:
    """Run a study; finished parts are not run again.

    Example:
        salgp study run mstar-convnet --preset cpu --seeds 0,1,2 -o study
    """
    from salgp_study.grid import run_grid
    from salgp_study.run import run_study

    numbers = _numbers(seeds)
    on = fit_on.split(",") if fit_on else None
    with console.progress(f"study {name}") as advance:

        def progress(line: str) -> None:
            advance(1, line)

        if engine != "local":
            where: Any = {"engine": engine, "workers": workers}
            folder = run_grid([name], numbers, preset, out, data, **where, fit_on=on, progress=progress)
        else:
            folder = run_study(name, preset, numbers, out, data, progress=progress, fit_on=on)
    following = pasteable("salgp", "study", "table", folder)
    console.finish({"out": str(folder)}, f"records in {folder}; next: {following}")


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds {seeds}: expected whole numbers separated by commas") from error


def table(console: Console, out: Records) -> None:
    """Write the tables of a study folder as Markdown and LaTeX.

    Example:
        salgp study table study
    """
    from salgp_study.tables import make_tables

    written = [str(path) for path in make_tables(out)]
    console.finish({"tables": written}, "\n".join(written))


def figures(console: Console, out: Records, data: Data = None) -> None:
    """Draw the figures of a study folder.

    Example:
        salgp study figures study
    """
    from salgp_study.figures import make_figures

    with console.progress("drawing"):
        written = [str(path) for path in make_figures(out, data)]
    console.finish({"figures": written}, "\n".join(written))
