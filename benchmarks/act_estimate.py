"""Accuracy of unlabelled sets: ours and the published estimators, over all shifted sets of the suite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from act_data import MOST, Suite, clean, plain, read_suite, suite_sets

from salgp_study.estimators import BASELINES

LINE = ",\n"
POINTS = Path(__file__).parent / "results" / "act-estimates.json"
OURS = "layer evidence, context"
WINDOW = 200
NORMAL = 1.645
FAILED = 0.15
"""An estimate that is off by more is named."""


def section(data: Path, cache: Path, quick: bool) -> str:
    kept = [] if quick or not POINTS.exists() else json.loads(POINTS.read_text(encoding="utf-8"))
    names = [name for name in suite_sets(cache) if name.endswith("-0") and _records(cache, name)]
    found = {name: _rows(cache, name, kept) for name in (names[:2] if quick else names)}
    rows = [row for part in found.values() for row in part]
    if not quick:
        POINTS.write_text(f"[{LINE.join(json.dumps(row) for row in rows)}]\n", encoding="utf-8")
    methods = sorted(rows[0]["estimates"], key=_order)
    lines = [
        f"Absolute error of the estimated accuracy, mean / largest over the shifted sets of "
        f"{len(found)} networks of the suite (seed 0), without labels. Baselines read temperature-scaled "
        f"predictions of up to {MOST:,} samples of each set and learn from the calibration samples. Ours is "
        f"the mean confidence of layer evidence, one sample at a time or in windows of {WINDOW} "
        f'("context"), as the suite scored it (`python -m salgp_study.suite score`). *Chance*: the mean '
        f"error of an estimator that knows every sample's true probability, since the accuracy it is "
        f"compared with is itself counted on few samples. Last column: share of our 90 % intervals (with "
        f"context) that hold the truth; what calibration does not know is in the calibrator's own error "
        f"bars, which it measures on left-out families at every fit. CBPE is NannyML's definition (the "
        f"package does not install beside our pinned versions).",
        "",
        f"| set (shifted sets) | {' | '.join(methods)} | chance | ours: intervals that hold |",
        "|---|" + "---|" * (len(methods) + 2),
        *(_row(f"{name} ({len(part)})", part, methods) for name, part in found.items()),
        _row(f"**all** ({len(rows)})", rows, methods),
        "",
        _ratio(rows, methods),
        "",
        _by_network(found),
        "",
        _failures(rows),
    ]
    return "\n".join(lines)


def _records(cache: Path, name: str) -> dict[tuple[str, int], dict]:
    """What the suite recorded of layer evidence, by shifted set and window."""
    path = cache / "records" / name / "layer-evidence.jsonl"
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {
        (record["test"].replace(" ", "-"), record["window"]): record
        for record in reversed(records)
        if record["kind"] == "shift" and record["window"] in (0, WINDOW)
    }


def _rows(cache: Path, name: str, kept: list[dict]) -> list[dict]:
    """One row per shifted set; baselines are taken from an earlier run where it has all of them."""
    records = _records(cache, name)
    known = {
        row["shift"]: row
        for row in kept
        if row["set"] == name and BASELINES.keys() <= row["estimates"].keys()
    }
    shifts = sorted({shift for shift, _ in records})
    if not known.keys() >= set(shifts):
        known = {**_baselines(read_suite(cache, name)), **known}
    rows = [_joined(known[shift], records, shift) for shift in shifts if shift in known]
    print(name, len(rows), flush=True)
    return rows


def _baselines(suite: Suite) -> dict[str, dict]:
    calibration, labels = clean(*suite.calibration)
    temperature = suite.temperature()
    source = temperature.predict(calibration)
    rows = {}
    for shift, (features, y) in suite.shifted.items():
        batch = temperature.predict(plain(features[:MOST]))
        estimates = {name: round(one(source, labels, batch), 5) for name, one in BASELINES.items()}
        truth = float((batch.label == y[:MOST]).double().mean())
        rows[shift] = {"set": suite.name, "shift": shift, "truth": round(truth, 5), "estimates": estimates}
    return rows


def _joined(row: dict, records: dict[tuple[str, int], dict], shift: str) -> dict:
    """A row of baselines with ours beside it; ours saw all samples, whose accuracy is ``truth_all``."""
    alone, together = records[shift, 0], records[shift, WINDOW]
    s, n = together["confidence"], together["n"]
    half = math.hypot(together["width"] / 2, NORMAL * math.sqrt(s * (1 - s) / n))
    baselines = {key: value for key, value in row["estimates"].items() if key in BASELINES}
    return {
        "set": row["set"],
        "shift": shift,
        "n": int(n),
        "truth": row["truth"],
        "truth_all": together["accuracy"],
        "estimates": {**baselines, "layer evidence": alone["confidence"], OURS: s},
        "holds": abs(s - together["accuracy"]) <= half,
    }


def _error(row: dict, method: str) -> float:
    truth = row["truth_all"] if method.startswith("layer") else row["truth"]
    return abs(row["estimates"][method] - truth)


def _ratio(rows: list[dict], methods: list[str]) -> str:
    mean = {method: float(np.mean([_error(row, method) for row in rows])) for method in methods}
    others = {method: value for method, value in mean.items() if not method.startswith("layer")}
    best = min(others, key=others.__getitem__)
    return f"Ours with context: {mean[OURS] / others[best]:.2f} of the best baseline's error ({best})."


def _by_network(found: dict[str, list[dict]]) -> str:
    """The mean in which every network counts as one, and what each network adds to the mean of all sets."""
    sums = {name: sum(_error(row, OURS) for row in part) for name, part in found.items()}
    count = sum(map(len, found.values()))
    means = {name: sums[name] / len(part) for name, part in found.items()}
    worst = max(means, key=means.__getitem__)
    others = [value for name, value in means.items() if name != worst]
    parts = ", ".join(f"{name} {value / count:.4f}" for name, value in sums.items())
    return (
        f"With every network counting as one, ours with context is off by "
        f"{np.mean(list(means.values())):.3f}, and by {np.mean(others):.3f} without {worst}. "
        f"Of the mean over all {count} sets the networks have: {parts}."
    )


def _failures(rows: list[dict]) -> str:
    bad = sorted((row for row in rows if _error(row, OURS) > FAILED), key=lambda row: -_error(row, OURS))
    words = "; ".join(_words(row) for row in bad)
    return (
        f"Sets on which ours with context is off by more than {FAILED} ({len(bad)} of {len(rows)}; estimate, "
        f"truth): {words}."
    )


def _order(method: str) -> tuple[bool, str]:
    return method.startswith("layer"), method


def _row(name: str, rows: list[dict], methods: list[str]) -> str:
    cells = []
    for method in methods:
        errors = [_error(row, method) for row in rows]
        cells.append(f"{np.mean(errors):.3f} / {np.max(errors):.2f}")
    chance = np.mean([np.sqrt(2 / np.pi * row["truth"] * (1 - row["truth"]) / row["n"]) for row in rows])
    held = np.mean([row["holds"] for row in rows])
    return f"| {name} | {' | '.join(cells)} | {chance:.3f} | {held:.0%} |"


def _words(row: dict) -> str:
    return f"{row['set']} {row['shift']} ({row['estimates'][OURS]:.2f}, {row['truth_all']:.2f})"
