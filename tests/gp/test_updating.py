"""Adding samples equals conditioning from scratch; suggestions are uncertain and diverse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from salgp.calibrators.gp.salgp import SALGP
from salgp.calibrators.gp.structures import observe
from salgp.features import Features
from salgp.gp.kernels import Rows
from salgp.gp.regression import condition_exact, condition_inducing, statistics
from salgp.neighbours import spread_choice


def made(n: int, seed: int = 0) -> tuple[Features, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n, 4, generator=g)
    layers = {"a": torch.randn(n, 5, generator=g), "b": torch.randn(n, 3, generator=g)}
    wrong = (layers["a"][:, 0] + layers["b"][:, 0] > 0.5) & (torch.rand(n, generator=g) < 0.9)
    return Features(logits, layers), torch.where(wrong, (logits.argmax(1) + 1) % 4, logits.argmax(1))


def residuals(gp: SALGP, features: Features, labels: Tensor) -> tuple[Rows, Tensor, Tensor]:
    """Flat rows with their targets and noise."""
    seen = observe(gp.structure_, features, labels)
    return seen.rows, seen.target, torch.full_like(seen.target, gp.fitted_.log_noise).exp()


@pytest.mark.parametrize("covariance", ["sum", "ml", "hl"])
@pytest.mark.parametrize("inference", ["exact", "inducing"])
def test_update_equals_conditioning_from_scratch(covariance: str, inference: str) -> None:
    (old, old_labels), (new, new_labels), (test, _) = made(50), made(20, 1), made(30, 2)
    gp = SALGP(covariance, inference=inference, n_inducing=30).fit(old, old_labels)
    p, before = gp.fitted_.posterior, gp.predict(test)
    both, labels = Features.concatenate([old, new]), torch.cat([old_labels, new_labels])
    rows, y, noise = residuals(gp, both, labels)
    if inference == "exact":
        scratch = condition_exact(p.covariance, p.theta, rows, y, noise)
    else:
        sums = statistics(p.covariance_to(rows).mT, p.prior_variance(rows), y, noise)
        scratch = condition_inducing(p.covariance, p.theta, p.rows, sums)
    after = gp.update(new, new_labels).predict(test)
    assert (after.confidence - before.confidence).abs().max() > 1e-3
    fresh = residuals(gp, *made(30, 2))[0]
    for ours, theirs in zip(gp.fitted_.posterior(fresh), scratch(fresh), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("inference", ["exact", "inducing"])
def test_samples_may_come_one_after_another(inference: str) -> None:
    (old, old_labels), (new, new_labels), (test, _) = made(50), made(20, 1), made(30, 2)
    once, twice = (SALGP(inference=inference, n_inducing=30).fit(old, old_labels) for _ in range(2))
    once.update(new, new_labels)
    twice.update(new[:7], new_labels[:7]).update(new[7:], new_labels[7:])
    a, b = once.predict(test), twice.predict(test)
    torch.testing.assert_close(a.confidence, b.confidence, atol=1e-8, rtol=0)
    torch.testing.assert_close(a.std, b.std, atol=1e-8, rtol=0)


def test_suggestions_avoid_duplicates() -> None:
    features, _ = made(40)
    doubled = Features.concatenate([features, features])
    picked = spread_choice(doubled, torch.rand(40, generator=torch.Generator().manual_seed(0)).repeat(2), 20)
    assert len(set((picked % 40).tolist())) == 20


def test_suggested_samples_are_more_uncertain_than_average() -> None:
    gp = SALGP("sum").fit(*made(50))
    pool, _ = made(200, 5)
    std = gp.predict(pool).std
    assert std is not None
    assert std[gp.suggest(pool, 10)].mean() > std.mean()


@pytest.mark.parametrize("inference", ["exact", "inducing"])
def test_a_fitted_gp_moves_whole(inference: str) -> None:
    """What it was conditioned on goes along, so that it can be conditioned on more there."""
    gp = SALGP("sum", inference=inference, n_inducing=20).fit(*made(40))
    away = gp.to("meta").fitted_
    more = [away.y] if away.summary is None else [away.summary.A, away.summary.trace]
    assert all(x is not None and x.is_meta for x in (away.posterior.alpha, *more))
