"""The deep Gaussian process comparator."""

from __future__ import annotations

import pytest
import torch

from salgp import SALGP, Features
from salgp.metrics import mean_variance, nll_correct
from salgp_study.deep_gp import DeepGPCalibrator, _build, _output


def drawn(n: int = 200, seed: int = 0) -> tuple[Features, torch.Tensor]:
    """A network that is sure everywhere, and wrong where the feature is positive."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    z = 3 * torch.nn.functional.one_hot(torch.arange(n) % 3, 3).float()
    labels = torch.where(x[:, 0] > 0, (torch.arange(n) + 1) % 3, torch.arange(n) % 3)
    return Features(z, {"a": x, "b": torch.randn(n, 3, generator=generator)}), labels


def test_learns_what_the_layers_know() -> None:
    f, labels = drawn()
    new, truth = drawn(seed=1)
    fitted = DeepGPCalibrator(steps=60, n_inducing=16, lr=0.05).fit(f, labels)
    p = fitted.predict(new)
    assert fitted.history_[-1] > fitted.history_[0] + 0.1
    assert nll_correct(p.confidence, p.label == truth) < nll_correct(new.confidence, new.label == truth) - 0.5
    assert float(p.std.min()) > 0


def test_draws_touch_no_global_state_and_rows_do_not_depend_on_each_other() -> None:
    f, labels = drawn(60)
    before = torch.random.get_rng_state()
    fitted = DeepGPCalibrator(steps=5, n_inducing=8).fit(f, labels)
    p = fitted.predict(f)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(fitted.predict(f[:7]).confidence, p.confidence[:7])
    assert torch.equal(
        DeepGPCalibrator(steps=5, n_inducing=8).fit(f, labels).predict(f).confidence, p.confidence
    )
    other = DeepGPCalibrator(steps=5, n_inducing=8, seed=1).fit(f, labels).predict(f)
    assert not torch.equal(other.confidence, p.confidence)


def test_first_layer_starts_at_its_principal_mean() -> None:
    X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    projection = torch.linalg.qr(
        torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ).Q
    model = _build(X[:10], projection)
    hidden = model.hidden(X)
    torch.testing.assert_close(hidden.mean, (X @ projection).T, atol=1e-8, rtol=0)
    mean, variance = _output(model, X, torch.zeros(3, 2, dtype=torch.float64))
    assert mean.shape == variance.shape == (3, 30)


def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    f, labels = drawn(50)
    assert len(DeepGPCalibrator(steps=4, n_inducing=8, batch_size=16).fit(f, labels).predict(f)) == 50


@pytest.mark.filterwarnings("ignore:hyperparameters ended on their bounds")
def test_variance_is_inflated_against_one_layer_of_gps() -> None:
    """What the layerwise model is compared with: uncertainty of the hidden layer is carried on and
    adds up.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    z = 3 * torch.stack([x[:, 0], -x[:, 0], x[:, 1]], dim=1)
    labels = torch.multinomial(torch.softmax(z / 2, 1), 1, generator=generator)[:, 0]
    f = Features(z, {"a": x, "b": x @ torch.randn(2, 3, generator=generator)})
    deep, flat = (
        c.fit(f[:200], labels[:200]).predict(f[200:]) for c in (DeepGPCalibrator(steps=150), SALGP())
    )
    assert mean_variance(deep.std) > 3 * mean_variance(flat.std)
