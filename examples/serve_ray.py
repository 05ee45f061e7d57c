"""A Ray Serve deployment: calibrated network, rule ("act or ask") and monitor behind one handle.

Replicas share nothing but the monitor's folder: its lock lets them take turns, and each reads what the others
wrote. Here the deployment runs in this process (Ray's local testing mode); on a cluster it is ``serve run
serve_ray:app`` with a folder that all machines see.
"""

from pathlib import Path

import numpy as np
import torch
from ray import serve
from sklearn.datasets import load_digits
from torch import nn

import salgp

FOLDER = Path("ray-service").resolve()


def network() -> nn.Module:
    """The architecture; weights are loaded where it runs."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def prepare() -> tuple[np.ndarray, np.ndarray]:
    """Once, offline: train, calibrate, choose the rule, start the monitor. Gives samples to try."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:300]), y[:300]).backward()
        optimizer.step()
    classifier = salgp.calibrate(model, [(x[300:600], y[300:600])], method="temperature")
    if not FOLDER.exists():
        classifier.save(FOLDER / "calibrated")
        torch.save(model.state_dict(), FOLDER / "network.pt")
        held_out = classifier(x[600:1300])
        salgp.decide.choose_threshold(held_out, y[600:1300], error=0.05).save(FOLDER / "rule.json")
        salgp.Monitor.start(held_out, FOLDER / "watch")
    return x[1300:].numpy(), y[1300:].numpy()


@serve.deployment(num_replicas=1)
class Classify:
    """One replica: everything it needs is read from the folder."""

    def __init__(self, folder: str) -> None:
        here = Path(folder)
        model = network()
        model.load_state_dict(torch.load(here / "network.pt", weights_only=True))
        self.classifier = salgp.load(here / "calibrated", model.eval())
        self.rule = salgp.decide.Rule.load(here / "rule.json")
        self.monitor = salgp.Monitor.open(here / "watch")

    def __call__(self, samples: np.ndarray) -> list[dict[str, object]]:
        """A batch in, an answer for every sample out; every batch is watched."""
        prediction = self.classifier(torch.from_numpy(samples))
        self.monitor.feed(prediction)
        rows = zip(prediction.label, prediction.confidence, self.rule(prediction), strict=True)
        return [{"label": int(k), "confidence": float(c), "act": bool(a)} for k, c, a in rows]

    def health(self) -> dict[str, object]:
        """For the dashboard: what the monitor says."""
        status = self.monitor.status()
        return {"alarm": list(status.alarm), "says": str(status)}


samples, truth = prepare()
app = Classify.bind(str(FOLDER))


if __name__ == "__main__":
    handle = serve.run(app, _local_testing_mode=True)
    answers = handle.remote(samples[:200]).result()
    acted = np.array([answer["act"] for answer in answers])
    right = np.array([answer["label"] for answer in answers]) == truth[:200]
    print(f"acts on {acted.mean():.0%}, {right[acted].mean():.1%} of those right")
    print(handle.health.remote().result()["says"])
    noise = np.random.default_rng(1).normal(size=samples[200:400].shape).astype(np.float32)
    handle.remote(samples[200:400] + 0.6 * noise).result()
    print(handle.health.remote().result()["says"])
    assert handle.health.remote().result()["alarm"] == ["shift"]
