"""Features longer than any that are known: confidence falls back to chance, in domain nothing changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_single import fitted, world

from salgp.calibrators.evidence.model import TOLERATED
from salgp.calibrators.evidence.reference import layer_evidence
from salgp.features import Features


def longer(features: Features, factor: float) -> Features:
    """What a column in other units does to a network without normalisation: everything grows."""
    layers = {name: factor * x for name, x in features.layers.items()}
    return Features(factor * features.logits, layers)


@pytest.mark.parametrize("trust", [0.0, 1.0])
@pytest.mark.parametrize("context", [None, "all"])
def test_confidence_falls_back_to_chance_and_novelty_rises(trust: float, context: str | None) -> None:
    calibrator = fitted(trust=trust)
    home = world(200, 3)[0]
    near, far = (calibrator.predict(longer(home, factor), context) for factor in (1.0, 1e6))
    assert float(near.confidence.mean()) > 0.7
    torch.testing.assert_close(far.confidence, torch.full_like(far.confidence, 1 / 3), atol=1e-3, rtol=0)
    assert float((far.novelty - near.novelty).min()) > 8
    assert far.layers is not None
    np.testing.assert_allclose(  # the terms still add up
        far.layers.mean.sum(dim=1),
        torch.logit(far.confidence) - 20.0,  # raw log-odds are bounded
        atol=0.05,
    )


def test_log_odds_are_divided_by_how_far_it_is() -> None:
    calibrator = fitted()
    home = world(50, 4)[0]
    samples = Features(home.logits, longer(home, 30.0).layers)
    scales = calibrator.evidence_.scales
    length = layer_evidence(calibrator.evidence_.reference, samples).length
    far = (length / (TOLERATED * scales.longest)).clamp_min(1.0)
    assert (far > 2).all()
    unbounded = fitted()
    unbounded.evidence_ = replace(
        unbounded.evidence_, scales=replace(scales, longest=torch.tensor(1e12).to(scales.longest))
    )
    chance = -np.log(2)
    expected = chance + (torch.logit(unbounded.predict(samples).confidence) - chance) / far
    torch.testing.assert_close(torch.logit(calibrator.predict(samples).confidence), expected)


def test_up_to_twice_the_longest_original_nothing_changes() -> None:
    calibrator = fitted()
    features = world(240, 1)[0]  # the originals
    longest = layer_evidence(calibrator.evidence_.reference, features).length.max()
    torch.testing.assert_close(calibrator.evidence_.scales.longest, longest)
    wider = replace(calibrator.evidence_, scales=replace(calibrator.evidence_.scales, longest=10 * longest))
    samples = longer(features, 1.99)
    before = calibrator.predict(samples).confidence
    calibrator.evidence_ = wider
    assert torch.equal(calibrator.predict(samples).confidence, before)


def test_one_sample_is_judged_as_among_others() -> None:
    calibrator = fitted()
    samples = longer(world(20, 6)[0], 17.0)
    together = calibrator.predict(samples)
    for i in range(20):
        alone = calibrator.predict(samples[i : i + 1])
        torch.testing.assert_close(alone.confidence, together.confidence[i : i + 1], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.novelty, together.novelty[i : i + 1], atol=1e-4, rtol=0)


def test_class_probabilities_follow() -> None:
    calibrator = fitted()
    found = calibrator.predict_classes(longer(world(40, 7)[0], 1e6))
    torch.testing.assert_close(found.probs, torch.full_like(found.probs, 1 / 3), atol=0.05, rtol=0)


def test_the_graph_does_the_same(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from salgp.export import export_head

    calibrator = fitted()
    session = onnxruntime.InferenceSession(export_head(calibrator, tmp_path / "head.onnx"))
    samples = longer(world(30, 8)[0], 40.0)
    given = {"logits": samples.logits, **{f"layers.{name}": x for name, x in samples.layers.items()}}
    found = session.run(["confidence"], {name: x.float().numpy() for name, x in given.items()})[0]
    np.testing.assert_allclose(found, calibrator.predict(samples).confidence, atol=1e-4)
