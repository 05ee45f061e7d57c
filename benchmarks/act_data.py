"""Predictions that the benchmarks of `act.py` share: three real sets, and the cached features."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from salgp import Features, LayerEvidence, Prediction, load_features
from salgp.calibrators import evidence as evidence_room
from salgp.calibrators import get

__all__ = [
    "MOST",
    "Predicted",
    "Suite",
    "clean",
    "digits",
    "predictions",
    "plain",
    "published",
    "read_suite",
    "suite_sets",
    "unshared",
]


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
        """Layer evidence fitted on originals and augmented samples."""
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
    """The originals, without augmented samples."""
    rows = features.families == 0
    return plain(features[rows]), labels[rows]


def plain(features: Features) -> Features:
    """Without the columns that say which rows are augmented."""
    return Features(features.logits, features.layers)


def unshared(prediction: Prediction, seed: int = 0) -> Prediction:
    """The same with ties in the confidence broken at random by less than 1e-9."""
    g = torch.Generator().manual_seed(seed)
    s = prediction.confidence.double()
    return Prediction(prediction.label, prediction.probs, s - 1e-9 * torch.rand(len(s), generator=g))


MOST = 1000
"""Samples of a shifted set that are looked at."""


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions of temperature scaling and of layer evidence for one set of samples.

    ``alone``: layer evidence one sample at a time; ``together``: with the whole set as its context;
    ``classes``: one sample at a time, with all classes on equal terms.
    """

    tempered: Prediction
    alone: Prediction
    together: Prediction
    classes: Prediction
    labels: Tensor


def predictions(cache: Path, name: str) -> dict[str, Predicted]:
    """Predictions of one network's sets: ``home`` (calibration), ``test``, and the shifted ones by name.

    Kept in ``CACHE/act`` under the source of the calibrator, so that a run goes on where another stopped and
    never uses predictions of an older model.
    """
    path = cache / "act" / f"{name}-{_model()}.npz"
    if not path.exists():
        suite = read_suite(cache, name)
        temperature, evidence = suite.temperature(), suite.evidence()
        sets = {"home": clean(*suite.calibration), "test": suite.test, **suite.shifted}
        arrays: dict[str, np.ndarray] = {}
        for key, (features, y) in sets.items():
            n = len(y) if key in ("home", "test") else min(len(y), MOST)
            arrays |= {
                f"{key}|{k}": v for k, v in _columns(temperature, evidence, plain(features[:n])).items()
            }
            arrays[f"{key}|y"] = y[:n].numpy()
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(part, **arrays)
        part.rename(path)
    with np.load(path, allow_pickle=False) as file:
        keys = dict.fromkeys(entry.rsplit("|", 1)[0] for entry in file.files)
        return {key: _read(key, file) for key in keys}


def _columns(temperature, evidence, batch: Features) -> dict[str, np.ndarray]:
    tempered, alone = temperature.predict(batch), evidence.predict(batch)
    together = evidence.predict(batch, context="all")
    columns = {
        "probs": tempered.probs,
        "label": tempered.label,
        "alone": alone.confidence,
        "novelty": alone.novelty,
        "together": together.confidence,
        "std": together.std,
        "classes": evidence.predict_classes(batch).probs,
    }
    return {name: value.numpy() for name, value in columns.items()}


def _read(key: str, file: np.lib.npyio.NpzFile) -> Predicted:
    column = {
        name: torch.from_numpy(file[f"{key}|{name}"])
        for name in ("probs", "label", "alone", "novelty", "together", "std", "classes", "y")
    }
    probs, label = column["probs"], column["label"]
    tempered = Prediction(label, probs, probs.gather(1, label[:, None])[:, 0])
    alone = Prediction(label, probs, column["alone"], novelty=column["novelty"])
    together = Prediction(label, probs, column["together"], std=column["std"])
    classes = replace(alone, probs=column["classes"])
    return Predicted(tempered, alone, together, classes, column["y"])


def _model() -> str:
    """Eight letters that change with the source of layer evidence."""
    found = hashlib.sha256()
    for path in sorted(Path(evidence_room.__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:8]
