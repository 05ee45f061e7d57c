"""Accuracy of unlabelled sets: ours and the published estimators, over all shifted sets of the suite."""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path

import numpy as np
from act_data import Suite, clean, plain, read_suite, suite_sets

from salgp.estimate import (
    ATC,
    CBPE,
    AverageConfidence,
    DifferenceOfConfidences,
    ImportanceWeighting,
    accuracy,
    left_out_spread,
)

MOST = 1000
LINE = ",\n"
POINTS = Path(__file__).parent / "results" / "act-estimates.json"
RIVALS = {
    "average confidence": AverageConfidence(),
    "ATC, confidence": ATC("confidence"),
    "ATC, entropy": ATC("entropy"),
    "difference of confidences": DifferenceOfConfidences(),
    "CBPE": CBPE(),
    "importance weighting": ImportanceWeighting(),
}


def section(data: Path, cache: Path, quick: bool) -> str:
    names = [name for name in suite_sets(cache) if read_suite(cache, name).shifted]
    names = names[:2] if quick else names
    found = {name: _estimates(read_suite(cache, name), quick) for name in names}
    methods = sorted({m for rows in found.values() for r in rows for m in r["estimates"]}, key=_order)
    lines = [
        f"Absolute error of the estimated accuracy, mean / largest over the shifted sets (up to {MOST:,} "
        f"samples "
        f"each, no labels). Rivals read temperature-scaled predictions and learn from the calibration "
        f"samples. "
        f"Ours is the mean confidence of layer evidence; the last column says how many of its 90 % intervals "
        f"hold the truth, with the spread measured on left-out families and samples (`left_out_spread`). "
        f"CBPE is NannyML's "
        f"definition "
        f"(the package does not install beside our pinned versions).",
        "",
        f"| set (shifted sets) | {' | '.join(methods)} | ours: intervals that hold |",
        "|---|" + "---|" * (len(methods) + 1),
    ]
    for name, rows in found.items():
        lines.append(_row(f"{name} ({len(rows)})", rows, methods))
    everything = [row for rows in found.values() for row in rows]
    lines.append(_row(f"**all** ({len(everything)})", everything, methods))
    worst = sorted(everything, key=lambda row: -abs(row["estimates"]["layer evidence"] - row["truth"]))[:8]
    lines += ["", "Where ours fails most (estimate, truth): " + "; ".join(map(_words, worst)) + "."]
    if not quick:
        POINTS.write_text(f"[{LINE.join(json.dumps(row) for row in everything)}]\n", encoding="utf-8")
    return "\n".join(lines)


def _estimates(suite: Suite, quick: bool) -> list[dict]:
    home, labels = clean(*suite.calibration)
    temperature, evidence = suite.temperature(), suite.evidence()
    source = temperature.predict(home)
    fitted = {name: rival.fit(source, labels) for name, rival in RIVALS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spread = left_out_spread(evidence, *suite.calibration, suite.reference)
    rows = []
    for name, (features, y) in list(suite.shifted.items())[: 5 if quick else None]:
        batch, y = plain(features[:MOST]), y[:MOST]
        tempered, ours = temperature.predict(batch), evidence.predict(batch)
        estimates = {key: rival.estimate(tempered) for key, rival in fitted.items()}
        estimates["layer evidence"] = accuracy(ours).value
        if "context" in inspect.signature(evidence.predict).parameters:
            ours = evidence.predict(batch, context="all")
            estimates["layer evidence, context"] = accuracy(ours).value
        found = accuracy(ours, spread)
        truth = float((ours.label == y).double().mean())
        holds = found.lower <= truth <= found.upper
        rows.append(
            {"set": suite.name, "shift": name, "truth": truth, "estimates": estimates, "holds": holds}
        )
    print(suite.name, "done", flush=True)
    return rows


def _order(method: str) -> tuple[bool, str]:
    return method.startswith("layer"), method


def _row(name: str, rows: list[dict], methods: list[str]) -> str:
    cells = []
    for method in methods:
        errors = [abs(row["estimates"][method] - row["truth"]) for row in rows]
        cells.append(f"{np.mean(errors):.3f} / {np.max(errors):.2f}")
    return f"| {name} | {' | '.join(cells)} | {np.mean([row['holds'] for row in rows]):.0%} |"


def _words(row: dict) -> str:
    return f"{row['set']} {row['shift']} ({row['estimates']['layer evidence']:.2f}, {row['truth']:.2f})"
