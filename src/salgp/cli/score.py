"""``salgp score``: any number of samples, shard by shard, on this machine or on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salgp.cli import options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.predictions import check_alike, read_calibrator
from salgp.cli.preflight import check_apart, check_inputs

__all__ = ["register"]

Store = Annotated[
    Path, typer.Argument(metavar="STORE", help="Folder of shards, as `salgp extract -o FOLDER` writes it.")
]
Scored = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the scored shards; a stopped run continues there.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Pieces of work at a time. Default: one per core.")
]
WithLayers = Annotated[bool, typer.Option("--layers", help="Also write each layer's part of the correction.")]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "score", "salgp score cal shards/ -o scored/")(score)


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
    """Score any number of samples shard by shard, on this machine or on Ray; a stopped run continues."""
    check_inputs(calibrator, features)
    check_apart(out, calibrator, features)
    if features.is_file():
        raise UsageError(
            f"{features} is one file; score works on a folder of shards (salgp extract -o FOLDER), salgp "
            f"apply on a file"
        )
    window = options.context_of(context)
    from salgp.files import first_shard
    from salgp.store import score as score_store

    fitted = read_calibrator(calibrator)
    check_alike(str(calibrator), fitted.origin, first_shard(features)[0])
    done = score_store(
        features,
        calibrator,
        out,
        engine="local" if engine == "local" else "ray",
        ray_address=None if engine in ("local", "ray") else engine,
        workers=workers,
        layers=layers,
        context=window,
        progress=console.shows_progress,
    )
    told = {key: getattr(done, key) for key in ("rows", "new_rows", "seconds")}
    console.finish(
        {"out": str(out)} | told,
        f"{done.rows:,} samples in {out}, {done.new_rows:,} of them now ({done.rate:,.0f} per second)",
    )
