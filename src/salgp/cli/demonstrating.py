"""``salgp demo``: two minutes that show what calibration buys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from salgp.cli.options import Force
from salgp.cli.shell import Shell, command
from salgp.cli.tables import score_table
from salgp.cli.targets import check_target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "demo", "salgp demo --out demo")(demo)


def demo(
    shell: Shell,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the demo's files.")] = Path(
        "salgp-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of data, network and calibration.")] = 0,
    force: Force = False,
) -> None:
    """Train a small network on hand-drawn digits, calibrate it, and show what that buys on photographs of
    them.
    """
    check_target(out / "report.html", force, kind="report")
    from salgp.demo import STEPS, run_demo

    with shell.progress("demo", total=STEPS) as advance:
        result = run_demo(out, seed=seed, force=force, progress=lambda text: advance(1, text))
    shown: list[Any] = [
        score_table(result.scores[name], f"{name}: {what}") for name, what in result.tests.items()
    ]
    layers = ", ".join(f"{name} ({size:.2f})" for name, size in result.layers.items())
    text = (
        f"What this means. {result.words}\n\nlayers that mattered (mean correction, {result.unit}): "
        f"{layers}\n\nreport: {result.report} (open it in any browser)"
    )
    scores = {name: comparison.as_dict() for name, comparison in result.scores.items()}
    kept = {"report": str(result.report), "scores": scores, "layers": result.layers, "words": result.words}
    shell.finish(kept, *shown, text)
