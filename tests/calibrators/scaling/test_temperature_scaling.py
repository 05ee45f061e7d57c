"""Temperature scaling and its relatives."""

from __future__ import annotations

import os
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import OptimizeResult

from salgp import Features
from salgp.calibrators.base import CalibrationWarning
from salgp.calibrators.scaling.temperature import (
    EnsembleTemperatureScaling,
    PerturbedTemperatureScaling,
    TemperatureScaling,
    Uncalibrated,
    ensemble_softmax,
    mixture_weights,
)
from salgp.logits import BOUNDS, best_temperature
from salgp.metrics import ece, nll

DATA = Path(os.environ.get("SALGP_DATA", Path(__file__).parents[3] / "shared" / "data"))


def drawn(
    n: int, c: int, temperature: float, seed: int = 0, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, c, generator=generator, dtype=torch.float64)
    return z, torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=generator)[:, 0]


@pytest.mark.data
def test_published_resnet50() -> None:
    path = DATA / "published_calibration.npz"
    if not path.is_file():
        pytest.skip(f"{path} is absent; set SALGP_DATA to the folder with the real data")
    data = np.load(path)
    val, test = (Features(torch.tensor(data[f"resnet50_c10_{part}_logits"])) for part in ("val", "test"))
    labels = torch.tensor(data["resnet50_c10_test_labels"]).long().flatten()
    fitted = TemperatureScaling().fit(val, data["resnet50_c10_val_labels"].astype(np.int64))
    assert fitted.temperature_ == pytest.approx(1.063, abs=0.002)
    scaled, raw = (
        fitted.predict(test),
        Uncalibrated().fit(val, data["resnet50_c10_val_labels"].astype(np.int64)).predict(test),
    )
    assert nll(raw.probs, labels) == pytest.approx(0.17551, abs=1e-5)
    assert nll(scaled.probs, labels) == pytest.approx(0.17384, abs=1e-5)
    assert ece(raw.confidence, raw.label == labels) == pytest.approx(0.01552, abs=1e-5)
    assert ece(scaled.confidence, scaled.label == labels) == pytest.approx(0.00972, abs=1e-5)


def test_all_correct_stops_at_the_bound_and_says_so() -> None:
    z, _ = drawn(50, 3, 1.0)
    with pytest.warns(CalibrationWarning, match=r"bound 0\.01 .*every calibration sample is correct"):
        fitted = TemperatureScaling().fit(Features(z), z.argmax(1))
    assert fitted.at_bound_
    assert fitted.temperature_ == BOUNDS[0]


def test_all_wrong_stops_at_the_other_bound() -> None:
    z, _ = drawn(50, 3, 1.0)
    with pytest.warns(CalibrationWarning, match="bound 20"):
        fitted = TemperatureScaling().fit(Features(z), z.argmin(1))
    assert fitted.temperature_ == BOUNDS[1]
    assert fitted.at_bound_


def test_constant_logits_have_temperature_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert best_temperature(torch.ones(10, 3), torch.arange(10) % 3) == (1.0, False)


def test_unknown_classes_are_left_out() -> None:
    z, labels = drawn(200, 4, 2.0)
    some = labels.clone()
    some[::4] = -1
    kept = some >= 0
    assert best_temperature(z, some)[0] == pytest.approx(best_temperature(z[kept], labels[kept])[0], rel=1e-9)


def test_likelihood_never_gets_worse_on_the_fit_set() -> None:
    for seed in range(5):
        z, labels = drawn(80, 4, 1.0 + seed, seed)
        raw = nll(torch.softmax(z, 1), labels)
        ts, ets = (
            c.fit(Features(z), labels).predict(Features(z)).probs
            for c in (TemperatureScaling(), EnsembleTemperatureScaling())
        )
        assert nll(ts, labels) <= raw + 1e-12
        assert nll(ets, labels) <= nll(ts, labels) + 1e-9


def test_ensemble_weights_beat_a_grid() -> None:
    z, labels = drawn(400, 3, 1.0)
    labels = labels.where(
        torch.arange(400) % 5 > 0, torch.arange(400) % 3
    )  # a fifth at random: the uniform part is needed
    fitted = EnsembleTemperatureScaling().fit(Features(z), labels)
    best = nll(ensemble_softmax(z, fitted.temperature_, fitted.weights_), labels)
    assert bool((fitted.weights_ >= 0).all())
    for a in np.linspace(0, 1, 21):
        for b in np.linspace(0, 1 - a, 11):
            w = torch.tensor([a, b, 1 - a - b])
            assert best <= nll(ensemble_softmax(z, fitted.temperature_, w).clamp_min(1e-300), labels) + 1e-9


def test_augmented_samples_share_the_weight_of_their_original() -> None:
    z, labels = drawn(60, 3, 2.0)
    rows = torch.cat([torch.arange(60), torch.zeros(30, dtype=torch.long)])  # sample 0 stands there 31 times
    fitted = PerturbedTemperatureScaling().fit(Features(z[rows], groups=rows), labels[rows])
    assert fitted.temperature_ == pytest.approx(best_temperature(z, labels)[0], rel=1e-9)
    with pytest.warns(CalibrationWarning, match="no groups"):
        PerturbedTemperatureScaling().fit(Features(z), labels)


def test_noise_raises_the_temperature() -> None:
    z, labels = drawn(400, 4, 1.0)
    noisy = z + 4 * torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    augmented = Features(torch.cat([z, noisy]), groups=torch.arange(400).repeat(2))
    assert PerturbedTemperatureScaling().fit(augmented, labels.repeat(2)).temperature_ > 1.3


def test_weights_stay_where_a_search_ends_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = OptimizeResult(x=np.full(3, np.nan), success=True, fun=np.nan, jac=np.zeros(3))
    monkeypatch.setattr("scipy.optimize.minimize", lambda *args, **kwargs: lost)
    likelihood = torch.tensor([[0.9, 0.5, 0.1]], dtype=torch.float64)
    assert mixture_weights(likelihood, (1, 0, 0)).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_fifty_thousand_by_a_thousand_in_little_memory() -> None:
    z = torch.randn(50_000, 1000, generator=torch.Generator().manual_seed(0))
    labels = z.argmax(1).where(torch.arange(50_000) % 2 > 0, torch.arange(50_000) % 1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    TemperatureScaling().fit(Features(z), labels)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100  # MB; the logits alone are 200
