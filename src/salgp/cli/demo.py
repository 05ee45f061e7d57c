"""``salgp demo``: the effect of calibration on a small network, in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from salgp.cli import options
from salgp.cli.checks import check_target
from salgp.cli.console import Console, score_table

__all__ = []

DemoFolder = Annotated[Path, Option("--out", "-o", help="Folder of the demo's files.")]


def demo(console: Console, out: DemoFolder = Path("salgp-demo"), force: options.Force = False) -> None:
    """Train a small network on hand-drawn digits, calibrate it, and show the effect on photographs of
    them.

    Example:
        salgp demo --out demo
    """
    check_target(out / "report.html", "report", force)
    from salgp.demo import STEPS, TESTS, run_demo

    with console.progress("demo", total=STEPS) as advance:
        result = run_demo(out, force=force, progress=lambda text: advance(1, text))
    tables = [score_table(result.scores[name], f"{name}: {what}") for name, what in TESTS.items()]
    text = f"What this means. {result.words}\n\nreport: {result.report} (open it in any browser)"
    scores = {name: comparison.as_dict() for name, comparison in result.scores.items()}
    told = {"report": str(result.report), "scores": scores, "words": result.words}
    console.finish(told, *tables, text)
