"""Data that gave wrong numbers without a word: huge features, masks, signs as labels, missing classes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import salgp
from salgp import Features
from salgp.calibrators import get
from salgp.calibrators.base import CalibrationWarning


def drawn(n: int = 120, c: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(n, c, generator=g, dtype=torch.float64)
    return z, torch.multinomial(torch.softmax(z, 1), 1, generator=g)[:, 0]


def test_features_whose_distances_overflow_are_refused() -> None:
    z, labels = drawn()
    with pytest.raises(ValueError, match="layer 'a' holds numbers of size 1e\\+155"):
        get("density-aware").fit(Features(z, {"a": torch.full_like(z, 1e155)}), labels)
    fitted = get("density-aware", k=5).fit(Features(z, {"a": z}), labels)
    with pytest.raises(ValueError, match="overflow"):
        fitted.predict(Features(z, {"a": 1e155 * z}))
    assert bool(fitted.predict(Features(z, {"a": 1e70 * z})).confidence.isfinite().all())


def test_masked_arrays_are_refused() -> None:
    z, labels = drawn()
    masked = np.ma.masked_array(z.numpy(), z.numpy() > 3)
    with pytest.raises(ValueError, match="masked"):
        salgp.calibrate_outputs(masked, labels, method="temperature")
    with pytest.raises(ValueError, match="masked"):
        salgp.calibrate_outputs(z, labels, layers={"a": masked})
    with pytest.raises(ValueError, match="masked"):
        Features(masked)
    with pytest.raises(ValueError, match="labels"):
        salgp.calibrate_outputs(z, np.ma.masked_array(labels.numpy(), labels.numpy() == 1))
    plain = np.ma.masked_array(z.numpy(), False)  # nothing is masked
    assert len(Features.from_logits(plain)) == len(z)


def test_labels_of_minus_one_and_one_are_named() -> None:
    z, labels = drawn(c=2)
    with pytest.raises(ValueError, match="-1 and 1"):
        get("temperature").fit(Features(z), 2 * labels - 1)
    some = labels.where(torch.arange(len(labels)) % 5 > 0, -1)  # unknown classes are something else
    get("temperature").fit(Features(z), some)


def test_many_classes_without_a_sample_are_told() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(400, 214, generator=g)
    labels = torch.randint(40, (400,), generator=g)
    z[torch.arange(400), labels] += 3
    with pytest.warns(CalibrationWarning, match="174 of 214 classes"):
        get("temperature").fit(Features(z), labels)


def test_latent_gp_takes_logits_in_any_scale() -> None:
    z, labels = drawn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, large = (get("latent-gp", n_inducing=5).fit(Features(k * z), labels) for k in (1, 100))
    assert plain.scale_ == 1.0
    assert large.scale_ > 10.0
    gap = plain.predict(Features(z)).confidence - large.predict(Features(100 * z)).confidence
    assert float(gap.abs().mean()) < 0.02
