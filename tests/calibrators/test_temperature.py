"""The likelihood of a temperature and its optimum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from salgp.calibrators.temperature import BOUNDS, best_temperature, tempered_softmax


def drawn(
    n: int, c: int, temperature: float, seed: int = 0, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, c, generator=generator, dtype=torch.float64)
    return z, torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("c", [2, 10])
def test_temperature_is_the_optimum_of_a_plain_search(c: int, temperature: float) -> None:
    z, labels = drawn(500, c, temperature)

    def loss(log_t: float) -> float:
        return float(torch.nn.functional.cross_entropy(z / np.exp(log_t), labels))

    best = minimize_scalar(
        loss, bounds=(np.log(BOUNDS[0]), np.log(BOUNDS[1])), method="bounded", options={"xatol": 1e-9}
    )
    found, at_bound = best_temperature(z, labels)
    assert np.log(found) == pytest.approx(best.x, abs=1e-5)
    assert not at_bound


def test_parity_with_sklearn() -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    if "_TemperatureScaling" not in vars(calibration):
        pytest.skip("this scikit-learn has no temperature scaling")
    z, labels = drawn(1000, 4, 2.5)
    rival = calibration._TemperatureScaling().fit(z.numpy(), labels.numpy())
    assert best_temperature(z, labels)[0] == pytest.approx(1 / rival.beta_, rel=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parity_with_netcal_whose_temperature_is_the_inverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it may write log folders where it stands
    scaling = pytest.importorskip("netcal.scaling")
    z, labels = drawn(1000, 4, 2.0)
    rival = scaling.TemperatureScaling(method="mle")
    rival.fit(torch.softmax(z, 1).numpy(), labels.numpy())
    assert float(rival.temperature[0]) != pytest.approx(
        1.0, abs=1e-3
    )  # its fit can be a silent no-op; then this test says nothing
    assert best_temperature(z, labels)[0] == pytest.approx(1 / float(rival.temperature[0]), rel=1e-3)


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
