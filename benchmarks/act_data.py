"""Predictions that the benchmarks of `act.py` share: three real sets, and the cached features."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from salgp import Features, LayerEvidence, Prediction, load_features
from salgp.calibrators import get

__all__ = ["Suite", "clean", "digits", "plain", "published", "read_suite", "suite_sets", "unshared"]


def published(data: Path) -> tuple[Prediction, Tensor]:
    """ResNet-50 on CIFAR-10: published logits of 10,000 test images, temperature from the 5,000 others."""
    with np.load(data / "published_calibration.npz", allow_pickle=False) as file:
        parts = {
            split: (
                Features(torch.from_numpy(file[f"resnet50_c10_{split}_logits"]).double()),
                torch.from_numpy(file[f"resnet50_c10_{split}_labels"].ravel()).long(),
            )
            for split in ("val", "test")
        }
    test, labels = parts["test"]
    return get("temperature").fit(*parts["val"]).predict(test), labels


def digits() -> tuple[Prediction, Tensor]:
    """Logistic regression on 300 of scikit-learn's digits; the other 1,497 are predicted."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    fit, rest = order[:300], order[300:]
    model = LogisticRegression(C=1.0, max_iter=2000).fit(x[fit] / 16, y[fit])
    features = Features(torch.from_numpy(model.decision_function(x[rest] / 16)))
    return Prediction.from_probs(features, features.probs), torch.from_numpy(y[rest]).long()


@dataclass(frozen=True, eq=False)
class Suite:
    """One data set of the suite: features with labels, and shifted sets by name."""

    name: str
    reference: tuple[Features, Tensor]
    calibration: tuple[Features, Tensor]
    test: tuple[Features, Tensor]
    shifted: dict[str, tuple[Features, Tensor]]

    def evidence(self) -> LayerEvidence:
        """Layer evidence fitted on originals and copies."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LayerEvidence().fit(*self.calibration, self.reference)

    def temperature(self) -> object:
        """Temperature scaling fitted on originals."""
        return get("temperature").fit(*clean(*self.calibration))


def suite_sets(cache: Path) -> list[str]:
    """Names of the sets that are there, with their seeds."""
    return sorted(p.parent.name for p in cache.glob("*/test.safetensors"))


def read_suite(cache: Path, name: str) -> Suite:
    """Read one set."""
    folder = cache / name
    parts = [load_features(folder / f"{part}.safetensors") for part in ("reference", "calibration", "test")]
    shifted = {
        path.stem.removeprefix("shift-"): load_features(path)
        for path in sorted(folder.glob("shift-*.safetensors"))
    }
    return Suite(name, *parts, shifted)


def clean(features: Features, labels: Tensor) -> tuple[Features, Tensor]:
    """The originals, without their copies."""
    rows = features.families == 0
    return plain(features[rows]), labels[rows]


def plain(features: Features) -> Features:
    """Without the columns that say which rows are copies."""
    return Features(features.logits, features.layers)


def unshared(prediction: Prediction, seed: int = 0) -> Prediction:
    """The same with ties in the confidence broken at random by less than 1e-9."""
    g = torch.Generator().manual_seed(seed)
    s = prediction.confidence.double()
    return Prediction(prediction.label, prediction.probs, s - 1e-9 * torch.rand(len(s), generator=g))
