"""A store is fitted out of core, in memory, or on a stratified subset, as the method allows."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from scale_jobs import samples, small_calibrator, small_store

from salgp import calibrators
from salgp.calibrators.base import CalibrationWarning
from salgp.features import Features
from salgp.io import ChecksumError
from salgp.store.fit import fit_store, subset_of
from salgp.store.store import write_store

pytestmark = [
    pytest.mark.filterwarnings("ignore:hyperparameter optimisation did not converge"),
    pytest.mark.filterwarnings("ignore:hyperparameters ended on their bounds"),
]


def test_a_gaussian_process_is_fitted_on_a_subset_and_says_so(tmp_path: Path) -> None:
    store, calibrator = small_store(tmp_path), small_calibrator()
    with pytest.warns(CalibrationWarning, match=r"layerwise GP \(sum\) is fitted on 300 of 2,000 rows"):
        fitted = fit_store(calibrator, store, subset=300)
    assert fitted is calibrator
    expected = small_calibrator().fit(*subset_of(store, 300))
    features, _ = samples(50, seed=3)
    assert torch.equal(fitted.predict(features).confidence, expected.predict(features).confidence)


def test_nothing_is_said_where_the_subset_is_the_store(tmp_path: Path) -> None:
    store = small_store(tmp_path, n=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        fitted = fit_store(small_calibrator(), store)
    assert fitted.fitted_.summary.n == 200


@pytest.mark.parametrize("name", ["temperature", "isotonic"])
def test_calibrators_of_logits_see_all_rows(tmp_path: Path, name: str) -> None:
    store = small_store(tmp_path)
    features, labels = store.to_features()
    a, b = fit_store(calibrators.get(name), store), calibrators.get(name).fit(features, labels)
    assert torch.equal(a.predict(features).confidence, b.predict(features).confidence)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    path = tmp_path / "part-000001.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError, match="part-000001"):
        fit_store(small_calibrator(), store, subset=200)


def test_a_subset_keeps_every_sample_with_its_copies(tmp_path: Path) -> None:
    """Copies are far from their originals in the store, in other shards and before them."""
    clean, labels = samples(500)
    parts = [
        (Features(clean.logits, clean.layers, torch.arange(500), torch.full((500,), family)), labels)
        for family in (1, 0, 2, 3)
    ]
    store = write_store(parts, tmp_path, rows=300)
    features, y = subset_of(store, 400)
    kept, counts = features.groups.unique(return_counts=True)
    assert len(kept) == 100
    assert set(counts.tolist()) == {4}
    assert torch.equal(y, labels[features.groups])
    assert torch.equal(features.logits, clean.logits[features.groups])
    share = clean.correct(labels).double().mean()
    assert float(features.correct(y).double().mean()) == pytest.approx(float(share), abs=0.03)
