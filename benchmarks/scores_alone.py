"""Calibration from class scores alone: five models of scikit-learn on eight data sets.

Every method gets the same probabilities. Beside ours run those of scikit-learn (`CalibratedClassifierCV`
around a frozen model) and of probmetrics. Log loss and Brier score are means over the 40 problems, on test
samples that no method has seen; ranks are by log loss, 1 is best. The second table is that of another split
of the same data.

    python benchmarks/scores_alone.py                          # two tables on the screen, about ten minutes
    python benchmarks/scores_alone.py --write benchmarks/results/scores-alone.md
"""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from history import record_page
from scipy.stats import rankdata
from sklearn import datasets
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import salgp

CALIBRATION = 400
SPLITS = 2
TRAINING = 600
SMALLEST = 1e-12
"""A probability counts at least this much in the log loss."""

MODELS: dict[str, Callable[[], ClassifierMixin]] = {
    "forest": lambda: RandomForestClassifier(100, random_state=0),
    "boosting": lambda: HistGradientBoostingClassifier(random_state=0),
    "naive Bayes": GaussianNB,
    "MLP": lambda: make_pipeline(StandardScaler(), MLPClassifier((100,), max_iter=500, random_state=0)),
    "k-NN": lambda: make_pipeline(StandardScaler(), KNeighborsClassifier(10)),
}

Problem = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Probabilities and labels of the calibration samples, then of the test samples."""
Method = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From probabilities and labels of the calibration samples to probabilities of the test samples."""


def main() -> None:
    """Score every method on every problem and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--only", nargs="+", help="these methods only")
    arguments = parser.parse_args()
    chosen = {name: f for name, f in methods().items() if not arguments.only or name in arguments.only}
    first, *others = (table(run(chosen, split)) for split in range(SPLITS))
    text = "\n".join([heading(), first, "Another split of the same data:\n", *others])
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
        record_page("scores-alone", first)


def sets() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Eight data sets that scikit-learn has or makes; 2 to 10 classes, some with noisy labels."""
    made = datasets.make_classification
    shape: dict[str, Any] = {"n_samples": 6000, "n_features": 20, "random_state": 0}
    return {
        "digits": datasets.load_digits(return_X_y=True),
        "moons": datasets.make_moons(6000, noise=0.35, random_state=0),
        "quantiles": datasets.make_gaussian_quantiles(
            n_samples=6000, n_features=5, n_classes=4, random_state=0
        ),
        "hastie": as_classes(datasets.make_hastie_10_2(6000, random_state=0)),
        "blobs": datasets.make_blobs(6000, n_features=5, centers=6, cluster_std=5.0, random_state=0),
        "rare": made(**shape, n_informative=6, weights=[0.9], flip_y=0.05),
        "noisy": made(**shape, n_informative=8, n_classes=5, flip_y=0.2),
        "ten": made(**shape, n_informative=10, n_classes=10, class_sep=1.5),
    }


def as_classes(data: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Labels numbered from 0."""
    return data[0], np.unique(data[1], return_inverse=True)[1]


def problems(split: int) -> Iterator[tuple[str, Problem]]:
    """Name and scores of the 40 problems, of one split of the data."""
    for name, (x, y) in sets().items():
        x_train, x_rest, y_train, y_rest = train_test_split(
            x, y, train_size=TRAINING, stratify=y, random_state=2 * split
        )
        x_cal, x_test, y_cal, y_test = train_test_split(
            x_rest, y_rest, train_size=CALIBRATION, stratify=y_rest, random_state=2 * split + 1
        )
        for model_name, build in MODELS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model: Any = build().fit(x_train, y_train)
            yield (
                f"{name}, {model_name}",
                (model.predict_proba(x_cal), y_cal, model.predict_proba(x_test), y_test),
            )


def methods() -> dict[str, Method]:
    """Every method by the name it has in the table."""
    ours = {
        name: by_salgp(name)
        for name in (
            "temperature",
            "ensemble-temperature",
            "beta",
            "isotonic",
            "vector",
            "matrix",
            "dirichlet",
        )
    }
    theirs = {f"scikit-learn {name}": by_sklearn(name) for name in ("sigmoid", "isotonic", "temperature")}
    more = {f"probmetrics {name}": by_probmetrics(name) for name in ("sms", "svs", "ts-mix", "logistic")}
    return {"raw": lambda p, y, new: new, "auto": by_salgp("auto"), **ours, **theirs, **more}


def by_salgp(name: str) -> Method:
    """A method of ours."""

    def calibrated(probs: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
        fitted = salgp.calibrate_outputs(probs=probs, labels=labels, method=name)
        return np.asarray(fitted.predict(probs=new).probs.numpy())

    return calibrated


def by_sklearn(name: str) -> Method:
    """A method of scikit-learn, around a classifier that gives back the probabilities it gets."""

    def calibrated(probs: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
        frozen = FrozenEstimator(Given(probs.shape[1]))
        fitted = CalibratedClassifierCV(frozen, method=name).fit(probs, labels)
        return np.asarray(fitted.predict_proba(new))

    return calibrated


def by_probmetrics(name: str) -> Method:
    """A method of probmetrics."""
    from probmetrics.calibrators import get_calibrator

    def calibrated(probs: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
        with contextlib.redirect_stdout(io.StringIO()):  # some of them print what they begin with
            return np.asarray(get_calibrator(name).fit(probs, labels).predict_proba(new))

    return calibrated


class Given(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are its probabilities."""

    def __init__(self, n_classes: int) -> None:
        self.n_classes = n_classes
        self.classes_ = np.arange(n_classes)

    def fit(self, X: np.ndarray, y: np.ndarray) -> Given:
        """Nothing to learn."""
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """The inputs."""
        return X

    def predict(self, X: np.ndarray) -> np.ndarray:
        """The class of the largest input."""
        return X.argmax(axis=1)


def run(chosen: dict[str, Method], split: int) -> dict[str, np.ndarray]:
    """Log loss and Brier score ``(40, 2)`` of each method."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for problem, (probs, labels, new, truth) in problems(split):
        for name, method in chosen.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name].append(scores(method(probs, labels, new), truth))
        print(problem, {name: round(each[-1][0], 3) for name, each in found.items()}, flush=True)
    return {name: np.array(each) for name, each in found.items()}


def scores(probs: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Log loss and Brier score, summed over classes."""
    p = np.clip(probs, SMALLEST, 1.0)
    p /= p.sum(axis=1, keepdims=True)
    true = np.eye(p.shape[1])[labels]
    return float(-np.log((p * true).sum(axis=1)).mean()), float(((p - true) ** 2).sum(axis=1).mean())


def heading() -> str:
    """What stands above the tables."""
    return (
        f"# Class scores alone: 40 problems, {CALIBRATION} calibration samples, measured by "
        f"`python benchmarks/scores_alone.py`\n\n"
        f"Five models of scikit-learn ({', '.join(MODELS)}) on eight data sets ({', '.join(sets())}).\n"
        f"Means over the problems; rank by log loss, 1 is best; how often the log loss is above that of the\n"
        f"uncalibrated scores, and by how much at most.\n"
    )


def table(found: dict[str, np.ndarray]) -> str:
    """One line for each method, the best mean log loss first."""
    loss = np.stack([each[:, 0] for each in found.values()])  # (methods, problems)
    rank = dict(zip(found, rankdata(loss, axis=0).mean(axis=1), strict=True))
    raw = found["raw"][:, 0]
    lines = [
        "| method | log loss | Brier score | mean rank | worse than raw | at most by |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in sorted(found.items(), key=lambda item: float(item[1][:, 0].mean())):
        log_loss, brier = each.mean(axis=0)
        excess = each[:, 0] - raw
        worse = f"{int((excess > 1e-6).sum())} of {len(raw)} | {max(excess.max(), 0):.3f}"
        lines.append(f"| {name} | {log_loss:.4f} | {brier:.4f} | {rank[name]:.1f} | {worse} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
