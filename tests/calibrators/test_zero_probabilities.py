"""Probabilities of exactly 0: what takes their place, and that no single one decides a fit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.tree import DecisionTreeClassifier

import salgp
from salgp import Features
from salgp.calibrators import get
from salgp.calibrators.checks import SINGLE, CalibrationWarning, floor_zeros, learn_zero_logits
from salgp.export import export_classifier, export_head
from salgp.logits import ZERO, as_logits
from salgp.metrics import ece
from salgp.sklearn import CalibratedEstimator

MANY = "has a probability of exactly 0"


def votes(n: int = 500, voters: int = 20, c: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Shares of votes of which most go to the true class, as a forest gives them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, c, n)
    hard = rng.dirichlet(np.full(c, 0.4), n) * 0.6 + 0.4 * np.eye(c)[labels]
    counts = np.array([rng.multinomial(voters, p / p.sum()) for p in hard])
    return counts / voters, labels


# --- the values


def test_positive_probabilities_keep_their_logarithms() -> None:
    p = torch.tensor([[1 - 2e-6, 1e-6, 1e-6], [1.0, 1e-37, 0.0]])
    z = as_logits(p, "probabilities")
    torch.testing.assert_close(z[:, :2], p[:, :2].log())
    assert z[1, 2] == ZERO
    floored = floor_zeros(Features(z), learn_zero_logits(z)).logits
    assert torch.equal(floored[z != ZERO], z[z != ZERO])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_zero_is_one_number_in_every_precision(dtype: torch.dtype) -> None:
    z = as_logits(torch.tensor([[1.0, 0.0]], dtype=dtype), "probabilities")
    assert z.tolist() == [[0.0, ZERO]]
    assert Features(z).probs.tolist() == [[1.0, 0.0]]
    assert as_logits(torch.tensor([1.0], dtype=dtype), "probabilities").tolist() == [[ZERO, 0.0]]
    logarithms = torch.tensor([[0.0, -torch.inf]], dtype=dtype)
    assert as_logits(logarithms, "log-probabilities").tolist() == [[0.0, ZERO]]
    assert math.log(5e-324) > ZERO


def test_zeros_of_a_sample_together_count_as_the_smallest_probability() -> None:
    p = torch.tensor([[0.75, 0.25, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]).double()
    zeros = learn_zero_logits(as_logits(p, "probabilities"))
    assert zeros is not None
    torch.testing.assert_close(zeros.exp(), torch.full((4,), 0.25 / 4, dtype=torch.float64))


def test_a_class_is_resolved_as_its_own_probabilities_are() -> None:
    """A sigmoid in single precision tells 1e-30 from 0, but nothing between 1 - 6e-8 and 1."""
    z = torch.linspace(-60, 60, 241)
    zeros = learn_zero_logits(as_logits(torch.sigmoid(z), "probabilities"))
    assert zeros is not None
    assert float(zeros[0].exp()) == pytest.approx(2**-24 / 2)
    assert float(zeros[1]) == pytest.approx(-60 - math.log(2), abs=1e-4)


def test_no_zeros_no_change() -> None:
    z = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    assert learn_zero_logits(z) is None
    features = Features(z)
    assert floor_zeros(features, None) is features
    far = Features(torch.tensor([[0.0, -2000.0]]))
    assert torch.equal(floor_zeros(far, learn_zero_logits(far.logits)).logits, far.logits)  # a real logit
    late = floor_zeros(Features(torch.tensor([[0.0, ZERO]])), None).logits
    assert float(late[0, 1]) == pytest.approx(SINGLE - math.log(2))


# --- fits


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_one_zero_does_not_decide_a_fit(kind: type) -> None:
    labels = np.arange(500) % 3
    probs = np.full((500, 3), 0.1)
    probs[np.arange(500), labels] = 0.8
    given, true = probs.copy(), labels.copy()
    given[0], true[0] = [0, 0.5, 0.5], 0
    found = salgp.calibrate_outputs(probs=given.astype(kind), labels=true, method="temperature").predict(
        probs=probs[-1:].astype(kind)
    )
    assert float(found.confidence[0]) == pytest.approx(0.9974, abs=2e-4)


@pytest.mark.parametrize("name", ["temperature", "platt", "vector", "isotonic", "layer-evidence"])
def test_a_calibrator_that_is_loaded_takes_zeros_as_the_fitted_one(name: str, tmp_path: Path) -> None:
    probs, labels = votes()
    features = Features.from_probs(probs, {"a": probs})
    fitted = get(name).fit(features, labels)
    loaded = salgp.load(fitted.save(tmp_path / "kept"))
    assert loaded.zero_logits_ is not None
    assert torch.equal(loaded.predict(features).probs, fitted.predict(features).probs)
    refitted = fitted.fit(Features.from_probs(probs * 0.9 + 0.1 / 3, {"a": probs}), labels)
    assert refitted.zero_logits_ is None


def test_uncalibrated_stays_the_classifiers_own() -> None:
    probs, labels = votes()
    features = Features.from_probs(probs)
    own = get("uncalibrated").fit(features, labels).predict(features)
    np.testing.assert_allclose(own.probs.numpy(), probs, atol=1e-12)


def test_many_zeros_of_true_classes_are_told_where_it_helps() -> None:
    probs, labels = votes(voters=3)
    with pytest.warns(CalibrationWarning, match=MANY):
        salgp.calibrate_outputs(probs=probs, labels=labels)
    salgp.calibrate_outputs(probs=probs, labels=labels, method="isotonic")
    salgp.calibrate_outputs(probs=votes(voters=100)[0], labels=labels)


# --- out of core, and in graphs


def test_a_fit_out_of_core_takes_zeros_as_one_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from salgp.store import fit_store, write_store

    probs, labels = votes(300)
    features = Features.from_probs(probs.astype(np.float32), {"a": probs.astype(np.float32)})
    known = (features, torch.as_tensor(labels))
    store = write_store([known], tmp_path / "store", rows=100)
    streamed = fit_store(get("layer-evidence"), store, reference=store)
    expected = learn_zero_logits(features.logits)
    assert expected is not None
    assert streamed.zero_logits_ is not None
    torch.testing.assert_close(streamed.zero_logits_, expected)
    p = streamed.predict(features)
    assert abs(float(p.confidence.mean()) - float((p.label == known[1]).double().mean())) < 0.05


def graph(path: Path, **given: torch.Tensor) -> dict[str, np.ndarray]:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {k: x.numpy() for k, x in given.items()}), strict=True))


def test_a_head_takes_logarithms_of_zero(tmp_path: Path) -> None:
    probs, labels = votes()
    single = torch.as_tensor(probs, dtype=torch.float32)
    found = salgp.calibrate_outputs(probs=single, labels=labels)
    path = export_head(found.calibrator, tmp_path / "head.onnx")
    expected = found.predict(probs=single).confidence.numpy()
    for logits in (single.log(), Features.from_probs(single).logits):
        np.testing.assert_allclose(graph(path, logits=logits)["confidence"], expected, atol=1e-6)


class Votes(torch.nn.Module):
    """Inputs that are probabilities already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def test_a_network_of_probabilities_and_its_graph_agree(tmp_path: Path) -> None:
    probs, labels = votes()
    x = torch.as_tensor(probs, dtype=torch.float32)
    loader = [(x, torch.as_tensor(labels))]
    model = salgp.calibrate(Votes(), loader, method="temperature", output="probabilities")
    expected = (
        salgp.calibrate_outputs(probs=x, labels=labels, method="temperature").predict(probs=x).confidence
    )
    torch.testing.assert_close(model(x).confidence, expected)
    path = export_classifier(model, x[:4], tmp_path / "whole.onnx")
    np.testing.assert_allclose(graph(path, input=x)["confidence"], expected.numpy(), atol=1e-6)


# --- real classifiers


CLASSIFIERS = {
    "forest of 5": RandomForestClassifier(5, random_state=0),
    "forest of 20": RandomForestClassifier(20, random_state=0),
    "forest of 50": RandomForestClassifier(50, random_state=0),
    "tree": DecisionTreeClassifier(random_state=0),
    "tree with leaves": DecisionTreeClassifier(min_samples_leaf=10, random_state=0),
    "neighbours": KNeighborsClassifier(5),
    "naive Bayes": GaussianNB(),
}


@pytest.mark.filterwarnings(f"ignore:.*{MANY}", "ignore:the temperature stopped")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_default_is_no_worse_than_the_classifier_itself(name: str) -> None:
    X, y = load_digits(return_X_y=True)
    X, test, y, truth = train_test_split(X, y, test_size=0.4, random_state=0)
    train, held_out, seen, labels = train_test_split(X, y, test_size=0.4, random_state=0)
    model = CLASSIFIERS[name].fit(train, seen)
    own = Features.from_probs(model.predict_proba(test))
    found = CalibratedEstimator(model).fit(held_out, labels).prediction(test)
    right = (found.label.numpy() == truth).astype(float)
    assert ece(found.confidence, right) <= ece(own.confidence, right) + 0.01
    assert ece(found.confidence, right) < 0.1
