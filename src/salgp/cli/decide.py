"""``salgp decide``: a rule that says when to act. ``salgp sets``: which classes remain possible."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

import salgp
from salgp.cli import options
from salgp.cli.checks import check_suffix, check_target
from salgp.cli.console import Console, UsageError, pasteable
from salgp.cli.inputs import PredictionOptions

__all__ = []

Assurance = Annotated[float, typer.Option(help="Probability that the guarantee holds, at least 0.5.")]
Costs = Annotated[str | None, typer.Option(metavar="WRONG,ASK", help="Prices, instead of --error.")]
By = Annotated[str, typer.Option(metavar="all|class", help="One guarantee, or one per predicted class.")]
Coverage = Annotated[float, typer.Option(help="Probability that the set contains the true class.")]
Groups = Annotated[
    str, typer.Option(metavar="all|class|confidence|novelty", help="In which groups it holds.")
]


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

    Example:
        salgp decide cal labelled.safetensors --error 0.05 -o rule.json
        salgp decide cal labelled.safetensors --costs 10,1 -o rule.json
    """
    if by not in ("all", "class"):
        raise UsageError(f"--by {by}: expected all or class")
    check_suffix(out, ".json")
    check_target(out, "rule", force, *given.inputs)
    wrong, ask = _prices(costs)
    _, loaded, prediction = given.predict(console, labelled=True)
    prices: Any = {"cost_wrong": wrong, "cost_ask": ask}
    rule = salgp.decide.choose_threshold(
        prediction, loaded.known_labels, error, assurance, per_class=by == "class", **prices
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

    Example:
        salgp sets cal labelled.safetensors --coverage 0.95 -o sets.safetensors
    """
    check_suffix(out, ".safetensors")
    check_target(out, "prediction sets", force, *given.inputs)
    _, loaded, prediction = given.predict(console, labelled=True)
    fitted, n = salgp.sets.fit_sets(prediction, loaded.known_labels, coverage, by=by), len(prediction)
    fitted.save(out)
    size = float(fitted(prediction).sum(1).double().mean())
    following = pasteable("salgp", "apply", given.calibrator, "NEW", "--sets", out, "-o", "predictions.csv")
    console.finish(
        {"out": str(out), "n": n, "coverage": coverage, "by": by, "mean_size": size},
        f"sets contain the true class with probability {coverage:g}; fitted on {n:,} samples, {size:.2f} "
        f"classes on average\nsets: {out}\nnext: {following}",
    )
