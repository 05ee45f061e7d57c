"""The targets of the shift benchmark, set before it was run, against what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from shift_rivals import OURS, RIVALS

Records = Sequence[dict[str, Any]]
BASE, SOFTMAX = "temperature", "uncalibrated"


def targets(records: Records) -> list[str]:
    """A table of targets, figures and verdicts."""
    rows = [
        *_in_domain(records),
        *_error(records),
        *_ranking(records),
        *_novelty(records),
        *_interval(records),
        *_time(records),
    ]
    lines = ["| target | measured | met |", "|---|---|---|"]
    return [
        *lines,
        *(f"| {what} | {measured} | {'yes' if met else '**no**'} |" for what, measured, met in rows),
    ]


Row = tuple[str, str, bool]


def mean(records: Records, kind: str, key: str, method: str, case: str | None = None) -> float:
    """Mean over the data sets, each the mean of its test sets and seeds."""
    cases = list(dict.fromkeys(r["case"] for r in records if case in (None, r["case"])))
    per = [
        [r[key] for r in records if (r["method"], r["kind"], r["case"]) == (method, kind, c) and key in r]
        for c in cases
    ]
    return float(np.mean([np.nanmean(v) for v in per if v])) if any(per) else float("nan")


def _in_domain(records: Records) -> list[Row]:
    cases, rivals = list(dict.fromkeys(r["case"] for r in records)), _rivals(records)
    more = {c: mean(records, "in", "ece", OURS, c) - mean(records, "in", "ece", BASE, c) for c in cases}
    worst = max(more, key=lambda c: more[c])
    best = {c: min(mean(records, "in", "nll", m, c) for m in rivals) for c in cases}
    mine = {c: mean(records, "in", "nll", OURS, c) for c in cases}
    near = {c: min(mean(records, "in", "ece", m, c) for m in rivals) for c in cases}
    said = ", ".join(f"{c} {mine[c]:.3f} (best rival {best[c]:.3f})" for c in cases)
    both = ", ".join(
        f"{c} {mean(records, 'in', 'ece', OURS, c):.3f} (best rival {near[c]:.3f})" for c in cases
    )
    return [
        (
            "in domain: ECE at most .005 above temperature scaling on every data set",
            f"largest difference {more[worst]:+.3f} ({worst})",
            more[worst] <= 0.005,
        ),
        (
            "in domain: NLL of correctness at most that of the best rival",
            said,
            all(mine[c] <= best[c] for c in cases),
        ),
        (
            "in domain: ECE within noise of the best rival (1.64 binomial standard errors)",
            both,
            all(mean(records, "in", "ece", OURS, c) <= near[c] + _noise(records, c) for c in cases),
        ),
    ]


def _noise(records: Records, case: str) -> float:
    """Sampling error of a mean gap between confidence and accuracy, over all seeds of a data set."""
    mine = [r for r in records if (r["method"], r["kind"], r["case"]) == (OURS, "in", case)]
    accuracy, n = np.mean([r["accuracy"] for r in mine]), sum(r["n"] for r in mine)
    return float(1.64 * np.sqrt(accuracy * (1 - accuracy) / n))


def _error(records: Records) -> list[Row]:
    rivals, ours, base = (
        _rivals(records),
        mean(records, "shift", "ece", OURS),
        mean(records, "shift", "ece", BASE),
    )
    best = min(rivals, key=lambda m: mean(records, "shift", "ece", m))
    least = min(rivals, key=lambda m: mean(records, "shift", "nll", m))
    error, loss = mean(records, "shift", "ece", best), mean(records, "shift", "nll", least)
    worse = _sets_where(records, "ece", BASE, lambda a, b: a > b)
    return [
        (
            "under shift: ECE at most half of temperature scaling's",
            f"{ours:.3f} against {base:.3f}, ratio {ours / base:.2f}",
            ours <= base / 2,
        ),
        (
            "... and 20 % below the best rival",
            f"{100 * (1 - ours / error):.0f} % below {best} ({error:.3f}, which has "
            f"{mean(records, 'in', 'ece', best):.3f} in domain)",
            ours <= 0.8 * error,
        ),
        (
            "NLL below every rival",
            f"{mean(records, 'shift', 'nll', OURS):.3f}; best rival {least} {loss:.3f}",
            mean(records, "shift", "nll", OURS) < loss,
        ),
        ("on no shifted set a larger ECE than temperature scaling", _listed(records, worse), not worse),
    ]


def _ranking(records: Records) -> list[Row]:
    ours, theirs = (mean(records, "shift", "auroc", m) for m in (OURS, SOFTMAX))
    left, right = (mean(records, "shift", "aurc", m) for m in (OURS, SOFTMAX))
    worse = _sets_where(records, "auroc", SOFTMAX, lambda a, b: a <= b)
    return [
        (
            "AUROC of spotting errors .05 above max softmax on average",
            f"{ours:.3f} against {theirs:.3f}",
            ours >= theirs + 0.05,
        ),
        ("... and above it on every shifted set", _listed(records, worse), not worse),
        ("AURC better on average", f"{left:.3f} against {right:.3f}", left < right),
    ]


def _novelty(records: Records) -> list[Row]:
    rows = []
    for what, name in (
        ("shift", "shifted samples told from in-domain ones"),
        ("unknown", "unknown SPCC types told from known ones"),
    ):
        a, b, c = (
            mean(records, "shift", f"{what}_{score}", OURS) for score in ("novelty", "softmax", "energy")
        )
        rows.append(
            (
                f"{name}: AUROC above max softmax and energy",
                f"{a:.3f} against {b:.3f}, {c:.3f}",
                a > max(b, c),
            )
        )
    return rows


def _interval(records: Records) -> list[Row]:
    cases = list(dict.fromkeys(r["case"] for r in records))
    covered = {c: mean(records, "in", "coverage", OURS, c) for c in cases}
    inside, outside = (mean(records, kind, "width", OURS) for kind in ("in", "shift"))
    said = ", ".join(f"{c} {v:.2f}" for c, v in covered.items())
    return [
        (
            "90 % interval covers the binned accuracy 85-97 % in domain",
            said,
            all(0.85 <= v <= 0.97 for v in covered.values()),
        ),
        ("... and is wider under shift", f"mean width {inside:.2f} to {outside:.2f}", outside > inside),
    ]


def _time(records: Records) -> list[Row]:
    longest = max((r for r in records if r["method"] == OURS), key=lambda r: float(r["fit_seconds"]))
    return [
        (
            "fit beyond the forward passes under 30 s",
            f"at most {longest['fit_seconds']:.1f} s of one core ({longest['case']})",
            longest["fit_seconds"] < 30,
        )
    ]


def _rivals(records: Records) -> list[str]:
    there = {r["method"] for r in records}
    return [m for m in RIVALS if m in there]


def _sets_where(records: Records, key: str, rival: str, worse: Callable[[float, float], bool]) -> list[str]:
    found = []
    for case, test in dict.fromkeys((r["case"], r["test"]) for r in records if r["kind"] == "shift"):
        a, b = (
            float(
                np.nanmean(
                    [r[key] for r in records if (r["case"], r["test"], r["method"]) == (case, test, m)]
                )
            )
            for m in (OURS, rival)
        )
        if worse(a, b):
            found.append(f"{case} {test} ({a:.3f} against {b:.3f})")
    return found


def _listed(records: Records, found: list[str]) -> str:
    total = len({(r["case"], r["test"]) for r in records if r["kind"] == "shift"})
    return f"{len(found)} of {total} sets are worse" + (f": {'; '.join(found)}" if found else "")
