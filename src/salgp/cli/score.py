"""``salgp score``: any number of samples, shard by shard, on this machine or on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.predictions import context_of
from salgp.cli.preflight import check_apart, check_inputs

__all__ = ["register"]

Store = Annotated[
    Path, typer.Argument(metavar="STORE", help="Folder of shards, as `salgp extract -o FOLDER` writes it.")
]
Scored = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the scored shards; a stopped run continues there.")
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
    workers: options.Workers = None,
    layers: WithLayers = False,
    context: options.Context = None,
    any_network: options.AnyNetwork = False,
) -> None:
    """Score any number of samples shard by shard, on this machine or on Ray; a stopped run continues."""
    check_inputs(calibrator, features)
    check_apart(out, calibrator, features)
    if features.is_file():
        raise UsageError(
            f"{features} is one file; score works on a folder of shards (salgp extract -o FOLDER), salgp "
            f"apply on a file"
        )
    files.read_calibrator(calibrator)
    files.check_source(calibrator, files.first_rows(features)[0], any_network)
    from salgp.store import score as score_store

    where: dict[str, Any] = {"engine": engine}
    if engine not in ("local", "ray"):
        where = {"engine": "ray", "ray_address": engine}
    done = score_store(
        features,
        calibrator,
        out,
        **where,
        workers=workers,
        layers=layers,
        context=context_of(context),
        progress=console.shows_progress,
    )
    told = {key: getattr(done, key) for key in ("rows", "new_rows", "seconds")}
    console.finish(
        {"out": str(out)} | told,
        f"{done.rows:,} samples in {out}, {done.new_rows:,} of them now ({done.rate:,.0f} per second)",
    )
