"""Prediction sets: coverage and size, in domain and under shift, on MAPIE's scores and on ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from act_data import plain, read_suite
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, LACConformityScore
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor

from salgp import Prediction
from salgp.sets import fit_sets, overtaking

COVERAGE = 0.98
SETS = ("cifar10-resnet20-0", "digits-weak-0", "mstar-convnet-0")


class Given(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose inputs are its probabilities."""

    def __init__(self, n_classes: int = 10) -> None:
        self.n_classes = n_classes
        self.classes_ = np.arange(n_classes)

    def fit(self, X: object, y: object) -> Given:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        return np.asarray(X)

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.asarray(X).argmax(1)


def section(data: Path, cache: Path, quick: bool) -> str:
    draws = 5 if quick else 20
    lines = [
        f"Sets that promise {COVERAGE:.0%}, fitted on a random half of the unseen in-domain samples and "
        f"tried on the other half ({draws} draws; mean, and 3 sd of the mean of the coverage) and on all "
        f"shifted sets (5 draws). Cells: coverage in domain / mean size; coverage under shift / mean size. "
        f"Layer evidence: `overtaking` shares the mass besides the label as the tempered softmax has it. By "
        f"novelty: the promise holds in each of five bands of novelty.",
        "",
        "| set | score | MAPIE, temperature | salgp.sets, temperature | layer evidence | layer evidence, "
        "by novelty |",
        "|---|---|---|---|---|---|",
    ]
    for name in SETS:
        suite = read_suite(cache, name)
        temperature, evidence = suite.temperature(), suite.evidence()
        home = _both(temperature, evidence, suite.test[0])
        away = [(_both(temperature, evidence, f[:300]), y[:300]) for f, y in suite.shifted.values()]
        for score in ("lac", "aps"):
            cells = [
                _cell(home[which], suite.test[1], [(p[which], y) for p, y in away], kind, score, draws)
                for which, kind in ((0, "mapie"), (0, "all"), (1, "all"), (1, "novelty"))
            ]
            lines.append(f"| {name} | {score.upper()} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def _both(temperature, evidence, features) -> tuple[Prediction, Prediction]:
    """Tempered softmax, and layer evidence with the rest of the mass shared as that has it."""
    batch = plain(features)
    tempered = temperature.predict(batch)
    return tempered, overtaking(evidence.predict(batch), tempered.probs)


def _cell(
    home: Prediction, labels: Tensor, away: list[tuple[Prediction, Tensor]], kind: str, score: str, draws: int
) -> str:
    rng = np.random.default_rng(0)
    found, shifted = [], []
    for draw in range(draws):
        order = torch.from_numpy(rng.permutation(len(labels)))
        fit, rest = order[: len(order) // 2], order[len(order) // 2 :]
        apply = _fitted(home[fit], labels[fit], kind, score)
        found.append(_tried(apply, home[rest], labels[rest]))
        if draw < 5:
            shifted.append(np.mean([_tried(apply, p, y) for p, y in away], axis=0))
    coverage, size = np.mean(found, axis=0)
    noise = 3 * np.std(found, axis=0)[0] / np.sqrt(draws)
    there = np.mean(shifted, axis=0)
    return f"{coverage:.3f} ± {noise:.3f} / {size:.3f}; {there[0]:.3f} / {there[1]:.2f}"


def _fitted(prediction: Prediction, labels: Tensor, kind: str, score: str):
    if kind != "mapie":
        return fit_sets(prediction, labels, COVERAGE, score, kind)
    chosen = LACConformityScore() if score == "lac" else APSConformityScore()
    fitted = SplitConformalClassifier(
        Given(prediction.probs.shape[1]),
        confidence_level=COVERAGE,
        conformity_score=chosen,
        prefit=True,
        random_state=0,
    ).conformalize(prediction.probs.double().numpy(), labels.numpy())
    return lambda p: torch.from_numpy(fitted.predict_set(p.probs.double().numpy())[1][:, :, 0])


def _tried(apply, prediction: Prediction, labels: Tensor) -> tuple[float, float]:
    members = apply(prediction)
    covered = members[torch.arange(len(labels)), labels]
    return float(covered.double().mean()), float(members.sum(1).double().mean())
