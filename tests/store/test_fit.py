"""Out-of-core fitting equals conditioning in memory on the same inducing rows, for every likelihood and row
layout.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scale_jobs import samples, small_calibrator, small_store

from salgp import calibrators
from salgp.calibrators.gp.salgp import SALGP, ResidualGP
from salgp.calibrators.gp.structures import log_odds_design, rows_of
from salgp.features import Features
from salgp.gp.covariance import gaps
from salgp.gp.likelihood import bernoulli_sites, gaussian_sites
from salgp.gp.regression import condition_inducing, inducing_log_evidence, statistics
from salgp.io import ChecksumError
from salgp.store.fit import fit_store, subset_of
from salgp.store.store import FeatureStore, write_store

pytestmark = [
    pytest.mark.filterwarnings("ignore:hyperparameter optimisation did not converge"),
    pytest.mark.filterwarnings("ignore:hyperparameters ended on their bounds"),
]


def in_memory(fitted: SALGP, store: FeatureStore, n_rounds: int = 1, weight: float = 1.0) -> SALGP:
    """The same calibrator, conditioned on all rows at once, on the inducing rows and hyperparameters that
    were found.
    """
    features, labels = store.to_features()
    p, structure, f = fitted.fitted_.posterior, fitted.structure_, fitted.fitted_
    rows = rows_of(structure, features).flatten()
    repeats = len(rows) // len(features)
    Kuf, prior = (
        p.covariance(p.theta, gaps(p.rows, rows, p.covariance)),
        p.prior_variance(rows),
    )
    bernoulli = len(f.mean_weights) > 0
    y = (
        (features.correct(labels) if bernoulli else features.residual(labels))
        .double()
        .repeat_interleave(repeats)
    )
    X = log_odds_design(features).repeat_interleave(repeats, 0) if bernoulli else None
    offset = 0.0 if X is None else X @ f.mean_weights
    for _ in range(n_rounds):
        mean, variance = p.moments(Kuf.T, prior)
        gaussian = gaussian_sites(y, torch.tensor(f.log_noise, dtype=torch.float64), weight)
        sites = bernoulli_sites(y, mean + offset, variance, weight) if bernoulli else gaussian
        sums = statistics(Kuf, prior, sites.target - offset, sites.noise, X)
        p = condition_inducing(p.covariance, p.theta, p.rows, sums)
    Kuu = p.covariance(p.theta, gaps(p.rows, p.rows, p.covariance))
    evidence = float(inducing_log_evidence(Kuu, sums) + sites.constant)
    same = copy.deepcopy(fitted)
    same.fitted_ = replace(f, posterior=p, log_evidence=evidence)
    return same


def assert_same(a: SALGP, b: SALGP, atol: float) -> None:
    features, _ = samples(300, seed=3)
    one, two = a.predict(features), b.predict(features)
    torch.testing.assert_close(one.confidence, two.confidence, rtol=0, atol=atol)
    torch.testing.assert_close(one.std, two.std, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("covariance", "tempering"), [("sum", False), ("ml", True), ("additive", False), ("concat", False)]
)
def test_gaussian_equals_conditioning_in_memory(tmp_path: Path, covariance: str, tempering: bool) -> None:
    store = small_store(tmp_path)
    calibrator = small_calibrator(covariance=covariance).set_params(tempering=tempering)
    fitted = fit_store(calibrator, store, subset=300)
    assert fitted is calibrator
    assert fitted.fitted_.summary.n == len(store) * (3 if covariance in ("ml", "additive") else 1)
    whole = in_memory(fitted, store, weight=1 / 3 if tempering else 1.0)
    assert_same(fitted, whole, atol=1e-7)
    assert fitted.fitted_.log_evidence == pytest.approx(whole.fitted_.log_evidence, rel=1e-9)


def test_bernoulli_is_a_fixed_point_of_the_site_updates(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    fitted = fit_store(small_calibrator("bernoulli"), store, subset=300)
    assert fitted.fitted_.summary.n == len(store)
    assert "passes" not in fitted.fitted_.reason
    settled = in_memory(fitted, store, n_rounds=50)
    assert fitted.fitted_.log_evidence == pytest.approx(settled.fitted_.log_evidence, abs=0.05)
    assert_same(fitted, settled, atol=2e-3)
    features, labels = samples(500, seed=5)
    before = -torch.nn.functional.binary_cross_entropy(
        features.confidence.double(), features.correct(labels).double()
    )
    after = -torch.nn.functional.binary_cross_entropy(
        fitted.predict(features).confidence, features.correct(labels).double()
    )
    assert after > before


def test_all_rows_beat_the_subset(tmp_path: Path) -> None:
    store = small_store(tmp_path, n=4000)
    few = fit_store(small_calibrator(), store, subset=200)
    features, labels = samples(3000, seed=9)
    target = features.residual(labels).double()
    subset = small_calibrator().fit(*store.shard(0))
    error = [
        float((c.predict(features).confidence - features.confidence - target).square().mean())
        for c in (few, subset)
    ]
    assert error[0] < error[1]


def test_loaded_fit_predicts_the_same(tmp_path: Path) -> None:
    fitted = fit_store(small_calibrator(), small_store(tmp_path / "s"), subset=200)
    features, _ = samples(50, seed=3)
    loaded = calibrators.load_calibrator(fitted.save(tmp_path / "c"))
    assert torch.equal(loaded.predict(features).confidence, fitted.predict(features).confidence)


@pytest.mark.parametrize("name", ["temperature", "isotonic"])
def test_calibrators_of_logits_see_all_rows(tmp_path: Path, name: str) -> None:
    store = small_store(tmp_path)
    features, labels = store.to_features()
    a, b = fit_store(calibrators.get(name), store), calibrators.get(name).fit(features, labels)
    assert torch.equal(a.predict(features).confidence, b.predict(features).confidence)


def test_residual_gp_out_of_core(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    fitted = fit_store(ResidualGP(n_inducing=24, max_steps=5), store, subset=200)
    assert fitted.fitted_.summary.n == len(store)
    assert_same(fitted, in_memory(fitted, store), atol=1e-7)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    with pytest.raises(ValueError, match="set inference="):
        fit_store(small_calibrator().set_params(inference="exact"), store)
    path = tmp_path / "part-000001.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError, match="part-000001"):
        fit_store(small_calibrator(), store, subset=200)


def test_a_subset_keeps_every_sample_with_its_copies(tmp_path: Path) -> None:
    """Copies are far from their originals in the store, in other shards and before them."""
    clean, labels = samples(500)
    parts = [
        (Features(clean.logits, clean.layers, torch.arange(500), torch.full((500,), family)), labels)
        for family in (1, 0, 2, 3)
    ]
    store = write_store(parts, tmp_path, rows=300)
    features, y = subset_of(store, 400)
    kept, counts = features.groups.unique(return_counts=True)
    assert len(kept) == 100
    assert set(counts.tolist()) == {4}
    assert torch.equal(y, labels[features.groups])
    assert torch.equal(features.logits, clean.logits[features.groups])
    share = clean.correct(labels).double().mean()
    assert float(features.correct(y).double().mean()) == pytest.approx(float(share), abs=0.03)


def test_workers_do_not_change_a_bit(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s")
    one, two = (fit_store(small_calibrator(), store, subset=200, workers=workers) for workers in (1, 3))
    assert torch.equal(one.fitted_.posterior.alpha, two.fitted_.posterior.alpha)


def test_inducing_rows_are_chosen_over_all_rows(tmp_path: Path) -> None:
    """Some are rows of the store that are not in the subset."""
    store = small_store(tmp_path)
    fitted = fit_store(small_calibrator(), store, subset=100)
    subset = rows_of(fitted.structure_, subset_of(store, 100)[0]).flatten()
    chosen = next(iter(fitted.fitted_.posterior.rows.blocks.values()))
    known = next(iter(subset.blocks.values()))
    assert float(torch.cdist(chosen.double(), known.double()).min(dim=1).values.max()) > 0
