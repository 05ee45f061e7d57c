"""What the suite must show, against what it shows; sets that fail come first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from salgp_study.suite.summary import BASE, CONTEXT, PER_SAMPLE, SOFTMAX, Results, Way, table

__all__ = [
    "Verdict",
    "in_domain",
    "min_ece",
    "probabilities",
    "short_name",
    "under_shift",
    "verdict_table",
]

NOISE = 0.05
"""Share of the replicates beyond which a difference is more than noise: one end of a 90 % interval."""


@dataclass(frozen=True)
class Verdict:
    """One promise, what was measured, and whether it is kept."""

    promise: str
    measured: str
    kept: bool


def verdict_table(verdicts: list[Verdict]) -> list[str]:
    """Verdicts as a table, broken promises first."""
    ordered = sorted(verdicts, key=lambda v: v.kept)
    rows = [[v.promise, v.measured, "yes" if v.kept else "**no**"] for v in ordered]
    return table(["must show", "measured", "kept"], rows)


def in_domain(results: Results) -> list[Verdict]:
    """On every set: ECE within noise of the better of no calibration and temperature, NLL not above
    temperature's, AUROC not below max softmax's.
    """
    return [v for way in results.ours for name in results.sets for v in _in_domain(results, way, name)]


def under_shift(results: Results) -> list[Verdict]:
    """Mean over all sets: with a context at most .28 of temperature's ECE and 40 % below the best baseline;
    sample by sample .45 and 20 %; rarely worse than temperature on any one set.
    """
    bounds = {PER_SAMPLE: (0.45, 0.8), CONTEXT: (0.28, 0.6)}
    return [v for way in results.ours for v in _under_shift(results, way, *bounds[way])]


def probabilities(results: Results) -> list[Verdict]:
    """NLL and Brier score of the whole probability vector not above temperature's on any set."""
    return [
        _probabilities(results.of_sets([name]), way, name) for way in results.ours for name in results.sets
    ]


def _in_domain(results: Results, way: Way, name: str) -> Iterator[Verdict]:
    one = results.of_sets([name])
    better = min_ece(one)
    for key, baseline, sign in (("ece", better, 1), ("nll", BASE, 1), ("auroc", SOFTMAX, -1)):
        mine, theirs = one.mean(way, "in", key), one.mean(baseline, "in", key)
        a, b = one.replicates(way, key, name), one.replicates(baseline, key, name)
        sure = a is not None and b is not None and _surely_worse(sign * (a - b))
        kept = not sure if key == "ece" else not sign * (mine - theirs) > 5e-4
        noise = "beyond noise" if sure else "within noise"
        said = f"{mine:.4f} against {theirs:.4f} ({baseline.method}), {noise}"
        yield Verdict(f"in domain, {name}, {short_name(way)}: {key.upper()}", said, kept)


def min_ece(results: Results) -> Way:
    """No calibration or temperature scaling, whichever has the lower ECE in domain."""
    return min((SOFTMAX, BASE), key=lambda way: results.mean(way, "in", "ece"))


def _surely_worse(differences: np.ndarray) -> bool:
    known = differences[np.isfinite(differences)]
    return len(known) > 0 and float(np.quantile(known, NOISE)) > 0


def _under_shift(results: Results, way: Way, of_base: float, of_baseline: float) -> Iterator[Verdict]:
    mine, base = results.mean(way, "shift", "ece"), results.mean(BASE, "shift", "ece")
    said = f"{mine:.3f} against {base:.3f}, ratio {mine / base:.2f}"
    yield Verdict(
        f"under shift, {short_name(way)}: ECE at most {of_base} of temperature's",
        said,
        mine <= of_base * base,
    )
    for baseline in results.best_baselines(1):
        theirs = results.mean(baseline, "shift", "ece")
        cost = results.mean(baseline, "in", "ece")
        gain = f"{100 * (1 - mine / theirs):.0f} %"
        said = f"{gain} below {baseline} ({theirs:.3f}, which has {cost:.3f} in domain)"
        promise = (
            f"under shift, {short_name(way)}: ECE {100 * (1 - of_baseline):.0f} % below the best baseline"
        )
        yield Verdict(promise, said, mine <= of_baseline * theirs)
    yield _rarely(results, way, "ece", 0.02, 20)
    yield _rarely(results, way, "auroc", 0.0, 10)
    if "cifar10-resnet20" in results.sets and way == CONTEXT:
        yield from _cifar(results.of_sets(["cifar10-resnet20"]), way)


def _rarely(results: Results, way: Way, key: str, slack: float, one_in: int) -> Verdict:
    """On how many shifted sets is it worse than temperature by more than ``slack``?"""
    mine, base = results.by_test(way, "shift", key), results.by_test(BASE, "shift", key)
    sign = -1 if key == "auroc" else 1
    worse = {where: sign * (mine[where] - base[where]) for where in mine if where in base}
    worse = {where: gap for where, gap in worse.items() if gap > slack}
    worst = sorted(worse, key=lambda where: -worse[where])[:3]
    said = f"{len(worse)} of {len(mine)}"
    if worst:
        said += ", worst: " + "; ".join(f"{' '.join(w)} ({mine[w]:.3f} against {base[w]:.3f})" for w in worst)
    by = f" by more than {slack}" if slack else ""
    promise = (
        f"under shift, {short_name(way)}: {key.upper()} worse than temperature's{by} on at most 1 of {one_in}"
    )
    return Verdict(promise, said, len(worse) * one_in <= len(mine))


def _cifar(results: Results, way: Way) -> Iterator[Verdict]:
    for key, bound, sign in (("ece", 0.040, 1), ("nll", 0.43, 1), ("auroc", 0.80, -1)):
        value = results.mean(way, "shift", key)
        word = "at most" if sign > 0 else "at least"
        promise = f"CIFAR-10 ResNet-20 under shift, {short_name(way)}: {key.upper()} {word} {bound}"
        yield Verdict(promise, f"{value:.3f}", sign * value <= sign * bound)


def _probabilities(results: Results, way: Way, name: str) -> Verdict:
    pairs = []
    for kind in ("in", "shift"):
        for key in ("nll_probs", "brier_probs"):
            pairs.append((kind, key, results.mean(way, kind, key), results.mean(BASE, kind, key)))
    said = ", ".join(f"{kind} {key[:-6]} {a:.3f} / {b:.3f}" for kind, key, a, b in pairs)
    kept = all(not a > b + 5e-4 for _, _, a, b in pairs)
    return Verdict(
        f"probabilities, {name}, {short_name(way)}: NLL and Brier not above temperature's", said, kept
    )


def short_name(way: Way) -> str:
    """How a way of ours is called in promises."""
    return f"context of {way.window}" if way.window else "per sample"
