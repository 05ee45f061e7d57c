"""Exported graphs agree with eager prediction, for any batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.calibrators import get
from salgp.export import OUTPUTS, export_classifier, export_head

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

HEADS = {
    "temperature": lambda: get("temperature"),
    "sum": lambda: salgp.SALGP("sum"),
    "ml": lambda: salgp.SALGP("ml", n_inducing=40, inference="inducing"),
    "hl-bernoulli": lambda: salgp.SALGP("hl", likelihood="bernoulli", n_inducing=30, inference="inducing"),
    "rio": lambda: salgp.ResidualGP("rio"),
}


def made(n: int, seed: int) -> tuple[salgp.Features, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n, 4, generator=g)
    layers = {"a": torch.randn(n, 6, generator=g), "b": torch.randn(n, 3, generator=g)}
    noisy = logits + 2.0 * torch.randn(n, 4, generator=g)
    return salgp.Features(logits, layers), noisy.argmax(1)


def run_onnx(path: Path, inputs: list[Tensor]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(str(path))
    names = [i.name for i in session.get_inputs()]
    values = session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))
    return dict(zip((o.name for o in session.get_outputs()), values, strict=True))


def check(found: dict[str, np.ndarray], prediction: salgp.Prediction) -> None:
    expected = prediction.numpy()
    assert list(found) == [name for name in OUTPUTS if name in expected]
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_head_agrees_for_other_batch_sizes(head: str, suffix: str, tmp_path: Path) -> None:
    calibrator = HEADS[head]().fit(*made(60, 0))
    path = export_head(calibrator, tmp_path / f"head{suffix}")
    for n in (1, 17):
        features, _ = made(n, 1)
        inputs = [features.logits, *(features.layers[k] for k in calibrator.layer_widths_)]
        prediction = calibrator.predict(features)
        if suffix == ".onnx":
            found = run_onnx(path, inputs)
        else:
            values = torch.export.load(path).module()(*inputs)
            found = {k: v.numpy() for k, v in zip((name for name in OUTPUTS if name in prediction.numpy()), values, strict=True)}
        check(found, prediction)


def test_whole_network_in_one_graph(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    x = torch.randn(80, 1, 8, 8, generator=g)
    y = torch.randint(0, 3, (80,), generator=g)
    classifier = salgp.calibrate(model, [(x, y)], method=salgp.SALGP("sum"))
    path = export_classifier(classifier, x[:4], tmp_path / "whole.onnx")
    for n in (1, 9):
        check(run_onnx(path, [x[:n]]), classifier(x[:n]))


def test_unknown_ending_is_refused(tmp_path: Path) -> None:
    calibrator = get("temperature").fit(*made(60, 0))
    with pytest.raises(ValueError, match=r"\.onnx or \.pt2"):
        export_head(calibrator, tmp_path / "head.bin")
    assert list(tmp_path.iterdir()) == []
