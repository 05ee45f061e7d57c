"""A nightly job: extract the day's data into a feature store, score it, watch it, exit with 1 on an alarm.

Everything can be repeated after a kill: the store, the scores and the monitor never count a day twice.
"""

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import salgp
from salgp.store import extract_to_store

FOLDER = Path("nightly")


def train() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small network and shuffled data."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:300]), y[:300]).backward()
        optimizer.step()
    return model, x, y


def night(classifier: salgp.CalibratedClassifier, images: torch.Tensor, day: str) -> int:
    """What cron runs: one day's images in, exit code out."""
    store = extract_to_store(classifier.model, [(images,)], FOLDER / day, reader=classifier.taps)
    features, _ = store.to_features()
    monitor = salgp.Monitor.open(FOLDER / "watch")
    status = monitor.feed(classifier.calibrator.predict(features), key=day)
    monitor.page(FOLDER / "watch.html")
    print(f"{day}: {status}")
    return 1 if status.alarm and status.may_matter else 0


model, x, y = train()
classifier = salgp.calibrate(model, [(x[300:600], y[300:600])], reference=[(x[:300], y[:300])])
if not (FOLDER / "watch").exists():
    held_out, _ = classifier.extract([(x[600:1000], y[600:1000])])
    salgp.Monitor.start(classifier.calibrator.predict(held_out), FOLDER / "watch", window=2)

codes = [night(classifier, x[1000 + 150 * k : 1150 + 150 * k], f"2026-03-0{k + 1}") for k in range(2)]
noise = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
codes += [
    night(
        classifier, x[1300 + 150 * k : 1450 + 150 * k] + noise[150 * k : 150 * k + 150], f"2026-03-0{k + 3}"
    )
    for k in range(2)
]
assert codes[:2] == [0, 0]
assert codes[-1] == 1
