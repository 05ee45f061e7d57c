"""Append-only logs: what was written comes back, a torn end is forgotten, anything else is noticed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from salgp.io import ChecksumError, FormatError, append_line, read_lines

RECORDS = [{"a": i, "b": [0.1 * i, "ü", None], "c": {"x": True}} for i in range(6)]


def append_lines(path: Path, records: list[dict[str, Any]]) -> None:
    for record in records:
        append_line(path, record)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    append_lines(tmp_path / "log.jsonl", RECORDS)
    return tmp_path / "log.jsonl"


def test_records_come_back(log: Path) -> None:
    assert read_lines(log) == RECORDS
    append_line(log, {"t": (1, 2)})
    assert read_lines(log)[-1] == {"t": [1, 2]}
    assert read_lines(log.parent / "none.jsonl") == []


def test_any_cut_leaves_the_first_records(log: Path) -> None:
    whole = log.read_bytes()
    for cut in range(len(whole)):
        log.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        assert read_lines(log) == RECORDS[:kept]
        append_line(log, {"next": 1})
        assert read_lines(log) == [*RECORDS[:kept], {"next": 1}]


def test_long_lines_are_cut_and_continued(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    records: list[dict[str, Any]] = [{"text": "x" * 50_000, "i": i} for i in range(3)]
    append_lines(log, records)
    with log.open("ab") as file:
        file.write(b"y" * 40_000)
    append_line(log, {"i": 3})
    assert read_lines(log) == [*records, {"i": 3}]


def test_lost_doubled_and_exchanged_lines_are_noticed(log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    a, b, c, *rest = lines
    for changed in ([a, c, *rest], [b, c, *rest], [a, b, b, c, *rest], [a, c, b, *rest]):
        log.write_bytes(b"".join(changed))
        with pytest.raises(ChecksumError, match="line"):
            read_lines(log)


def test_logs_may_follow_each_other(log: Path, tmp_path: Path) -> None:
    other = [{"other": 1}, *RECORDS]
    append_lines(tmp_path / "other.jsonl", other)
    log.write_bytes(log.read_bytes() + (tmp_path / "other.jsonl").read_bytes())
    assert read_lines(log) == [*RECORDS, *other]


def test_the_same_log_twice_is_refused(log: Path) -> None:
    first = log.read_bytes().splitlines(keepends=True)[0]
    for again in (first, log.read_bytes()):
        log.write_bytes(log.read_bytes() + again)
        with pytest.raises(ChecksumError, match=f"line {len(RECORDS) + 1} repeats an earlier one"):
            read_lines(log)


def test_every_changed_bit_is_noticed_or_harmless(log: Path) -> None:
    whole, rng = log.read_bytes(), random.Random(0)
    for _ in range(3000):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        log.write_bytes(changed)
        try:
            found = read_lines(log)
        except FormatError:
            continue
        assert found == RECORDS[: len(found)]
        assert len(found) >= len(RECORDS) - 1, "only the last newline can go"


@pytest.mark.parametrize(
    "line", [b"rubbish", b"[1]", b"3", b"{}", b"[" * 100_000, b"\xff", b'{"a": NaN}', b'{"sha256": []}', b""]
)
def test_a_line_that_is_no_record_is_named(log: Path, line: bytes) -> None:
    with log.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(FormatError, match=r"log\.jsonl: line 7"):
        read_lines(log)


def test_what_cannot_be_kept_is_refused(log: Path) -> None:
    before = log.read_bytes()
    with pytest.raises(ValueError, match="sha256"):
        append_line(log, {"sha256": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_line(log, {"x": float("nan")})
    assert log.read_bytes() == before


def test_several_processes_may_append(tmp_path: Path) -> None:
    code = (
        "import sys; from salgp.io import append_line\n"
        "for i in range(100): append_line(sys.argv[1], {'who': sys.argv[2], 'i': i})"
    )
    log = tmp_path / "log.jsonl"
    workers = [subprocess.Popen([sys.executable, "-c", code, str(log), name]) for name in "ab"]
    assert [worker.wait() for worker in workers] == [0, 0]
    found = read_lines(log)
    for name in "ab":
        assert [r["i"] for r in found if r["who"] == name] == list(range(100))


def test_what_a_link_points_to_is_not_touched(tmp_path: Path) -> None:
    """Appending would cut off the last line of somebody else's text."""
    theirs, link = tmp_path / "theirs.txt", tmp_path / "log.jsonl"
    theirs.write_text("first line\nwithout an end")
    link.symlink_to(theirs)
    with pytest.raises(FileExistsError, match="symbolic link"):
        append_line(link, {"a": 1})
    assert theirs.read_text() == "first line\nwithout an end"
