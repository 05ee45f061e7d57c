"""Evidence at any time: ranks by double loops, fairness by simulation, changes found."""

from __future__ import annotations

import math

import numpy as np
import pytest

from salgp.monitor.martingale import BLOCK, CELLS, LAMBDAS, Promise, Wealth, _ranks, _stakes, cells


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
    draws = rng.random((9, 2))
    found = _ranks(Wealth.start(seen).counts, new, draws)
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
                Wealth.start(cells(rng.normal(size=(40, 1)))).counts,
                cells(rng.normal(size=(50, 1))),
                rng.random((50, 1)),
            )
            for _ in range(200)
        ]
    )[:, 0]
    histogram = np.histogram(p, 10, (0, 1))[0]
    assert np.abs(histogram - 1000).max() < 4.5 * math.sqrt(900)
    assert abs(np.corrcoef(p[:-1], p[1:])[0, 1]) < 0.03


def test_money_is_fair_and_ever_exceeds_its_limit_as_rarely_as_stated() -> None:
    """300 streams of 40 reference and 1,200 new samples, looked at after every block."""
    rng = np.random.default_rng(2)
    peaks, ends = [], []
    for _ in range(300):
        wealth = Wealth.start(cells(rng.exponential(size=(40, 2))))
        for _ in range(6):
            wealth = wealth.bet(cells(rng.exponential(size=(200, 2))), rng)
        peaks.append(wealth.peak)
        ends.append(wealth.log_total)
    assert np.mean(np.array(peaks) >= math.log(10)) <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 300)
    assert 0.3 < np.exp(ends).mean() < 2.5


@pytest.mark.parametrize("quiet", [0, 20000])
@pytest.mark.parametrize("kind", ["rise", "spread"])
def test_changes_are_found_also_after_a_long_quiet_time(kind: str, quiet: int) -> None:
    rng = np.random.default_rng(3)
    wealth = Wealth.start(cells(rng.normal(size=(1000, 2)))).bet(cells(rng.normal(size=(quiet, 2))), rng)
    new = rng.normal(size=(2000, 2))
    new[:, 1] = new[:, 1] + 0.7 if kind == "rise" else 2 * new[:, 1]
    after = wealth.bet(cells(new), rng)
    assert wealth.peak < math.log(100) <= after.peak
    assert after.log_channels[1] > after.log_channels[0] + 3


def test_same_stream_in_batches_of_whole_blocks_gives_the_same() -> None:
    rng = np.random.default_rng(4)
    start, values = cells(rng.normal(size=(100, 1))), cells(rng.normal(size=(4 * BLOCK, 1)))
    whole = Wealth.start(start).bet(values, np.random.default_rng(5))
    parts, draws = Wealth.start(start), np.random.default_rng(5)
    for part in np.split(values, 2):
        parts = parts.bet(part, draws)
    np.testing.assert_allclose(parts.log_money, whole.log_money, atol=1e-10)
    assert np.array_equal(parts.counts, whole.counts)


def test_broken_promises_are_found_and_kept_ones_are_not() -> None:
    rng = np.random.default_rng(6)
    peaks = []
    for _ in range(300):
        s = rng.uniform(0.5, 1, 1500)
        peaks.append(Promise.start().bet(s, rng.random(1500) < s - 0.02, 0.02).peak)  # at the very limit
    assert np.mean(np.array(peaks) >= math.log(10)) <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 300)
    s = rng.uniform(0.5, 1, 1500)
    assert Promise.start().bet(s, rng.random(1500) < s - 0.15, 0.02).peak > math.log(1000)


@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.1, 0.11, 0.3, 0.99])
def test_no_answer_takes_all_the_money_whatever_the_tolerance(tolerance: float) -> None:
    """Right answers of no confidence cost most; sure and wrong ones are found all the same."""
    cheap = Promise.start().bet(np.zeros(50), np.ones(50, dtype=bool), tolerance)
    assert np.isfinite(cheap.log_money).all()
    late = cheap.bet(np.full(4000, 0.999), np.zeros(4000, dtype=bool), tolerance)
    assert np.isfinite(late.log_money).all()
    assert late.peak > math.log(1000)


def test_stakes_of_usual_tolerances_are_not_lowered() -> None:
    assert np.array_equal(_stakes(0.02), LAMBDAS)
    assert np.array_equal(_stakes(0.3)[:-1], LAMBDAS[:-1])


@pytest.mark.parametrize("tolerance", [-0.01, 1.0, math.nan])
def test_tolerances_that_nothing_can_break_are_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be at least 0 and below 1"):
        Promise.start().bet(np.zeros(1), np.ones(1, dtype=bool), tolerance)
