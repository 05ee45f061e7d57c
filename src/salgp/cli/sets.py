"""``salgp sets``: prediction sets that contain the true class as often as asked for."""

from __future__ import annotations

from typing import Annotated

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, command, pasteable
from salgp.cli.predictions import predicted
from salgp.cli.preflight import check_inputs, check_suffix, check_target

__all__ = ["register"]

Coverage = Annotated[
    float, typer.Option("--coverage", help="Probability that the set contains the true class.")
]
By = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="all|class|confidence|novelty",
        help="Hold the coverage for all samples together, or in each group.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "sets", "salgp sets cal labelled.safetensors --coverage 0.95 -o sets.safetensors")(sets)


def sets(
    console: Console,
    calibrator: options.CalibratorFolder,
    features: options.FeaturesFile,
    out: options.Out,
    coverage: Coverage = 0.9,
    by: By = "all",
    probs: options.Probs = None,
    any_network: options.AnyNetwork = False,
    force: options.Force = False,
) -> None:
    """Fit prediction sets: the classes that remain possible for each sample.

    The labelled samples must not have been used to fit the calibrator. The sets are written for
    `salgp apply --sets` and salgp.sets.PredictionSets.load.
    """
    check_suffix("--out", out, ".safetensors")
    check_inputs(calibrator, features)
    check_target(out, force, features, calibrator, kind="prediction sets")
    loaded, prediction = predicted(console, calibrator, features, any_network, probs=probs, labelled=True)
    from salgp.sets import fit_sets

    fitted = fit_sets(prediction, files.labels_of(loaded), coverage, by=by)
    fitted.save(out)
    size = float(fitted(prediction).sum(1).double().mean())
    following = pasteable("salgp", "apply", calibrator, "NEW", "--sets", out, "-o", "predictions.csv")
    told = {"out": str(out), "n": len(prediction), "coverage": coverage, "by": by, "mean_size": size}
    console.finish(
        told,
        f"sets contain the true class with probability {coverage:g}; fitted on {len(prediction):,} samples, "
        f"{size:.2f} classes on average\nsets: {out}\nnext: {following}",
    )
