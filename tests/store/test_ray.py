"""Ray gives the same bytes as threads, and a worker killed in the middle of a job loses nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scale_jobs import (
    contents,
    evidence_stores,
    network,
    part_loader,
    samples,
    score_and_die_once,
    small_calibrator,
    small_store,
)

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.io import ChecksumError
from salgp.store import scoring
from salgp.store.engines import _ray_session, run
from salgp.store.extraction import extract_parts
from salgp.store.fit import fit_store
from salgp.store.scoring import score

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One small Ray for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        )
        patch.setenv("RAY_worker_niceness", "0")  # else they starve beside other work
        with _ray_session(2, None) as session:
            yield session


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray")
    small_store(path / "store", n=1200, rows=200)
    small_calibrator().fit(*samples(200)).save(path / "calibrator")
    return path


def test_scoring_gives_the_same_bytes(ray: Any, folder: Path, tmp_path: Path) -> None:
    for engine in ("local", "ray"):
        score(folder / "store", folder / "calibrator", tmp_path / engine, engine=engine, workers=2)
    assert contents(tmp_path / "local") == contents(tmp_path / "ray")


def test_layer_evidence_with_a_reference_gives_the_same_bytes(ray: Any, tmp_path: Path) -> None:
    """Both passes, over the reference and over the calibration data, on Ray."""
    calibration, reference = evidence_stores(tmp_path)
    for engine in ("local", "ray"):
        method = LayerEvidence(size=10)
        fitted = fit_store(method, calibration, reference=reference, engine=engine, workers=2)
        fitted.save(tmp_path / engine)
    assert contents(tmp_path / "local") == contents(tmp_path / "ray")


def test_extraction_with_a_network_per_worker(ray: Any, tmp_path: Path) -> None:
    for engine in ("local", "ray"):
        extract_parts(network, part_loader, 3, tmp_path / engine, engine=engine, workers=2)
    local, remote = contents(tmp_path / "local"), contents(tmp_path / "ray")
    assert local.keys() == remote.keys()


def test_a_killed_worker_loses_nothing(
    ray: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(folder / "store", folder / "calibrator", tmp_path / "expected", workers=1)
    marker = tmp_path / "killed"

    def run_and_kill(function: Any, pieces: Any, **how: Any) -> Any:
        return run(score_and_die_once, [(str(marker), *piece) for piece in pieces], **how)

    monkeypatch.setattr(scoring, "run", run_and_kill)
    score(folder / "store", folder / "calibrator", tmp_path / "out", engine="ray", workers=2)
    assert marker.exists()
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_errors_of_the_work_reach_the_caller(ray: Any, folder: Path, tmp_path: Path) -> None:
    small_store(tmp_path / "store", n=600, rows=200)
    path = tmp_path / "store/part-000001.parquet"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(ChecksumError, match="part-000001"):
        score(tmp_path / "store", folder / "calibrator", tmp_path / "out", engine="ray", workers=2)
