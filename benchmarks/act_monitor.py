"""The monitor: false alarms without shift, batches until the alarm for real shifts, samples per minute."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from act_data import Suite, plain, read_suite
from scipy.stats import ks_2samp, wasserstein_distance

from salgp import Features, Monitor, Prediction
from salgp.monitor.martingale import AccuracyMartingale, ConformalMartingale, feature_cells
from salgp.prediction import LayerTerms

SET = "cifar10-resnet20-0"
SHIFTS = ("gaussian-noise-1", "gaussian-blur-1", "contrast-2", "fog-1", "jpeg-1")
BATCH = 100
REFERENCE = 2000
RATES = (0.1, 0.05, 0.01)


def alarms(data: Path, cache: Path, quick: bool) -> str:
    suite = read_suite(cache, SET)
    prediction = suite.evidence().predict(plain(suite.test[0]))
    weeks, lives, long = (200, 4, 5) if quick else (10_000, 40, 100)
    values, s = feature_cells(prediction), prediction.confidence.double().numpy()
    right = (prediction.label == suite.test[1]).numpy()
    one = [_life(values, s, right, 7, seed) for seed in range(weeks)]
    many = [_life(values, s, right, 7 * long, 10**6 + seed) for seed in range(lives)]
    baselines = _baseline_weeks(suite, 20 if quick else 100)
    lines = [
        f"No shift at all: daily batches of {BATCH}, and a reference of 1,000, drawn with replacement from "
        f"the in-domain samples of {SET}; one answer in ten gets its label. Share of monitors that ever "
        f"alarm; at most the stated rate, plus noise (99 % binomial).",
        "",
        "| stated rate | " + " | ".join(f"{rate:.0%}" for rate in RATES) + " |",
        "|---|" + "---|" * len(RATES),
        f"| {weeks:,} lives of one week | " + " | ".join(_share(one, rate) for rate in RATES) + " |",
        f"| {lives:,} lives of {long:,} weeks | " + " | ".join(_share(many, rate) for rate in RATES) + " |",
        "",
        "Baselines at their defaults, share of quiet weeks (7 batches) with at least one alarm: "
        + "; ".join(f"{name} {share:.0%}" for name, share in baselines.items())
        + ".",
    ]
    return "\n".join(lines)


def delay(data: Path, cache: Path, quick: bool) -> str:
    suite = read_suite(cache, SET)
    model = suite.evidence()
    repeats, most = (3, 10) if quick else (30, 40)
    names = ["salgp.Monitor (1 % ever)", *BASELINES]
    lines = [
        f"{SET}: reference of {REFERENCE:,} unseen in-domain samples, ten quiet batches of {BATCH}, then "
        f"shifted ones. Median number of shifted batches until the alarm ({repeats} runs; more than {most}: "
        f"never). *Early*: share of runs that alarmed in the ten quiet batches. KS: two-sample test of the "
        f"confidences, p < .05; corrected: p < .01 / 50, which is 1 % over 50 looks and no promise after "
        f"that. MMD: last layer, Gaussian kernel of median width, 100 permutations, p < .05. Evidently: its "
        f"documented default (above 1,000 reference rows the normed Wasserstein distance per column, drift "
        f"from .1 on, alarm when half of the columns drift) on confidence and last layer, as the source of "
        f"0.7.23 has it; the package needs 33 others and does not load beside our pinned pandas.",
        "",
        "| shift | accuracy | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    in_domain = suite.test[0]
    for shift in SHIFTS:
        if shift not in suite.shifted:
            continue
        away, y = suite.shifted[shift]
        runs = [_delays(model, in_domain, away, most, seed) for seed in range(repeats)]
        right = float((away.label == y).double().mean())
        cells = [_median([run[name] for run in runs], most) for name in names]
        lines.append(f"| {shift} | {right:.3f} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def speed(data: Path, cache: Path, quick: bool) -> str:
    n, size = (100_000, 10_000) if quick else (1_000_000, 10_000)
    g = torch.Generator().manual_seed(0)
    batch = _made(size, g)
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor.start(_made(REFERENCE, g), Path(folder, "watch"))
        began, processor = time.perf_counter(), time.process_time()
        for k in range(n // size):
            monitor.feed(batch, key=str(k))
        wall, used = time.perf_counter() - began, time.process_time() - processor
    return (
        f"{n:,} samples in batches of {size:,}, 10 classes, 7 features, state kept on disk, one thread: "
        f"{used:.1f} s of processor time, {wall:.1f} s by the clock: **{60 * n / wall / 1e6:.1f} million "
        f"samples a minute** by the clock, {60 * n / used / 1e6:.1f} million of processor time, on one core."
    )


def _life(
    values: np.ndarray, s: np.ndarray, right: np.ndarray, batches: int, seed: int
) -> tuple[float, float]:
    """Largest evidence of a shift and of too many errors over a life; reference and stream are drawn "
    "alike."""
    rng = np.random.default_rng(seed)
    shift, accuracy = (
        ConformalMartingale.start(values[rng.integers(0, len(s), 1000)]),
        AccuracyMartingale.start(),
    )
    for _ in range(batches):
        rows = rng.integers(0, len(s), BATCH)
        shift = shift.bet(values[rows], rng)
        some = rows[: BATCH // 10]
        accuracy = accuracy.bet(s[some], right[some], 0.02)
    return shift.peak, accuracy.peak


def _share(peaks: list[tuple[float, float]], rate: float) -> str:
    found = float(np.mean([max(both) >= math.log(2 / rate) for both in peaks]))
    noise = rate + 2.33 * math.sqrt(rate * (1 - rate) / len(peaks))
    return f"{found:.2%} (at most {noise:.2%})"


def _delays(model: object, in_domain: Features, away: Features, most: int, seed: int) -> dict[str, float]:
    """Shifted batches until each method alarms; -1 for an alarm before the shift."""
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(len(in_domain)))
    reference, rest = in_domain[order[:REFERENCE]], in_domain[order[REFERENCE:]]
    batches = [plain(rest[k * BATCH : (k + 1) * BATCH]) for k in range(10)]
    shuffled = away[torch.from_numpy(rng.permutation(len(away)))]
    n_away = min(most, len(away) // BATCH)
    batches += [plain(shuffled[k * BATCH : (k + 1) * BATCH]) for k in range(n_away)]
    monitor = Monitor.start(model.predict(plain(reference)), false_alarm=0.01, seed=seed)
    looks: dict[str, Callable[[Features], bool]] = {
        "salgp.Monitor (1 % ever)": lambda batch: bool(monitor.feed(model.predict(batch)).alarm),
        **{name: make(reference, rng) for name, make in BASELINES.items()},
    }
    return {name: _first(look, batches) for name, look in looks.items()}


def _first(look: Callable[[Features], bool], batches: list[Features]) -> float:
    early = 0.0
    for k, batch in enumerate(batches):
        if look(batch):
            if k >= 10:
                return k - 9 + early
            early = 0.001  # marked, and watched on as if it had been dismissed
    return math.inf


def _median(values: list[float], most: int) -> str:
    whole = [v if math.isinf(v) else math.floor(v) for v in values]
    early = np.mean([not math.isinf(v) and v != math.floor(v) for v in values])
    middle = float(np.median(whole))
    text = f"never in {most}" if math.isinf(middle) else f"{middle:.0f}"
    return text if early == 0 else f"{text} (early {early:.0%})"


def _baseline_weeks(suite: Suite, weeks: int) -> dict[str, float]:
    in_domain = plain(suite.test[0])
    found: dict[str, list[bool]] = {name: [] for name in BASELINES}
    for seed in range(weeks):
        rng = np.random.default_rng(seed)
        order = torch.from_numpy(rng.permutation(len(in_domain)))
        reference = in_domain[order[:REFERENCE]]
        batches = [in_domain[order[REFERENCE + k * BATCH :][:BATCH]] for k in range(7)]
        for name, make in BASELINES.items():
            if name.startswith("MMD") and seed >= 60:
                continue
            look = make(reference, rng)
            found[name].append(any(look(batch) for batch in batches))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _ks(reference: Features, rng: np.random.Generator) -> Callable[[Features], bool]:
    in_domain = reference.confidence.numpy()
    return lambda batch: bool(ks_2samp(in_domain, batch.confidence.numpy()).pvalue < 0.05)


def _ks_corrected(reference: Features, rng: np.random.Generator) -> Callable[[Features], bool]:
    in_domain = reference.confidence.numpy()
    return lambda batch: bool(ks_2samp(in_domain, batch.confidence.numpy()).pvalue < 0.01 / 50)


def _mmd(reference: Features, rng: np.random.Generator) -> Callable[[Features], bool]:
    x = _last_layer(reference)[:300]
    width = np.median(_square(x, x)[np.triu_indices(len(x), 1)])

    def look(batch: Features) -> bool:
        both = np.concatenate([x, _last_layer(batch)])
        K = np.exp(-_square(both, both) / width)
        inside = np.arange(len(both)) < len(x)
        seen = _distance(K, inside)
        drawn = [_distance(K, rng.permutation(inside)) for _ in range(100)]
        return (1 + sum(d >= seen for d in drawn)) / 101 < 0.05

    return look


def _evidently(reference: Features, rng: np.random.Generator) -> Callable[[Features], bool]:
    in_domain = np.column_stack([reference.confidence.numpy(), _last_layer(reference)])
    scale = np.maximum(in_domain.std(0), 1e-3)

    def look(batch: Features) -> bool:
        now = np.column_stack([batch.confidence.numpy(), _last_layer(batch)])
        shifted = [
            wasserstein_distance(in_domain[:, j], now[:, j]) / scale[j] >= 0.1
            for j in range(in_domain.shape[1])
        ]
        return float(np.mean(shifted)) >= 0.5

    return look


BASELINES = {
    "KS, confidence": _ks,
    "KS, corrected": _ks_corrected,
    "MMD, last layer": _mmd,
    "Evidently's default": _evidently,
}


def _last_layer(features: Features) -> np.ndarray:
    return features.layers[features.layer_names[-1]].double().numpy()


def _square(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T


def _distance(K: np.ndarray, inside: np.ndarray) -> float:
    a, b = inside / inside.sum(), ~inside / (~inside).sum()
    w = a - b
    return float(w @ K @ w)


def _made(n: int, g: torch.Generator) -> Prediction:
    s = 0.1 + 0.9 * torch.rand(n, generator=g, dtype=torch.float64)
    label = torch.randint(0, 10, (n,), generator=g)
    probs = ((1 - s) / 9)[:, None].repeat(1, 10).scatter(1, label[:, None], s[:, None])
    terms = LayerTerms(tuple("abcd"), torch.randn(n, 4, generator=g, dtype=torch.float64))
    return Prediction(label, probs, s, layers=terms, novelty=torch.randn(n, generator=g))
