"""Adding and taking back samples equals conditioning from scratch; suggestions are uncertain and diverse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from salgp.calibrators.gp.salgp import SALGP
from salgp.calibrators.gp.structures import rows_of
from salgp.features import Features
from salgp.gp.regression import condition_exact
from salgp.neighbours import spread_choice


def made(n: int, seed: int = 0) -> tuple[Features, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n, 4, generator=g)
    layers = {"a": torch.randn(n, 5, generator=g), "b": torch.randn(n, 3, generator=g)}
    wrong = (layers["a"][:, 0] + layers["b"][:, 0] > 0.5) & (torch.rand(n, generator=g) < 0.9)
    return Features(logits, layers), torch.where(wrong, (logits.argmax(1) + 1) % 4, logits.argmax(1))


@pytest.mark.parametrize("covariance", ["sum", "ml", "hl"])
@pytest.mark.parametrize("inference", ["exact", "inducing"])
@pytest.mark.parametrize("tempering", [False, True])
def test_update_then_forget_returns_to_the_start(covariance: str, inference: str, tempering: bool) -> None:
    old, old_labels = made(50)
    new, new_labels = made(20, 1)
    test, _ = made(30, 2)
    gp = SALGP(covariance, inference=inference, n_inducing=30, tempering=tempering).fit(old, old_labels)
    before = gp.predict(test)
    after = gp.update(new, new_labels).predict(test)
    assert (after.confidence - before.confidence).abs().max() > 1e-3
    again = gp.forget(new, new_labels).predict(test)
    torch.testing.assert_close(again.confidence, before.confidence, atol=1e-6, rtol=0)
    torch.testing.assert_close(again.std, before.std, atol=1e-6, rtol=0)


def test_update_equals_conditioning_from_scratch() -> None:
    old, old_labels = made(50)
    new, new_labels = made(20, 1)
    gp = SALGP("sum", inference="exact").fit(old, old_labels)
    p, noise = gp.fitted_.posterior, gp.fitted_.log_noise
    both, labels = Features.concatenate([old, new]), torch.cat([old_labels, new_labels])
    y = both.residual(labels).double()
    scratch = condition_exact(
        p.covariance, p.theta, rows_of(gp.structure_, both), y, torch.full_like(y, noise).exp()
    )
    gp.update(new, new_labels)
    test = rows_of(gp.structure_, made(30, 2)[0])
    for ours, theirs in zip(gp.fitted_.posterior(test), scratch(test), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_updated_inducing_posterior_equals_summed_statistics_of_all() -> None:
    old, old_labels = made(60)
    gp = SALGP("ml", inference="inducing", n_inducing=40).fit(old, old_labels)
    whole = gp.predict(old)
    gp.forget(old[40:], old_labels[40:]).update(old[40:], old_labels[40:])
    torch.testing.assert_close(gp.predict(old).confidence, whole.confidence, atol=1e-6, rtol=0)


def test_bernoulli_learns_from_new_errors_and_says_why_it_cannot_forget() -> None:
    old, old_labels = made(60)
    gp = SALGP("sum", likelihood="bernoulli").fit(old, old_labels)
    new, _ = made(15, 3)
    wrong = (new.label + 1) % 4
    before = gp.predict(new).confidence.mean()
    assert gp.update(new, wrong).predict(new).confidence.mean() < before
    with pytest.raises(ValueError, match="fit again"):
        gp.forget(new, wrong)


def test_forgetting_an_unknown_sample_is_refused() -> None:
    gp = SALGP("sum", inference="exact").fit(*made(40))
    with pytest.raises(ValueError, match="not among those"):
        gp.forget(*made(3, 9))


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
    found = [away.posterior.alpha, away.mean_weights]
    found += [away.y, away.noise] if away.summary is None else [away.summary.A, away.summary.trace]
    assert all(x is not None and x.is_meta for x in found)
