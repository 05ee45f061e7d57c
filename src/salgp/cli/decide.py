"""``salgp decide``: a rule that says when to act. ``salgp sets``: which classes remain possible."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from salgp.cli import options
from salgp.cli.console import Console, UsageError, command, pasteable
from salgp.cli.predictions import PredictionOptions
from salgp.cli.preflight import check_suffix, check_target

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
Coverage = Annotated[
    float, typer.Option("--coverage", help="Probability that the set contains the true class.")
]
Groups = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="all|class|confidence|novelty",
        help="Hold the coverage for all samples together, or in each group.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    by_cost = "salgp decide cal labelled.safetensors --costs 10,1 -o rule.json"
    command(app, "decide", "salgp decide cal labelled.safetensors --error 0.05 -o rule.json", by_cost)(decide)
    command(app, "sets", "salgp sets cal labelled.safetensors --coverage 0.95 -o sets.safetensors")(sets)


def decide(
    console: Console,
    given: PredictionOptions,
    out: options.Out,
    error: options.Error = None,
    assurance: Assurance = 0.95,
    costs: Costs = None,
    by: By = "all",
    force: options.Force = False,
) -> None:
    """Choose a threshold: act on answers above it, ask a human about the others.

    The labelled samples must not have been used to fit the calibrator. The rule is written as JSON for
    `salgp apply --rule`, `salgp export --rule` and salgp.decide.Rule.load.
    """
    if by not in ("all", "class"):
        raise UsageError(f"--by {by}: expected all or class")
    check_suffix(out, ".json")
    check_target(out, "rule", force, *given.inputs)
    wrong, ask = _prices(costs)
    _, loaded, prediction = given.predict(console, labelled=True)
    from salgp.decide import choose_threshold

    groups, labels = by == "class", loaded.known_labels
    rule = choose_threshold(
        prediction, labels, error, assurance, per_class=groups, cost_wrong=wrong, cost_ask=ask
    )
    rule.save(out)
    following = pasteable("salgp", "apply", given.calibrator, "NEW", "--rule", out, "-o", "predictions.csv")
    shown = f"{rule.promise}\nrule: {out}" + (f"\nnext: {following}" if rule.reachable else "")
    told = {"out": str(out), "coverage": rule.coverage, "promise": rule.promise}
    console.finish(told | asdict(rule), shown)


def _prices(text: str | None) -> tuple[float | None, float | None]:
    if text is None:
        return None, None
    try:
        wrong, ask = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--costs {text}: expected two numbers, WRONG,ASK") from error
    return wrong, ask


def sets(
    console: Console,
    given: PredictionOptions,
    out: options.Out,
    coverage: Coverage = 0.9,
    by: Groups = "all",
    force: options.Force = False,
) -> None:
    """Fit prediction sets: the classes that remain possible for each sample.

    The labelled samples must not have been used to fit the calibrator. The sets are written for
    `salgp apply --sets` and salgp.sets.PredictionSets.load.
    """
    check_suffix(out, ".safetensors")
    check_target(out, "prediction sets", force, *given.inputs)
    _, loaded, prediction = given.predict(console, labelled=True)
    from salgp.sets import fit_sets

    fitted, n = fit_sets(prediction, loaded.known_labels, coverage, by=by), len(prediction)
    fitted.save(out)
    size = float(fitted(prediction).sum(1).double().mean())
    following = pasteable("salgp", "apply", given.calibrator, "NEW", "--sets", out, "-o", "predictions.csv")
    console.finish(
        {"out": str(out), "n": n, "coverage": coverage, "by": by, "mean_size": size},
        f"sets contain the true class with probability {coverage:g}; fitted on {n:,} samples, {size:.2f} "
        f"classes on average\nsets: {out}\nnext: {following}",
    )
