"""Single-layer residual GPs: forms, layer choice, restarts by evidence, equivalences."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample

import salgp
from salgp.calibrators.gp.salgp import SALGP, ResidualGP
from salgp.gp.optimise import NotConvergedWarning

FEATURES, LABELS = sample(40)
NEW, _ = sample(20, seed=1)


def fitted(method: Any, features: salgp.Features = FEATURES) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return method.fit(features, LABELS)


@pytest.mark.parametrize("form", ["feature", "rio", "red"])
@pytest.mark.parametrize("inference", ["exact", "inducing"])
def test_forms_predict_and_reload(form: str, inference: str, tmp_path: Path) -> None:
    method = fitted(ResidualGP(form, inference=inference, n_inducing=15, max_steps=4))
    p, q = method.predict(NEW), salgp.load(method.save(tmp_path)).predict(NEW)
    assert torch.equal(p.confidence, q.confidence)
    assert torch.equal(p.std, q.std)
    assert torch.equal(p.label, NEW.label)
    assert p.layers is not None
    assert p.layers.names == ("layer2",)


def test_rio_is_sum_of_one_layer() -> None:
    rio = fitted(ResidualGP("rio", layer="layer1")).predict(NEW)
    ours = fitted(SALGP("sum"), FEATURES.select(["layer1"])).predict(NEW)
    torch.testing.assert_close(rio.confidence, ours.confidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rio.std, ours.std, rtol=1e-9, atol=1e-9)


def test_feature_form_does_not_read_the_confidence() -> None:
    method = fitted(ResidualGP("feature", layer=0, max_steps=4))
    sharper = salgp.Features(3.0 * NEW.logits, NEW.layers)
    a, b = method.predict(NEW), method.predict(sharper)
    assert a.layers is not None
    assert b.layers is not None
    assert torch.equal(a.layers.mean, b.layers.mean)


@pytest.mark.parametrize(("layer", "name"), [(0, "layer0"), (-1, "layer2"), ("layer1", "layer1")])
def test_layer_by_name_or_position(layer: str | int, name: str) -> None:
    method = fitted(ResidualGP("feature", layer=layer, max_steps=2))
    assert method.layer_ == name
    changed = {k: x if k == name else torch.zeros_like(x) for k, x in NEW.layers.items()}
    assert torch.equal(
        method.predict(NEW).confidence, method.predict(salgp.Features(NEW.logits, changed)).confidence
    )


def test_unknown_layer_or_form_is_refused() -> None:
    with pytest.raises(KeyError, match=r"no layer named 'conv9'; known layers: layer0"):
        ResidualGP(layer="conv9").fit(FEATURES, LABELS)
    with pytest.raises(ValueError, match=r"layer 7 .* 3 layers"):
        ResidualGP(layer=7).fit(FEATURES, LABELS)
    with pytest.raises(ValueError, match="form must be one of feature, rio, red, got 'full'"):
        ResidualGP("full").fit(FEATURES, LABELS)


def test_red_has_one_lengthscale_per_dimension_and_restarts_by_evidence() -> None:
    alone = fitted(ResidualGP("red", layer=0, max_steps=15))
    several = fitted(ResidualGP("red", layer=0, max_steps=15, restarts=3, seed=2))
    theta = several.fitted_.posterior.theta
    assert theta["features.log_lengthscales"].shape == (4,)
    assert theta["softmax.log_lengthscales"].shape == (3,)
    assert several.fitted_.log_evidence >= alone.fitted_.log_evidence


def test_red_learns_which_dimension_matters() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=g, dtype=torch.float64)
    logits = torch.randn(120, 2, generator=g, dtype=torch.float64)
    wrong = x[:, 1] > 0
    labels = torch.where(wrong, 1 - logits.argmax(1), logits.argmax(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        theta = ResidualGP("red").fit(salgp.Features(logits, {"x": x}), labels).fitted_.posterior.theta
    assert int(theta["features.log_lengthscales"].argmin()) == 1
