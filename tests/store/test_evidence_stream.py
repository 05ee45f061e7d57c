"""Layer evidence fitted out of core: the same as in memory, whatever the pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scale_jobs import contents, evidence_stores, samples

from salgp.calibrators import load_calibrator
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.layer_spaces import ReferenceSettings, layer_evidence, make_reference
from salgp.features import Features
from salgp.store.fit import fit_store
from salgp.store.store import FeatureStore, write_store

pytestmark = pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")
Stores = tuple[FeatureStore, FeatureStore]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return evidence_stores(tmp_path_factory.mktemp("evidence"))


def test_equals_a_fit_in_memory(stores: Stores) -> None:
    """Every sample of so small a reference is one of its points; the subset holds every original."""
    calibration, reference = stores
    streamed = fit_store(LayerEvidence(size=1000), calibration, reference=reference)
    whole = LayerEvidence(size=1000).fit(*calibration.to_features(), reference.to_features())
    new, _ = samples(200, seed=7)
    a, b = streamed.predict(new), whole.predict(new)
    torch.testing.assert_close(a.confidence, b.confidence, rtol=0, atol=1e-3)
    torch.testing.assert_close(a.layers.mean, b.layers.mean, rtol=0, atol=1e-2)
    classes, same = streamed.predict_classes(new), whole.predict_classes(new)
    torch.testing.assert_close(classes.probs, same.probs, rtol=0, atol=5e-3)


def test_a_small_reference_is_the_one_made_in_memory(stores: Stores) -> None:
    """Streaming changes nothing but the order of the sums."""
    calibration, reference = stores
    streamed = fit_store(LayerEvidence(size=1000), calibration, reference=reference)
    known = make_reference(*reference.to_features(), ReferenceSettings(size=1000))
    query = samples(50, seed=3)[0]
    a, b = layer_evidence(streamed.reference_, query), layer_evidence(known, query)
    torch.testing.assert_close(a.agreement, b.agreement, rtol=0, atol=2e-3)
    torch.testing.assert_close(a.novelty, b.novelty, rtol=0, atol=2e-3)


def test_without_a_reference_a_subset_with_whole_groups_is_fitted(stores: Stores) -> None:
    fitted = fit_store(LayerEvidence(), stores[0], subset=300)
    assert len(fitted.training_rows_) == 300


def test_the_command_line_fits_large_stores_out_of_core(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from salgp.cli import main

    calibration, reference = (str(store.folder) for store in stores)
    arguments = ["fit", calibration, "--reference", reference, "-o", str(tmp_path / "cal"), "--json"]
    monkeypatch.setattr("salgp.cli.fit.LARGE", 1000)
    assert main(arguments) == 0
    direct = fit_store(LayerEvidence(), stores[0], reference=stores[1])
    new, _ = samples(50, seed=7)
    saved = load_calibrator(tmp_path / "cal").predict(new).confidence
    assert torch.equal(saved, direct.predict(new).confidence)


def test_a_reference_of_other_layers_is_refused(stores: Stores, tmp_path: Path) -> None:
    other = write_store([(Features(torch.zeros(3, 4), {"x": torch.ones(3, 2)}), torch.arange(3))], tmp_path)
    with pytest.raises(ValueError, match="reference layers"):
        fit_store(LayerEvidence(), stores[0], reference=other)


def test_workers_do_not_change_a_byte(stores: Stores, tmp_path: Path) -> None:
    for workers in (1, 2):
        fitted = fit_store(LayerEvidence(size=10), stores[0], reference=stores[1], workers=workers)
        fitted.save(tmp_path / str(workers))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
