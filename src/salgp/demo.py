"""The demo: a small network learns clean digits, is calibrated, and meets photographs of digits.

The network learns from 600 hand-drawn digits and is calibrated on 600 others. It is then tried on clean
digits, and on photographs of them: turned, blurred, in shadow, noisy. They are in no augmentation.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from salgp.calibrators import Calibrator, get
from salgp.calibrators.gp.salgp import SALGP
from salgp.classifier import CalibratedClassifier, calibrate
from salgp.demo_digits import Digits, draw_digits, photograph
from salgp.features import Features
from salgp.io.files import AnyPath
from salgp.metrics import Comparison, compare
from salgp.prediction import Prediction

__all__ = ["STEPS", "TESTS", "run_demo"]

EPOCHS = 20
STEPS = EPOCHS + 6
"""Times `run_demo` reports progress."""
N_TRAIN, N_CALIBRATION, N_TEST = 600, 600, 2000
SETTINGS = {
    "network": f"small convolutional network, {N_TRAIN} training digits",
    "calibration": f"{N_CALIBRATION} clean digits",
}
TESTS = {
    "clean": "digits like those it was trained on",
    "photographed": "the same digits turned, blurred, in shadow and noisy; never seen before",
}
SURE = 0.9
"""Answers at least this confident are acted on in the demo's closing sentence."""
NETWORK, TEMPERATURE, PAPER, OURS = "network alone", "temperature", "SAL-GP (paper)", "layer evidence"

Progress = Callable[[str], object]
"""Called with a line whenever something is done."""
Predictions = Mapping[str, Prediction]
"""By the names of the methods."""


def say_nothing(line: str) -> None:
    """Where progress is not wanted."""


@dataclass(frozen=True, eq=False)
class DemoResult:
    """Results of the demo.

    Args:
        report: the page it wrote.
        scores: test set to the scores of all methods.
        words: what it means, for somebody who does not read tables.
        sets: the digits of each test set.
        predictions: test set to the predictions of all methods.
    """

    report: Path
    scores: Mapping[str, Comparison]
    words: str
    sets: Mapping[str, Digits]
    predictions: Mapping[str, Predictions]


def run_demo(out: AnyPath, force: bool = False, progress: Progress | None = None) -> DemoResult:
    """Train, calibrate, try on clean digits and on photographs, and write a report.

    Args:
        out: folder of the report.
        force: replace an existing report.
        progress: called with a line whenever something is done, `STEPS` times in all.

    Returns:
        Scores, a sentence and the report's path.
    """
    say = progress or say_nothing
    train, calibration = draw_digits(N_TRAIN, 1), draw_digits(N_CALIBRATION, 2)
    test = draw_digits(N_TEST, 3)
    say("digits drawn")
    network = train_network(train, say)
    classifier = calibrate(network, calibration.loader(), reference=train.loader())
    say("calibrated")
    baselines = _baselines(classifier.features(calibration.images), calibration.labels)
    say("fitted the baselines")
    sets = {"clean": test, "photographed": photograph(test)}
    predictions = {}
    for name, data in sets.items():
        predictions[name] = _all_methods(classifier, baselines, data)
        say(f"predicted the {name} digits")
    scores = {name: compare(found, sets[name].labels) for name, found in predictions.items()}
    shown = predictions["photographed"]
    path = _report(Path(out, "report.html"), classifier, sets["photographed"], shown, force)
    say("report written")
    words = in_plain_words(shown[NETWORK], shown[OURS], sets["photographed"].labels)
    return DemoResult(path, scores, words, sets, predictions)


def train_network(train: Digits, progress: Progress = say_nothing) -> nn.Module:
    """A small convolutional network, trained until it knows its digits by heart."""
    network = _untrained()
    optimiser = torch.optim.Adam(network.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(train.labels), generator=generator).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(train.images[rows]), train.labels[rows]).backward()
            optimiser.step()
        progress(f"training, epoch {epoch} of {EPOCHS}")
    return network.eval()


def _untrained() -> nn.Module:
    """The same at every call; the random numbers outside stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "strokes": nn.Sequential(nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.ReLU()),
            "corners": nn.Sequential(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU()),
            "shapes": nn.Sequential(nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.ReLU()),
            "whole": nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
            "digit": nn.Linear(64, 10),
        }
        return nn.Sequential(OrderedDict(parts))


def in_plain_words(before: Prediction, after: Prediction, labels: Tensor) -> str:
    """What a decision maker wants to know: how often it is right, what it claims, what happens if one acts.

    Example:
        >>> features = Features(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        >>> before = Prediction.from_probs(features, features.probs)
        >>> after = Prediction.from_confidence(features, torch.tensor([0.4, 0.6]))
        >>> print(in_plain_words(before, after, torch.tensor([1, 0])))
        The network is right on 50 % of these, and claims 97 %. Calibrated, it claims 50 %.
        Suppose you act on every answer that is at least 90 % sure.
        The network alone gives 2 such answers, and 50 % of them are wrong.
        Calibrated, it gives 0, and none of them is wrong; the rest goes to a human.
    """
    right = (before.label == labels.to(before.label.device)).double()
    lines = (
        f"The network is right on {right.mean():.0%} of these, and claims {before.confidence.mean():.0%}. "
        f"Calibrated, it claims {after.confidence.mean():.0%}.\n"
        f"Suppose you act on every answer that is at least {SURE:.0%} sure.\n"
        f"The network alone gives {_acted(before)} such answers, and {_wrong(before, right)} wrong.\n"
        f"Calibrated, it gives {_acted(after)}, and {_wrong(after, right)} wrong; the rest goes to a human."
    )
    return lines.replace("%", " %")


def _wrong(prediction: Prediction, right: Tensor) -> str:
    """The share of wrong answers among those acted on, in words that fit before "wrong"."""
    wrong = 1 - right[prediction.confidence >= SURE]
    return _of_them(float(wrong.mean()) if len(wrong) else 0.0)


def _of_them(share: float) -> str:
    if share == 0:
        return "none of them is"
    shown = f"{share:.0%}" if share >= 0.005 else "fewer than 1%"
    return f"{shown} of them are"


def _acted(prediction: Prediction) -> str:
    return f"{int((prediction.confidence >= SURE).sum()):,}"


def _baselines(features: Features, labels: Tensor) -> dict[str, Calibrator]:
    return {
        TEMPERATURE: get("temperature").fit(features, labels),
        PAPER: SALGP.paper("ml", exact_limit=500, n_inducing=256).fit(features, labels),
    }


def _all_methods(fitted: CalibratedClassifier, baselines: dict[str, Calibrator], data: Digits) -> Predictions:
    features = fitted.features(data.images)
    return {
        NETWORK: Prediction.from_probs(features, features.probs),
        **{name: baseline.predict(features) for name, baseline in baselines.items()},
        OURS: fitted.calibrator.predict(features),
    }


def _report(
    path: Path, classifier: CalibratedClassifier, digits: Digits, predictions: Predictions, force: bool
) -> Path:
    return classifier.report(
        digits.loader(),
        path,
        force=force,
        title="Photographed digits: can the network be trusted?",
        class_names=[str(k) for k in range(10)],
        images=digits.images.numpy(),
        others={name: predictions[name] for name in (TEMPERATURE, PAPER)},
        settings=SETTINGS,
    )
