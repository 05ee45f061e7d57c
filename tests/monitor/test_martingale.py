"""Evidence at any time: ranks by double loops, fairness by simulation, changes found."""

from __future__ import annotations

import math

import numpy as np
import pytest

from salgp.monitor.martingale import (
    BLOCK,
    CELLS,
    AccuracyMartingale,
    ConformalMartingale,
    _ranks,
    cells,
)


def test_cells_keep_the_order_and_stay_inside() -> None:
    values = np.sort(np.concatenate([np.random.default_rng(0).normal(size=500) * 50, [-1e12, 0, 1e12]]))
    found = cells(values)
    assert (np.diff(found) >= 0).all()
    assert found[0] == 0
    assert found[-1] == CELLS - 1
    assert len(np.unique(cells(np.linspace(0.5, 5, 400)))) > 150


def test_ranks_by_a_double_loop() -> None:
    rng = np.random.default_rng(0)
    seen, new = rng.integers(0, 12, (30, 2)), rng.integers(0, 12, (9, 2))
    seen[seen == 11] = new[new == 11] = CELLS - 1  # the last cell counts, too
    draws = rng.random((9, 2))
    found = _ranks(ConformalMartingale.start(seen).counts, new, draws)
    for j in range(2):
        past = seen[:, j].tolist()
        for t in range(9):
            past.append(new[t, j])
            larger = sum(v > new[t, j] for v in past)
            equal = sum(v == new[t, j] for v in past)
            assert found[t, j] == pytest.approx((larger + draws[t, j] * equal) / len(past))


def test_ranks_are_uniform_and_independent_where_nothing_changes() -> None:
    rng = np.random.default_rng(1)
    p = np.concatenate(
        [
            _ranks(
                ConformalMartingale.start(cells(rng.normal(size=(40, 1)))).counts,
                cells(rng.normal(size=(50, 1))),
                rng.random((50, 1)),
            )
            for _ in range(200)
        ]
    )[:, 0]
    histogram = np.histogram(p, 10, (0, 1))[0]
    assert np.abs(histogram - 1000).max() < 4.5 * math.sqrt(900)
    assert abs(np.corrcoef(p[:-1], p[1:])[0, 1]) < 0.03


def test_capital_is_fair_and_ever_exceeds_its_limit_as_rarely_as_stated() -> None:
    """300 streams of 40 reference and 1,200 new samples, looked at after every block."""
    rng = np.random.default_rng(2)
    peaks, ends = [], []
    for _ in range(300):
        evidence = ConformalMartingale.start(cells(rng.exponential(size=(40, 2))))
        for _ in range(6):
            evidence = evidence.bet(cells(rng.exponential(size=(200, 2))), rng)
        peaks.append(evidence.peak)
        ends.append(evidence.log_total)
    assert np.mean(np.array(peaks) >= math.log(10)) <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 300)
    assert 0.3 < np.exp(ends).mean() < 2.5


@pytest.mark.parametrize("quiet", [0, 20000])
@pytest.mark.parametrize("kind", ["rise", "spread"])
def test_changes_are_found_also_after_a_long_quiet_time(kind: str, quiet: int) -> None:
    rng = np.random.default_rng(3)
    evidence = ConformalMartingale.start(cells(rng.normal(size=(1000, 2)))).bet(
        cells(rng.normal(size=(quiet, 2))), rng
    )
    new = rng.normal(size=(2000, 2))
    new[:, 1] = new[:, 1] + 0.7 if kind == "rise" else 2 * new[:, 1]
    after = evidence.bet(cells(new), rng)
    assert evidence.peak < math.log(100) <= after.peak
    assert after.log_features[1] > after.log_features[0] + 3


def test_same_stream_in_batches_of_whole_blocks_gives_the_same() -> None:
    rng = np.random.default_rng(4)
    start, values = cells(rng.normal(size=(100, 1))), cells(rng.normal(size=(4 * BLOCK, 1)))
    whole = ConformalMartingale.start(start).bet(values, np.random.default_rng(5))
    parts, draws = ConformalMartingale.start(start), np.random.default_rng(5)
    for part in np.split(values, 2):
        parts = parts.bet(part, draws)
    np.testing.assert_allclose(parts.log_capital, whole.log_capital, atol=1e-10)
    assert np.array_equal(parts.counts, whole.counts)


def test_broken_promises_are_found_and_kept_ones_are_not() -> None:
    rng = np.random.default_rng(6)
    peaks = []
    for _ in range(300):
        s = rng.uniform(0.5, 1, 1500)
        peaks.append(
            AccuracyMartingale.start().bet(s, rng.random(1500) < s - 0.02, 0.02).peak
        )  # at the very limit
    assert np.mean(np.array(peaks) >= math.log(10)) <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 300)
    s = rng.uniform(0.5, 1, 1500)
    assert AccuracyMartingale.start().bet(s, rng.random(1500) < s - 0.15, 0.02).peak > math.log(1000)


@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.1, 0.11, 0.3, 0.99])
def test_no_answer_takes_all_the_capital_whatever_the_tolerance(tolerance: float) -> None:
    """Right answers of no confidence cost most; sure and wrong ones are found all the same."""
    cheap = AccuracyMartingale.start().bet(np.zeros(50), np.ones(50, dtype=bool), tolerance)
    assert np.isfinite(cheap.log_capital).all()
    late = cheap.bet(np.full(4000, 0.999), np.zeros(4000, dtype=bool), tolerance)
    assert np.isfinite(late.log_capital).all()
    assert late.peak > math.log(1000)


def test_capital_by_the_formula() -> None:
    """One block, one feature: the mean over all bets of the products, plus what is not bet."""
    rng = np.random.default_rng(7)
    seen, new, draws = rng.integers(0, 50, (20, 1)), rng.integers(0, 50, (30, 1)), np.random.default_rng(8)
    found = ConformalMartingale.start(seen).bet(new, draws)
    p = _ranks(ConformalMartingale.start(seen).counts, new, np.random.default_rng(8).random(new.shape))[:, 0]
    products = [
        np.prod(1 + stake * np.cos(k * np.pi * p))
        for k in (1, 2, 3)
        for stake in (-0.8, -0.3, -0.1, 0.1, 0.3, 0.8)
    ]
    assert found.log_total == pytest.approx(math.log(0.5 * np.mean(products) + 0.5))
    assert found.log_features[0] == pytest.approx(math.log(0.5 * np.mean(products)))
    assert found.peak == max(found.log_total, 0)


def test_restarts_by_the_formula() -> None:
    """Two blocks of labels: a bet that starts at block b has weight 1 / (b (b + 1))."""
    rng = np.random.default_rng(9)
    s, right = rng.uniform(0.5, 1, 2 * BLOCK), rng.random(2 * BLOCK) < 0.7
    found = AccuracyMartingale.start().bet(s, right, 0.02)
    gains = [
        [np.log1p(x * (s - 0.02 - right))[i : i + BLOCK].sum() for i in (0, BLOCK)]
        for x in (0.05, 0.2, 0.5, 0.9)
    ]
    total = np.mean([np.exp(a + b) / 2 + np.exp(b) / 6 for a, b in gains]) + 1 / 3
    assert found.log_total == pytest.approx(math.log(total))
    assert found.blocks == 2


@pytest.mark.parametrize("values", [np.array([0.001, 0.01, 0.1, 1.0, 10.0, 1000.0])])
def test_cells_are_steps_of_one_per_cent(values: np.ndarray) -> None:
    assert (cells(1.02 * values) > cells(values)).all()
    assert cells(np.array([1.5e6]))[0] < CELLS - 1 == cells(np.array([2e6]))[0]
