"""``salgp decide``: a rule that says when to act on an answer and when to ask, with its guarantee."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, UsageError, command, pasteable
from salgp.cli.predictions import predicted
from salgp.cli.preflight import check_inputs, check_suffix, check_target

__all__ = ["register"]

Assurance = Annotated[
    float, typer.Option("--assurance", help="Probability that the guarantee holds, at least 0.5.")
]
Costs = Annotated[
    str | None,
    typer.Option(
        "--costs", metavar="WRONG,ASK", help="Instead of --error: prices of a wrong answer and of asking."
    ),
]
By = Annotated[
    str, typer.Option("--by", metavar="all|class", help="One guarantee, or one per predicted class.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    by_cost = "salgp decide cal labelled.safetensors --costs 10,1 -o rule.json"
    command(app, "decide", "salgp decide cal labelled.safetensors --error 0.05 -o rule.json", by_cost)(decide)


def decide(
    console: Console,
    calibrator: options.CalibratorFolder,
    features: options.FeaturesFile,
    out: options.Out,
    error: options.Error = None,
    assurance: Assurance = 0.95,
    costs: Costs = None,
    by: By = "all",
    probs: options.Probs = None,
    any_network: options.AnyNetwork = False,
    force: options.Force = False,
) -> None:
    """Choose a threshold: act on answers above it, ask a human about the others.

    The labelled samples must not have been used to fit the calibrator. The rule is written as JSON for
    `salgp apply --rule`, `salgp export --rule` and salgp.decide.Rule.load.
    """
    if by not in ("all", "class"):
        raise UsageError(f"--by {by}: expected all or class")
    check_suffix("--out", out, ".json")
    check_inputs(calibrator, features)
    check_target(out, force, features, kind="rule")
    wrong, ask = (None, None) if costs is None else _prices(costs)
    loaded, prediction = predicted(console, calibrator, features, any_network, probs=probs, labelled=True)
    from salgp.decide import choose_threshold

    rule = choose_threshold(
        prediction,
        files.labels_of(loaded),
        error,
        assurance,
        per_class=by == "class",
        cost_wrong=wrong,
        cost_ask=ask,
    )
    rule.save(out)
    following = pasteable("salgp", "apply", calibrator, "NEW", "--rule", out, "-o", "predictions.csv")
    shown = f"{rule.promise}\nrule: {out}" + (f"\nnext: {following}" if rule.reachable else "")
    console.finish(
        {"out": str(out), "coverage": rule.coverage, "promise": rule.promise} | asdict(rule), shown
    )


def _prices(text: str) -> tuple[float, float]:
    try:
        wrong, ask = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--costs {text}: expected two numbers, WRONG,ASK") from error
    return wrong, ask
