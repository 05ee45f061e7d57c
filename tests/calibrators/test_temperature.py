"""The likelihood of a temperature and its optimum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from salgp.logits import BOUNDS, best_temperature, shrunk_temperature, tempered_softmax


def drawn(
    n: int, c: int, temperature: float, seed: int = 0, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, c, generator=generator, dtype=torch.float64)
    return z, torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("true", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("c", [2, 10])
def test_temperature_is_the_optimum_of_a_plain_search(c: int, true: float) -> None:
    z, labels = drawn(500, c, true)
    found, at_bound = best_temperature(z, labels)
    assert np.log(found) == pytest.approx(np.log(plain_search(z, labels)), abs=1e-5)
    assert not at_bound


def plain_search(z: torch.Tensor, labels: torch.Tensor) -> float:
    """The optimum by scipy, in the logarithm of the temperature."""

    def loss(log_t: float) -> float:
        return float(torch.nn.functional.cross_entropy(z / np.exp(log_t), labels))

    ends = (np.log(BOUNDS[0]), np.log(BOUNDS[1]))
    return float(np.exp(minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-9}).x))


def two_valued(size: float, wrong: int, n: int = 400, c: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """``size`` for the predicted class, 0 for all others; the first ``wrong`` samples are errors."""
    labels = torch.arange(n) % c
    predicted = torch.where(torch.arange(n) < wrong, (labels + 1) % c, labels)
    return size * torch.nn.functional.one_hot(predicted, c).double(), labels


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0, 6.9, 8.0, 15.0, 40.0])
@pytest.mark.parametrize("wrong", [1, 7, 40, 100, 150, 250])
def test_two_valued_logits_have_the_temperature_of_their_log_odds(size: float, wrong: int) -> None:
    z, labels = two_valued(size, wrong)
    exact = size / np.log((400 - wrong) * 9 / wrong)
    found, at_bound = best_temperature(z, labels)
    assert found == pytest.approx(min(max(exact, BOUNDS[0]), BOUNDS[1]), rel=1e-6)
    assert at_bound == (not BOUNDS[0] < exact < BOUNDS[1])


@pytest.mark.parametrize("seed", range(12))
def test_coarse_logits_have_the_temperature_of_a_plain_search(seed: int) -> None:
    """Logits on a grid, as of trees, counts or rounded files: the likelihood bends sharply."""
    g = torch.Generator().manual_seed(seed)
    step = [0.5, 3.0, 7.0, 30.0][seed % 4]
    z = step * torch.randint(0, 2 + seed % 3, (60, 3 + seed % 5), generator=g).double()
    likely = torch.multinomial(torch.softmax(z / (step / 2), 1), 1, generator=g)[:, 0]
    found, at_bound = best_temperature(z, likely)
    expected = plain_search(z, likely)
    assert np.log(found) == pytest.approx(np.log(expected), abs=1e-5 if not at_bound else 1e-3)


@pytest.mark.parametrize("size", [0.5, 6.9, 20.0, 300.0])
def test_without_an_optimum_the_bound_is_returned(size: float) -> None:
    z, labels = two_valued(size, wrong=0)
    assert best_temperature(z, labels) == (BOUNDS[0], True)


def test_a_shrunk_temperature_is_the_posterior_mode_of_a_plain_search() -> None:
    for true in (0.3, 3.0):
        z, labels = drawn(60, 4, true)

        def loss(log_t: float, z: torch.Tensor = z, labels: torch.Tensor = labels) -> float:
            fit = torch.nn.functional.cross_entropy(z / np.exp(log_t), labels, reduction="sum")
            return float(fit) + 0.5 * (min(log_t, 0.0) / 0.5) ** 2

        expected = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x
        assert np.log(shrunk_temperature(z, labels)) == pytest.approx(expected, abs=1e-5)


def test_parity_with_sklearn() -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    if "_TemperatureScaling" not in vars(calibration):
        pytest.skip("this scikit-learn has no temperature scaling")
    z, labels = drawn(1000, 4, 2.5)
    other = calibration._TemperatureScaling().fit(z.numpy(), labels.numpy())
    assert best_temperature(z, labels)[0] == pytest.approx(1 / other.beta_, rel=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parity_with_netcal_whose_temperature_is_the_inverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it may write log folders where it stands
    scaling = pytest.importorskip("netcal.scaling")
    z, labels = drawn(1000, 4, 2.0)
    other = scaling.TemperatureScaling(method="mle")
    other.fit(torch.softmax(z, 1).numpy(), labels.numpy())
    assert float(other.temperature[0]) != pytest.approx(
        1.0, abs=1e-3
    )  # its fit can be a silent no-op; then this test says nothing
    assert best_temperature(z, labels)[0] == pytest.approx(1 / float(other.temperature[0]), rel=1e-3)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e3])
def test_an_offset_of_the_logits_means_nothing(offset: float) -> None:
    z, labels = drawn(300, 4, 2.0)
    assert best_temperature((z + offset).float(), labels)[0] == pytest.approx(
        best_temperature(z, labels)[0], rel=1e-3
    )


def test_softmax_stays_positive() -> None:
    p = tempered_softmax(torch.tensor([[1e4, -1e4]]), 0.05)
    assert bool((p > 0).all())
    assert tempered_softmax(torch.zeros(1, 2, dtype=torch.float16), 1.0).dtype == torch.float32


def test_temporaries_do_not_grow_with_the_number_of_samples() -> None:
    z = 3 * torch.randn(20_000, 100, generator=torch.Generator().manual_seed(0))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.untyped_storage().data_ptr() != z.untyped_storage().data_ptr()
            ):
                largest = max(largest, out.numel())
            return out

    with Watch():
        best_temperature(z, z.argmax(1).where(torch.arange(20_000) % 2 > 0, torch.arange(20_000) % 100))
    assert 0 < largest <= 2**20
