"""Could a correction learned on the shifts of other networks, labels and all, make windows of 50 more right?

    python -m salgp_study.suite features --data DATA --cache CACHE
    python benchmarks/limits.py --cache CACHE --out benchmarks/results/limits.md

Development sets only. Every window is described by numbers that mean the same for every network, since they
are in units of its calibration samples: how far novelty, agreement and log-odds have moved, how the predicted
classes are mixed, how the last layer's features are spread. A correction of the log-odds that is linear in
them, as far as the window leans to the expert for shift, is fitted to the labels of all shifted test sets of
the *other* data sets. That is more than any calibrator can have: if it gains little, the numbers do not hold
what is missing. The last rows are bounds in sight of the truth.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.reference import Evidence, layer_evidence
from salgp.calibrators.evidence.rows import View
from salgp.features import Features
from salgp.gp.logistic import logistic
from salgp.metrics import ece, nll_correct
from salgp_study.suite.cache import CachedCase, CachedTest, case_folder, is_complete, read_case
from salgp_study.suite.protocol import read_protocol
from salgp_study.suite.scoring import ece_floor, told

WINDOW, ROWS, RIDGE = 50, 200, 0.003
"""Samples of a window, rows of a test set that a correction is fitted to, and its ridge."""
NUMBERS = (
    "one",
    "novelty, first layer",
    "novelty, last layer",
    "agreement, middle layer",
    "agreement, last layer",
    "log-odds",
    "log-odds at the usual length",
    "entropy of the predicted classes",
    "distance of their mix from the usual one",
    "offset of the last layer",
    "spread of the last layer",
)
TRIED: dict[str, tuple[int, ...]] = {
    "a constant": (0,),
    "novelty": (0, 1, 2),
    "agreement": (0, 3, 4),
    "log-odds": (0, 5, 6),
    "predicted classes": (0, 7, 8),
    "place and spread of the features": (0, 9, 10),
    "all of them": tuple(range(len(NUMBERS))),
}


@dataclass(frozen=True, eq=False)
class Shifted:
    """One test set: log-odds in windows, how far each window leans, its numbers, and the truth."""

    name: str
    log_odds: Tensor
    temperature: Tensor
    lean: Tensor
    numbers: Tensor
    correct: Tensor

    def columns(self, chosen: Sequence[int], slopes: bool) -> Tensor:
        """What a correction is linear in, ``(n, p)``."""
        X = self.numbers[:, list(chosen)] * self.lean[:, None]
        return torch.cat([X, X * self.log_odds[:, None] / 3], dim=1) if slopes else X


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache/shift"))
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    protocol = read_protocol()
    folders = [case_folder(options.cache, name, s) for name in protocol.development for s in protocol.seeds]
    sets = [one for folder in folders if is_complete(folder) for one in shifted_sets(read_case(folder))]
    text = page(sets)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


def shifted_sets(case: CachedCase) -> list[Shifted]:
    """Every shifted test set of one network."""
    calibrator = LayerEvidence().fit(*case.calibration, case.reference)
    return [shifted(calibrator, case.name, test) for test in case.tests if test.kind == "shift"]


def shifted(calibrator: LayerEvidence, name: str, test: CachedTest) -> Shifted:
    """One test set in windows."""
    model, features = calibrator.evidence_, Features(test.features.logits, test.features.layers)
    evidence = layer_evidence(model.reference, features)
    view, window = model.view(features, evidence), torch.arange(len(features)) // WINDOW
    seen = model.surroundings(features, evidence, WINDOW)
    assert model.environment is not None
    confidence = calibrator.from_evidence(features, evidence, seen).confidence.double()
    numbers = describe(calibrator, view, evidence, window)[window]
    correct = features.correct(test.labels).double()
    lean = model.environment.lean(seen.m)
    return Shifted(name, torch.logit(confidence), view.t, lean, numbers, correct)


def describe(calibrator: LayerEvidence, view: View, evidence: Evidence, window: Tensor) -> Tensor:
    """The `NUMBERS` of each window, ``(w, 11)``."""
    rows, environment = calibrator.seen_, calibrator.evidence_.environment
    assert environment is not None
    home, n = rows.view[(~rows.is_copy).nonzero()[:, 0]], torch.bincount(window).double()

    def mean(x: Tensor) -> Tensor:
        return x.new_zeros(len(n), *x.shape[1:]).index_add_(0, window, x) / n.reshape(-1, *[1] * (x.ndim - 1))

    L = view.agreement.shape[1]
    novelty, agreement = mean(view.height) - home.height.mean(0), mean(view.gated) - home.gated.mean(0)
    own = mean(view.own.clamp(-4, 4)) - home.own.clamp(-4, 4).mean(0)
    usual = environment.shares
    share = mean(torch.nn.functional.one_hot(view.label, len(usual)).double())
    surprise = (share.clamp_min(1e-9)).log()
    entropy = -(share * surprise).sum(1) + (usual * usual.log()).sum()
    distance = (share * (surprise - usual.log())).sum(1)
    x = evidence.place.double()[:, -(evidence.place.shape[1] // L) :].clamp(-6, 6)
    middle = mean(x)
    offset = middle.square().mean(1).clamp_min(1e-9).log() / 2
    spread = mean((x - middle[window]).square()).mean(1).clamp_min(1e-9).log()
    columns = [torch.ones_like(n), novelty[:, 0], novelty[:, -1], agreement[:, L // 2], agreement[:, -1]]
    return torch.stack([*columns, *own.T, entropy, distance, offset, spread], dim=1)


def corrected(sets: Sequence[Shifted], chosen: Sequence[int], slopes: bool = False) -> list[Tensor]:
    """Log-odds of every test set, corrected by what the other data sets teach."""
    weights = {
        name: fitted([one for one in sets if one.name != name], chosen, slopes)
        for name in {one.name for one in sets}
    }
    return [one.log_odds + one.columns(chosen, slopes) @ weights[one.name] for one in sets]


def fitted(sets: Sequence[Shifted], chosen: Sequence[int], slopes: bool) -> Tensor:
    """Weights of the columns; every data set counts once."""
    counts = {name: sum(one.name == name for one in sets) for name in {one.name for one in sets}}
    parts = []
    for one in sets:
        some = torch.randperm(len(one.correct), generator=torch.Generator().manual_seed(0))[:ROWS]
        weight = torch.full((len(some),), 1.0 / len(some) / counts[one.name]).double()
        parts.append((one.columns(chosen, slopes)[some], one.correct[some], one.log_odds[some], weight))
    X, y, offset, weight = (torch.cat(column) for column in zip(*parts, strict=True))
    scale = X.square().mean(0).sqrt().clamp_min(0.05)
    prior = torch.full((X.shape[1],), RIDGE * len(X)).double()
    return logistic(X / scale, y, weight * len(X) / weight.sum(), prior, offset) / scale


def page(sets: Sequence[Shifted]) -> str:
    """The table."""
    found = {
        "temperature scaling": [one.temperature for one in sets],
        "in use": [one.log_odds for one in sets],
    }
    for name, chosen in TRIED.items():
        found[f"+ a correction by {name}"] = corrected(sets, chosen)
    found["+ a correction by novelty, agreement and log-odds, slopes too"] = corrected(sets, range(7), True)
    found["bound: in use, told the accuracy of each test set"] = [
        torch.logit(torch.from_numpy(told(torch.sigmoid(one.log_odds).numpy(), float(one.correct.mean()))))
        for one in sets
    ]
    base = scores(sets, found["temperature scaling"])[0]
    rows = []
    for name, log_odds in found.items():
        error, loss, gap, worse = scores(sets, log_odds)
        rows.append(f"| {name} | {error:.4f} | {error / base:.2f} | {loss:.4f} | {gap:.4f} | {worse} |")
    floor = by_set(sets, [ece_floor(torch.sigmoid(one.log_odds).numpy()) for one in sets])
    rows.append(f"| floor: confidences exactly right | {floor:.4f} | {floor / base:.2f} | | | |")
    names = list(dict.fromkeys(one.name for one in sets))
    head = "| | ECE | of temperature's | NLL | mean confidence off by | sets worse than temperature by .02 |"
    return "\n".join(
        [
            "# What is left to gain under shift, and what numbers of a window hold of it",
            "",
            "Written by `python benchmarks/limits.py`; windows of 50, development sets only, each data set",
            f"counted once: {', '.join(names)}",
            f"({len(sets)} shifted sets of all draws). A correction is fitted to the labels of all shifted",
            "sets of the *other* data sets. Told the accuracy: one number is added to the log-odds of each",
            "test set, so that the mean confidence is its accuracy.",
            "",
            head,
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def scores(sets: Sequence[Shifted], log_odds: Sequence[Tensor]) -> tuple[float, float, float, int]:
    """ECE, NLL and distance of mean confidence and accuracy; sets worse than temperature scaling."""
    rows, worse = [], 0
    for one, f in zip(sets, log_odds, strict=True):
        p, correct = torch.sigmoid(f).numpy(), one.correct.numpy()
        error = ece(p, correct)
        rows.append((error, nll_correct(p, correct), abs(p.mean() - correct.mean())))
        worse += error > ece(torch.sigmoid(one.temperature).numpy(), correct) + 0.02
    error, loss, gap = (by_set(sets, column) for column in zip(*rows, strict=True))
    return error, loss, gap, worse


def by_set(sets: Sequence[Shifted], values: Sequence[float]) -> float:
    """Mean over the data sets, each the mean of its test sets."""
    names = {one.name for one in sets}
    means = [np.mean([v for one, v in zip(sets, values, strict=True) if one.name == name]) for name in names]
    return float(np.mean(means))


if __name__ == "__main__":
    main()
