"""Locks: one writer per folder, whoever else asks is told; a killed writer leaves nothing to clean up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from salgp.storage import LockedError, locked
from salgp.storage.locks import LOCK, _me, hold_file

HOLD = (
    "import sys, time; from salgp.storage import locked\n"
    "with locked(sys.argv[1]): print('held', flush=True); time.sleep(60)"
)
COUNT = (
    "import sys, pathlib; from salgp.storage import locked\n"
    "path = pathlib.Path(sys.argv[1]) / 'count'\n"
    "for _ in range(50):\n"
    "    with locked(sys.argv[1], wait=60): path.write_text(str(int(path.read_text()) + 1))\n"
)


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def refusal(folder: Path) -> str:
    with pytest.raises(LockedError) as caught, locked(folder):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_second_writer_is_told_and_a_killed_one_is_forgotten(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert f"being written by process {process.pid} since 20" in refusal(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    assert (tmp_path / LOCK).is_file(), "the stale lock of a killed process"
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == _me()["pid"]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_machine_is_kept(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2026-01-01"}))
    assert "on another machine since 2026-01-01" in refusal(tmp_path)
    assert refusal(tmp_path).endswith(f"remove {tmp_path / LOCK}")
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == 1


@pytest.mark.parametrize("rubbish", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_torn_lock_is_taken_over(tmp_path: Path, rubbish: bytes) -> None:
    (tmp_path / LOCK).write_bytes(rubbish)
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


def test_the_host_is_not_named() -> None:
    import platform

    assert platform.node() not in json.dumps(_me())


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("keep me")
    (tmp_path / ".salgp.lock").symlink_to(theirs)
    with pytest.raises(FileExistsError, match="symbolic link"), locked(tmp_path):
        pass
    assert theirs.read_text() == "keep me"
    assert (tmp_path / ".salgp.lock").is_symlink()


def test_a_lock_that_was_removed_by_hand_is_not_taken_from_its_next_owner(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK).unlink()
        theirs = locked(tmp_path)
        theirs.__enter__()
    assert (tmp_path / LOCK).is_file()
    assert "being written by process" in refusal(tmp_path)
    theirs.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_an_owner_without_a_name_is_given_a_moment(tmp_path: Path) -> None:
    """It is about to write its name, or about to leave."""
    held = (tmp_path / LOCK).open("wb")
    assert hold_file(held)
    threading.Timer(0.05, held.close).start()
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == _me()["pid"]
    held = (tmp_path / LOCK).open("wb")
    assert hold_file(held)
    start = time.monotonic()
    assert "process ? since a moment ago" in refusal(tmp_path)
    assert 0.2 < time.monotonic() - start < 10
    held.close()
