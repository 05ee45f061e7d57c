"""Two minutes that show what calibration buys: digits, a network trained on few of them, and a day in the
field.

The network learns from 300 of scikit-learn's handwritten digits and is calibrated on 400 others. It is then
tried on clean digits, and on digits that arrive rotated and noisy, which neither training nor calibration has
seen.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from salgp.calibrators import get
from salgp.features import Features
from salgp.metrics import Comparison, compare
from salgp.module import CalibratedClassifier, calibrate
from salgp.prediction import Prediction
from salgp.report import build
from salgp.report.summary import layer_shares

__all__ = ["STEPS", "DemoResult", "Digits", "damage", "load_digits", "run_demo", "train_network"]

EPOCHS = 30
STEPS = EPOCHS + 4
"""Times `run_demo` reports progress."""


@dataclass(frozen=True, eq=False)
class Digits:
    """Images ``(n, 1, 8, 8)`` in [0, 1] and labels ``(n,)``."""

    images: Tensor
    labels: Tensor

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches in order."""
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=64)


@dataclass(frozen=True, eq=False)
class DemoResult:
    """What the demo found.

    Args:
        report: the page it wrote.
        tests: name of each test set and what it is.
        scores: test set to the scores of all methods.
        layers: mean size of each layer's correction on the damaged digits.
        unit: of ``layers``.
    """

    report: Path
    tests: Mapping[str, str]
    scores: Mapping[str, Comparison]
    layers: Mapping[str, float]
    unit: str


def run_demo(
    out: str | os.PathLike[str],
    seed: int = 0,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> DemoResult:
    """Train, calibrate, try on clean and on damaged digits, and write a report.

    Args:
        out: folder of the report.
        seed: of data, network and calibration.
        force: replace an existing report.
        progress: called with a line whenever something is done, `STEPS` times in all.

    Returns:
        Scores, layers and the report's path.
    """
    say = progress or (lambda line: None)
    train, calibration, test = load_digits(seed)
    network = train_network(train, seed, lambda epoch: say(f"training, epoch {epoch} of {EPOCHS}"))
    classifier = calibrate(network, calibration.loader(), reference=train.loader(), seed=seed)
    say("calibrated")
    damaged = damage(test, seed)
    rivals = {
        "temperature": get("temperature").fit(classifier.features(calibration.images), calibration.labels)
    }
    scores, predictions = {}, {}
    for name, data in {"clean": test, "damaged": damaged}.items():
        features = classifier.features(data.images)
        network_alone = Prediction.from_probs(features, features.probs)
        methods = {
            "uncalibrated": network_alone,
            **{k: c.predict(features) for k, c in rivals.items()},
            "sal-gp": classifier(data.images),
        }
        scores[name], predictions[name] = compare(methods, data.labels), methods
        say(f"scored the {name} digits")
    path = _report(Path(out), classifier, damaged, predictions["damaged"], force, seed)
    say("report written")
    names = list(classifier.calibrator.layer_widths_)
    shares = sorted(
        (s for s in layer_shares(predictions["damaged"]["sal-gp"]) if s.name in names),
        key=lambda share: -share.size,
    )
    terms = predictions["damaged"]["sal-gp"].layers
    tests = {
        "clean": "digits like those it was trained on",
        "damaged": "rotated and noisy digits, never seen before",
    }
    return DemoResult(
        path,
        tests,
        scores,
        {share.name: share.size for share in shares},
        "" if terms is None else terms.scale,
    )


def load_digits(seed: int = 0) -> tuple[Digits, Digits, Digits]:
    """300 digits to train, 400 to calibrate, 1,097 to test."""
    from sklearn.datasets import load_digits as load

    found = load()
    x, y = torch.as_tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.as_tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, calibration, test = (Digits(x[rows], y[rows]) for rows in order.split([300, 400, len(x) - 700]))
    return train, calibration, test


def train_network(train: Digits, seed: int = 0, progress: Callable[[int], None] | None = None) -> nn.Module:
    """A small convolutional network, trained until it knows its 300 digits by heart."""
    with _seeded(seed):
        parts = {
            "stroke": nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            "shape": nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            "whole": nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU()),
            "digit": nn.Linear(64, 10),
        }
        network = nn.Sequential(OrderedDict(parts))
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(train.labels), generator=generator).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(train.images[rows]), train.labels[rows]).backward()
            optimiser.step()
        if progress is not None:
            progress(epoch)
    return network.eval()


def damage(digits: Digits, seed: int = 0) -> Digits:
    """Rotate each digit by up to 40 degrees and add noise."""
    g = torch.Generator().manual_seed(seed + 1)
    n = len(digits.labels)
    angle = (2 * torch.rand(n, generator=g) - 1) * 40 * torch.pi / 180
    zero = torch.zeros(n)
    rotation = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)],
        1,
    )
    grid = nn.functional.affine_grid(rotation, list(digits.images.shape), align_corners=False)
    turned = nn.functional.grid_sample(digits.images, grid, align_corners=False)
    strength = 0.35 * torch.rand(n, 1, 1, 1, generator=g)
    return Digits((turned + strength * torch.randn(turned.shape, generator=g)).clamp(0, 1), digits.labels)


def _report(
    out: Path,
    classifier: CalibratedClassifier,
    digits: Digits,
    predictions: Mapping[str, Prediction],
    force: bool,
    seed: int,
) -> Path:
    features: Features = classifier.features(digits.images)
    return build(
        out / "report.html",
        features,
        digits.labels,
        predictions["sal-gp"],
        force=force,
        title="Handwritten digits, rotated and noisy: can the network be trusted?",
        class_names=[str(k) for k in range(10)],
        images=digits.images.numpy(),
        others={"temperature scaling": predictions["temperature"]},
        settings={
            "network": "small convolutional network, 300 training digits",
            "calibration": "400 clean digits",
            "seed": seed,
        },
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers from ``seed`` inside; outside nothing changes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
