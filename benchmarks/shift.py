"""How well confidences hold under shift: layer evidence against every rival, on the same features.

    python benchmarks/shift.py --data ../shared/data --cache .cache/shift --out docs/research/shift-results.md

Trains what is not cached (hours on two cores for the MSTAR and SPCC networks); scoring everything then takes
about half an hour. Records are kept per data set, seed and method, so that a run continues where it was
stopped; ``--cases``, ``--seeds`` and ``--methods`` choose a part of it. See `shift_suite` for the data and
`shift_rivals` for the methods.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shift_rivals import ABLATIONS, OURS, RIVALS, Rival
from shift_suite import CASES, Cached, cached
from shift_targets import mean, targets

from salgp import metrics
from salgp.calibrators.evidence.choice import select_layers
from salgp.calibrators.evidence.model import originals
from salgp.features import Features
from salgp.prediction import Prediction

METHODS = {**RIVALS, **ABLATIONS}


def main() -> None:
    """Run the suite and write the tables."""
    options = _options()
    torch.set_num_threads(options.threads)
    records: list[dict[str, Any]] = []
    for seed in options.seeds:
        for key in options.cases:
            if _there(key, seed, options):
                records += _case_records(key, seed, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report(records), encoding="utf-8")
    print(report(records))


def _there(key: str, seed: int, options: argparse.Namespace) -> bool:
    return not options.cached_only or (options.cache / f"{key}-s{seed}" / "done").is_file()


def _case_records(key: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of one case and seed, method by method, from the cache where they are there."""
    case: Cached | None = None
    records = []
    for name in options.methods:
        path = (
            options.cache
            / "records"
            / f"{key}-s{seed}"
            / (re.sub(r"\W+", "-", name).strip("-+") + ("-plus" if name[0] == "+" else "") + ".json")
        )
        if options.fresh or not path.is_file():
            case = case or cached(key, seed, options.cache, options.data)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_score(case, name, METHODS[name])), encoding="utf-8")
        records += json.loads(path.read_text(encoding="utf-8"))
    return records


def _score(case: Cached, name: str, rival: Rival) -> list[dict[str, Any]]:
    """Scores of one method on all test sets of one case."""
    if rival.sees != "all":
        case = _seen(case, rival.sees)
    (features, labels), method = case.calibration, rival.build()
    if not rival.copies:
        first, _ = originals(features)
        features, labels = Features(features[first].logits, features[first].layers), labels[first]
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method.fit(features, labels, case.train)
    seconds = time.process_time() - started
    print(f"{case.name} {case.seed} {name}: fitted in {seconds:.1f} s", flush=True)
    inside = next(method.predict(f).novelty for kind, f, _ in case.tests.values() if kind == "in")
    rows = []
    for test, (kind, f, y) in case.tests.items():
        p = method.predict(f)
        rows.append(
            {
                "method": name,
                "case": case.name,
                "seed": case.seed,
                "test": test,
                "kind": kind,
                "fit_seconds": seconds,
                "layers": len(f.layers),
                **scores(p, f.correct(y).double().numpy()),
                **_ood(case, f, y, p, inside, kind),
            }
        )
    return rows


def scores(prediction: Prediction, correct: np.ndarray) -> dict[str, float]:
    """Calibration of the confidence, ranking of errors, interval."""
    s, both = prediction.confidence.double().numpy(), 0 < correct.mean() < 1
    out = {
        "n": len(s),
        "accuracy": correct.mean(),
        "ece": metrics.ece(s, correct),
        "nll": metrics.nll_correct(s, correct),
        "auroc": metrics.auroc(s, correct) if both else float("nan"),
        "aurc": metrics.aurc(s, correct),
    }
    if prediction.lower is not None and prediction.upper is not None:
        low, high = prediction.lower.double().numpy(), prediction.upper.double().numpy()
        out |= {
            "coverage": metrics.predictive_coverage(s, correct, low, high),
            "plain_coverage": metrics.interval_coverage(s, correct, low, high),
            "width": metrics.interval_width(low, high),
        }
    return {k: float(v) for k, v in out.items()}


def _ood(
    case: Cached, f: Features, y: torch.Tensor, p: Prediction, inside: torch.Tensor | None, kind: str
) -> dict[str, float]:
    """AUROC of telling shifted samples from in-domain ones, and unknown classes from known ones."""
    if p.novelty is None or inside is None:
        return {}
    base = next(g for k, g, _ in case.tests.values() if k == "in")
    out = {}
    unknown = (y < 0).double().numpy()
    pairs = {
        "novelty": (inside, p.novelty),
        "softmax": (-base.confidence, -f.confidence),
        "energy": (-base.logits.logsumexp(1), -f.logits.logsumexp(1)),
    }
    for name, (a, b) in pairs.items():
        if kind == "shift":
            flag = np.r_[np.zeros(len(a)), np.ones(len(b))]
            out[f"shift_{name}"] = metrics.auroc(np.r_[a.double().numpy(), b.double().numpy()], flag)
        if unknown.any():
            out[f"unknown_{name}"] = metrics.auroc(b.double().numpy(), unknown)
    return out


def _seen(case: Cached, what: str) -> Cached:
    """The case with some of its layers: the ``last``, those ``chosen`` by their worth, or the ``confidence``
    in their place.
    """
    names = [case.train[0].layer_names[-1]] if what == "last" else list(case.train[0].layer_names)
    if what == "chosen":
        names = list(select_layers(*case.calibration, case.train).names)

    def view(f: Features) -> Features:
        return (
            Features(f.logits, {"confidence": f.confidence[:, None]}, f.groups, f.families)
            if what == "confidence"
            else f.select(names)
        )

    tests = {k: (kind, view(f), y) for k, (kind, f, y) in case.tests.items()}
    return Cached(
        case.name,
        case.seed,
        (view(case.train[0]), case.train[1]),
        (view(case.calibration[0]), case.calibration[1]),
        tests,
    )


def report(records: Sequence[dict[str, Any]]) -> str:
    """All tables as Markdown; means are over the data sets, each the mean of its test sets and seeds."""
    names = list(dict.fromkeys(r["method"] for r in records))
    cases = list(dict.fromkeys(r["case"] for r in records))
    seeds = {c: len({r["seed"] for r in records if r["case"] == c}) for c in cases}
    lines = [
        "# Shift benchmark: results",
        "",
        "Written by `python benchmarks/shift.py`. Means are over data sets, each the mean of "
        "its test sets and seeds.",
    ]
    lines += [
        f"Data sets and seeds: {', '.join(f'{c} ({n})' for c, n in seeds.items())}.",
        "",
        "## Against the targets",
        "",
    ]
    lines += [*targets(records), "", "## Means over the data sets", ""]
    lines += [
        "| method | in: ECE | NLL | AUROC | shift: ECE | NLL | AUROC | AURC |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = [
        ("in", "ece"),
        ("in", "nll"),
        ("in", "auroc"),
        ("shift", "ece"),
        ("shift", "nll"),
        ("shift", "auroc"),
        ("shift", "aurc"),
    ]
    lines += [
        f"| {n} | " + " | ".join(f"{mean(records, kind, key, n):.3f}" for kind, key in keys) + " |"
        for n in names
    ]
    lines += [
        "",
        "## ECE in domain / under shift, by data set",
        "",
        "| method | " + " | ".join(cases) + " |",
        "|---|" + "---|" * len(cases),
    ]
    lines += [
        f"| {n} | "
        + " | ".join(
            f"{mean(records, 'in', 'ece', n, c):.3f} / {mean(records, 'shift', 'ece', n, c):.3f}"
            for c in cases
        )
        + " |"
        for n in names
    ]
    return (
        "\n".join([*lines, *_every_set(records), *_intervals(records, cases), *_novelty(records, cases)])
        + "\n"
    )


def _every_set(records: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["", "## Every test set: ours against temperature scaling (mean over seeds)", ""]
    lines += [
        "| data set | test | accuracy | ECE T | ECE ours | NLL T | NLL ours | AUROC T | AUROC ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, test in dict.fromkeys((r["case"], r["test"]) for r in records):
        both = [
            [r for r in records if (r["case"], r["test"], r["method"]) == (case, test, m)]
            for m in ("temperature", OURS)
        ]
        t, o = (
            {k: float(np.nanmean([r[k] for r in rows])) for k in ("accuracy", "ece", "nll", "auroc")}
            for rows in both
        )
        pairs = " | ".join(f"{t[k]:.3f} | {o[k]:.3f}" for k in ("ece", "nll", "auroc"))
        lines.append(f"| {case} | {test} | {t['accuracy']:.2f} | {pairs} |")
    return lines


def _intervals(records: Sequence[dict[str, Any]], cases: Sequence[str]) -> list[str]:
    lines = [
        "",
        "## 90 % interval of ours, and time to fit",
        "",
        "| data set | coverage in | width in | coverage shift | width shift | plain coverage "
        "in | fit (processor s) |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        mine = [r for r in records if r["method"] == OURS and r["case"] == case]
        cells = [
            np.mean([r[k] for r in mine if r["kind"] == kind])
            for kind in ("in", "shift")
            for k in ("coverage", "width")
        ]
        cells.append(np.mean([r["plain_coverage"] for r in mine if r["kind"] == "in"]))
        lines.append(
            f"| {case} | "
            + " | ".join(f"{x:.2f}" for x in cells)
            + f" | {np.mean([r['fit_seconds'] for r in mine]):.1f} |"
        )
    return lines


def _novelty(records: Sequence[dict[str, Any]], cases: Sequence[str]) -> list[str]:
    lines = [
        "",
        "## AUROC of telling novel samples",
        "",
        "| data set | what | novelty (ours) | max softmax | energy |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        for what, label in (("shift", "shifted from in-domain"), ("unknown", "unknown from known classes")):
            mine = [
                r for r in records if r["method"] == OURS and r["case"] == case and f"{what}_novelty" in r
            ]
            if mine:
                cells = " | ".join(
                    f"{np.nanmean([r[f'{what}_{k}'] for r in mine]):.3f}"
                    for k in ("novelty", "softmax", "energy")
                )
                lines.append(f"| {case} | {label} | {cells} |")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/shift"))
    parser.add_argument("--out", type=Path, default=Path("docs/research/shift-results.md"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD"
    )
    parser.add_argument(
        "--cached-only", action="store_true", help="leave out data sets whose features are not cached"
    )
    parser.add_argument("--fresh", action="store_true", help="score again, though records are cached")
    return parser.parse_args()


if __name__ == "__main__":
    main()
