"""Gate, experts, environment and what a fit says of itself, derived once more: loops, SciPy, known cases."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm
from test_calibrator import fitted, world
from test_environment import made_rows
from torch import Tensor

from salgp import metrics
from salgp.calibrators.evidence.check import LeftOut, check_table, mixed_log_odds, unseen_spread, verdict
from salgp.calibrators.evidence.environment import Environment, Surroundings, fit_environment
from salgp.calibrators.evidence.experts import Expert, InDomain, fit_in_domain, fit_shift, mixed
from salgp.calibrators.evidence.gate import Gate, choose_guard, fit_gate
from salgp.calibrators.evidence.model import LogOdds
from salgp.calibrators.evidence.reference import layer_evidence
from salgp.calibrators.evidence.rows import FittedRows, View
from salgp.calibrators.evidence.shift import _permutation_p
from salgp.calibrators.evidence.strangeness import energy, fit_strangeness
from salgp.gp.logistic import logistic


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def plus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def a_view(n: int = 12, seed: int = 0, layers: int = 2) -> View:
    label = torch.randint(3, (n,), generator=torch.Generator().manual_seed(seed))
    own = torch.stack([6 * random(n, seed=seed), random(n, seed=seed + 3)], dim=1)
    return View(own, 4 * random(n, layers, seed=seed + 1), 3 * random(n, layers, seed=seed + 2), label)


def likeliest(
    X: np.ndarray, y: np.ndarray, weight: np.ndarray, prior: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """Weights of a logistic regression by a general optimiser."""

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        f = X @ w + offset
        slope = X.T @ (weight * (sigmoid(f) - y)) + prior * w
        return float((weight * (plus(f) - y * f)).sum() + 0.5 * (prior * w * w).sum()), slope

    start = np.zeros(X.shape[1])
    options = {"maxiter": 5000, "gtol": 1e-10, "ftol": 1e-16}
    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x)


def gate_inputs(view: View, place: Tensor) -> np.ndarray:
    x = np.clip(place.double().numpy(), -6, 6)
    N = view.novelty.numpy()
    parts = [x, x**2, np.clip(view.agreement.numpy(), -6, 6), np.log1p(plus(N)), np.clip(N, -4, 4)]
    return np.concatenate([*parts, np.clip(view.t.numpy(), -10, 10)[:, None]], axis=1)


def test_a_gate_is_a_logistic_regression_beyond_its_guard() -> None:
    view, place = a_view(), 8 * random(12, 3, seed=9)
    p = gate_inputs(view, place).shape[1]
    gate = Gate(random(p), 0.3 + random(p, seed=1).abs(), 0.3 * random(1 + p, seed=2), 0.4)
    x = np.clip((gate_inputs(view, place) - gate.centre.numpy()) / gate.scale.numpy(), -8, 8)
    share = sigmoid(gate.weights[0].numpy() + x @ gate.weights[1:].numpy())
    expected = np.maximum((share - 0.4) / (1 - 0.4), 0)
    np.testing.assert_allclose(gate(view, place), expected, rtol=1e-9)
    assert 0 < (expected > 0).sum() < 12


def test_logistic_regression_by_another_optimiser() -> None:
    X, y = random(80, 4), (random(80, seed=1) > 0).double()
    weight, prior, offset = random(80, seed=2).abs(), torch.tensor([0.1, 2.0, 0.5, 1e-3]), random(80, seed=3)
    found = logistic(X, y, weight, prior.double(), offset)
    expected = likeliest(*(x.numpy() for x in (X, y, weight, prior.double(), offset)))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    plain = logistic(X, y, weight, prior.double())
    np.testing.assert_allclose(
        plain,
        likeliest(X.numpy(), y.numpy(), weight.numpy(), prior.double().numpy(), np.zeros(80)),
        atol=1e-5,
    )


def test_a_fitted_gate_by_loops() -> None:
    rows, inside, shift = made_rows(60)
    place = random(len(rows), 2, seed=5) + 0.7 * rows.is_copy[:, None]
    gate = fit_gate(rows, place, inside, shift, 0.9)
    x, copy = gate_inputs(rows.view, place), rows.is_copy.numpy()
    centre, scale = x[~copy].mean(0), np.maximum(x[~copy].std(0), 1e-6)
    np.testing.assert_allclose(gate.centre, centre, atol=1e-9)
    np.testing.assert_allclose(gate.scale, scale, atol=1e-9)
    X = np.column_stack([np.ones(len(x)), np.clip((x - centre) / scale, -8, 8)])

    def learned(some: np.ndarray) -> np.ndarray:
        among = copy[some].mean()
        weight = np.where(copy[some], 0.1 / among, 0.9 / (1 - among))
        prior = np.r_[1e-3, np.full(X.shape[1] - 1, 20.0)]
        return likeliest(X[some], copy[some].astype(float), weight, prior, np.zeros(some.sum()))

    np.testing.assert_allclose(gate.weights, learned(np.ones(len(x), bool)), atol=1e-5)
    t, group = rows.view.t.numpy(), rows.group.numpy()
    rank = {g: k for k, g in enumerate(group[~copy][np.argsort(t[~copy], kind="stable")])}
    fold = np.array([rank[g] % 3 for g in group])
    unseen = np.zeros(len(x))
    for k in range(3):
        unseen[fold == k] = sigmoid(X[fold == k] @ learned(fold != k))
    assert gate.guard == pytest.approx(np.quantile(unseen[~copy], 0.9), abs=1e-6)
    chosen = fit_gate(rows, place, inside, shift)
    first = ~rows.is_copy
    expected = choose_guard(torch.tensor(unseen[~copy]), inside[first], shift[first], rows.correct[first])
    assert chosen.guard == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_guard_opens_where_handing_over_surely_helps(seed: int) -> None:
    share = 0.9 * torch.rand(300, generator=torch.Generator().manual_seed(seed)).double()
    inside, shift = 2 + random(300, seed=seed), random(300, seed=seed + 50) - 1.0
    hard = share.numpy() > (0.6, 0.85, 0.88, 0.9, 0.75, 0.89)[seed]
    correct = torch.tensor(np.where(hard, 0.0, 1.0))
    before = plus(inside.numpy()) - correct.numpy() * inside.numpy()
    expected = np.quantile(share.numpy(), 0.99)
    for tried in (0.9, 0.95, 0.98):
        guard = np.quantile(share.numpy(), tried)
        lean = np.maximum((share.numpy() - guard) / (1 - guard), 0)
        f = inside.numpy() + lean * (shift - inside).numpy()
        change = plus(f) - correct.numpy() * f - before
        if change.mean() + change.std(ddof=1) / math.sqrt(300) <= 0 and (change != 0).any():
            expected = guard
            break
    assert choose_guard(share, inside, shift, correct) == pytest.approx(expected, abs=1e-9)
    always = torch.ones(300).double()
    assert choose_guard(always, inside, shift, always) == 0.99  # never a wall


def a_posterior(p: int = 7, C: int = 3) -> LogOdds:
    R = random(p, p, seed=7)
    return LogOdds(
        random(p, seed=8).abs(),
        random(C, seed=9),
        R @ R.T / p,
        random(C, p, seed=10),
        random(C, seed=11).abs(),
    )


def test_an_opinion_and_its_terms_by_loops() -> None:
    view, model, typical = a_view(9), a_posterior(), random(7, seed=12)
    expert = Expert(model, typical, 3.0, False)
    X = expert.columns(view)
    assert float(X[:, 1].abs().max()) == 3.0
    found, S = expert.opinion(view), model.covariance.numpy()
    for i in range(9):
        x, c = X[i].numpy(), int(view.label[i])
        pull, w = model.pull[c].numpy(), model.weights.numpy()
        assert float(found.mean[i]) == pytest.approx(x @ w + float(model.offsets[c]))
        phi = x - pull
        assert float(found.variance[i]) == pytest.approx(phi @ S @ phi + float(model.spare[c]))
        assert float(found.terms[i, 0]) == pytest.approx(float(model.offsets[c]))
        assert float(found.term_variance[i, 0]) == pytest.approx(pull @ S @ pull + float(model.spare[c]))
        off = x - typical.numpy()
        for k in range(2):
            own = np.zeros(7)
            own[3 + k], own[5 + k] = off[3 + k], off[5 + k]
            assert float(found.terms[i, 1 + k]) == pytest.approx(own @ w)
            assert float(found.term_variance[i, 1 + k]) == pytest.approx(own @ S @ own)
    np.testing.assert_allclose(expert.log_odds(view), found.mean)


@pytest.mark.parametrize("trust", [0.0, 0.25, 1.0])
def test_temperature_scaling_and_layers_are_mixed_by_their_trust(trust: float) -> None:
    view = a_view(9)
    expert, plain = (
        Expert(a_posterior(), random(7, seed=12), 3.0, True),
        torch.tensor([[0.3, 0.1], [0.1, 0.2]]),
    )
    found, layers = InDomain(expert, trust, plain.double()).opinion(view), expert.opinion(view)
    t = view.t.numpy()
    own = 0.3 + 2 * 0.1 * t + 0.2 * t**2
    np.testing.assert_allclose(found.mean, (1 - trust) * t + trust * layers.mean.numpy())
    np.testing.assert_allclose(
        found.variance, (1 - trust) ** 2 * own + trust**2 * layers.variance.numpy(), rtol=1e-6
    )
    np.testing.assert_allclose(found.terms, trust * layers.terms.numpy())
    np.testing.assert_allclose(found.term_variance, trust**2 * layers.term_variance.numpy())
    np.testing.assert_allclose(InDomain(expert, trust, plain.double()).log_odds(view), found.mean)


def test_two_opinions_mixed() -> None:
    view, lean = a_view(5), torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0]).double()
    one = Expert(a_posterior(), random(7, seed=12), 3.0, True).opinion(view)
    other = Expert(a_posterior(), random(7, seed=13), 9.0, False).opinion(view)
    found = mixed(one, other, lean, 0.7)
    a = lean.numpy()
    for name, power in (("mean", 1), ("variance", 2)):
        first, second = getattr(one, name).numpy(), getattr(other, name).numpy()
        extra = 0.7 * a**2 if power == 2 else 0.0
        np.testing.assert_allclose(getattr(found, name), (1 - a) ** power * first + a**power * second + extra)
    b = a[:, None]
    np.testing.assert_allclose(found.terms, (1 - b) * one.terms.numpy() + b * other.terms.numpy())
    expected = (1 - b) ** 2 * one.term_variance.numpy() + b**2 * other.term_variance.numpy()
    np.testing.assert_allclose(found.term_variance, expected)


def test_what_each_expert_learns_from() -> None:
    """Rows, weights, bounds and priors of the two fits, by a general optimiser."""
    rows, _, _ = made_rows(40)
    columns = {}
    for persistent, largest in ((True, 20.0), (False, 4.0)):
        N, A = rows.view.novelty.numpy(), rows.view.agreement.numpy()
        high = np.log1p(plus(N))
        high = np.minimum.accumulate(high[:, ::-1], axis=1)[:, ::-1] if persistent else high
        said = np.clip(rows.view.own.numpy(), -largest, largest)
        own = [np.ones(len(said)), *said.T]
        columns[persistent] = np.column_stack([*own, A / (1 + 0.3 * plus(N - 1)), -high])
    correct, copy = rows.correct.numpy(), rows.is_copy.numpy()

    def weights(clean: float, caution: float) -> np.ndarray:
        of_copies = copy * np.where(correct > 0, 1.0, caution)
        return np.where(copy, 40 * (1 - clean) * of_copies / of_copies.sum(), clean)

    inside, f, _ = fit_in_domain(rows, 3, clean=0.8, ridge=0.2, class_spread=0.7, trust=0.5)
    shift = fit_shift(rows, 3, caution=1.5, ridge=0.3)
    cases = (
        (inside.expert, columns[True], weights(0.8, 1.0) / 0.8, 0.2, 0.7),
        (shift, columns[False], weights(0.05, 1.5), 0.3, 1.0),
    )
    label = rows.view.label.numpy()
    for expert, X, weight, ridge, spread in cases:
        w, offsets = expert.posterior.weights.numpy(), expert.posterior.offsets.numpy()
        np.testing.assert_allclose(expert.columns(rows.view), X, atol=1e-12)
        np.testing.assert_allclose(expert.typical, X[~copy].mean(0), atol=1e-12)
        wrong = weight * (sigmoid(X @ w + offsets[label]) - correct)
        prior = np.r_[1e-2, 0.2 * ridge, np.full(5, 2 * ridge)]
        slope = X.T @ wrong + prior * (w - np.eye(7)[1])
        assert np.abs(np.where(w > 0, slope, np.minimum(slope, 0))[1:]).max() < 1e-4
        assert abs(slope[0]) < 1e-4
        by_class = np.array([wrong[label == c].sum() for c in range(3)]) + offsets / spread**2
        assert np.abs(by_class).max() < 1e-4
    first = ~copy
    H = 4.0 * np.eye(2)
    for t in rows.view.t.numpy()[first]:
        p = sigmoid(t)
        H += p * (1 - p) * np.outer([1, t], [1, t])
    np.testing.assert_allclose(inside.plain, np.linalg.inv(H), rtol=1e-9)
    assert inside.trust == 0.5
    layers = 2 * f - rows.view.t  # trust one half
    assert float((layers - inside.expert.log_odds(rows.view)).abs().max()) > 0.01  # each row was left out


def test_without_copies_every_original_counts_as_one() -> None:
    rows = made_rows(60)[0]
    alone = rows[(~rows.is_copy).nonzero()[:, 0]]
    one, other = (
        fit_in_domain(alone, 3, clean=c, ridge=0.2, class_spread=0.7, trust=1.0)[0] for c in (0.5, 1.0)
    )
    torch.testing.assert_close(one.expert.posterior.weights, other.expert.posterior.weights)
    torch.testing.assert_close(one.expert.posterior.covariance, other.expert.posterior.covariance)


def test_an_environment_by_loops() -> None:
    """The same windows, everything else in NumPy."""
    rows, inside, shift = made_rows(50)
    found = fit_environment(rows, inside, shift, 3, window=8, seed=4)
    f_in, f_shift, label = inside.numpy(), shift.numpy(), rows.view.label.numpy()
    first = ~rows.is_copy.numpy()
    values = np.column_stack([sigmoid(f_shift), sigmoid(f_in)])
    usual = np.zeros((3, 2))
    for c in range(3):
        own = values[first & (label == c)] - values[first].mean(0)
        usual[c] = own.sum(0) / (len(own) + 10)
    values = values - usual[label]
    centre, spread = values[first].mean(0), values[first].std(0)
    shares = np.array([(np.sum(first & (label == c)) + 0.5) / (first.sum() + 1.5) for c in range(3)])
    generator, X, y, offset, weight, many = torch.Generator().manual_seed(4), [], [], [], [], []
    t, strength, family = (x.numpy() for x in (rows.view.t, rows.strength, rows.family))
    for kind in (0, 1, 2):
        for level in sorted(set(strength[family == kind])):
            members = np.flatnonzero((family == kind) & (strength == level))
            members = members[np.argsort(t[members], kind="stable")]
            for _ in range(6 if kind else 24):
                window = members[torch.randperm(len(members), generator=generator)[:8].numpy()]
                u = (values[window].mean(0) - centre) / spread
                u = u**3 / (u**2 + 4 / 8)
                m = np.sign(u) * np.log1p(np.abs(u))
                for i in window:
                    count, usually = (label[window] == label[i]).sum(), shares[label[i]]
                    expected = 1 + 7 * usually
                    r = max(0.0, np.log((count + 5 * usually) / (expected + 5 * usually)))
                    many.append((m, r**3 / (r**2 + 4 / expected), f_shift[i] - f_in[i]))
                    X.append(m * (f_shift[i] - f_in[i]))
                    y.append(float(rows.correct[i]))
                    offset.append(f_in[i])
                    weight.append(1.0 if kind else 4.0)
    X, y, offset, weight = (np.array(x) for x in (X, y, offset, weight))
    scale = np.sqrt((X**2).mean(0) + 0.3**2)
    weight = weight * len(rows) / weight.sum()
    prior = np.full(2, 0.0025 * len(rows))
    w = likeliest(X / scale, y, weight, prior, offset)
    p = sigmoid(offset + X / scale @ w)
    H = (X / scale).T @ ((weight * p * (1 - p))[:, None] * (X / scale)) + np.diag(prior)
    np.testing.assert_allclose(found.usual, usual, atol=1e-12)
    np.testing.assert_allclose(found.centre, centre, atol=1e-12)
    np.testing.assert_allclose(found.spread, spread, atol=1e-12)
    np.testing.assert_allclose(found.weights, w / scale, atol=1e-4)
    np.testing.assert_allclose(
        found.covariance, np.linalg.inv(H) / np.outer(scale, scale), rtol=1e-3, atol=1e-6
    )
    np.testing.assert_allclose(found.opinions(inside, shift, rows.view.label), values, atol=1e-12)
    np.testing.assert_allclose(found.shares, shares, atol=1e-12)
    k = np.array([np.clip(m @ found.weights.numpy(), 0, 1) for m, _, _ in many])
    column = -k * np.array([r for _, r, _ in many])
    base = offset + k * np.array([gap for _, _, gap in many])
    wide = np.sqrt((column**2).mean() + 0.3**2)
    v = likeliest(column[:, None] / wide, y, weight, prior[:1], base)
    p = sigmoid(base + column / wide * v[0])
    curvature = (weight * p * (1 - p) * (column / wide) ** 2).sum() + prior[0]
    assert found.crowded == pytest.approx(np.clip(v[0] / wide, 0, 1), abs=1e-4)
    assert found.crowded_variance == pytest.approx(1 / curvature / wide**2, rel=1e-3)


def test_log_odds_in_an_environment() -> None:
    flat = torch.zeros(1, 2), torch.zeros(2), torch.ones(2)
    environment = Environment(*flat, random(2), torch.eye(2).double(), torch.ones(1), crowded=0.7)
    m, inside, shift = random(7, 2, seed=1), random(7, seed=3), random(7, seed=4)
    crowding = random(7, seed=5).abs()
    f, lean = mixed_log_odds(environment, Surroundings(m, crowding), inside, shift)
    a, b = environment.weights.tolist()
    for i in range(7):
        k = min(max(float(m[i, 0]) * a + float(m[i, 1]) * b, 0.0), 1.0)
        assert float(lean[i]) == pytest.approx(k)
        expected = float(inside[i]) + k * float(shift[i] - inside[i]) - 0.7 * k * float(crowding[i])
        assert float(f[i]) == pytest.approx(expected)


def test_the_spread_of_an_unseen_shift() -> None:
    rows, _, _ = made_rows(40)
    nearly = rows.view.t - 2.6 * rows.strength  # right but for a little
    parts = {}
    for family, lean in ((1, 0.5), (2, 0.8)):
        held = (rows.family == family).nonzero()[:, 0]
        parts[family] = LeftOut(held, nearly[held], torch.full((len(held),), lean).double())
    total = 0.0
    for part in parts.values():
        f, correct = part.log_odds.numpy(), rows.correct[part.rows].numpy()
        wanted = (correct.sum() + 0.5) / (len(correct) + 1)
        low, high = -20.0, 20.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if sigmoid(f + middle).mean() < wanted else (low, middle)
        total += middle**2
    assert unseen_spread(rows, parts) == pytest.approx(min(total / (0.25 + 0.64), 4.0), rel=1e-6)
    small = {k: LeftOut(p.rows, p.log_odds, 0.1 * torch.ones_like(p.lean)) for k, p in parts.items()}
    assert total / 0.2 < 4
    assert unseen_spread(rows, small) == pytest.approx(total / 0.2, rel=1e-6)
    far = {k: LeftOut(p.rows, p.log_odds + 9, p.lean) for k, p in parts.items()}
    assert unseen_spread(rows, far) == 4.0
    assert unseen_spread(rows, {}) == 0.0


def test_what_a_fit_says_of_itself() -> None:
    rows, inside, shift = made_rows(40)
    held = (rows.family == 1).nonzero()[:, 0]
    table = check_table(rows, 1.3 * inside, inside, {1: LeftOut(held, shift[held], shift[held])}, "ours")
    first = (~rows.is_copy).nonzero()[:, 0]
    for situation, index, ours in (
        ("in domain", first, inside[first]),
        ("left-out families", held, shift[held]),
    ):
        methods = {"uncalibrated": 1.3 * inside[index], "temperature": rows.view.t[index], "ours": ours}
        for method, f in methods.items():
            confidence, correct = torch.sigmoid(f), rows.correct[index]
            assert table[situation][method] == {
                "ece": metrics.ece(confidence, correct),
                "nll": metrics.nll_correct(confidence, correct),
                "auroc": metrics.auroc(f, correct),
            }
    assert set(check_table(rows, inside, inside, {}, "ours")) == {"in domain"}
    text = verdict(table, 0.5, "ours")
    nll, other = (table["in domain"][method]["nll"] for method in ("ours", "temperature"))
    gap, theirs = (table["left-out families"][method]["ece"] for method in ("ours", "temperature"))
    assert f"log-likelihood {nll:.3f} with samples left out, temperature scaling {other:.3f}" in text
    assert f"error is {gap:.3f}, temperature scaling's {theirs:.3f}." in text
    assert "add nothing certain" in verdict(table, 0.0, "ours")
    assert "error" not in verdict({"in domain": table["in domain"]}, 0.5, "ours", 10)
    assert "(a finding on 1 error only)" in verdict(table, 0.5, "ours", 1)
    assert "(a finding on 9 errors only)" in verdict(table, 0.0, "ours", 9)


def test_families_are_judged_one_by_one_and_not_together() -> None:
    """Too sure of one family and not sure enough of another is not calibrated."""
    rows, inside, _ = made_rows(200)
    parts = {}
    for k in rows.families:
        held = (rows.family == k).nonzero()[:, 0]
        off = torch.full((len(held),), 3.0 if k == 1 else -3.0).double()
        parts[k] = LeftOut(held, torch.logit(rows.correct[held].mean()) + off, off)
    found = check_table(rows, inside, inside, parts, "ours")["left-out families"]["ours"]
    each = [metrics.ece(torch.sigmoid(p.log_odds), rows.correct[p.rows]) for p in parts.values()]
    assert found["ece"] == pytest.approx(sum(each) / 2)
    assert min(each) > 0.2


def test_families_without_errors_have_no_auroc_and_give_no_warning() -> None:
    rows, inside, _ = made_rows(50)
    right = replace(rows, correct=torch.ones_like(rows.correct))
    held = (rows.family == 1).nonzero()[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = check_table(right, inside, inside, {1: LeftOut(held, inside[held], inside[held])}, "ours")
    assert math.isnan(table["left-out families"]["ours"]["auroc"])


def test_the_chance_of_a_shift_by_all_permutations() -> None:
    score = np.array([0.1, 0.9, 0.3, 0.5, 0.2, 0.8])
    for n_last in (2, 4):
        observed = float(score[-n_last:].mean())
        every = itertools.combinations(score.tolist(), n_last)
        exact = np.mean([np.mean(some) >= observed - 1e-12 for some in every])
        found = _permutation_p(score, n_last, 4000, 0)
        assert abs(found - exact) < 4 * math.sqrt(exact * (1 - exact) / 4000)
        assert _permutation_p(score, n_last, 9, 0) >= 0.1


def test_the_interval_is_nine_tenths_of_the_log_odds() -> None:
    calibrator, (features, _) = fitted(trust=1.0, gated=False), world(40, 3, 0.5)
    model = calibrator.evidence_
    view = model.view(features, layer_evidence(model.reference, features))
    opinion, found = model.inside.opinion(view), calibrator.predict(features)
    sd = calibrator.looseness * opinion.variance.sqrt().numpy()
    for end, quantile in ((found.lower, 0.05), (found.confidence, 0.5), (found.upper, 0.95)):
        np.testing.assert_allclose(end, sigmoid(opinion.mean.numpy() + norm.ppf(quantile) * sd), atol=1e-6)
    middle = (sigmoid(opinion.mean.numpy() + sd) - sigmoid(opinion.mean.numpy() - sd)) / 2
    np.testing.assert_allclose(found.std, middle, atol=1e-6)


def test_rows_are_joined_and_their_groups_stay_apart() -> None:
    rows, _, _ = made_rows(5)
    both = rows.joined(rows)
    assert isinstance(both, FittedRows)
    assert both.group.tolist() == rows.group.tolist() + [g + 5 for g in rows.group.tolist()]
    assert len(both.without(rows)) == len(rows)


def test_novelty_is_energy_disagreement_and_the_largest_distance() -> None:
    view, logits = a_view(31), 3 * random(31, 4, seed=20)
    e = -np.log(np.exp(logits.numpy() / 1.7).sum(1))
    a = view.agreement.numpy().mean(1)
    usual = fit_strangeness(view, energy(logits, 1.7))
    expected = np.log1p(plus(view.novelty.numpy())).max(1) / 3
    for sign, x in ((1, e), (-1, a)):
        z = (x - np.median(x)) / (np.median(np.abs(x - np.median(x))) / norm.ppf(0.75))
        expected = expected + np.log1p(plus(sign * z))
    np.testing.assert_allclose(usual(view, energy(logits, 1.7)), expected, rtol=1e-4)
