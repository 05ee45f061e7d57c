"""Stacked scaling: a mixture that leaving samples out must justify."""

from __future__ import annotations

import pytest
import torch

from salgp import Features
from salgp.calibrators import get
from salgp.calibrators.scaling.multiclass import StackedScaling, _identity
from salgp.metrics import nll

pytestmark = pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")


def drawn(n: int, c: int, seed: int, W: torch.Tensor | None = None) -> tuple[Features, torch.Tensor]:
    """Logits, and labels drawn after a linear map of the log-probabilities."""
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, c, generator=g, dtype=torch.float64)
    return Features(z), torch.multinomial(truth(z, W), 1, generator=g)[:, 0]


def truth(z: torch.Tensor, W: torch.Tensor | None) -> torch.Tensor:
    return torch.softmax(z if W is None else torch.log_softmax(z, 1) @ W.T, 1)


CONFUSED = torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.3, 0.0], [-0.8, 0.0, 1.5]], dtype=torch.float64)


@pytest.mark.parametrize("W", [None, CONFUSED / 2, torch.eye(3, dtype=torch.float64) / 4])
def test_nearly_as_good_as_the_truth_whatever_it_is(W: torch.Tensor | None) -> None:
    fitted = StackedScaling().fit(*drawn(1000, 3, 0, W))
    new, labels = drawn(20_000, 3, 1, W)
    best = nll(truth(new.logits, W), labels)
    assert nll(fitted.predict(new).probs, labels) < best + 0.015


def test_classes_that_are_confused_need_a_matrix() -> None:
    new, labels = drawn(20_000, 3, 1, CONFUSED)
    stacked, temperature = (
        get(name).fit(*drawn(1000, 3, 0, CONFUSED)).predict(new).probs for name in ("stacked", "temperature")
    )
    assert nll(stacked, labels) < nll(temperature, labels) - 0.05


def test_weights_lie_on_the_simplex_and_one_map_gives_its_own_softmax() -> None:
    fitted = StackedScaling().fit(*drawn(300, 4, 2))
    assert float(fitted.weights_.sum()) == pytest.approx(1.0)
    assert bool((fitted.weights_ >= 0).all())
    new = drawn(50, 4, 3)[0]
    raw = fitted.weights_ * 0
    raw[0] = 1
    fitted.weights_ = raw
    torch.testing.assert_close(fitted.predict(new).probs, torch.softmax(new.logits, 1))


@pytest.mark.parametrize(("n", "c", "shape"), [(400, 10, (10, 10)), (400, 50, (50,)), (400, 200, None)])
def test_parameters_are_as_many_as_samples_can_tell(n: int, c: int, shape: tuple[int, ...] | None) -> None:
    found = _identity(n, c)
    assert (None if found is None else tuple(found.shape)) == shape


def test_few_samples_are_temperature_scaling() -> None:
    features, labels = drawn(9, 3, 5)
    a, b = (get(name).fit(features, labels).predict(features).probs for name in ("stacked", "temperature"))
    torch.testing.assert_close(a, b)
