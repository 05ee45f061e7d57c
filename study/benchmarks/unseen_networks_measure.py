"""Train, calibrate and score the networks of `unseen_networks.py`, and keep what is done."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from unseen_networks_backbones import NETWORKS, Drawn, UnseenNetwork, batches, draw
from unseen_networks_data import Samples

import salgp
from salgp import CalibratedClassifier, Prediction
from salgp.metrics import auroc, ece, interval_coverage, nll_correct

__all__ = [
    "COMPARED",
    "IN_DOMAIN",
    "METHODS",
    "OURS",
    "TEMPERATURE",
    "TOGETHER",
    "Result",
    "Score",
    "measured",
]

IN_DOMAIN = "in domain"
OWN, TEMPERATURE, OURS, TOGETHER = "own", "temperature", "ours", "together"
METHODS = {
    OWN: "own confidence",
    TEMPERATURE: "temperature scaling",
    OURS: "ours",
    TOGETHER: "ours, context of 50",
}
COMPARED = (TEMPERATURE, OURS, TOGETHER)
CONTEXT = 50
"""Samples that are predicted together."""


@dataclass(frozen=True)
class Score:
    """Scores of one method on one set of samples.

    ``ece`` has 15 bins of equal mass, ``ece_width`` 15 of equal width; ``coverage`` is that of the 90 %
    intervals, NaN for methods without.
    """

    accuracy: float
    confidence: float
    ece: float
    ece_width: float
    nll: float
    auroc: float
    coverage: float

    @property
    def gap(self) -> float:
        """How far the mean confidence is from the accuracy."""
        return abs(self.confidence - self.accuracy)


@dataclass(frozen=True)
class Result:
    """Scores of one network and draw, by set and method."""

    name: str
    draw: int
    source: str
    sets: dict[str, dict[str, Score]]


def measured(wheels: Path, cache: Path, draws: int) -> list[Result]:
    """Every network and draw, out of the cache where it is there."""
    source = source_hash()
    known = {(found.name, found.draw): found for found in read_cache(cache) if found.source == source}
    results = []
    for network in NETWORKS:
        for seed in range(draws):
            found = known.get((network.name, seed))
            if found is None:
                found = measure(network, wheels, seed, source)
                with cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
            results.append(found)
    return results


def measure(network: UnseenNetwork, wheels: Path, seed: int, source: str) -> Result:
    """Train one network, calibrate it and score it; says so in one line."""
    start = time.perf_counter()
    drawn = draw(network, wheels, seed)
    trained = time.perf_counter()
    fitted = calibrated(drawn)
    every = {IN_DOMAIN: drawn.test, **drawn.shifted}
    sets = {name: scored(fitted, samples) for name, samples in every.items()}
    result = Result(network.name, seed, source, sets)
    seconds = (
        f"{trained - start:.0f} s to train, {time.perf_counter() - trained:.0f} s to calibrate and score"
    )
    print(f"{_summary(result)}; {seconds}", flush=True)
    return result


def calibrated(drawn: Drawn) -> dict[str, CalibratedClassifier]:
    """The network with each method, fitted on the same calibration samples."""
    calibration = batches(drawn.calibration)
    return {
        OWN: salgp.calibrate(drawn.model, calibration, method="uncalibrated"),
        TEMPERATURE: salgp.calibrate(drawn.model, calibration, method="temperature"),
        OURS: salgp.calibrate(drawn.model, calibration, reference=batches(drawn.train)),
    }


def scored(fitted: dict[str, CalibratedClassifier], samples: Samples) -> dict[str, Score]:
    """Every method on the same samples, in random order."""
    inputs, labels = samples
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    labels, loader = labels[order], batches((inputs[order], labels[order]))
    predictions = {method: classifier.predict(loader) for method, classifier in fitted.items()}
    predictions[TOGETHER] = fitted[OURS].predict(loader, context=CONTEXT)
    return {method: score(prediction, labels) for method, prediction in predictions.items()}


def score(prediction: Prediction, labels: torch.Tensor) -> Score:
    """Confidences against whether the network's label was right."""
    confidence = prediction.confidence.double().numpy()
    correct = (prediction.label == labels).numpy()
    coverage = float("nan")
    if prediction.lower is not None and prediction.upper is not None:
        ends = prediction.lower.double().numpy(), prediction.upper.double().numpy()
        coverage = interval_coverage(confidence, correct, *ends)
    return Score(
        accuracy=float(correct.mean()),
        confidence=float(confidence.mean()),
        ece=float(ece(confidence, correct, scheme="mass")),
        ece_width=float(ece(confidence, correct)),
        nll=float(nll_correct(confidence, correct)),
        auroc=float(auroc(confidence, correct)),
        coverage=coverage,
    )


def _summary(result: Result) -> str:
    shifted = [scores for name, scores in result.sets.items() if name != IN_DOMAIN]
    errors = [fmean(scores[method].ece for scores in shifted) for method in COMPARED]
    accuracy = result.sets[IN_DOMAIN][OURS].accuracy
    shown = " / ".join(f"{error:.3f}" for error in errors)
    return f"{result.name}, draw {result.draw}: accuracy {accuracy:.3f}, ECE under shift {shown}"


def read_cache(path: Path) -> list[Result]:
    """The lines that are whole; the last may have been cut off."""
    if not path.exists():
        return []
    results = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        results.append(_result(entry))
    return results


def _result(entry: dict[str, Any]) -> Result:
    sets = {
        name: {method: Score(**numbers) for method, numbers in methods.items()}
        for name, methods in entry.pop("sets").items()
    }
    return Result(sets=sets, **entry)


def source_hash() -> str:
    """Eight letters that change with the source of the library and with what is measured here."""
    library = sorted(Path(salgp.__file__).parent.rglob("*.py"))
    measuring = sorted(Path(__file__).parent.glob("unseen_networks_*.py"))
    found = hashlib.sha256()
    for path in [*library, *measuring]:
        found.update(path.read_bytes())
    return found.hexdigest()[:8]
