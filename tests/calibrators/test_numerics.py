"""Numbers at the edge of their types, and sets at the edge of usefulness: probabilities, or a sentence."""

from __future__ import annotations

import math
import time
import warnings
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from strategies import features, predictions, problems
from torch import Tensor

from salgp import metrics
from salgp.calibrators import Calibrator, get
from salgp.calibrators.registry import CLASSES
from salgp.features import Features
from salgp.prediction import Prediction

METHODS = list(CLASSES)


@cache
def fitted(name: str) -> Calibrator:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    x = torch.eye(3)[labels] + 0.8 * torch.randn(90, 3, generator=g)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get(name).fit(Features(3 * x, {"a": x, "b": torch.randn(90, 2, generator=g)}), labels)


def check(prediction: Prediction, label: Tensor) -> None:
    assert torch.equal(prediction.label, label)
    assert bool(torch.isfinite(prediction.probs).all())
    assert bool(torch.isfinite(prediction.confidence).all())
    assert float((prediction.probs.double().sum(dim=1) - 1).abs().max()) < 1e-3
    assert bool(((prediction.confidence >= 0) & (prediction.confidence <= 1)).all())
    for part in (prediction.std, prediction.lower, prediction.upper):
        assert part is None or bool(torch.isfinite(part).all())


EXTREMES = {
    "largest float32": torch.tensor([[3.4e38, -3.4e38, 0.0], [3.4e38, 3.4e38, 3.4e38], [-3.4e38, 0.0, 1.0]]),
    "1e300": torch.tensor([[1e300, -1e300, 0.0], [1e300, 1e300, 1e300]], dtype=torch.float64),
    "largest float64": torch.tensor([[1.7e308, -1.7e308, 0.0]], dtype=torch.float64),
    "smallest": torch.tensor([[1e-45, 0.0, -1e-45], [0.0, 0.0, 0.0]]),
    "float16": torch.tensor([[65504.0, -65504.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float16),
    "bfloat16": torch.tensor([[3e38, -3e38, 0.0]], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_logits_get_probabilities(name: str, extreme: str) -> None:
    logits = EXTREMES[extreme]
    n = len(logits)
    found = Features(logits, {"a": torch.zeros(n, 3), "b": torch.zeros(n, 2)})
    check(fitted(name).predict(found), found.label)


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_layers_and_empty_batches(name: str) -> None:
    half = Features(torch.randn(4, 3).half(), {"a": torch.randn(4, 3).half(), "b": torch.randn(4, 2).half()})
    check(fitted(name).predict(half), half.label)
    empty = fitted(name).predict(half[:0])
    assert len(empty) == 0
    assert empty.probs.shape == (0, 3)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_any_problem_is_fitted_or_refused_in_a_sentence(name: str, problem: tuple[Features, Tensor]) -> None:
    data, labels = problem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method = get(name).fit(data, labels)
        except (ValueError, TypeError):  # a refusal is a sentence; anything else is a bug
            return
        check(method.predict(data), data.label)


@pytest.mark.parametrize("name", [name for name in CLASSES if get(name).needs_layers])
def test_layers_without_columns_are_named_or_harmless(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    data = Features(torch.randn(60, 3, generator=g), {"none": torch.empty(60, 0), "a": torch.randn(60, 2)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "none" in _refusal(get(name), data, labels):
            return
        check(get(name).fit(data, labels).predict(data), data.label)


def _refusal(method: Calibrator, data: Features, labels: Tensor) -> str:
    try:
        method.fit(data, labels)
    except ValueError as error:
        return str(error)
    return ""


UNBOUNDED = ("nll", "nll_correct")


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_every_metric_of_anything_is_a_number_in_its_range(problem: tuple[Features, Tensor]) -> None:
    """All registered metrics at once, with and without error bars; what cannot be computed is None."""
    data, labels = problem
    std = torch.full_like(data.confidence.double(), 0.1)
    for prediction in (
        Prediction.from_probs(data, data.probs.double()),
        Prediction.from_confidence(data, data.confidence.double(), std),
    ):
        scores = metrics.evaluate(prediction, labels).as_dict()
        assert set(metrics.METRICS) <= set(scores)
        for name in metrics.METRICS:
            value, most = scores[name], 2.0 if name == "brier" else math.inf if name in UNBOUNDED else 1.0
            assert value is None or 0 <= value <= most + 1e-9, name


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(found=predictions())
def test_metrics_that_are_not_registered_are_numbers_too(found: tuple[Tensor, Tensor, Tensor]) -> None:
    probs, confidence, labels = found
    correct = probs.argmax(dim=1) == labels
    for name in ("ece", "mce", "adaptive_ece", "debiased_ece", "smooth_ece", "brier_correct", "aurc"):
        assert 0 <= float(getattr(metrics, name)(confidence, correct)) <= 1 + 1e-9, name
    assert 0 <= metrics.debiased_ece(confidence, correct, norm="l2") <= 1
    assert 0 <= metrics.interval_coverage(confidence, correct, confidence, confidence) <= 1
    parts = metrics.brier_decomposition(confidence, correct)
    assert parts.brier == pytest.approx(metrics.brier_correct(confidence, correct), abs=1e-9)
    if bool((labels >= 0).any()):
        assert 0 <= metrics.classwise_ece(probs, labels) <= 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(found=features())
def test_features_survive_slicing_and_saving(
    found: Features, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("f") / "f.safetensors"
    again = Features.load(found.save(path))
    assert torch.equal(again.logits, found.logits)
    assert again.layer_names == found.layer_names
    first = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == first, "the same features give the same bytes"
    assert torch.equal(found[:1].label, found.label[:1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "classes", "layers"), [("matrix", 2000, 0), ("dirichlet", 2000, 0), ("sal-gp", 3, 100)]
)
def test_many_classes_and_many_layers_take_less_than_a_minute(name: str, classes: int, layers: int) -> None:
    """Of processor time: 50 samples of 2,000 classes, 300 samples with 100 layers."""
    g = torch.Generator().manual_seed(0)
    n = 300 if layers else 50
    h = torch.randn(n, 4, generator=g)
    values = {f"layer{i}": h @ torch.randn(4, 6, generator=g) for i in range(layers)}
    made = Features(3 * torch.randn(n, classes, generator=g), values)
    start = time.process_time()
    prediction = get(name).fit(made, torch.randint(classes, (n,), generator=g)).predict(made)
    assert time.process_time() - start < 60
    assert bool(torch.isfinite(prediction.confidence).all())
