"""Bootstrap intervals: the fast path gives what resampling one by one gives, and covers the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binom

from salgp import metrics
from salgp.metrics import scores
from salgp.metrics.metric import Metric, Statistic
from salgp.metrics.scores import resample_counts

N = 80


def arrays(kind: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    s = rng.random(N).round(2)
    c = rng.random(N) < s
    if kind == "top-label":
        return s, c
    if kind == "multi-class":
        return rng.dirichlet(np.ones(3), N), rng.integers(-1, 3, N)
    if kind == "interval":
        return s, c, np.clip(s - 0.2, 0, 1), np.clip(s + 0.2, 0, 1)
    if kind == "ends":
        return np.clip(s - 0.2, 0, 1), np.clip(s + 0.2, 0, 1)
    return (c,) if kind == "correct" else (s,)


CASES = [
    (metrics.accuracy, "correct", {}),
    (metrics.aurc, "top-label", {}),
    (metrics.auroc, "top-label", {}),
    (metrics.ood_auroc, "top-label", {}),
    (metrics.brier, "multi-class", {}),
    (metrics.brier_correct, "top-label", {}),
    (metrics.classwise_ece, "multi-class", {}),
    (metrics.debiased_ece, "top-label", {}),
    (metrics.debiased_ece, "top-label", {"norm": "l2"}),
    (metrics.ece, "top-label", {}),
    (metrics.ece, "top-label", {"n_bins": 4}),
    (metrics.mce, "top-label", {}),
    (metrics.mean_variance, "std", {}),
    (metrics.nll, "multi-class", {}),
    (metrics.nll_correct, "top-label", {}),
    (metrics.interval_width, "ends", {}),
]


@pytest.mark.parametrize(("metric", "kind", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_fast_path_equals_resampling_one_by_one(metric, kind, options) -> None:
    data = arrays(kind)
    fast = metrics.bootstrap(metric, *data, n_resamples=30, seed=5, **options)
    slow = metrics.bootstrap(lambda *x, **o: metric(*x, **o), *data, n_resamples=30, seed=5, **options)
    assert isinstance(metric.formula(*data, **options), Statistic)
    assert fast.value == pytest.approx(slow.value, abs=1e-12)
    np.testing.assert_allclose(fast.replicates, slow.replicates, atol=1e-10)


def test_every_fast_metric_is_compared() -> None:
    every = {x for x in vars(metrics).values() if isinstance(x, Metric)}
    one_by_one = {metrics.smooth_ece, metrics.fpr95, metrics.interval_coverage}  # no function of weights
    plain_mean = {metrics.mean_confidence}
    assert {case[0] for case in CASES} | {metrics.adaptive_ece} | one_by_one | plain_mean == every


def test_equal_mass_bins_stay_those_of_the_whole_sample() -> None:
    """With the bins held fixed, an equal-mass resample is a resample of the bin sums."""
    s, c = arrays("top-label")
    edges = metrics.reliability_bins(s, c, 5, "mass").edges
    index = np.clip(np.searchsorted(edges, s) - 1, 0, None)
    expected = []
    for counts in np.concatenate(list(resample_counts(N, 10, seed=2))):
        row = np.repeat(np.arange(N), counts)
        gaps = [
            abs((s - c)[row][index[row] == b].mean())
            for b in range(len(edges) - 1)
            if (index[row] == b).any()
        ]
        expected.append(np.mean(gaps))
    got = metrics.bootstrap(metrics.adaptive_ece, s, c, n_resamples=10, seed=2, n_bins=5)
    np.testing.assert_allclose(got.replicates, expected)


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    s, c = arrays("top-label")
    whole = metrics.bootstrap(metrics.ece, s, c, n_resamples=20)
    monkeypatch.setattr(scores, "_CHUNK", 3 * N)
    np.testing.assert_allclose(
        metrics.bootstrap(metrics.ece, s, c, n_resamples=20).replicates, whole.replicates, rtol=1e-12
    )


@pytest.mark.parametrize("n", [1, 2, 3, 30, 400])
def test_counts_are_multinomial(n: int) -> None:
    counts = np.concatenate(list(resample_counts(n, 20_000, seed=0)))
    assert (counts.sum(axis=1) == n).all()
    each = binom(n, 1 / n)
    k = np.arange(min(n, 8) + 1)
    observed = (
        (counts[:, :, None] == k).mean(axis=(0, 1))
        if n < 100
        else np.array([(counts == j).mean() for j in k])
    )
    np.testing.assert_allclose(observed, each.pmf(k), atol=6 / np.sqrt(counts.size))
    if n > 1:  # the sum of a part is binomial: samples crowd each other out
        part = counts[:, : n // 2].sum(axis=1)
        assert part.var() == pytest.approx(n // 2 * (1 - (n // 2) / n), rel=0.06)


def test_counts_of_two_samples_have_exact_frequencies() -> None:
    counts = np.concatenate(list(resample_counts(2, 40_000, seed=1)))[:, 0]
    np.testing.assert_allclose(np.bincount(counts.astype(int)) / len(counts), [0.25, 0.5, 0.25], atol=0.01)


def test_the_same_seed_draws_the_same_samples_whatever_their_order() -> None:
    """Paired: the mean of a difference is the difference of the means, resample by resample."""
    s, _ = arrays("top-label")
    other = np.random.default_rng(5).random(N)
    one, two = (metrics.bootstrap(metrics.mean_variance, x, n_resamples=30).replicates for x in (s, other))
    both = metrics.bootstrap(lambda a, b: float((a**2 - b**2).mean()), s, other, n_resamples=30).replicates
    np.testing.assert_allclose(one - two, both, atol=1e-12)


def test_seed_decides() -> None:
    s, c = arrays("top-label")
    first, again, other = (
        metrics.bootstrap(metrics.nll_correct, s, c, n_resamples=50, seed=k) for k in (1, 1, 2)
    )
    assert (first.lower, first.upper) == (again.lower, again.upper)
    assert first.lower != other.lower


def test_interval_covers_the_true_accuracy_about_as_often_as_promised() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        result = metrics.bootstrap(metrics.accuracy, rng.random(200) < 0.7, n_resamples=200, seed=seed)
        hits += result.lower <= 0.7 <= result.upper
    assert 0.83 <= hits / 200 <= 0.96


def test_any_function_of_tensors_can_be_resampled() -> None:
    x = torch.arange(100.0)
    result = metrics.bootstrap(lambda t: t.median(), x, n_resamples=100)
    assert result.lower < result.value < result.upper
    assert result.std_error == pytest.approx(np.std(result.replicates, ddof=1))
    assert str(result).startswith("49.0000 [")


def test_undefined_resamples_are_left_out() -> None:
    result = metrics.bootstrap(metrics.auroc, [0.9, 0.8, 0.1], [1, 1, 0], n_resamples=200)
    assert np.isnan(result.replicates).any()
    assert result.lower <= result.upper
    assert np.isnan(metrics.bootstrap(metrics.auroc, [0.9, 0.8], [1, 1], n_resamples=5).upper)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (([0.5, 0.6], [1]), {}, "one common length"),
        (([], []), {}, "empty"),
        (([0.5], [1]), {"level": 1.0}, "level"),
        (([0.5], [1]), {"n_resamples": 0}, "n_resamples"),
    ],
)
def test_clear_errors(data, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.bootstrap(metrics.ece, *data, **options)


@pytest.mark.parametrize(("n", "rows"), [(1000, 262), (2**18, 1), (2**18 + 1, 1)])
def test_counts_are_made_a_chunk_at_a_time(n: int, rows: int) -> None:
    """At most 2**18 counts at once, and never less than one resample."""
    assert len(next(iter(resample_counts(n, 300, seed=0)))) == rows
