"""Could an estimate of accuracy be better than the mean confidence in windows of 50? What was tried.

    python benchmarks/estimate_ideas.py --cache CACHE

``CACHE`` is that of ``python -m salgp_study.suite``. Development sets only, every draw that is there. One row
for each idea: absolute error of the estimated accuracy, mean over all shifted sets, mean in which every data
set counts as one, and largest. Mixtures, bounds and signals start from the whole batch without caution.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from act_data import Suite, clean, plain, read_suite, suite_sets
from scipy.optimize import minimize
from torch import Tensor

from salgp import Features, LayerEvidence
from salgp.calibrators.evidence.check import leave_families_out
from salgp.calibrators.evidence.classes import farness
from salgp.calibrators.evidence.reference import layer_evidence
from salgp.estimate import ATC

DEVELOPMENT = ("digits", "digits-weak", "tabular-digits", "tabular-wine", "tabular-breast-cancer")
ALONE = ("mstar-convnet-0", "spcc-rnn-0")
SIGNALS = ("constant", "lean", "estimate", "ATC", "alone", "nearest", "novelty", "agreement", "overlap")
Row = dict[str, float | str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    cache = parser.parse_args().cache
    torch.set_num_threads(1)
    names = [name for name in suite_sets(cache) if name[:-2] in DEVELOPMENT or name in ALONE]
    rows = [row for name in names for row in rows_of(read_suite(cache, name))]
    print(f"{len(rows)} shifted sets of {len(names)} networks: mean, mean of data sets, largest")
    for idea, estimate in IDEAS.items():
        show(idea, rows, np.array([estimate(row) for row in rows]))
    for signal in range(len(SIGNALS)):
        show(
            f"one signal, best weight in sight of the truth: {SIGNALS[signal]}", rows, fitted(rows, [signal])
        )
    every = list(range(len(SIGNALS)))
    show("all signals, fitted in sight of the truth", rows, fitted(rows, every))
    show("all signals, fitted on the other data sets", rows, left_out(rows, every))


def rows_of(suite: Suite) -> list[Row]:
    """What is known of every shifted set of one network."""
    calibrator = suite.evidence()
    home, labels = clean(*suite.calibration)
    atc = ATC("entropy").fit(suite.temperature().predict(home), labels)
    usual = torch.bincount(home.label, minlength=home.n_classes) / len(home)
    bias = left_out_bias(calibrator, home.n_classes)
    near_home = nearest(calibrator, home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frank = LayerEvidence(caution=1.0).fit(*suite.calibration, suite.reference)
    found = []
    for shift, (features, y) in suite.shifted.items():
        batch = plain(features)
        row: Row = {"set": suite.name[:-2], "shift": shift, "bias": bias}
        row |= opinions(calibrator, batch)
        row["fitted frankly"] = float(frank.predict(batch, context=50).confidence.mean())
        row["truth"] = float((batch.label == y).double().mean())
        row["ATC"] = atc.estimate(suite.temperature().predict(batch))
        row["nearest"] = log_odds(nearest(calibrator, batch)) - log_odds(near_home)
        shares = torch.bincount(batch.label, minlength=batch.n_classes) / len(batch)
        row["overlap"] = float(torch.minimum(shares, usual).sum())
        found.append(row)
    print(suite.name, flush=True)
    return found


def opinions(calibrator: LayerEvidence, batch: Features) -> Row:
    """Mean confidences alone, in windows and in the whole batch, as they are and without caution."""
    model = calibrator.evidence_
    evidence = layer_evidence(model.reference, batch)
    view = model.view(batch, evidence)
    row: Row = {
        "alone": float(calibrator.predict(batch).confidence.mean()),
        "novelty": float(view.novelty.mean()),
        "agreement": float(view.agreement.mean()),
    }
    for name, context in (("window", 50), ("whole", "all")):
        seen = calibrator.evidence_.surroundings(batch, evidence, context)
        f = torch.logit(calibrator.from_evidence(batch, evidence, seen).confidence)
        lean = calibrator.evidence_.heard(view, evidence, seen)
        row[name] = float(torch.sigmoid(f).mean())
        row[f"{name}, frank"] = float(torch.sigmoid(f + math.log(calibrator.caution) * lean).mean())
        row["lean"] = float(lean.mean())
    return row


def left_out_bias(calibrator: LayerEvidence, n_classes: int) -> float:
    """Log-odds by which left-out families are misjudged, per weight of the expert for shift."""
    rows, inside = calibrator.seen_, calibrator.evidence_.inside
    settings = {
        name: getattr(calibrator, name) for name in ("caution", "ridge", "window", "seed", "crowding")
    }
    above = below = 0.0
    for part in leave_families_out(rows, inside, n_classes, **settings).values():
        lean, right = float(part.lean.mean()), float(rows.correct[part.rows].mean())
        above += lean * (log_odds(right) - log_odds(float(torch.sigmoid(part.log_odds).mean())))
        below += lean**2
    return above / (below + 0.5)


def nearest(calibrator: LayerEvidence, batch: Features) -> float:
    """Share of samples whose nearest class is the label, over all layers."""
    far: Tensor = farness(calibrator.evidence_.reference, batch)
    return float((far.argmin(dim=2) == batch.label).double().mean())


def log_odds(share: float) -> float:
    inside = min(max(share, 0.02), 0.98)
    return math.log(inside / (1 - inside))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


IDEAS: dict[str, Callable[[Row], float]] = {
    "windows of 50 (in use)": lambda row: row["window"],
    "the whole batch as context": lambda row: row["whole"],
    "the same, caution taken back": lambda row: row["whole, frank"],
    "windows of 50, caution taken back": lambda row: row["window, frank"],
    "windows of 50, fitted without caution": lambda row: row["fitted frankly"],
    "whole batch, bias of left-out families taken back": lambda row: sigmoid(
        log_odds(row["whole"]) + row["bias"] * row["lean"]
    ),
    "at most the overlap of the classes": lambda row: min(row["whole, frank"], row["overlap"]),
    "10 % ATC": lambda row: 0.9 * row["whole, frank"] + 0.1 * row["ATC"],
    "20 % ATC": lambda row: 0.8 * row["whole, frank"] + 0.2 * row["ATC"],
    "half alone": lambda row: (row["whole, frank"] + row["alone"]) / 2,
}


def signals(rows: list[Row], which: list[int]) -> np.ndarray:
    """Columns of unit mean square that might tell what the estimate misses, ``(n, k)``."""
    columns = []
    for row in rows:
        start = log_odds(row["whole, frank"])
        gaps = [log_odds(row[name]) - start for name in ("ATC", "alone")]
        plain_numbers = [row[name] for name in ("nearest", "novelty", "agreement")]
        columns.append([1.0, row["lean"], start, *gaps, *plain_numbers, 1 - row["overlap"]])
    X = np.array(columns)[:, which]
    return X / np.sqrt((X**2).mean(axis=0))


def fitted(rows: list[Row], which: list[int], seen: np.ndarray | None = None) -> np.ndarray:
    """Estimates whose log-odds are corrected by signals, with the weights of least error where ``seen``."""
    X, seen = signals(rows, which), np.ones(len(rows), dtype=bool) if seen is None else seen
    start = np.array([log_odds(row["whole, frank"]) for row in rows])
    truth = np.array([row["truth"] for row in rows])

    def loss(w: np.ndarray) -> float:
        missed = sigmoid(start + X @ w) - truth
        return float(np.sqrt(missed[seen] ** 2 + 1e-4).mean() + 1e-3 * (w**2).sum())

    return sigmoid(start + X @ minimize(loss, np.zeros(len(which))).x)


def left_out(rows: list[Row], which: list[int]) -> np.ndarray:
    sets = np.array([row["set"] for row in rows])
    found = np.zeros(len(rows))
    for one in dict.fromkeys(sets):
        found[sets == one] = fitted(rows, which, sets != one)[sets == one]
    return found


def show(idea: str, rows: list[Row], estimate: np.ndarray) -> None:
    error = np.abs(estimate - np.array([row["truth"] for row in rows]))
    sets = np.array([row["set"] for row in rows])
    each = np.mean([error[sets == one].mean() for one in dict.fromkeys(sets)])
    print(f"{error.mean():.4f}  {each:.4f}  {error.max():.2f}  {idea}")


if __name__ == "__main__":
    main()
