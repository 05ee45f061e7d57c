"""GPs on the evidence of the layers: no sample is its own neighbour, and terms add up to the correction."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import salgp
from salgp.calibrators.evidence.layer_spaces import layer_evidence
from salgp.features import Features
from salgp.gp.optimise import NotConvergedWarning
from salgp_study.evidence_gp import EvidenceGP, learn_columns


def world(n: int, seed: int, copied: bool = False) -> tuple[Features, Tensor]:
    """Three classes as clusters; the second layer is the noisier one."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, 3, (n,), generator=g)
    x = 2.0 * torch.nn.functional.one_hot(truth, 3).double() + torch.randn(n, 3, generator=g).double()
    y = x + 0.5 * torch.randn(n, 3, generator=g).double()
    features = Features(2.0 * y, {"one": torch.cat([x, x[:, :1] * x[:, 1:2]], dim=1), "two": y})
    if not copied:
        return features, truth
    moved = {k: v + 0.3 * torch.randn(v.shape, generator=g).double() for k, v in features.layers.items()}
    both = Features.concatenate([features, Features(features.logits, moved)])
    groups, families = torch.arange(n).repeat(2), torch.arange(2).repeat_interleave(n)
    return Features(both.logits, both.layers, groups, families), truth.repeat(2)


@pytest.mark.parametrize("copied", [False, True])
def test_without_a_reference_no_sample_is_its_own_neighbour(copied: bool) -> None:
    """The evidence at the fit is of the kind that new samples will have."""
    features, labels = world(150, 0, copied)
    columns, samples = learn_columns(features, labels, None)
    fresh = world(400, 1)[0]
    for column in (2, 3):
        at_fit, later = samples.design[:150, column], columns(fresh)[:, column]
        assert abs(float(at_fit.mean() - later.mean())) < 0.35 * float(later.std())
    itself = layer_evidence(columns.reference, features[:150]).agreement.mean()
    assert float(itself) > 1.5 * float(layer_evidence(columns.reference, fresh).agreement.mean())


@pytest.mark.parametrize(
    ("kernel", "terms"),
    [("matern52", ("one", "two", "confidence")), ("linear", ("constant", "log-odds", "one", "two"))],
)
def test_terms_add_up_to_the_correction_also_of_a_loaded_one(
    kernel: str, terms: tuple[str, ...], tmp_path: Path
) -> None:
    features, labels = world(160, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        calibrator = EvidenceGP(kernel=kernel, max_steps=20).fit(features, labels)
    fresh = world(50, 3)[0]
    p = calibrator.predict(fresh)
    assert p.layers is not None
    assert p.layers.names == terms
    expected = (fresh.confidence + p.layers.mean.sum(dim=1)).clamp(1e-6, 1 - 1e-6)
    torch.testing.assert_close(expected, p.confidence)
    assert torch.equal(salgp.load(calibrator.save(tmp_path)).predict(fresh).confidence, p.confidence)
