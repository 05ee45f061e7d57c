"""From a fitted method and cached test sets to records: one per data set, seed, method, test set and window.

A record says how right the confidences are (ECE, NLL of correctness), how well they rank errors (AUROC,
AURC), what the whole probability vector is worth (multi-class NLL and Brier), how far the mean confidence is
from the accuracy, and whether novelty tells unknown classes; ``ece_floor`` is what the ECE would be with
confidences that are exactly right, from the size of the set alone; ``ece_told`` what it would be if the
accuracy of the set had been told, which no method can know without labels. In domain it also keeps bootstrap
replicates; they are drawn with the same seed for every method, so that differences between methods are
paired.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit
from torch import Tensor

from salgp import metrics
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features
from salgp.prediction import Prediction
from salgp_study.suite.cache import CachedCase, CachedTest
from salgp_study.suite.methods import OURS, WINDOWS, Entry, predict_windows, takes_context

__all__ = ["Record", "ece_floor", "score_method", "scores", "told"]

Record = dict[str, Any]
RESAMPLES = 300
REPLICATED = (OURS, "temperature", "uncalibrated")
"""Methods whose in-domain scores are compared by a paired bootstrap."""
MIXED_SHARE, MIXED_WINDOW = 0.3, 50
"""Of a mixed window, the share of shifted samples, and its size."""


@dataclass(frozen=True, eq=False)
class _Fitted:
    name: str
    method: Any
    seconds: float
    windows: tuple[int, ...]


def score_method(case: CachedCase, name: str, entry: Entry) -> Iterator[Record]:
    """Fit one method on one case and score it on every test set."""
    seen = _view(case, entry.sees)
    fitted = _fit(seen, name, entry)
    in_domain = next(test for test in seen.tests if test.kind == "in")
    novelty = predict_windows(fitted.method, in_domain.features, 0).novelty
    distances = _layer_novelty(fitted.method, in_domain.features)
    for test in seen.tests:
        for window in fitted.windows:
            prediction = predict_windows(fitted.method, test.features, window)
            yield {
                **_about(case, fitted, test, window),
                **scores(prediction, test.features, test.labels),
                **_replicates(name, prediction, test),
                **(_novelty(prediction, novelty, test, in_domain) if window == 0 else {}),
                **(_best_layer(fitted.method, distances, test) if window == 0 else {}),
            }
        if MIXED_WINDOW in fitted.windows and test.kind == "shift" and test.severity in (0, 2, 3):
            yield from _mixed(case, fitted, in_domain, test)


def scores(prediction: Prediction, features: Features, labels: Tensor) -> Record:
    """How good the confidences and the probabilities are."""
    s = prediction.confidence.double().numpy()
    correct = features.correct(labels).double().numpy()
    both = 0 < correct.mean() < 1
    known = labels >= 0
    found: Record = {
        "n": len(s),
        "accuracy": correct.mean(),
        "confidence": s.mean(),
        "ece": metrics.ece(s, correct),
        "ece_floor": ece_floor(s),
        "ece_told": metrics.ece(told(s, correct.mean()), correct),
        "nll": metrics.nll_correct(s, correct),
        "auroc": metrics.auroc(s, correct) if both else float("nan"),
        "aurc": metrics.aurc(s, correct),
        "nll_probs": metrics.nll(prediction.probs[known].double(), labels[known]),
        "brier_probs": metrics.brier(prediction.probs[known].double(), labels[known]),
    }
    return {k: round(float(v), 6) for k, v in {**found, **_interval(prediction, s, correct)}.items()}


def ece_floor(confidence: np.ndarray, draws: int = 20) -> float:
    """ECE that these confidences would have on average if they were exactly right: the noise of few samples.

    Example:
        >>> ece_floor(np.full(50, 0.8)) > 5 * ece_floor(np.full(5000, 0.8))
        True
    """
    random = np.random.default_rng(0)
    right = random.random((draws, len(confidence))) < confidence
    return float(np.mean([metrics.ece(confidence, row) for row in right]))


def told(confidence: np.ndarray, accuracy: float) -> np.ndarray:
    """The confidences with one number added to all log-odds, so that their mean is the accuracy.

    Example:
        >>> float(told(np.array([0.2, 0.5, 0.9]), 0.7).mean().round(6))
        0.7
    """
    f = logit(np.clip(confidence, 1e-9, 1 - 1e-9))
    if not 0 < accuracy < 1:
        return np.full_like(f, accuracy)
    shifted = brentq(lambda a: float(expit(f + a).mean()) - accuracy, -60.0, 60.0)
    found: np.ndarray = expit(f + shifted)
    return found


def _fit(case: CachedCase, name: str, entry: Entry) -> _Fitted:
    features, labels = case.calibration
    if not entry.copies:
        first = features.families == 0 if features.families is not None else slice(None)
        features, labels = features[first], labels[first]
        features = Features(features.logits, features.layers)
    method = entry.build()
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a record says how well it went
        method.fit(features, labels, case.reference)
    seconds = time.process_time() - started
    return _Fitted(name, method, seconds, _windows(name, method) if entry.copies else (0,))


def _windows(name: str, method: Any) -> tuple[int, ...]:
    """The windows a method is scored with: all for ours, one for its ablations, none for the others."""
    if not takes_context(method):
        return (0,)
    return (0, *WINDOWS) if name == OURS else (0, MIXED_WINDOW)


def _about(case: CachedCase, fitted: _Fitted, test: CachedTest, window: int) -> Record:
    return {
        "set": case.name,
        "seed": case.seed,
        "method": fitted.name,
        "window": window,
        "test": test.name,
        "kind": test.kind,
        "like": test.like,
        "severity": test.severity,
        "fit_seconds": round(fitted.seconds, 3),
    }


def _replicates(name: str, prediction: Prediction, test: CachedTest) -> Record:
    if test.kind != "in" or name not in REPLICATED:
        return {}
    s = prediction.confidence.double().numpy()
    correct = test.features.correct(test.labels).double().numpy()
    found = {}
    for key, metric in (("ece", metrics.ece), ("nll", metrics.nll_correct), ("auroc", metrics.auroc)):
        interval = metrics.bootstrap(metric, s, correct, n_resamples=RESAMPLES, seed=0)
        found[f"{key}_replicates"] = np.round(interval.replicates, 5).tolist()
    return found


def _interval(prediction: Prediction, s: np.ndarray, correct: np.ndarray) -> Record:
    if prediction.lower is None or prediction.upper is None:
        return {}
    low, high = prediction.lower.double().numpy(), prediction.upper.double().numpy()
    return {
        "coverage": metrics.interval_coverage(s, correct, low, high),
        "width": metrics.interval_width(low, high),
    }


def _novelty(
    prediction: Prediction, in_domain_novelty: Tensor | None, test: CachedTest, in_domain: CachedTest
) -> Record:
    """AUROC of telling shifted samples from in-domain ones, or unknown classes from known ones."""
    if prediction.novelty is None or in_domain_novelty is None or test.kind == "in":
        return {}
    f, g = test.features, in_domain.features
    pairs = {
        "novelty": (in_domain_novelty, prediction.novelty),
        "softmax": (-g.confidence, -f.confidence),
        "energy": (-g.logits.logsumexp(1), -f.logits.logsumexp(1)),
    }
    return {f"{test.kind}_{name}": round(_told_apart(a, b, test), 5) for name, (a, b) in pairs.items()}


def _layer_novelty(method: Any, features: Features) -> Tensor | None:
    """Distances ``(n, L)`` of all layers by themselves, of a method that has them."""
    return method.standard_novelty(features) if isinstance(method, LayerEvidence) else None


def _best_layer(method: Any, in_domain: Tensor | None, test: CachedTest) -> Record:
    """AUROC of the layer whose distance tells best, which nobody knows beforehand."""
    here = None if in_domain is None or test.kind == "in" else _layer_novelty(method, test.features)
    if in_domain is None or here is None:
        return {}
    found = [_told_apart(a, b, test) for a, b in zip(in_domain.unbind(1), here.unbind(1), strict=True)]
    return {f"{test.kind}_layer": round(max(found), 5)}


def _told_apart(in_domain: Tensor, here: Tensor, test: CachedTest) -> float:
    """AUROC of a number, of samples in domain and of the test set: unknown classes from known ones of the
    same set, or all shifted samples from those in domain.
    """
    if test.kind == "unknown":
        return metrics.auroc(here.double().numpy(), (test.labels < 0).double().numpy())
    shifted = np.r_[np.zeros(len(in_domain)), np.ones(len(here))]
    return metrics.auroc(torch.cat([in_domain, here]).double().numpy(), shifted)


def _mixed(case: CachedCase, fitted: _Fitted, in_domain: CachedTest, test: CachedTest) -> Iterator[Record]:
    """Windows with a share of shifted samples: clean and shifted rows are scored apart."""
    few = round(MIXED_SHARE * MIXED_WINDOW)
    many = MIXED_WINDOW - few
    count = min(len(test.features) // few, len(in_domain.features) // many)
    if count == 0:
        return
    parts, shifted = [], []
    for i in range(count):
        parts.append(_bare(in_domain.features[i * many : (i + 1) * many]))
        parts.append(_bare(test.features[i * few : (i + 1) * few]))
        shifted += [False] * many + [True] * few
    prediction = predict_windows(fitted.method, Features.concatenate(parts), MIXED_WINDOW)
    is_shifted = torch.tensor(shifted)
    for kind, rows, source, size in (
        ("mixed in", ~is_shifted, in_domain, many),
        ("mixed", is_shifted, test, few),
    ):
        about = replace(test, kind=kind)
        found = scores(prediction[rows], source.features[: count * size], source.labels[: count * size])
        yield {**_about(case, fitted, about, MIXED_WINDOW), **found}


def _bare(features: Features) -> Features:
    return Features(features.logits, features.layers)


def _view(case: CachedCase, sees: str) -> CachedCase:
    """The case with some of its layers, or some of its augmented samples."""
    if sees == "all":
        return case
    if sees in ("half", "one", "two strengths"):
        features, labels = case.calibration
        rows = _some_augmented(features, sees)
        return replace(case, calibration=(features[rows], labels[rows]))

    def view(f: Features) -> Features:
        layers = {"confidence": f.confidence[:, None]} if sees == "confidence" else f.layers
        names = list(layers)[-1:]
        return replace(f, layers={name: layers[name] for name in names})

    return replace(
        case,
        reference=(view(case.reference[0]), case.reference[1]),
        calibration=(view(case.calibration[0]), case.calibration[1]),
        tests=[replace(t, features=view(t.features)) for t in case.tests],
    )


def _some_augmented(features: Features, sees: str) -> Tensor:
    """Originals, and augmented samples of half the families, of the first, or of two strengths."""
    assert features.families is not None
    assert features.strengths is not None
    if sees == "half":
        return (features.families == 0) | (features.families % 2 == 1)
    if sees == "one":
        return features.families <= 1
    levels = features.strengths.unique(sorted=True)
    wanted = levels[torch.tensor([0, len(levels) // 2, len(levels) - 1])]
    return torch.isin(features.strengths, wanted)
