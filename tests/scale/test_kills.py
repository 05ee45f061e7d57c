"""Processes killed with SIGKILL at random moments: the same command then gives the same bytes as without the kills."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest
from scale_jobs import JOBS, contents, samples, small_calibrator, small_store

KILLS = {"fast": 4, "slow": 20}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the jobs read."""
    folder = tmp_path_factory.mktemp("kills")
    small_store(folder / "store", n=1000, rows=50)
    small_calibrator().set_params(max_steps=None).fit(*samples(200)).save(folder / "calibrator")
    return folder


@pytest.mark.parametrize("job", JOBS)
def test_killed_jobs_continue(prepared: Path, tmp_path: Path, job: str) -> None:
    kill_and_compare(prepared, tmp_path, job, KILLS["fast"])


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_jobs_killed_twenty_times_continue(prepared: Path, tmp_path: Path, job: str) -> None:
    kill_and_compare(prepared, tmp_path, job, KILLS["slow"])


def kill_and_compare(prepared: Path, tmp_path: Path, job: str, kills: int) -> None:
    expected = tmp_path / "expected"
    link(prepared, expected)
    duration = run(job, expected)
    found, moments, killed = tmp_path / "found", random.Random(job), 0
    attempt = 0
    while killed < kills and attempt < 3 * kills:
        attempt += 1
        if attempt == 1 or ((found / "out/manifest.json").is_file() and '"complete": true' in (found / "out/manifest.json").read_text()):
            found = tmp_path / f"found-{attempt}"
            link(prepared, found)
        killed += run(job, found, moments.uniform(0.0, duration)) < 0
    assert killed >= kills // 2, f"only {killed} of {attempt} runs were caught alive"
    assert run(job, found) > 0
    assert contents(found / "out") == contents(expected / "out")


def link(prepared: Path, folder: Path) -> None:
    folder.mkdir()
    for name in ("store", "calibrator"):
        (folder / name).symlink_to(prepared / name)


def run(job: str, folder: Path, kill_after: float | None = None) -> float:
    """Seconds the job took, or -1 where it was killed first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scale_jobs"])
    process = context.Process(target=JOBS[job], args=(str(folder),))
    process.start()
    start = time.perf_counter()
    process.join(kill_after)
    if process.is_alive():
        process.kill()
    process.join()
    assert process.exitcode in (0, -9), f"the job failed with exit code {process.exitcode}"
    return time.perf_counter() - start if process.exitcode == 0 else -1.0
