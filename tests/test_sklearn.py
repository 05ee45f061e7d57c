"""The scikit-learn classifier: estimator checks, pipelines, calibrated probabilities."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

from salgp.sklearn import CalibratedEstimator, CalibratedTorchClassifier

SKIPPED = {
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


# --- a fitted estimator with calibrated confidences


def halves() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    X, y = make_classification(600, 8, n_informative=4, n_classes=3, random_state=0)
    return X[:300], y[:300], X[300:], y[300:]


def test_a_saved_estimator_is_put_together_with_the_model_again(tmp_path: Path) -> None:
    X, y, new, truth = halves()
    forest = RandomForestClassifier(15, random_state=0).fit(X, y)
    fitted = CalibratedEstimator(forest, "platt").fit(new, truth)
    again = CalibratedEstimator.load(fitted.save(tmp_path / "kept"), forest)
    np.testing.assert_array_equal(again.predict_proba(new), fitted.predict_proba(new))
    np.testing.assert_array_equal(again.predict(new), fitted.predict(new))
    refitted = clone(again).set_params(estimator=forest).fit(new, truth)  # method and all
    np.testing.assert_array_equal(refitted.predict_proba(new), fitted.predict_proba(new))


def test_layers_are_given_again(tmp_path: Path) -> None:
    X, y, new, truth = halves()
    model = LogisticRegression().fit(X, y)
    fitted = CalibratedEstimator(model, layers=lambda X: {"inputs": X}).fit(new, truth)
    again = CalibratedEstimator.load(fitted.save(tmp_path / "kept"), model, layers=lambda X: {"inputs": X})
    np.testing.assert_array_equal(again.predict_proba(new), fitted.predict_proba(new))


def test_another_model_is_refused(tmp_path: Path) -> None:
    X, y, new, truth = halves()
    saved = CalibratedEstimator(LogisticRegression().fit(X, y)).fit(new, truth).save(tmp_path / "kept")
    with pytest.raises(ValueError, match="fitted on 3 classes, the estimator has 2"):
        CalibratedEstimator.load(saved, LogisticRegression().fit(X, y > 0))
    with pytest.raises(NotFittedError, match="LogisticRegression is not fitted"):
        CalibratedEstimator.load(saved, LogisticRegression())
    with pytest.raises(NotFittedError):
        CalibratedEstimator(LogisticRegression().fit(X, y)).save(tmp_path / "other")


def doubled(fitted: CalibratedEstimator, X: np.ndarray) -> np.ndarray:
    return fitted.predict_proba(X)


def test_fitted_models_survive_pickle_joblib_copies_and_process_pools(tmp_path: Path) -> None:
    X, y, new, truth = halves()
    fitted = CalibratedEstimator(LogisticRegression().fit(X, y)).fit(new, truth)
    expected = fitted.predict_proba(new)
    joblib.dump(fitted, tmp_path / "m.joblib")
    for again in (
        pickle.loads(pickle.dumps(fitted)),
        joblib.load(tmp_path / "m.joblib"),
        copy.deepcopy(fitted),
    ):
        np.testing.assert_array_equal(again.predict_proba(new), expected)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        np.testing.assert_array_equal(pool.submit(doubled, fitted, new).result(), expected)
    pickle.dumps(clone(fitted))  # unfitted, as searches send it to their workers


def test_in_cross_validation_a_frozen_model_stays_fitted() -> None:
    X, y, new, truth = halves()
    model = LogisticRegression().fit(X, y)
    with pytest.raises(NotFittedError, match=r"FrozenEstimator\(model\)"):
        cross_val_score(CalibratedEstimator(model), new, truth, cv=3, error_score="raise")
    scores = cross_val_score(CalibratedEstimator(FrozenEstimator(model)), new, truth, cv=3)
    assert scores.mean() == pytest.approx(model.score(new, truth))
    search = GridSearchCV(
        CalibratedEstimator(FrozenEstimator(model)), {"method": ["temperature", "isotonic"]}, cv=3
    ).fit(new, truth)
    np.testing.assert_array_equal(search.predict(new), model.predict(new))


@pytest.mark.parametrize("wrong", [nn.Linear(4, 3), "resnet18"])
def test_a_network_in_place_of_its_factory_is_refused(wrong: object) -> None:
    X, y = load_iris(return_X_y=True)
    with pytest.raises(TypeError, match=r"network must be a function .*salgp\.calibrate\(network, loader\)"):
        CalibratedTorchClassifier(wrong).fit(X, y)  # type: ignore[arg-type]
    CalibratedTorchClassifier(nn.Linear, method="temperature", epochs=2).fit(X, y)


@pytest.mark.parametrize("what", [None, 3, "model"])
def test_what_cannot_predict_is_no_classifier(what: object) -> None:
    with pytest.raises(TypeError, match="expected a fitted classifier"):
        CalibratedEstimator(what).fit([[0.0], [1.0]], [0, 1])


def test_masked_inputs_are_refused() -> None:
    x, y = np.arange(40.0)[:, None], np.arange(40) // 20
    found = CalibratedEstimator(LogisticRegression().fit(x, y)).fit(x, y)
    with pytest.raises(ValueError, match="masked"):
        found.predict_proba(np.ma.masked_less(x, 3.0))


def test_a_regressor_is_no_classifier() -> None:
    from sklearn.linear_model import LinearRegression

    X, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    with pytest.raises(TypeError, match="LinearRegression is a regressor"):
        CalibratedEstimator(LinearRegression().fit(X, y)).fit(X, y)
