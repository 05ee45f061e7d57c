"""A web service that answers, says when to ask a human, and watches itself: ONNX graph, rule and monitor.

The graph holds network, calibrator and rule, so that the service needs no PyTorch model. Here it is called in
the same process by a test client; serve it with ``uvicorn serve_fastapi:app``, and let Prometheus scrape
``/metrics``.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime
import torch
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field
from sklearn.datasets import load_digits
from torch import nn

import salgp
from salgp.export import export_classifier

FOLDER = Path("service")


def prepare() -> tuple[np.ndarray, np.ndarray]:
    """Once, offline: train, calibrate, export, choose the rule, start the monitor. Gives samples to try."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order] / 16, dtype=torch.float32)
    y = torch.tensor(labels[order])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:300]), y[:300]).backward()
        optimizer.step()
    classifier = salgp.calibrate(model, [(x[300:600], y[300:600])], method="temperature")
    FOLDER.mkdir(exist_ok=True)
    held_out = classifier(x[600:1300])
    rule = salgp.decide.choose_threshold(held_out, y[600:1300], error=0.05)
    rule.save(FOLDER / "rule.json")
    export_classifier(classifier, x[:4], FOLDER / "whole.onnx", rule)
    if not (FOLDER / "watch").exists():
        salgp.Monitor.start(held_out, FOLDER / "watch")
    return x[1300:].numpy(), y[1300:].numpy()


class Images(BaseModel):
    """What a client sends: a batch of flattened images; others are refused."""

    pixels: list[Annotated[list[float], Field(min_length=64, max_length=64)]] = Field(min_length=1)


class Service:
    """Graph, rule and monitor, loaded once."""

    def __init__(self, folder: Path) -> None:
        self.graph = onnxruntime.InferenceSession(str(folder / "whole.onnx"))
        self.names = [output.name for output in self.graph.get_outputs()]
        self.rule = salgp.decide.Rule.load(folder / "rule.json")
        self.monitor = salgp.Monitor.open(folder / "watch")

    def predict(self, pixels: list[list[float]]) -> tuple[salgp.Prediction, list[bool]]:
        """Run the graph: predictions, and where to act."""
        found = self.graph.run(None, {"input": np.asarray(pixels, dtype=np.float32)})
        arrays = {name: torch.from_numpy(value) for name, value in zip(self.names, found, strict=True)}
        prediction = salgp.Prediction(arrays["label"], arrays["probs"], arrays["confidence"])
        return prediction, arrays["act"].tolist()


samples, truth = prepare()
service = Service(FOLDER)
app = FastAPI()


@app.post("/predict")
def predict(images: Images) -> dict[str, list]:
    """Answers, confidences, and whether to act; every batch is watched."""
    prediction, act = service.predict(images.pixels)
    service.monitor.feed(prediction)
    return {
        "label": prediction.label.tolist(),
        "confidence": prediction.confidence.tolist(),
        "act": act,
    }


@app.get("/metrics", response_class=PlainTextResponse)
def metrics() -> str:
    """For Prometheus: accuracy, evidence, alarms and shifted features as numbers."""
    return service.monitor.prometheus()


@app.get("/health")
def health() -> dict[str, object]:
    """For the dashboard: what the monitor says."""
    status = service.monitor.status()
    return {"alarm": list(status.alarm), "matters": status.matters, "says": str(status)}


if __name__ == "__main__":
    client = TestClient(app)
    answer = client.post("/predict", json={"pixels": samples[:200].tolist()}).json()
    acted = np.array(answer["act"])
    right = np.array(answer["label"])[acted] == truth[:200][acted]
    print(service.rule.promise)
    print(f"acts on {acted.mean():.0%} of a batch, {right.mean():.1%} of those right")
    print(client.get("/health").json()["says"])
    noise = np.random.default_rng(1).normal(size=samples[200:400].shape)
    client.post("/predict", json={"pixels": (samples[200:400] + 0.6 * noise).tolist()})
    print(client.get("/health").json()["says"])
    assert client.get("/health").json()["alarm"] == ["shift"]
    assert 'salgp_alarm{kind="shift"} 1' in client.get("/metrics").text.splitlines()
