"""One sample by itself gives what it gives among others, whatever the model has learned."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features
from salgp.prediction import Prediction

CLOSE = 1e-5
"""Distances among many samples are rounded to single precision; this is what it does to log-odds."""
FIELDS = [f.name for f in dataclasses.fields(Prediction) if f.name != "layers"]


def world(n: int, seed: int, noise: float = 0.0, classes: int = 3) -> tuple[Features, Tensor]:
    """Blobs seen through a linear network; one layer is narrower than what the gate looks at, one wider."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    x = 1.8 * torch.eye(classes, 20)[labels] + (0.8 + noise) * torch.randn(n, 20, generator=g)
    return Features(3.0 * x[:, :classes], {"narrow": x[:, :6], "wide": torch.cat([x, x.square()], 1)}), labels


def fitted(classes: int = 3, copies: bool = True, **arguments: Any) -> LayerEvidence:
    parts = [world(240, 1, noise, classes) for noise in ((0.0, 0.7, 1.4) if copies else (0.0,))]
    rows = [
        Features(f.logits, f.layers, torch.arange(240), torch.full((240,), family))
        for family, (f, _) in enumerate(parts)
    ]
    labels = torch.cat([y for _, y in parts])
    return LayerEvidence(**arguments).fit(Features.concatenate(rows), labels, world(400, 0, 0.0, classes))


CASES: dict[str, dict[str, Any]] = {
    "temperature scaling": {"trust": 0.0},
    "mixed": {"trust": 0.5},
    "layers": {"trust": 1.0},
    "gate wide open": {"trust": 1.0, "guard": 0.0},
    "gate wide open, plain": {"trust": 0.0, "guard": 0.0},
    "no gate": {"gated": False},
    "no copies": {"copies": False},
    "loose": {"looseness": 2.0},
    "many points": {"reference": "full"},
    "one neighbour": {"k": 1},
    "nine classes": {"classes": 9},
    "8-bit": {"precision": "8-bit"},
}


@pytest.mark.parametrize("case", CASES)
def test_one_sample_is_judged_as_among_others(case: str) -> None:
    calibrator = fitted(**CASES[case])
    samples = world(40, 5, 0.8, calibrator.n_classes_)[0]
    assert calibrator.evidence_.single is not None
    together = calibrator.predict(samples)
    alone = Prediction.concatenate([calibrator.predict(samples[i : i + 1]) for i in range(40)])
    for name in FIELDS:
        ours, expected = getattr(alone, name), getattr(together, name)
        assert ours.dtype == expected.dtype
        np.testing.assert_allclose(ours, expected, rtol=0, atol=CLOSE, err_msg=name)
    assert alone.layers is not None
    assert together.layers is not None
    assert alone.layers.names == together.layers.names
    np.testing.assert_allclose(alone.layers.mean, together.layers.mean, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(alone.layers.std, together.layers.std, rtol=0, atol=CLOSE)


def test_the_open_gate_is_heard() -> None:
    """Otherwise the cases above would not tell that a single sample asks the expert for shift."""
    samples = world(20, 5, 2.0)[0]
    closed, opened = fitted(trust=0.0, gated=False), fitted(trust=0.0, guard=0.0)
    change = [
        float(opened.predict(samples[i : i + 1]).confidence - closed.predict(samples[i : i + 1]).confidence)
        for i in range(20)
    ]
    assert max(map(abs, change)) > 0.05


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
def test_logits_of_any_size(scale: float) -> None:
    calibrator = fitted(trust=0.5)
    features = world(20, 6, 0.8)[0]
    samples = Features(scale * features.logits, features.layers)
    together = calibrator.predict(samples)
    for i in range(20):
        alone = calibrator.predict(samples[i : i + 1])
        np.testing.assert_allclose(alone.probs[0], together.probs[i], rtol=0, atol=CLOSE)
        np.testing.assert_allclose(alone.novelty, together.novelty[i : i + 1], rtol=1e-5, atol=CLOSE)


def test_a_copy_of_a_reference_sample() -> None:
    """Its distance is 0, so agreement is at its bound."""
    reference, _ = world(400, 0)
    calibrator = fitted(reference="full", precision="single", k=1)
    together = calibrator.predict(reference[:6])
    for i in range(6):
        alone = calibrator.predict(reference[i : i + 1])
        np.testing.assert_allclose(alone.confidence, together.confidence[i : i + 1], rtol=0, atol=CLOSE)


def test_a_class_with_too_few_points_and_class_statistics_take_the_usual_way() -> None:
    """One class has a single point; there is none to look for in its own class but that."""
    features, labels = world(400, 0)
    few = (labels != 2) | (torch.arange(400) == 2)
    lacking = LayerEvidence().fit(*world(240, 1), reference=(features[few], labels[few]))
    for calibrator in (lacking, fitted(reference="statistics")):
        assert calibrator.evidence_.single is None
        samples = world(5, 5)[0]
        alone = calibrator.predict(samples[:1]).confidence
        np.testing.assert_allclose(alone, calibrator.predict(samples).confidence[:1], rtol=0, atol=1e-9)


def test_the_result_is_its_own() -> None:
    """Nothing that is kept for the next sample can be changed through it."""
    calibrator = fitted()
    samples = world(2, 5)[0]
    first = calibrator.predict(samples[:1])
    before = first.copy()
    for name in FIELDS:
        getattr(first, name).fill_(0)
    again = calibrator.predict(samples[:1])
    for name in FIELDS:
        if name != "label":
            torch.testing.assert_close(getattr(again, name), getattr(before, name), rtol=0, atol=0)


@pytest.mark.parametrize("part", ["logits", "layers"])
@pytest.mark.parametrize("kind", ["bfloat16", "gradients"])
def test_what_numpy_cannot_read_takes_the_usual_way(part: str, kind: str) -> None:
    calibrator, sample = fitted(), world(40, 5, 0.8)[0][:1]
    expected = calibrator.predict(sample).confidence

    def changed(x: Tensor) -> Tensor:
        return x.bfloat16() if kind == "bfloat16" else x.clone().requires_grad_()

    logits = changed(sample.logits) if part == "logits" else sample.logits
    layers = {name: changed(x) if part == "layers" else x for name, x in sample.layers.items()}
    found = calibrator.predict(Features(logits, layers)).confidence
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.02, check_dtype=False)
