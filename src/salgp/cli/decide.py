"""``salgp decide``: a rule that says when to act. ``salgp sets``: which classes remain possible."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Option

import salgp
from salgp.cli import options
from salgp.cli.checks import check_suffix, check_target
from salgp.cli.console import Console, UsageError, pasteable
from salgp.cli.inputs import PredictionOptions

__all__ = []

Assurance = Annotated[float, Option(help="Probability that the guarantee holds, at least 0.5.")]
Costs = Annotated[str | None, Option(metavar="WRONG,ASK", help="Prices, instead of --error.")]
By = Annotated[str, Option(metavar="all|class", help="One guarantee, or one per predicted class.")]
Coverage = Annotated[float, Option(help="Probability that the set contains the true class.")]
Groups = Annotated[str, Option(metavar="all|class|confidence|novelty", help="In which groups it holds.")]


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
    prices = {} if costs is None else _prices(costs)
    _, loaded, prediction = given.predict(console, labelled=True)
    prices["per_class"] = by == "class"
    rule = salgp.decide.choose_threshold(prediction, loaded.known_labels, error, assurance, **prices)
    rule.save(out)
    shown = f"{rule.promise}\nrule: {out}"
    if rule.reachable:
        shown += f"\nnext: {_next(given, '--rule', out)}"
    told = {"out": str(out), "coverage": rule.coverage, "promise": rule.promise}
    console.finish(told | asdict(rule), shown)


def _prices(text: str) -> dict[str, Any]:
    try:
        wrong, ask = map(float, text.split(","))
    except ValueError as error:
        raise UsageError(f"--costs {text}: expected two numbers, WRONG,ASK") from error
    return {"cost_wrong": wrong, "cost_ask": ask}


def _next(given: PredictionOptions, option: str, out: Path) -> str:
    """The command that uses what was written."""
    return pasteable("salgp", "apply", given.calibrator, "NEW", option, out, "-o", "predictions.csv")


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
    fitted = salgp.sets.fit_sets(prediction, loaded.known_labels, coverage, by=by)
    fitted.save(out)
    n = len(prediction)
    size = float(fitted(prediction).sum(1).double().mean())
    told = {"out": str(out), "n": n, "coverage": coverage, "by": by, "mean_size": size}
    fit = f"fitted on {n:,} samples, {size:.2f} classes on average"
    shown = f"sets contain the true class with probability {coverage:g}; {fit}\nsets: {out}"
    console.finish(told, f"{shown}\nnext: {_next(given, '--sets', out)}")
