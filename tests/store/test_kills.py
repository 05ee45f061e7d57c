"""Processes killed with SIGKILL at random moments: the same command then gives the same bytes as without the
kills.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest
from scale_jobs import JOBS, contents, samples, small_calibrator, small_store

pytestmark = pytest.mark.filterwarnings("ignore:hyperparameters ended on their bounds")

PRELOAD = ["pyarrow.parquet", "salgp.store.extraction", "salgp.store.scoring"]
"""Imported once, before processes fork: they then start in a moment."""

KILLS = 20


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the jobs read."""
    folder = tmp_path_factory.mktemp("kills")
    small_store(folder / "store", n=1000, rows=50)
    small_calibrator().set_params(max_steps=None).fit(*samples(200)).save(folder / "calibrator")
    return folder


@pytest.mark.parametrize("job", JOBS)
def test_jobs_killed_twenty_times_continue(prepared: Path, tmp_path: Path, job: str) -> None:
    """Kill the job again and again until it gets through, several times over, and compare what it leaves."""
    expected = prepared_copy(prepared, tmp_path / "expected")
    duration, moments, killed, finished = run(job, expected), random.Random(job), 0, 0
    found = prepared_copy(prepared, tmp_path / "found-0")
    while killed < KILLS:
        if run(job, found, moments.uniform(0.0, duration)) < 0:
            killed += 1
            continue
        assert contents(found / "out") == contents(expected / "out")
        finished += 1
        assert finished < 20 * KILLS, f"only {killed} runs were caught alive"
        found = prepared_copy(prepared, tmp_path / f"found-{finished}")
    assert run(job, found) > 0
    assert contents(found / "out") == contents(expected / "out")


def prepared_copy(prepared: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("store", "calibrator"):
        (folder / name).symlink_to(prepared / name)
    return folder


def run(job: str, folder: Path, kill_after: float | None = None) -> float:
    """Seconds the job took, or -1 where it was killed first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=JOBS[job], args=(str(folder),))
    process.start()
    start = time.perf_counter()
    process.join(kill_after)
    if process.is_alive():
        process.kill()
    process.join()
    assert process.exitcode in (0, -9), f"the job failed with exit code {process.exitcode}"
    return time.perf_counter() - start if process.exitcode == 0 else -1.0
