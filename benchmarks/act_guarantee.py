"""Do rules keep their promise, and how much do they act? Against a naive threshold and MAPIE."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from act_data import digits, published, read_suite, unshared
from mapie.risk_control import BinaryClassificationController
from scipy.special import bdtr
from torch import Tensor

from salgp import Prediction
from salgp.decide import ALWAYS, NEVER, choose_threshold

ASSURANCE = 0.95
MAPIE_DRAWS = 250
"""MAPIE takes several times as long as everything else."""
MORE = ((1, 0.01, 12_000), (2, 0.03, 1000))
"""Set, error, samples: where half of the set is too little to show more."""
Choose = Callable[[Prediction, Tensor, float], float]


def section(data: Path, cache: Path, quick: bool) -> str:
    draws = 50 if quick else 1000
    kept = Kept(cache / "act" / "guarantee.json", draws)
    lines = [
        f"{draws:,} times, `n` labelled samples are drawn from a real set (with replacement, so that the "
        f"whole set is the population and the true error of a rule is known exactly), a threshold is "
        f"chosen with {ASSURANCE:.0%} assurance and tried on the whole set. *Broken*: share of thresholds "
        f"whose true error exceeds the promise; it may be {1 - ASSURANCE:.0%}, and up to "
        f"{_noise(draws):.1%} by chance (99 % binomial). *Coverage*: mean share acted on, as a share of "
        f"that of the best threshold in hindsight: the lowest one whose error on the whole set is what was"
        f" promised, which knows all labels. *Provable*: the lowest threshold whose own exact binomial "
        f"test passes on the draw, searched with the labels in sight; it is no valid rule, but the limit "
        f"of all rules that rest on such a test. MAPIE: `BinaryClassificationController` on the "
        f"confidences, risk precision, its default grid of 100 thresholds and Bonferroni-Holm, on the "
        f"first {MAPIE_DRAWS} draws; and the same with its `fixed_sequence` from the highest threshold on.",
        "",
        "| set, error promised, n | best coverage | naive: broken / coverage | MAPIE | MAPIE, fixed sequence "
        "| provable | **salgp.decide** |",
        "|---|---|---|---|---|---|---|",
    ]
    sets = _sets(data, cache)
    for name, prediction, labels, n, errors in sets:
        for error in errors:
            lines.append(_row(name, unshared(prediction), labels, n, error, kept))
            print(lines[-1], flush=True)
    more = []
    for index, error, n in MORE:
        name, prediction, labels, *_ = sets[index]
        _, cells = _cells(name, unshared(prediction), labels, n, error, kept, ("provable", "ours"))
        more.append(f"{name}, {error:.0%}, {n:,} samples: {cells[1]} (provable {cells[0]})")
    lines += ["", f"With more labelled samples (broken / coverage): {'; '.join(more)}."]
    return "\n".join(lines)


class Kept:
    """What was found, on disk, so that a run goes on where another stopped."""

    def __init__(self, path: Path, draws: int) -> None:
        self.path = path
        self.draws = draws
        self.values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def get(self, key: str, make: Callable[[], list[float]]) -> list[float]:
        """``[broken, coverage]`` under a name, worked out if it is not there."""
        full = f"{key}, {self.draws}"
        if full not in self.values:
            self.values[full] = make()
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(self.values, indent=0), encoding="utf-8")
        return self.values[full]


def _sets(data: Path, cache: Path) -> list[tuple[str, Prediction, Tensor, int, tuple[float, ...]]]:
    suite = read_suite(cache, "cifar10-resnet20-0")
    cifar = suite.temperature().predict(suite.test[0])
    return [
        ("CIFAR-10 ResNet-20", cifar, suite.test[1], 4500, (0.02, 0.03, 0.05)),
        ("CIFAR-10 ResNet-50", *published(data), 5000, (0.01, 0.02, 0.03)),
        ("digits", *digits(), 750, (0.03, 0.05)),
    ]


def _row(name: str, prediction: Prediction, labels: Tensor, n: int, error: float, kept: Kept) -> str:
    best, cells = _cells(name, prediction, labels, n, error, kept, tuple(_METHODS))
    cells[-1] = f"**{cells[-1]}**"
    return f"| {name}, {error:.0%}, {n:,} | {best:.1%} | {' | '.join(cells)} |"


def _cells(
    name: str,
    prediction: Prediction,
    labels: Tensor,
    n: int,
    error: float,
    kept: Kept,
    methods: tuple[str, ...],
) -> tuple[float, list[str]]:
    best = _best(prediction.confidence.numpy(), (prediction.label != labels).numpy(), error)
    cells = []
    for method in methods:
        broken, coverage = kept.get(
            f"{name}, {error}, {n}, {method}",
            lambda method=method: _tried(prediction, labels, n, error, method, kept.draws),
        )
        cells.append(f"{broken:.1%} / {coverage / best:.1%}")
    return best, cells


def _tried(
    prediction: Prediction, labels: Tensor, n: int, error: float, method: str, draws: int
) -> list[float]:
    s = prediction.confidence.numpy()
    wrong = (prediction.label != labels).numpy()
    rng = np.random.default_rng(0)
    found = []
    for _ in range(min(draws, MAPIE_DRAWS) if method.startswith("MAPIE") else draws):
        rows = torch.from_numpy(rng.integers(0, len(s), n))
        acted = s > _METHODS[method](prediction[rows], labels[rows], error)
        found.append((bool(acted.any() and wrong[acted].mean() > error), acted.mean()))
    return np.mean(found, axis=0).tolist()


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


def _provable(prediction: Prediction, labels: Tensor, error: float) -> float:
    s, wrong = prediction.confidence.numpy(), (prediction.label != labels).numpy()
    order = np.argsort(-s)
    m = np.arange(1, len(s) + 1)
    passed = np.flatnonzero(bdtr(np.cumsum(wrong[order]), m, error) <= 1 - ASSURANCE)
    last = passed[-1] + 1 if len(passed) else 0
    return NEVER if not last else ALWAYS if last == len(s) else float(s[order][last])


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
    risk = 1 - ASSURANCE
    return risk + 2.33 * math.sqrt(risk * ASSURANCE / draws)


_METHODS: dict[str, Choose] = {
    "naive": _naive,
    "MAPIE": _mapie,
    "MAPIE, fixed sequence": _mapie_sequence,
    "provable": _provable,
    "ours": _ours,
}
