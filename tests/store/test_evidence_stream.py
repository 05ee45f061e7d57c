"""Layer evidence fitted out of core: the same as in memory on the same reference, whatever the pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scale_jobs import contents, evidence_stores, samples

from salgp.calibrators import load_calibrator
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.reference import layer_evidence, make_reference
from salgp.features import Features
from salgp.store import stream as module
from salgp.store.fit import fit_store
from salgp.store.store import FeatureStore, write_store

pytestmark = pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")
Stores = tuple[FeatureStore, FeatureStore]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return evidence_stores(tmp_path_factory.mktemp("evidence"))


@pytest.mark.parametrize("form", ["prototypes", "statistics"])
def test_equals_a_fit_in_memory_on_the_same_reference(stores: Stores, form: str) -> None:
    calibration, reference = stores
    streamed = fit_store(LayerEvidence(reference=form, size=10), calibration, reference=reference)
    features, labels = calibration.to_features()
    known = streamed.evidence_.reference
    whole = LayerEvidence(reference=form, size=10)
    whole.learn(features, labels, layer_evidence(known, features), known)
    whole.n_classes_, whole.layer_widths_ = features.n_classes, features.widths
    new, _ = samples(200, seed=7)
    a, b = streamed.predict(new), whole.predict(new)
    torch.testing.assert_close(a.confidence, b.confidence, rtol=0, atol=1e-6)
    torch.testing.assert_close(a.std, b.std, rtol=0, atol=1e-6)
    torch.testing.assert_close(a.layers.mean, b.layers.mean, rtol=0, atol=1e-5)


def test_class_probabilities_are_those_of_a_fit_in_memory(stores: Stores) -> None:
    """The subset holds every original here."""
    calibration, reference = stores
    streamed = fit_store(LayerEvidence(reference="full"), calibration, reference=reference)
    whole = LayerEvidence(reference="full").fit(*calibration.to_features(), reference.to_features())
    new, _ = samples(200, seed=7)
    a, b = streamed.predict_classes(new), whole.predict_classes(new)
    torch.testing.assert_close(a.probs, b.probs, rtol=0, atol=5e-3)  # points in half precision


def test_a_small_reference_is_the_one_made_in_memory(stores: Stores) -> None:
    """Where every sample is drawn, streaming changes nothing but the order of the sums."""
    calibration, reference = stores
    streamed = fit_store(LayerEvidence(reference="full"), calibration, reference=reference)
    features, labels = reference.to_features()
    known = make_reference(features, labels)
    query = samples(50, seed=3)[0]
    a, b = layer_evidence(streamed.evidence_.reference, query), layer_evidence(known, query)
    torch.testing.assert_close(a.agreement, b.agreement, rtol=0, atol=2e-3)  # points in half precision
    torch.testing.assert_close(a.novelty, b.novelty, rtol=0, atol=2e-3)


def test_pieces_and_workers_do_not_matter(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pieces, workers in (("a", 1024, 1), ("b", 2, 2)):
        monkeypatch.setattr(module, "MAX_PIECES", pieces)
        fitted = fit_store(LayerEvidence(size=10), stores[0], reference=stores[1], workers=workers)
        fitted.save(tmp_path / name)
    new, _ = samples(100, seed=7)
    a, b = (load_calibrator(tmp_path / name).predict(new).confidence for name in ("a", "b"))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_second_call_reads_what_the_first_left(stores: Stores, tmp_path: Path) -> None:
    for name in ("a", "b"):
        fit_store(LayerEvidence(size=5), stores[0], reference=stores[1], work=tmp_path / "w").save(
            tmp_path / name
        )
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    with pytest.raises(ValueError, match=r"another job: .*differ"):
        fit_store(LayerEvidence(size=6), stores[0], reference=stores[1], work=tmp_path / "w")


def test_without_a_reference_a_subset_with_whole_groups_is_fitted(stores: Stores) -> None:
    fitted = fit_store(LayerEvidence(), stores[0], subset=300)
    assert len(fitted.evidence_.reference) == 100
    assert int(fitted.seen_.is_copy.sum()) == 200


def test_the_command_line_fits_large_stores_out_of_core(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from salgp.cli import main

    calibration, reference = (str(store.folder) for store in stores)
    arguments = ["fit", calibration, "--reference", reference, "-o", str(tmp_path / "cal"), "--json"]
    monkeypatch.setattr("salgp.cli.files.LARGE", 1000)
    assert main(arguments) == 0
    direct = fit_store(LayerEvidence(), stores[0], reference=stores[1])
    new, _ = samples(50, seed=7)
    saved = load_calibrator(tmp_path / "cal").predict(new).confidence
    assert torch.equal(saved, direct.predict(new).confidence)
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_reference_of_other_layers_is_refused(stores: Stores, tmp_path: Path) -> None:
    other = write_store([(Features(torch.zeros(3, 4), {"x": torch.ones(3, 2)}), torch.arange(3))], tmp_path)
    with pytest.raises(ValueError, match="reference layers"):
        fit_store(LayerEvidence(), stores[0], reference=other)
