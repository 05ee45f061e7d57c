"""The scikit-learn classifier: estimator checks, pipelines, calibrated probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from salgp.sklearn import CalibratedTorchClassifier

SKIPPED = {
    "check_estimators_pickle": "fitted calibrators are saved with safetensors and never pickled",
    "check_readonly_memmap_input": "the check pickles its data with joblib into a memory map",
    "check_classifiers_one_label_sample_weights": "no sample weights",
    "check_dict_unchanged": "the classifier is a module that settles its taps on first use",
}


def small(**arguments: object) -> CalibratedTorchClassifier:
    return CalibratedTorchClassifier(**{"method": "temperature", "epochs": 25, **arguments})


CHECKS = [
    (check.func.__name__, check, estimator)
    for estimator, check in estimator_checks_generator(small())
    if check.func.__name__ not in SKIPPED
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "check", "estimator"), CHECKS, ids=[f"{c[0]}-{i}" for i, c in enumerate(CHECKS)]
)
def test_estimator_checks(name: str, check, estimator) -> None:
    check(estimator)


@pytest.mark.filterwarnings("ignore")
def test_in_a_pipeline() -> None:
    X, y = load_iris(return_X_y=True)
    scores = cross_val_score(make_pipeline(StandardScaler(), small(epochs=40)), X, y, cv=3)
    assert scores.mean() > 0.85


@pytest.mark.filterwarnings("ignore")
def test_layerwise_method_gives_std_and_string_labels_survive() -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = CalibratedTorchClassifier(method="sal-gp", epochs=20).fit(X, names)
    assert set(model.predict(X)) <= set(names)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1.0, atol=1e-9)
    std = model.predict_std(X)
    assert std is not None
    assert (std > 0).all()


def test_same_seed_same_result_and_global_seed_untouched() -> None:
    X, y = load_iris(return_X_y=True)
    before = torch.random.get_rng_state()
    first, second = (small(epochs=3).fit(X, y).predict_proba(X) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())
