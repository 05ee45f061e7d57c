"""Locks: one writer per folder, whoever else asks is told; a killed writer leaves nothing to clean up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from salgp.io import LockedError, locked
from salgp.io.files import LOCK

HOLD = (
    "import sys, time; from salgp.io import locked\n"
    "with locked(sys.argv[1]): print('held', flush=True); time.sleep(60)"
)
COUNT = (
    "import sys, pathlib; from salgp.io import locked\n"
    "path = pathlib.Path(sys.argv[1]) / 'count'\n"
    "for _ in range(50):\n"
    "    with locked(sys.argv[1], wait=60): path.write_text(str(int(path.read_text()) + 1))\n"
)


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def test_the_second_writer_is_told_and_a_killed_one_is_forgotten(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match="being written by another process"), locked(tmp_path):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with locked(tmp_path):
        pass


def test_threads_exclude_each_other_and_errors_release(tmp_path: Path) -> None:
    inside = [0, 0]

    def work() -> None:
        for _ in range(20):
            with locked(tmp_path, wait=60):
                inside[0] += 1
                inside[1] = max(inside)
                time.sleep(0.0005)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [0, 1]
    with pytest.raises(RuntimeError, match="inside"), locked(tmp_path):
        raise RuntimeError("inside")
    with locked(tmp_path):
        pass


def test_no_update_is_lost_between_processes(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    processes = [start(COUNT, tmp_path) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    assert (tmp_path / "count").read_text() == "150"


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("keep me")
    (tmp_path / LOCK).symlink_to(theirs)
    with pytest.raises(FileExistsError, match="symbolic link"), locked(tmp_path):
        pass
    assert theirs.read_text() == "keep me"
