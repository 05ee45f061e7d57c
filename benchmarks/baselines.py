"""Time of the baseline calibrators against netcal and scikit-learn, for the same method on the same samples.

Everybody starts from the same logits and ends with calibrated ``(n, c)`` probabilities. A reference that
wants confidences gets the softmax and its maximum first, and its answer is put back into the rows, other
classes scaled in proportion; that is part of its time, as it is of ours. All run on one thread; processor
time is counted, ours and theirs take turns, and the median of ``--repeat`` rounds is given, so that other
work on the machine meets both alike. The ratio is the reference's time over ours: above 1 we are faster. The
last column is the mean difference of the two answers in the confidence of the label: the same method, up to
what each library does at the edges (smoothing, prior, optimiser).

    python benchmarks/baselines.py                          # 5,000 x 100, under two minutes
    python benchmarks/baselines.py --n 50000 --c 1000 --write benchmarks/results/baselines.md    # about ten
    minutes, 3 GB python benchmarks/baselines.py --only temperature platt
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from history import record_page
from sklearn.calibration import _SigmoidCalibration, _TemperatureScaling
from sklearn.isotonic import IsotonicRegression
from threadpoolctl import threadpool_limits

from salgp import Features, calibrators

Predict = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Reference:
    """``fit(logits, labels)`` returns the function that predicts ``(n, c)`` probabilities."""

    method: str
    arguments: dict[str, Any]
    library: str
    fit: Callable[[np.ndarray, np.ndarray], Predict]

    @property
    def title(self) -> str:
        return " ".join([self.method, *map(str, self.arguments.values())])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=5000, help="samples")
    parser.add_argument("--c", type=int, default=100, help="classes")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--only", nargs="*", help="names of methods")
    parser.add_argument("--write", type=Path, help="file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logits, labels = draw(args.n, args.c)
    lines = header(args.n, args.c, args.repeat)
    print("\n".join(lines))
    with threadpool_limits(1):
        for reference in references():
            if not args.only or reference.method in args.only:
                lines.append(row(reference, logits, labels, args.repeat))
                print(lines[-1], flush=True)
    if args.write:
        args.write.write_text("\n".join([*lines, ""]), encoding="utf-8")
        record_page("baselines", "\n".join(lines))


def header(n: int, c: int, repeat: int) -> list[str]:
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "numpy", "scipy", "scikit-learn", "netcal")
    )
    return [
        f"# Baselines against netcal and scikit-learn, {n:,} x {c:,}, measured by `python "
        f"benchmarks/baselines.py --n {n} --c {c}`\n",
        f"Single-precision logits in, calibrated probabilities out; processor seconds on one "
        f"thread, in turns, median of {repeat} rounds.",
        f"Python {platform.python_version()}, {libraries}. A ratio above 1: we are faster.\n",
        "| method | reference | fit ours s | fit reference s | ratio | predict ours s | predict reference "
        "s | ratio | mean difference of confidence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


def row(reference: Reference, logits: np.ndarray, labels: np.ndarray, repeat: int) -> str:
    """Fit and predict by turns."""
    ours, theirs = [], []
    for _ in range(repeat):
        a = timed(lambda z, y: fit_ours(reference, z, y), logits, labels)
        with quiet():
            b = timed(reference.fit, logits, labels)
        ours.append(a[:2])
        theirs.append(b[:2])
    difference = float(np.abs(a[2] - b[2]).mean())
    cells = [f"{x:.3f} | {y:.3f} | {y / x:.1f}" for x, y in zip(medians(ours), medians(theirs), strict=True)]
    return f"| {reference.title} | {reference.library} | {' | '.join(cells)} | {difference:.1e} |"


def medians(rounds: list[tuple[float, float]]) -> list[float]:
    return [median(column) for column in zip(*rounds, strict=True)]


def draw(n: int, c: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overconfident logits: labels come from a softmax at temperature 1.5."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, c, generator=generator) * 3
    labels = torch.multinomial(torch.softmax(z / 1.5, dim=1), 1, generator=generator)[:, 0]
    return z.numpy(), labels.numpy()


def timed(
    fit: Callable[[np.ndarray, np.ndarray], Predict], logits: np.ndarray, labels: np.ndarray
) -> tuple[float, float, np.ndarray]:
    """Seconds to fit and to predict, and the confidence of the label."""
    np.ones(
        3 * logits.size, dtype=logits.dtype
    )  # touched and let go: nobody pays for being the first to use the machine's memory
    start = time.process_time()
    predict = fit(logits, labels)
    middle = time.process_time()
    probs = predict(logits)
    end = time.process_time()
    return middle - start, end - middle, probs[np.arange(len(probs)), logits.argmax(axis=1)]


def fit_ours(reference: Reference, logits: np.ndarray, labels: np.ndarray) -> Predict:
    fitted = calibrators.get(reference.method, **reference.arguments).fit(
        Features(torch.from_numpy(logits)), labels
    )
    return lambda z: fitted.predict(Features(torch.from_numpy(z))).probs.numpy()


def references() -> list[Reference]:
    from netcal import binning, scaling

    return [
        Reference("temperature", {}, "scikit-learn", fit_sklearn_temperature),
        Reference(
            "temperature",
            {},
            "netcal",
            lambda z, y: on_probabilities(scaling.TemperatureScaling(method="mle"), z, y, np.float64),
        ),
        Reference("platt", {}, "scikit-learn", lambda z, y: on_log_odds(_SigmoidCalibration(), z, y)),
        Reference(
            "platt", {}, "netcal", lambda z, y: on_confidence(scaling.LogisticCalibration(method="mle"), z, y)
        ),
        Reference(
            "beta", {}, "netcal", lambda z, y: on_confidence(scaling.BetaCalibration(method="mle"), z, y)
        ),
        Reference(
            "histogram", {}, "netcal", lambda z, y: on_confidence(binning.HistogramBinning(bins=15), z, y)
        ),
        Reference("bbq", {}, "netcal", lambda z, y: on_confidence(binning.BBQ(), z, y)),
        Reference(
            "isotonic",
            {},
            "scikit-learn",
            lambda z, y: on_confidence(IsotonicRegression(out_of_bounds="clip"), z, y),
        ),
        Reference("isotonic", {}, "netcal", lambda z, y: on_confidence(binning.IsotonicRegression(), z, y)),
    ]


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(logits), dim=1).numpy()


def on_confidence(method: Any, logits: np.ndarray, labels: np.ndarray) -> Predict:
    """A reference that maps the top-label confidence; in double precision, since netcal's optimiser stands
    still in single.
    """
    probs = softmax(logits)
    method.fit(probs.max(axis=1).astype(np.float64), (probs.argmax(axis=1) == labels).astype(int))

    def predict(z: np.ndarray) -> np.ndarray:
        p = softmax(z)
        return put_back(p, method.transform(p.max(axis=1).astype(np.float64)))

    return predict


def on_log_odds(method: Any, logits: np.ndarray, labels: np.ndarray) -> Predict:
    """A reference that maps a decision score: the log-odds of the top label."""

    def scores(p: np.ndarray) -> np.ndarray:
        s = np.clip(p.max(axis=1).astype(np.float64), 1e-12, 1 - 1e-12)
        return np.log(s) - np.log1p(-s)

    probs = softmax(logits)
    method.fit(scores(probs), (probs.argmax(axis=1) == labels).astype(int))

    def predict(z: np.ndarray) -> np.ndarray:
        p = softmax(z)
        return put_back(p, method.predict(scores(p)))

    return predict


def on_probabilities(method: Any, logits: np.ndarray, labels: np.ndarray, dtype: Any = np.float32) -> Predict:
    """A reference that maps whole probability vectors; netcal's temperature stays 1 without a word unless
    they are double.
    """
    method.fit(softmax(logits).astype(dtype), labels)
    return lambda z: method.transform(softmax(z).astype(dtype))


def fit_sklearn_temperature(logits: np.ndarray, labels: np.ndarray) -> Predict:
    return _TemperatureScaling().fit(logits, labels).predict


def put_back(probs: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """Put the confidence on the top label and scale the other classes in proportion, in place and in single
    precision.
    """
    rows, top = np.arange(len(probs)), probs.argmax(axis=1)
    rest = np.maximum(1 - probs[rows, top], 1e-12)
    probs *= ((1 - confidence) / rest).astype(probs.dtype)[:, None]
    probs[rows, top] = confidence
    return probs


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """References print bars, warn, and write log folders where they stand: let them do it elsewhere."""
    here = os.getcwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


if __name__ == "__main__":
    main()
