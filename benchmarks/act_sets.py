"""Prediction sets: coverage and size, in domain and under shift, on MAPIE's scores and on ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from act_data import Predicted, predictions, suite_sets
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, LACConformityScore
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor

from salgp import Prediction
from salgp.sets import PredictionSets, fit_sets

COVERAGE = 0.98
SETS = ("digits-0", "digits-weak-0", "tabular-digits-0", "tabular-breast-cancer-0", "mstar-convnet-0")
"""Development sets: the score was chosen on these."""
REPORTED = ("cifar10-resnet20-0", "clinc150-minilm-0", "mstar-aconvnet-0", "plasticc-table-0")


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
    draws = 5 if quick else 40
    lines = [
        f"Sets that promise {COVERAGE:.0%}, fitted on a random half of the unseen in-domain samples and "
        f"tried on the other half ({draws} draws; mean, and 3 sd of the mean of the coverage) and on all "
        f"shifted sets (5 draws). APS has the same random numbers everywhere, those of MAPIE. "
        f"Cells: coverage in domain / mean size; coverage under shift / mean size. "
        f"Layer evidence, one sample at a time: `predict_classes`, by logits and layers together. "
        f"By novelty: the promise holds in each of five bands of novelty. The first "
        f"{len(SETS)} networks are those the score was chosen on.",
        "",
        "| set | score | MAPIE, temperature | salgp.sets, temperature | layer evidence | layer evidence, "
        "by novelty | ours / MAPIE's size |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {"lac": [], "aps": []}
    for name in (*SETS, *REPORTED)[: 2 if quick else None]:
        found = predictions(cache, name)
        binary = found["test"].tempered.probs.shape[1] == 2  # MAPIE has no APS for two classes
        for score in ("lac",) if binary else ("lac", "aps"):
            cells = [_cell(found, which, kind, score, draws) for which, kind in COLUMNS]
            ratio = cells[2][1] / cells[0][1]
            ratios[score].append(ratio)
            texts = " | ".join(text for text, _ in cells)
            lines.append(f"| {name} | {score.upper()} | {texts} | {ratio:.3f} |")
            print(lines[-1], flush=True)
    means = ", ".join(f"{score.upper()} {np.mean(values):.3f}" for score, values in ratios.items())
    lines += ["", f"Mean of the last column: {means}."]
    if not quick:
        lines += ["", _other_draws(cache, draws)]
    return "\n".join(lines)


def _other_draws(cache: Path, draws: int) -> str:
    """The last column for the same sets drawn and trained anew, where the suite has them."""
    parts = []
    for name in (*SETS, *REPORTED):
        others = [other for other in suite_sets(cache) if other[:-1] == name[:-1] and other != name]
        found = [predictions(cache, other) for other in others]
        for score in ("lac", "aps") if found else ():
            ratios = [_ratio(one, score, draws) for one in found]
            cells = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            parts.append(f"{name[:-2]} {score.upper()} {cells}")
            print(parts[-1], flush=True)
    return (
        "The same where the suite has two more draws of data and network (both sides by `salgp.sets`, which "
        f"equals MAPIE): {'; '.join(parts)}."
    )


def _ratio(found: dict[str, Predicted], score: str, draws: int) -> float:
    ours, theirs = (_cell(found, which, "all", score, draws)[1] for which in ("evidence", "tempered"))
    return ours / theirs


COLUMNS = (("tempered", "mapie"), ("tempered", "all"), ("evidence", "all"), ("evidence", "novelty"))


def _of(which: str, found: Predicted) -> Prediction:
    """Tempered softmax, or the class probabilities of layer evidence."""
    return found.tempered if which == "tempered" else found.classes


def _cell(found: dict[str, Predicted], which: str, kind: str, score: str, draws: int) -> tuple[str, float]:
    """The cell, and the mean size in domain."""
    rng = np.random.default_rng(0)
    test, labels = _of(which, found["test"]), found["test"].labels
    away = [(_of(which, f)[:300], f.labels[:300]) for key, f in found.items() if key not in ("home", "test")]
    in_domain, shifted = [], []
    for draw in range(draws):
        order = torch.from_numpy(rng.permutation(len(labels)))
        fit, rest = order[: len(order) // 2], order[len(order) // 2 :]
        apply = _fitted(test[fit], labels[fit], kind, score, draw)
        in_domain.append(_tried(apply, test[rest], labels[rest]))
        if draw < 5:
            shifted.append(np.mean([_tried(apply, p, y) for p, y in away], axis=0))
    coverage, size = np.mean(in_domain, axis=0)
    noise = 3 * np.std(in_domain, axis=0)[0] / np.sqrt(draws)
    there = np.mean(shifted, axis=0)
    return f"{coverage:.3f} ± {noise:.3f} / {size:.3f}; {there[0]:.3f} / {there[1]:.2f}", float(size)


def _fitted(prediction: Prediction, labels: Tensor, kind: str, score: str, seed: int):
    if kind != "mapie":
        fitted = fit_sets(prediction, labels, COVERAGE, score, kind)
        return fitted if score == "lac" else _same_draws(fitted, prediction, labels, seed)
    chosen = LACConformityScore() if score == "lac" else APSConformityScore()
    fitted = SplitConformalClassifier(
        Given(prediction.probs.shape[1]),
        confidence_level=COVERAGE,
        conformity_score=chosen,
        prefit=True,
        random_state=seed,
    ).conformalize(prediction.probs.double().numpy(), labels.numpy())
    return lambda p: torch.from_numpy(fitted.predict_set(p.probs.double().numpy())[1][:, :, 0])


def _same_draws(sets: PredictionSets, prediction: Prediction, labels: Tensor, seed: int) -> PredictionSets:
    """The sets with the random numbers that MAPIE draws, so that both rest on the same scores."""
    draws = torch.from_numpy(np.random.RandomState(seed).uniform(size=len(labels)))
    scores = sets._matrix(prediction.probs.double(), draws)
    return replace(sets, scores=scores.gather(1, labels[:, None])[:, 0])


def _tried(apply, prediction: Prediction, labels: Tensor) -> tuple[float, float]:
    members = apply(prediction)
    covered = members[torch.arange(len(labels)), labels]
    return float(covered.double().mean()), float(members.sum(1).double().mean())
