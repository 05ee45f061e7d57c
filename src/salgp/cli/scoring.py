"""``salgp score``: any number of samples, shard by shard, on this machine or on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salgp.cli import files
from salgp.cli.applying import context_of
from salgp.cli.options import AnyNetwork, Cal, Engine, InContext, RayAddress, Workers
from salgp.cli.shell import Shell, UsageError, command
from salgp.cli.targets import check_apart, check_inputs

__all__ = ["register"]

Store = Annotated[
    Path, typer.Argument(metavar="STORE", help="Folder of shards, as `salgp extract -o FOLDER` writes it.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "score", "salgp score cal shards/ -o scored/ --engine local")(score)


def score(
    shell: Shell,
    calibrator: Cal,
    features: Store,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the scored shards; a stopped run continues there.")
    ],
    engine: Engine = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    layers: Annotated[bool, typer.Option(help="Also write each layer's part of the correction.")] = False,
    context: InContext = None,
    any_network: AnyNetwork = False,
) -> None:
    """Score any number of samples shard by shard, on this machine or on Ray; continues where it
    was stopped.
    """
    if engine not in ("local", "ray"):
        raise UsageError(f"--engine {engine}: expected local or ray")
    check_inputs(calibrator, features)
    check_apart(out, calibrator, features)
    if features.is_file():
        raise UsageError(
            f"{features} is one file; score works on a folder of shards (salgp extract -o "
            f"FOLDER), salgp apply on a file"
        )
    files.read_calibrator(calibrator)
    files.check_network(calibrator, files.first_rows(features)[0], any_network)
    from salgp.store import score as run

    done = run(
        features,
        calibrator,
        out,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
        layers=layers,
        context=context_of(context),
        progress=shell.is_watched,
    )
    shell.finish(
        {
            "out": str(out),
            "rows": done.rows,
            "new_rows": done.new_rows,
            "seconds": done.seconds,
            "precision": done.precision,
        },
        f"{done.rows:,} samples in {out}, {done.new_rows:,} of them now ({done.rate:,.0f} per second)",
    )
