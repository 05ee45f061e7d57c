"""Do rules keep their promise, and how much do they act? Against a naive threshold and MAPIE."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from act_data import digits, published, read_suite, unshared
from mapie.risk_control import BinaryClassificationController
from torch import Tensor

from salgp import Prediction
from salgp.decide import ALWAYS, NEVER, choose_threshold

ASSURANCE = 0.95
MAPIE_DRAWS = 250
"""MAPIE takes several times as long as everything else."""
Choose = Callable[[Prediction, Tensor, float], float]


def section(data: Path, cache: Path, quick: bool) -> str:
    draws = 50 if quick else 1000
    lines = [
        f"{draws:,} times, `n` labelled samples are drawn from a real set (with replacement, so that the "
        f"whole "
        f"set is the population and the true error of a rule is known exactly), a threshold is chosen with "
        f"{ASSURANCE:.0%} assurance and tried on the whole set. *Broken*: share of thresholds whose true "
        f"error "
        f"exceeds the promise; it may be {1 - ASSURANCE:.0%}, and up to {_noise(draws):.1%} by chance (99 % "
        f"binomial). *Coverage*: mean share acted on, as a share of that of the best threshold in hindsight. "
        f"MAPIE: `BinaryClassificationController` on the confidences, risk precision, its default grid of "
        f"100 "
        f"thresholds and Bonferroni-Holm, on the first {MAPIE_DRAWS} draws; and the same with its "
        f"`fixed_sequence` from the highest threshold "
        f"on.",
        "",
        "| set, error promised, n | best coverage | naive: broken / coverage | MAPIE | MAPIE, fixed "
        "sequence | "
        "**salgp.decide** |",
        "|---|---|---|---|---|---|",
    ]
    for name, prediction, labels, n, errors in _sets(data, cache):
        for error in errors:
            lines.append(_row(name, unshared(prediction), labels, n, error, draws))
            print(lines[-1], flush=True)
    return "\n".join(lines)


def _sets(data: Path, cache: Path) -> list[tuple[str, Prediction, Tensor, int, tuple[float, ...]]]:
    suite = read_suite(cache, "cifar10-resnet20-0")
    cifar = suite.temperature().predict(suite.test[0])
    return [
        ("CIFAR-10 ResNet-20", cifar, suite.test[1], 4500, (0.02, 0.03, 0.05)),
        ("CIFAR-10 ResNet-50", *published(data), 5000, (0.01, 0.02, 0.03)),
        ("digits", *digits(), 750, (0.03, 0.05)),
    ]


def _row(name: str, prediction: Prediction, labels: Tensor, n: int, error: float, draws: int) -> str:
    s = prediction.confidence.numpy()
    wrong = (prediction.label != labels).numpy()
    best = _best(s, wrong, error)
    found = {key: [] for key in _METHODS}
    rng = np.random.default_rng(0)
    for draw in range(draws):
        rows = torch.from_numpy(rng.integers(0, len(s), n))
        for key, choose in _METHODS.items():
            if key.startswith("MAPIE") and draw >= MAPIE_DRAWS:
                continue
            acted = s > choose(prediction[rows], labels[rows], error)
            found[key].append((acted.mean(), bool(acted.any() and wrong[acted].mean() > error)))
    cells = [_cell(np.array(found[key]), best) for key in _METHODS]
    cells[-1] = f"**{cells[-1]}**"
    return f"| {name}, {error:.0%}, {n:,} | {best:.1%} | {' | '.join(cells)} |"


def _cell(values: np.ndarray, best: float) -> str:
    coverage, broken = values.mean(0)
    return f"{broken:.1%} / {coverage / best:.1%}"


def _best(s: np.ndarray, wrong: np.ndarray, error: float) -> float:
    order = np.argsort(-s)
    rate = np.cumsum(wrong[order]) / np.arange(1, len(s) + 1)
    return (np.flatnonzero(rate <= error).max() + 1) / len(s)


def _naive(prediction: Prediction, labels: Tensor, error: float) -> float:
    """The smallest threshold at which the observed error is what was asked for."""
    s, wrong = prediction.confidence.numpy(), (prediction.label != labels).numpy()
    order = np.argsort(-s)
    kept = np.flatnonzero(np.cumsum(wrong[order]) / np.arange(1, len(s) + 1) <= error)
    return NEVER if not len(kept) else ALWAYS if kept[-1] + 1 == len(s) else float(s[order][kept[-1] + 1])


def _ours(prediction: Prediction, labels: Tensor, error: float) -> float:
    return choose_threshold(prediction, labels, error, ASSURANCE).threshold[0]


def _mapie(prediction: Prediction, labels: Tensor, error: float, sequence: bool = False) -> float:
    s, right = prediction.confidence.numpy(), (prediction.label == labels).numpy().astype(int)
    grid = np.linspace(0, 0.99, 100)
    more = {"fwer_method": "fixed_sequence", "list_predict_params": grid[::-1]} if sequence else {}
    controller = BinaryClassificationController(
        lambda x: np.stack([1 - x, x], 1), "precision", 1 - error, ASSURANCE, **more
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller.calibrate(s, right)
    best = controller.best_predict_param
    return NEVER if best is None else float(best) - 1e-12  # MAPIE acts at the threshold too


def _mapie_sequence(prediction: Prediction, labels: Tensor, error: float) -> float:
    return _mapie(prediction, labels, error, sequence=True)


def _noise(draws: int) -> float:
    doubt = 1 - ASSURANCE
    return doubt + 2.33 * math.sqrt(doubt * ASSURANCE / draws)


_METHODS: dict[str, Choose] = {
    "naive": _naive,
    "MAPIE": _mapie,
    "MAPIE, fixed sequence": _mapie_sequence,
    "ours": _ours,
}
