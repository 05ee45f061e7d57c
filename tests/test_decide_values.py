"""Rules against loops over every threshold, exact tails from scipy.stats, and sentences word by word."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom
from sealing import edit_header

from salgp import FormatError, Prediction
from salgp.decide import ALWAYS, NEVER, Rule, choose_threshold, samples_needed


def drawn(
    n: int, seed: int, classes: int = 2, power: float = 0.3
) -> tuple[Prediction, torch.Tensor, np.ndarray]:
    """A prediction, true labels and which answers are wrong."""
    rng = np.random.default_rng(seed)
    s = np.round(0.5 + 0.5 * rng.random(n) ** power, 3)  # with ties
    wrong = rng.random(n) > s
    label = rng.integers(0, classes, n)
    probs = np.repeat(((1 - s) / (classes - 1))[:, None], classes, 1)
    probs[np.arange(n), label] = s
    truth = np.where(wrong, (label + 1) % classes, label)
    made = Prediction(torch.tensor(label), torch.tensor(probs), torch.tensor(s))
    return made, torch.tensor(truth), wrong


def fewest(error: float, doubt: float, observed: float = 0.0) -> int:
    """Samples needed, one by one."""
    n = 1
    while binom.cdf(math.ceil(observed * n), n, error) > doubt:
        n += 1
    return n


def by_loops(s: np.ndarray, wrong: np.ndarray, error: float, assurance: float) -> tuple[float, int, int]:
    """Walks from six starts, as the module's text says it."""
    n, doubt = len(s), 1 - assurance
    falling = sorted(s, reverse=True)
    first = fewest(error, doubt)
    counts = sorted({min(math.ceil(first * 1.002**i), n) for i in range(4000)}) if first <= n else []
    starts = [0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 2]
    behind = waiting = 0.0
    best, walking = (NEVER, 0, 0), False
    for low, high in itertools.pairwise(starts):
        part = waiting + doubt / 6
        at_start, enough = True, fewest(error, part)
        for m in (m for m in counts if low <= m / n < high):
            limit = falling[m] if m < n else ALWAYS
            kept = s > limit
            if kept.sum() < enough:
                continue
            p = binom.cdf(wrong[kept].sum(), kept.sum(), error)
            walking = (walking and p <= behind + part) or (at_start and p <= part)
            at_start = False
            if walking:
                best = (limit, int(kept.sum()), int(wrong[kept].sum()))
        if at_start:
            waiting = part
        else:
            behind, waiting = behind + part, 0.0
    return best


@pytest.mark.parametrize("n", [30, 130, 700])
@pytest.mark.parametrize(("error", "assurance"), [(0.1, 0.95), (0.2, 0.8), (0.05, 0.9)])
def test_the_rule_is_that_of_a_loop(n: int, error: float, assurance: float) -> None:
    found = []
    for seed in range(4):
        prediction, truth, wrong = drawn(n, seed, power=0.3 if seed % 2 else 0.1)
        rule = choose_threshold(prediction, truth, error, assurance)
        expected = by_loops(prediction.confidence.numpy(), wrong, error, assurance)
        assert (rule.threshold[0], rule.kept, rule.wrong) == expected
        assert (rule.error, rule.assurance, rule.n) == (error, assurance, n)
        found.append(rule.reachable)
    assert any(found) or n == 30 or error == 0.05


@pytest.mark.parametrize(("price", "ask"), [(10.0, 1.0), (5.0, 2.0), (3.0, 2.9), (100.0, 1.0)])
def test_the_cheapest_rule_and_its_bound_by_loops(price: float, ask: float) -> None:
    prediction, truth, wrong = drawn(400, 5)
    s = prediction.confidence.numpy()
    odds = (price - ask) / ask
    limits = [-1.0, *(1 / (1 + math.exp(-g) / odds) for g in np.linspace(-3, 3, 25)), 1.0]
    costs = []
    for limit in limits:
        costs.append(sum(ask if c <= limit else price * w for c, w in zip(s, wrong, strict=True)) / 400)
    chosen = int(np.argmin(costs))
    acted = s > limits[chosen]
    rule = choose_threshold(prediction, truth, cost_wrong=price, cost_ask=ask)
    assert rule.threshold[0] == pytest.approx(limits[chosen], abs=1e-12)
    assert (rule.kept, rule.wrong) == (int(acted.sum()), int(wrong[acted].sum()))
    doubt = 0.05 / (2 * 27)
    bound = 0.0
    for each, count in ((ask, 400 - rule.kept), (price, rule.wrong)):
        bound += each * (1.0 if count == 400 else beta.ppf(1 - doubt, count + 1, 400 - count))
    assert rule.cost_bound == pytest.approx(min(bound, price), rel=1e-9)
    assert rule.cost_bound >= costs[chosen]
    assert (rule.error, rule.n, rule.cost_wrong, rule.cost_ask) == (None, 400, price, ask)


@pytest.mark.parametrize(
    ("error", "assurance", "observed"),
    [(0.05, 0.95, 0.0), (0.05, 0.95, 0.03), (0.2, 0.9, 0.1), (0.5, 0.5, 0.0)],
)
def test_samples_needed_one_by_one(error: float, assurance: float, observed: float) -> None:
    found = samples_needed(error, assurance, observed)
    assert binom.cdf(math.ceil(observed * found), found, error) <= 1 - assurance
    if observed == 0:
        assert found == fewest(error, 1 - assurance)
    else:
        assert binom.cdf(math.ceil(observed * (found - 1)), found - 1, error) > 1 - assurance


@pytest.mark.parametrize("n", [105, 123, 150])
def test_how_many_labelled_samples_would_be_needed(n: int) -> None:
    error = 0.05
    s = torch.linspace(0.99, 0.5, n, dtype=torch.float64)
    wrong = torch.arange(n) < 4  # the most confident ones
    prediction = Prediction(torch.zeros(n, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
    rule = choose_threshold(prediction, wrong.long(), error)
    hopeful = [m for m in range(fewest(error, 0.05), n + 1) if 4.5 / (m + 1) < 0.9 * error]
    some = hopeful[:: len(hopeful) // 20 + 1]
    totals = [samples_needed(error, 0.95, 4.5 / (m + 1)) * n / m for m in some]
    assert not rule.reachable
    assert rule.needed == max(n + 1, math.ceil(min(totals)))
    assert rule.needed > n
    assert (rule.kept, rule.wrong, rule.n, rule.coverage) == (0, 0, n, 0.0)
    assert rule.promise == (
        f"No rule: on {n} labelled samples no threshold keeps the error at or below 5 % with 95% assurance; "
        f"about {rule.needed:,} labelled samples would be needed."
    )


def test_each_class_gets_its_share_of_the_doubt() -> None:
    prediction, truth, _ = drawn(900, 2, classes=3)
    rule = choose_threshold(prediction, truth, 0.15, 0.9, per_class=True)
    alone = []
    for number in range(3):
        own = (prediction.label == number).numpy()
        part = Prediction(prediction.label[own], prediction.probs[own], prediction.confidence[own])
        alone.append(choose_threshold(part, truth[own], 0.15, 1 - 0.1 / 3))
    assert rule.threshold == tuple(one.threshold[0] for one in alone)
    assert (rule.kept, rule.wrong) == (sum(one.kept for one in alone), sum(one.wrong for one in alone))
    assert (rule.error, rule.assurance, rule.n) == (0.15, 0.9, 900)
    assert rule.reachable


def test_sentences() -> None:
    plain = Rule((0.9,), error=0.05, n=1000, kept=700, wrong=20)
    assert plain.promise == (
        "Act above a confidence of 0.9: at most 5 % of the answers acted on are wrong, with 95% assurance; "
        "on 1,000 labelled samples it acted on 70.0%."
    )
    classes = Rule((0.9, NEVER, 0.75), error=0.05, n=1000, kept=700, wrong=20)
    assert classes.promise.startswith(
        "Act above its class's threshold (0.75 to 0.9; never for 1 of 3 classes): at most 5 % of the answers "
        "acted on of each class are wrong"
    )
    both = Rule((0.8, ALWAYS), error=0.05, n=10, kept=7)
    assert "(0 to 0.8)" in both.promise
    assert "of each class" in both.promise
    cost = Rule((ALWAYS,), n=10, kept=10, cost_wrong=10.0, cost_ask=1.0, cost_bound=0.123456)
    assert cost.promise == (
        "Act always: the mean cost per sample is at most 0.123 with 95% assurance; "
        "on 10 labelled samples it acted on 100.0%."
    )
    never = Rule((NEVER,), n=10, cost_wrong=10.0, cost_ask=1.0, cost_bound=1.0)
    assert never.promise == (
        "Always ask: on 10 labelled samples acting never paid at these prices; "
        "the mean cost per sample is at most 1."
    )
    assert Rule((0.5,)).coverage == 0.0


def test_a_class_without_samples_and_rules_of_a_newer_version(tmp_path: Path) -> None:
    prediction, truth, _ = drawn(300, 2)
    three = Prediction(
        prediction.label, torch.nn.functional.pad(prediction.probs, (0, 1)), prediction.confidence
    )
    rule = choose_threshold(three, truth, 0.2, per_class=True)
    assert rule.threshold[2] == NEVER
    rule.save(tmp_path / "rule.json")
    edit_header(tmp_path / "rule.json", lambda value: {**value, "format_version": 2})
    with pytest.raises(FormatError, match="newer version"):
        Rule.load(tmp_path / "rule.json")
