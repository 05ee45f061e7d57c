"""Exported graphs agree with eager prediction, for any batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.calibrators import get
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.export import LOWEST_TORCH, OUTPUTS, export_classifier, export_head
from salgp.features import Features

pytest.importorskip("torch", LOWEST_TORCH)
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# random layers tell a GP nothing, so the variances of its terms rightly end at their lower bounds
pytestmark = pytest.mark.filterwarnings("ignore:hyperparameters ended on their bounds")

SINGLE = 3e-4
"""Distances of layer evidence are in single precision, which runtimes round differently."""
HEADS = {
    "temperature": lambda: get("temperature"),
    "sum": lambda: salgp.SALGP("sum"),
    "ml": lambda: salgp.SALGP("ml", n_inducing=40, inference="inducing"),
    "hl": lambda: salgp.SALGP("hl", n_inducing=30, inference="inducing"),
    "rio": lambda: salgp.ResidualGP("rio"),
    "layer-evidence": lambda: get("layer-evidence", size=4),
    "histogram": lambda: get("histogram"),
    "beta": lambda: get("beta"),
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


def check(found: dict[str, np.ndarray], prediction: salgp.Prediction, atol: float = 1e-5) -> None:
    expected = prediction.numpy()
    assert list(found) == [name for name in OUTPUTS if name in expected]
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=atol, err_msg=name)


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
            found = {
                k: v.numpy()
                for k, v in zip((name for name in OUTPUTS if name in prediction.numpy()), values, strict=True)
            }
        check(found, prediction, SINGLE if head == "layer-evidence" else 1e-5)


def test_an_older_torch_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("salgp.export.LOWEST_TORCH", "99.0")
    with pytest.raises(ImportError, match=r"export needs torch 99\.0 or newer"):
        export_head(get("temperature").fit(*made(60, 0)), tmp_path / "head.onnx")
    assert not list(tmp_path.iterdir())


def test_whole_network_in_one_graph(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    x = torch.randn(80, 1, 8, 8, generator=g)
    y = torch.randint(0, 3, (80,), generator=g)
    classifier = salgp.calibrate(model, [(x, y)], method=salgp.SALGP("sum"))
    path = export_classifier(classifier, x[:4], tmp_path / "whole.onnx")
    assert [i.shape for i in ort.InferenceSession(str(path)).get_inputs()] == [["batch", 1, 8, 8]]
    for n in (1, 9):
        check(run_onnx(path, [x[:n]]), classifier(x[:n]))


def test_layer_evidence_with_small_and_unknown_classes(tmp_path: Path) -> None:
    """A class of fewer samples than neighbours, and a predicted class the reference lacks."""
    features, labels = made(60, 0)
    labels = torch.where(torch.arange(60) < 2, 3, labels.clamp(max=2))
    labels[labels == 1] = 0
    calibrator = get("layer-evidence", size=5).fit(features, labels)
    path = export_head(calibrator, tmp_path / "head.onnx")
    for n in (1, 23):
        features, _ = made(n, 2)
        found = run_onnx(path, [features.logits, *features.layers.values()])
        check(found, calibrator.predict(features), SINGLE)


ENDS: dict[str, tuple[int, nn.Module, str]] = {
    "softmax": (3, nn.Softmax(1), "probabilities"),
    "log-softmax": (3, nn.LogSoftmax(1), "log-probabilities"),
    "sigmoid per class": (3, nn.Sigmoid(), "sigmoids"),
    "sigmoid": (1, nn.Sigmoid(), "probabilities"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("method", ["temperature", "layer-evidence"])
def test_networks_that_end_in_probabilities(end: str, method: str, tmp_path: Path) -> None:
    width, last, output = ENDS[end]
    g = torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, width), last)
    x = 3 * torch.randn(80, 4, generator=g)
    z = salgp.extract(model, [x], reader=salgp.Reader(layers=()), output=output)[0].logits
    y = torch.multinomial(torch.softmax(z, 1), 1, generator=g)[:, 0]  # it is right about its chances
    classifier = salgp.calibrate(model, [(x, y)], method=method, output=output, perturb=False)
    path = export_classifier(classifier, x[:4], tmp_path / "whole.onnx")
    for n in (1, 9):
        check(run_onnx(path, [x[:n]]), classifier.predict([x[:n]]), SINGLE)


class Two(nn.Module):
    """Two inputs, also by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(image) + self.second(table)))


@pytest.mark.parametrize("named", [False, True])
def test_several_inputs_in_order_or_by_name(named: bool, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    batch = {"image": torch.randn(50, 4, generator=g), "table": torch.randn(50, 3, generator=g)}
    y = torch.randint(0, 3, (50,), generator=g)
    classifier = salgp.calibrate(
        Two(), [{**batch, "labels": y}] if named else [(*batch.values(), y)], method="uncalibrated"
    )
    example = {k: x[:3] for k, x in batch.items()}
    path = export_classifier(classifier, example if named else list(example.values()), tmp_path / "two.onnx")
    assert [i.name for i in ort.InferenceSession(str(path)).get_inputs()] == (
        list(batch) if named else ["input", "input1"]
    )
    check(run_onnx(path, [x[:7] for x in batch.values()]), classifier(*(x[:7] for x in batch.values())))


class Pixels(nn.Module):
    """Takes its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(pixel_values)


X4 = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y3 = torch.arange(50) % 3
BATCHES: dict[str, tuple[object, dict[str, object], str]] = {
    "label": ({"pixel_values": X4, "label": Y3}, {}, "pixel_values"),
    "labels": ({"pixel_values": X4, "labels": Y3}, {}, "pixel_values"),
    "truth": ({"pixel_values": X4, "truth": Y3}, {"reader": salgp.Reader(labels_at="truth")}, "pixel_values"),
    "numpy by name": ({"pixel_values": X4.numpy(), "y": Y3.numpy()}, {}, "pixel_values"),
    "numpy": ((X4.numpy(), Y3.numpy()), {}, "input"),
    "pair": (({"pixel_values": X4}, Y3), {}, "pixel_values"),
    "tuple": ((X4, Y3), {}, "input"),
    "with number": ((X4, Y3, torch.arange(50)), {"reader": salgp.Reader(labels_at=1)}, "input"),
    "forward": ((X4, Y3), {"reader": salgp.Reader(forward=lambda model, batch: model(batch[0]))}, "input"),
}


@pytest.mark.parametrize("form", BATCHES)
def test_a_batch_of_the_loader_is_an_example(form: str, tmp_path: Path) -> None:
    batch, options, name = BATCHES[form]
    classifier = salgp.calibrate(Pixels(), [batch], method="uncalibrated", **options)  # type: ignore[arg-type]
    path = export_classifier(classifier, batch, tmp_path / "whole.onnx")  # type: ignore[arg-type]
    assert [i.name for i in ort.InferenceSession(str(path)).get_inputs()] == [name]
    check(run_onnx(path, [X4[:7]]), classifier.predict([batch])[:7])


def test_one_input_as_numpy(tmp_path: Path) -> None:
    classifier = salgp.calibrate(Pixels(), [(X4, Y3)], method="uncalibrated")
    path = export_classifier(classifier, X4.double().numpy(), tmp_path / "whole.onnx")
    check(run_onnx(path, [X4[:7]]), classifier(X4[:7]))


class Label(nn.Linear):
    """An input with the name of an output."""

    def forward(self, confidence: Tensor) -> Tensor:
        return super().forward(confidence)


def test_examples_that_make_no_graph_are_refused(tmp_path: Path) -> None:
    classifier = salgp.calibrate(Label(4, 3), [(X4, Y3)], method="uncalibrated")
    with pytest.raises(
        ValueError, match=r"the input 'confidence' has the name of .* in order, \[x, \.\.\.\]"
    ):
        export_classifier(classifier, {"confidence": X4}, tmp_path / "whole.onnx")
    with pytest.raises(TypeError, match="one row for each sample, got a list as 'input'"):
        export_classifier(classifier, [X4.tolist()], tmp_path / "whole.onnx")
    with pytest.raises(TypeError, match="got a single number as 'input'"):
        export_classifier(classifier, torch.tensor(1.0), tmp_path / "whole.onnx")
    assert list(tmp_path.iterdir()) == []
    path = export_classifier(classifier, [X4], tmp_path / "whole.onnx")
    check(run_onnx(path, [X4[:7]]), classifier(X4[:7]))


def test_what_no_runtime_computes_is_refused(tmp_path: Path) -> None:
    half, brain = (
        salgp.calibrate(Pixels().to(kind), [(X4, Y3)], method="uncalibrated")
        for kind in (torch.float16, torch.bfloat16)
    )
    with pytest.raises(
        ValueError, match=r"ONNX .* bfloat16 .* copy\.deepcopy\(model\)\.float\(\), or .* \.pt2"
    ):
        export_classifier(brain, X4, tmp_path / "whole.onnx")
    assert list(tmp_path.iterdir()) == []
    found = torch.export.load(export_classifier(brain, X4, tmp_path / "whole.pt2")).module()(
        X4[:7].bfloat16()
    )
    torch.testing.assert_close(found[1], brain(X4[:7]).confidence)
    path = export_classifier(half, X4, tmp_path / "whole.onnx")
    np.testing.assert_allclose(
        run_onnx(path, [X4[:7].half()])["confidence"], half(X4[:7]).confidence.numpy(), atol=1e-2
    )


class Moody(nn.Linear):
    """A network whose way depends on the numbers, which no graph can follow."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if float(input.sum()) > 0 else -super().forward(input)


def test_what_cannot_be_a_graph_is_said_in_one_sentence(tmp_path: Path) -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    classifier = salgp.calibrate(Moody(4, 3), [(x, torch.arange(50) % 3)], method="uncalibrated")
    with pytest.raises(RuntimeError, match="does not make one graph; export the calibrator alone") as caught:
        export_classifier(classifier, x[:4], tmp_path / "whole.onnx")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="at least two samples"):
        export_classifier(classifier, x[:1], tmp_path / "whole.onnx")
    assert list(tmp_path.iterdir()) == []


def test_unknown_ending_is_refused(tmp_path: Path) -> None:
    calibrator = get("temperature").fit(*made(60, 0))
    with pytest.raises(ValueError, match=r"\.onnx \(ONNX\) or \.pt2"):
        export_head(calibrator, tmp_path / "head.bin")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_graph_with_context_predicts_as_python_does(tmp_path: Path, suffix: str) -> None:
    calibrator, features, shifted = with_augmented()
    path = export_head(calibrator, tmp_path / f"head{suffix}", context=True)
    for given in (features, shifted):
        context = calibrator.context(given)
        inputs = {"logits": given.logits, "layers.a": given.layers["a"], "context": context.total.float()}
        found = _run_named(path, inputs)
        expected = calibrator.predict(given, context=context)
        np.testing.assert_allclose(found["confidence"], expected.confidence.numpy(), atol=SINGLE)
        np.testing.assert_allclose(found["upper"], expected.upper.numpy(), atol=SINGLE)
        # what the graph gives for each sample adds up to the context of the window
        np.testing.assert_allclose(found["sample_context"].sum(axis=0), context.total.numpy(), atol=1e-2)
    nothing = {**inputs, "context": torch.zeros(4)}
    alone = calibrator.predict(shifted).confidence.numpy()
    np.testing.assert_allclose(_run_named(path, nothing)["confidence"], alone, atol=SINGLE)
    assert np.abs(found["confidence"] - alone).max() > 0.01


def test_a_graph_with_context_needs_a_method_that_takes_one(tmp_path: Path) -> None:
    features = Features(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
    plain = get("temperature").fit(features, torch.arange(50) % 3)
    with pytest.raises(ValueError, match="it takes no context"):
        export_head(plain, tmp_path / "head.onnx", context=True)
    assert not (tmp_path / "head.onnx").exists()


def with_augmented() -> tuple[LayerEvidence, Features, Features]:
    """Layer evidence fitted on samples and noisy ones made of them; samples in domain, and noisy ones."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=g)
    labels = (x + 0.5 * torch.randn(300, 2, generator=g)).argmax(dim=1)
    far = x + 1.5 * torch.randn(300, 2, generator=g)
    both = torch.cat([x, far])
    origin = torch.arange(300).repeat(2), torch.arange(600) // 300
    known = Features(3 * both, {"a": both}, *origin)
    calibrator = LayerEvidence().fit(known, labels.repeat(2))
    new = torch.randn(80, 2, generator=g)
    noisy = new + 1.5 * torch.randn(80, 2, generator=g)
    return calibrator, Features(3 * new, {"a": new}), Features(3 * noisy, {"a": noisy})


def _run_named(path: Path, inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    names = (*OUTPUTS, "sample_context")
    if path.suffix == ".pt2":
        found = torch.export.load(path).module()(*inputs.values())
        return {name: x.detach().numpy() for name, x in zip(names, found, strict=True)}
    session = ort.InferenceSession(str(path))
    assert [x.name for x in session.get_outputs()] == list(names)
    return dict(zip(names, session.run(None, {k: x.numpy() for k, x in inputs.items()}), strict=True))


def test_the_graph_of_layer_evidence_is_small(tmp_path: Path) -> None:
    """A runtime pays for every operation."""
    onnx = pytest.importorskip("onnx")
    features, labels = made(120, 0)
    layers = {k: torch.cat([x, x + 0.5]) for k, x in features.layers.items()}
    both = Features(
        features.logits.repeat(2, 1), layers, torch.arange(120).repeat(2), torch.arange(240) // 120
    )
    calibrator = LayerEvidence(layers_in_domain=True).fit(both, labels.repeat(2), reference=made(200, 1))
    assert len(onnx.load(export_head(calibrator, tmp_path / "head.onnx")).graph.node) < 260
