"""How well confidences hold under shift: layer evidence against every rival, on the same features.

    python benchmarks/shift.py --data ../shared/data --cache .cache/shift --out docs/research/shift-results.md

Trains what is not cached (hours on two cores for the MSTAR and SPCC networks), then takes minutes. ``--cases`` and
``--seeds`` choose a part of it; ``--slow`` adds the Gaussian-process rivals. See `shift_suite` for the data.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shift_suite import CASES, Cached, cached

from salgp.calibrators import Calibrator, get
from salgp.calibrators.evidence import LayerEvidence
from salgp.calibrators.evidence_model import originals
from salgp.features import Features
from salgp.metrics.binned import assign_bins
from salgp.prediction import Prediction

Methods = dict[str, tuple[Callable[[], Calibrator], bool]]

OURS = "layer evidence"
METHODS: Methods = {
    "uncalibrated": (lambda: get("uncalibrated"), False),
    "temperature": (lambda: get("temperature"), False),
    "perturbed temperature": (lambda: get("perturbed-temperature"), True),
    "ensemble temperature": (lambda: get("ensemble-temperature"), False),
    "isotonic": (lambda: get("isotonic"), False),
    "beta": (lambda: get("beta"), False),
    "Dirichlet": (lambda: get("dirichlet"), False),
    "latent GP (GPcalib)": (lambda: get("latent-gp"), False),
    "density-aware": (lambda: get("density-aware"), False),
    "density-aware, on copies": (lambda: get("density-aware"), True),
    "Trust Score": (lambda: get("trust-score"), False),
    "Trust Score, on copies": (lambda: get("trust-score"), True),
    "deep k-NN": (lambda: get("deep-knn"), False),
    OURS: (LayerEvidence, True),
    "- without copies": (LayerEvidence, False),
    "- without caution": (lambda: LayerEvidence(caution=1.0), True),
    "- 20 prototypes per class": (lambda: LayerEvidence(prototypes=20), True),
}
"""Name -> how it is built, and whether it is fitted on perturbed copies too."""

SLOW: Methods = {
    "residual GP, last layer (RIO)": (lambda: get("residual-gp"), False),
    "SAL-GP ML (paper)": (lambda: get("sal-gp", covariance="ml", inference="inducing", n_inducing=128, max_steps=60), False),
    "SAL-GP HL (paper)": (lambda: get("sal-gp", covariance="hl", inference="inducing", n_inducing=128, max_steps=60), False),
    "SAL-GP sum": (lambda: get("sal-gp", covariance="sum", max_steps=60), False),
}


def main() -> None:
    """Run the suite and write the tables."""
    options = _options()
    torch.set_num_threads(options.threads)
    records: list[dict[str, Any]] = []
    methods = {**METHODS, **(SLOW if options.slow else {})}
    for seed in options.seeds:
        for key in options.cases:
            records += _kept(key, seed, methods, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report(records), encoding="utf-8")
    print(report(records))


def _kept(key: str, seed: int, methods: Methods, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of one case and seed, from the cache where they are there."""
    path = options.cache / "records" / f"{key}-s{seed}{'-slow' if options.slow else ''}.json"
    if path.is_file() and not options.fresh:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return found
    records = score_case(cached(key, seed, options.cache, options.data), methods)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records), encoding="utf-8")
    return records


def score_case(case: Cached, methods: Methods) -> list[dict[str, Any]]:
    """Scores of all methods on all test sets of one case; the last layer alone is an ablation of ours."""
    rows = []
    for name, (build, copies) in methods.items():
        rows += _score(case, name, build(), copies)
    rows += _score(_last_layer(case), "- last layer only", LayerEvidence(), True)
    print(case.name, case.seed, "done", flush=True)
    return rows


def _score(case: Cached, name: str, calibrator: Calibrator, copies: bool) -> list[dict[str, Any]]:
    features, labels = case.calibration
    if not copies:
        first, _ = originals(features)
        features, labels = Features(features[first].logits, features[first].layers), labels[first]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrator.fit(features, labels, case.train)
    seconds = time.perf_counter() - start
    inside = next(calibrator.predict(f).novelty for kind, f, _ in case.tests.values() if kind == "in")
    rows = []
    for test, (kind, f, y) in case.tests.items():
        p = calibrator.predict(f)
        correct = f.correct(y).double().numpy()
        rows.append({"method": name, "case": case.name, "seed": case.seed, "test": test, "kind": kind, "fit_seconds": seconds,
                     **scores(p, correct), **_ood(case, f, y, p, inside, kind)})  # fmt: skip
    return rows


def scores(prediction: Prediction, correct: np.ndarray) -> dict[str, float]:
    """Calibration of the confidence, ranking of errors, interval."""
    s = prediction.confidence.double().numpy()
    out = {
        "n": len(s),
        "accuracy": correct.mean(),
        "ece": ece(s, correct),
        "nll": nll(s, correct),
        "auroc": auroc(s, correct),
        "aurc": aurc(s, correct),
    }
    if prediction.lower is not None and prediction.upper is not None:
        low, high = prediction.lower.double().numpy(), prediction.upper.double().numpy()
        out |= {"coverage": predictive_coverage(s, correct, low, high), "width": float((high - low).mean())}
    return {k: float(v) for k, v in out.items()}


def ece(s: np.ndarray, correct: np.ndarray, bins: int = 15) -> float:
    index = np.clip((s * bins).astype(int), 0, bins - 1)
    return float(np.abs(np.bincount(index, s - correct, bins)).sum() / len(s))


def nll(s: np.ndarray, correct: np.ndarray) -> float:
    p = np.clip(s, 1e-6, 1 - 1e-6)
    return float(-(correct * np.log(p) + (1 - correct) * np.log(1 - p)).mean())


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    from scipy.stats import rankdata

    n1 = positive.sum()
    n0 = len(positive) - n1
    return float((rankdata(score)[positive > 0].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)) if n1 and n0 else float("nan")


def aurc(s: np.ndarray, correct: np.ndarray) -> float:
    wrong = 1 - correct[np.argsort(-s, kind="stable")]
    return float((np.cumsum(wrong) / np.arange(1, len(s) + 1)).mean())


def predictive_coverage(s: np.ndarray, correct: np.ndarray, low: np.ndarray, high: np.ndarray, bins: int = 15, draws: int = 400) -> float:
    """Share of samples in equal-mass bins whose accuracy is inside the 90 % range the intervals predict for that bin.

    The accuracy of a bin of m samples varies with the confidences (as their intervals say, together) and with the
    luck of m draws; the range holds both.
    """
    rng = np.random.default_rng(0)
    logit = [np.log(np.clip(x, 1e-9, 1 - 1e-9) / (1 - np.clip(x, 1e-9, 1 - 1e-9))) for x in (low, s, high)]
    up, down = (logit[2] - logit[1]) / 1.645, (logit[1] - logit[0]) / 1.645
    index, edges = assign_bins(s, bins, "mass")
    hit = 0
    for b in range(len(edges) - 1):
        rows = index == b
        if rows.any():
            z = rng.standard_normal(draws)[:, None]
            p = 1 / (1 + np.exp(-(logit[1][rows] + np.where(z > 0, up[rows], down[rows]) * z)))
            accuracy = rng.binomial(int(rows.sum()), p.mean(axis=1)) / rows.sum()
            hit += rows.sum() * (np.quantile(accuracy, 0.05) - 1e-9 <= correct[rows].mean() <= np.quantile(accuracy, 0.95) + 1e-9)
    return float(hit / len(s))


def _ood(case: Cached, f: Features, y: torch.Tensor, p: Prediction, inside: torch.Tensor | None, kind: str) -> dict[str, float]:
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
            out[f"shift_{name}"] = auroc(np.r_[a.double().numpy(), b.double().numpy()], flag)
        if unknown.any():
            out[f"unknown_{name}"] = auroc(b.double().numpy(), unknown)
    return out


def _last_layer(case: Cached) -> Cached:
    last = [case.train[0].layer_names[-1]]
    pick = lambda pair: (pair[0].select(last), pair[1])  # noqa: E731
    tests = {k: (kind, f.select(last), y) for k, (kind, f, y) in case.tests.items()}
    return Cached(case.name, case.seed, pick(case.train), pick(case.calibration), tests)


def report(records: Sequence[dict[str, Any]]) -> str:
    """All tables as Markdown; means are over the data sets, each the mean of its test sets and seeds."""
    names = list(dict.fromkeys(r["method"] for r in records))
    cases = list(dict.fromkeys(r["case"] for r in records))
    seeds = {c: len({r["seed"] for r in records if r["case"] == c}) for c in cases}

    def mean(kind: str, key: str, name: str, case: str | None = None) -> float:
        per = [
            [r[key] for r in records if r["method"] == name and r["kind"] == kind and r["case"] == c and key in r] for c in cases if case in (None, c)
        ]
        return float(np.mean([np.nanmean(v) for v in per if v])) if any(per) else float("nan")

    lines = [f"Cases and seeds: {', '.join(f'{c} ({n})' for c, n in seeds.items())}.", "", "## Means over the data sets", ""]
    lines += ["| method | in: ECE | NLL | AUROC | shift: ECE | NLL | AUROC | AURC |", "|---|---|---|---|---|---|---|---|"]
    keys = [("in", "ece"), ("in", "nll"), ("in", "auroc"), ("shift", "ece"), ("shift", "nll"), ("shift", "auroc"), ("shift", "aurc")]
    lines += [f"| {n} | " + " | ".join(f"{mean(kind, key, n):.3f}" for kind, key in keys) + " |" for n in names]
    lines += ["", "## ECE in domain / under shift, by data set", "", "| method | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]
    lines += [f"| {n} | " + " | ".join(f"{mean('in', 'ece', n, c):.3f} / {mean('shift', 'ece', n, c):.3f}" for c in cases) + " |" for n in names]
    return "\n".join([*lines, *_every_set(records), *_intervals(records, cases), *_novelty(records, cases)]) + "\n"


def _every_set(records: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["", "## Every test set: ours against temperature scaling (mean over seeds)", ""]
    lines += ["| data set | test | accuracy | ECE T | ECE ours | NLL T | NLL ours | AUROC T | AUROC ours |", "|---|---|---|---|---|---|---|---|---|"]
    for case, test in dict.fromkeys((r["case"], r["test"]) for r in records):
        both = [[r for r in records if (r["case"], r["test"], r["method"]) == (case, test, m)] for m in ("temperature", OURS)]
        t, o = ({k: float(np.nanmean([r[k] for r in rows])) for k in ("accuracy", "ece", "nll", "auroc")} for rows in both)
        pairs = " | ".join(f"{t[k]:.3f} | {o[k]:.3f}" for k in ("ece", "nll", "auroc"))
        lines.append(f"| {case} | {test} | {t['accuracy']:.2f} | {pairs} |")
    return lines


def _intervals(records: Sequence[dict[str, Any]], cases: Sequence[str]) -> list[str]:
    lines = [
        "",
        "## 90 % interval of ours, and time to fit",
        "",
        "| data set | coverage in | width in | coverage shift | width shift | fit (s) |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        mine = [r for r in records if r["method"] == OURS and r["case"] == case]
        cells = [np.mean([r[k] for r in mine if r["kind"] == kind]) for kind in ("in", "shift") for k in ("coverage", "width")]
        lines.append(f"| {case} | " + " | ".join(f"{x:.2f}" for x in cells) + f" | {np.mean([r['fit_seconds'] for r in mine]):.1f} |")
    return lines


def _novelty(records: Sequence[dict[str, Any]], cases: Sequence[str]) -> list[str]:
    lines = ["", "## AUROC of telling novel samples", "", "| data set | what | novelty (ours) | max softmax | energy |", "|---|---|---|---|---|"]
    for case in cases:
        for what, label in (("shift", "shifted from in-domain"), ("unknown", "unknown from known classes")):
            mine = [r for r in records if r["method"] == OURS and r["case"] == case and f"{what}_novelty" in r]
            if mine:
                cells = " | ".join(f"{np.nanmean([r[f'{what}_{k}'] for r in mine]):.3f}" for k in ("novelty", "softmax", "energy"))
                lines.append(f"| {case} | {label} | {cells} |")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/shift"))
    parser.add_argument("--out", type=Path, default=Path("docs/research/shift-results.md"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="score again, though records are cached")
    return parser.parse_args()


if __name__ == "__main__":
    main()
