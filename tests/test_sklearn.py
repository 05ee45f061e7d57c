"""A fitted estimator with calibrated confidences: kept, copied, cross-validated."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score

from salgp.sklearn import CalibratedEstimator


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
