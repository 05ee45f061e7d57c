"""Labels that cannot be those of the samples are told; weak networks are not accused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from salgp import Features
from salgp.calibrators import get
from salgp.calibrators.checks import CalibrationWarning, _hits, misaligned, misaligned_reference

GUESS = "no more than if their labels were shuffled"
NONE = "no calibration sample is classified correctly"


def network(
    n: int = 400, c: int = 5, accuracy: float = 0.9, confidence: float = 0.9, seed: int = 0
) -> tuple[Features, torch.Tensor]:
    """A network of this accuracy that claims this confidence, and the true classes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, c, (n,), generator=g)
    off = torch.randint(1, c, (n,), generator=g)
    predicted = torch.where(torch.rand(n, generator=g) < accuracy, labels, (labels + off) % c)
    z = float(np.log(confidence * (c - 1) / (1 - confidence))) * torch.nn.functional.one_hot(predicted, c)
    x = torch.randn(n, 4, generator=g)
    return Features(z + 0.01 * torch.randn(n, c, generator=g), {"a": x}), labels


def shuffled(labels: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


def test_hits_of_shuffled_labels_have_the_stated_mean_and_deviation() -> None:
    features, labels = network(n=150, c=4, accuracy=0.5)
    labels = labels.clamp_max(2)  # classes of unequal size
    found = _hits(features, labels)
    drawn = [int((features.label == shuffled(labels, seed)).sum()) for seed in range(3000)]
    assert np.mean(drawn) == pytest.approx(found.mean, abs=0.4)
    assert np.std(drawn) == pytest.approx(found.sd, rel=0.05)
    assert found.hits == int((features.label == labels).sum())


@pytest.mark.parametrize("c", [2, 5, 100])
@pytest.mark.parametrize("confidence", [0.7, 0.95])
@pytest.mark.parametrize("seed", range(5))
def test_shuffled_labels_are_told(c: int, confidence: float, seed: int) -> None:
    features, labels = network(c=c, accuracy=confidence, confidence=confidence, seed=seed)
    assert misaligned(features, labels) is None
    assert GUESS in str(misaligned(features, shuffled(labels, seed + 9)))


@pytest.mark.parametrize("c", [2, 3, 10])
def test_labels_in_another_order_are_told(c: int) -> None:
    features, labels = network(c=c, accuracy=1.0)
    assert str(misaligned(features, (labels + 1) % c)).startswith(NONE)


def test_labels_that_are_all_unknown_are_told() -> None:
    features, labels = network()
    assert str(misaligned(features, torch.full_like(labels, -1))).startswith(
        "no calibration sample has a known"
    )
    some = labels.where(torch.arange(400) % 2 > 0, -1)
    assert misaligned(features, some) is None


@pytest.mark.parametrize(
    ("c", "accuracy", "confidence", "n"),
    [
        (2, 0.55, 0.56, 400),  # weak, and says so
        (2, 0.6, 0.9, 1000),  # far too sure, but better than a guess
        (10, 0.13, 0.2, 300),
        (100, 0.02, 0.05, 300),
        (1000, 0.005, 0.05, 60),  # hardly a hit, as expected of so few
    ],
)
def test_weak_networks_are_not_accused(c: int, accuracy: float, confidence: float, n: int) -> None:
    found = [misaligned(*network(n, c, accuracy, confidence, seed)) for seed in range(40)]
    assert found == [None] * 40


def test_a_network_that_knows_one_answer_only_is_not_accused() -> None:
    g = torch.Generator().manual_seed(0)
    labels = (torch.rand(2000, generator=g) < 0.2).long()
    z = torch.tensor([3.0, 0.0]) + 0.1 * torch.randn(2000, 2, generator=g)  # 80 % right, claims 95 %
    assert misaligned(Features(z), labels) is None


@pytest.mark.parametrize("method", ["temperature", "isotonic", "layer-evidence"])
def test_every_method_tells_it(method: str) -> None:
    features, labels = network()
    with pytest.warns(CalibrationWarning, match=GUESS):
        get(method).fit(features, shuffled(labels))


def test_the_verdict_does_not_praise_a_fit_to_such_labels() -> None:
    features, labels = network()
    assert get("layer-evidence").fit(features, labels).verdict_.startswith("In domain")
    wrong = get("layer-evidence").fit(features, shuffled(labels))
    assert wrong.verdict_.startswith("Not to be relied on: the network is right on")


@pytest.mark.parametrize("c", [2, 5])
def test_a_reference_whose_labels_are_off_is_told(c: int) -> None:
    calibration, reference = network(c=c, accuracy=0.8), network(600, c, 0.85, seed=3)
    assert misaligned_reference(calibration, reference) is None
    wrong = (reference[0], reference[1].roll(1))
    with pytest.warns(CalibrationWarning, match="are the labels of the reference in the order"):
        get("deep-knn").fit(*calibration, reference=wrong)


@pytest.mark.parametrize("accuracy", [0.65, 0.8, 0.99])
def test_a_harder_reference_is_not_accused(accuracy: float) -> None:
    """Augmented or noisily labelled training data are known less well than clean ones."""
    found = [
        misaligned_reference(network(seed=seed), network(300, accuracy=accuracy, seed=50 + seed))
        for seed in range(20)
    ]
    assert found == [None] * 20


def test_a_reference_of_embeddings_alone_is_not_accused() -> None:
    calibration, (known, labels) = network(), network(seed=1)
    bare = Features(torch.zeros_like(known.logits), known.layers)
    assert misaligned_reference(calibration, (bare, labels)) is None


def test_good_data_are_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get("layer-evidence").fit(*network(), reference=network(seed=1))


@pytest.mark.parametrize(("n", "seen"), [(400, 40), (200, 40), (100, 40), (4000, 213)])
def test_classes_without_a_calibration_sample_are_named(n: int, seen: int) -> None:
    """174 of 214 classes were missing, and no warning came."""
    labels = torch.arange(n) % seen
    said = torch.where(torch.arange(n) % 7 == 0, (labels + 1) % 214, labels)
    features = Features(8 * torch.nn.functional.one_hot(said, 214).double())
    with pytest.warns(CalibrationWarning, match=f"no calibration samples of {214 - seen} of 214 classes"):
        get("temperature").fit(features, labels)
