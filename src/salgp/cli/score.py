"""``salgp score``: any number of samples, shard by shard, on this machine or on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import salgp
from salgp.cli import options
from salgp.cli.checks import check_apart, check_inputs
from salgp.cli.console import Console, UsageError
from salgp.cli.inputs import check_alike, read_calibrator

__all__ = []

Store = Annotated[Path, Argument(metavar="STORE", help="Folder of shards, as `salgp extract` writes.")]
Scored = Annotated[Path, Option("--out", "-o", help="Folder of the scores; a stopped run continues.")]
Workers = Annotated[int | None, Option(min=1, help="Pieces of work at a time. Default: one per core.")]
WithLayers = Annotated[bool, Option("--layers", help="Also write each layer's part of the correction.")]


def score(
    console: Console,
    calibrator: options.CalibratorFolder,
    features: Store,
    out: Scored,
    engine: options.Engine = "local",
    workers: Workers = None,
    layers: WithLayers = False,
    context: options.Context = None,
) -> None:
    """Score any number of samples shard by shard, on this machine or on Ray; a stopped run continues.

    Example:
        salgp score cal shards/ -o scored/
    """
    check_inputs(calibrator, features)
    check_apart(out, calibrator, features)
    if features.is_file():
        advice = "score works on a folder of shards (salgp extract -o FOLDER), salgp apply on a file"
        raise UsageError(f"{features} is one file; {advice}")
    window = options.context_of(context)
    fitted = read_calibrator(calibrator)
    check_alike(calibrator, fitted.origin, salgp.files.first_shard(features)[0])
    done = salgp.store.score(
        features,
        calibrator,
        out,
        engine=engine,
        workers=workers,
        layers=layers,
        context=window,
        progress=console.shows_progress,
    )
    told = {"out": str(out), "rows": done.rows, "new_rows": done.new_rows, "seconds": done.seconds}
    rate = f"{done.new_rows:,} of them now ({done.rate:,.0f} per second)"
    console.finish(told, f"{done.rows:,} samples in {out}, {rate}")
