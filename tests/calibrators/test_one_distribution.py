"""Confidence, standard deviation and interval belong to one distribution, for every method that has them.

The interval has the 5 % and the 95 % point; they tell the distribution, which tells the rest. "1.00 +- .16"
came from a confidence at one place of a distribution and a standard deviation around another.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from scipy.stats import norm

from salgp import Features, Prediction, calibrators
from salgp.calibrators.registry import CLASSES

Z = norm.ppf(0.95)
pytestmark = pytest.mark.filterwarnings("ignore")  # of fits to made-up data


def problem(n: int = 260) -> tuple[Features, torch.Tensor, Features]:
    """Over-confident logits, one half of whose space is hardly better than a guess, and samples far away."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(n, 3, generator=g)
    layers = {"a": h @ torch.randn(3, 4, generator=g), "b": h @ torch.randn(3, 5, generator=g)}
    logits = 3 * h
    slope = 0.05 + 0.9 * (layers["a"][:, :1] > 0)
    labels = torch.multinomial((slope * logits).softmax(1), 1, generator=g)[:, 0]
    far = Features(logits * 4, {name: 3 * x for name, x in layers.items()})
    return Features(logits, layers), labels, far


def predicted(method: str, **how: object) -> Prediction:
    """Of both kinds of samples."""
    features, labels, far = problem()
    fitted = calibrators.get(method, **how).fit(features, labels)
    return Prediction.concatenate([fitted.predict(features), fitted.predict(far)])


def arrays(p: Prediction) -> tuple[np.ndarray, ...]:
    return tuple(x.double().numpy() for x in (p.confidence, p.std, p.lower, p.upper))


def latent(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of log-odds with these points."""
    return (logit(lower) + logit(upper)) / 2, (logit(upper) - logit(lower)) / (2 * Z)


def test_log_odds_of_layer_evidence() -> None:
    confidence, std, lower, upper = arrays(predicted("layer-evidence"))
    m, s = latent(lower, upper)
    assert s.max() > 0.3
    np.testing.assert_allclose(confidence, expit(m), atol=1e-5)
    np.testing.assert_allclose(std, (expit(m + s) - expit(m - s)) / 2, atol=1e-5)


@pytest.mark.parametrize("method", ["sal-gp", "residual-gp"])
def test_a_gaussian_process_of_the_confidence_is_one_normal(method: str) -> None:
    """As in the paper, on the whole line; where a value beyond 0 or 1 was cut off, `clipped` says so."""
    p = predicted(method)
    confidence, std, lower, upper = arrays(p)
    inside = (lower > 0) & (upper < 1)
    assert inside.sum() > 20
    np.testing.assert_allclose(confidence[inside], ((lower + upper) / 2)[inside], atol=1e-9)
    np.testing.assert_allclose(std[inside], ((upper - lower) / (2 * Z))[inside], atol=1e-9)
    above = ~inside & (lower > 0) & ~p.clipped.numpy()
    np.testing.assert_allclose(std[above], ((confidence - lower) / Z)[above], atol=1e-9)
    assert ((confidence > 1 - 2e-6) <= p.clipped.numpy()).all()


def test_a_latent_process_has_the_moments_of_a_probability() -> None:
    """No distribution between 0 and 1 of this mean spreads further."""
    confidence, std, lower, upper = arrays(predicted("latent-gp"))
    assert (std <= np.sqrt(confidence * (1 - confidence)) + 1e-6).all()
    np.testing.assert_allclose(lower, (confidence - Z * std).clip(0, 1), atol=1e-6)
    np.testing.assert_allclose(upper, (confidence + Z * std).clip(0, 1), atol=1e-6)


def test_every_method_with_a_standard_deviation_is_here() -> None:
    """A new one is to be added above."""
    features, labels, _ = problem(80)
    with_std = set()
    for name in CLASSES:
        p = calibrators.get(name).fit(features, labels).predict(features)
        with_std |= {name} if p.std is not None else set()
    assert with_std == {"layer-evidence", "sal-gp", "residual-gp", "latent-gp"}
