"""Append-only logs: one JSON object per line, each with a checksum that also covers the line before.

A line is written whole and synced before the next begins; a last line torn by a kill is cut off on the next
write and ignored by the reader. The checksum of a line is that of its record and of the previous checksum, so
that a changed, dropped, doubled or exchanged line is noticed; only the newest lines can be missing, as after
a kill. Logs may be concatenated: the first line of a log follows nothing. Several processes may append.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from salgp.io.errors import ChecksumError, FormatError
from salgp.io.files import open_regular, refuse_special
from salgp.io.json_schema import plain_number
from salgp.io.locks import lock_file

__all__ = ["append_line", "append_lines", "read_lines"]

CHECK = "sha256"


def append_line(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add one record, after cutting off a torn last line if there is one."""
    append_lines(path, [record])


def append_lines(path: str | os.PathLike[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Add several records and sync once; a kill leaves the first few of them, each whole.

    Args:
        path: of the log; created where missing.
        records: objects of numbers, strings, lists and objects; no NaN, and no key ``sha256``.
    """
    where = Path(path)
    refuse_special(where)
    with lock_file(where.with_name(f".{where.name}.lock")):
        where.touch()
        _append(where, records)


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole records of a log, in the order written; none where there is no file.

    Raises:
        FormatError: a line is not what was written, with its number.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Path(folder, "log.jsonl")
        ...     append_line(log, {"ece": 0.1})
        ...     with log.open("a") as file:
        ...         _ = file.write('{"ece": 0.')  # torn by a kill
        ...     append_line(log, {"ece": 0.2})
        ...     read_lines(log)
        [{'ece': 0.1}, {'ece': 0.2}]
    """
    where = Path(path)
    if not where.exists():
        return []
    with open_regular(where) as file:
        lines = file.read().split(b"\n")[:-1]  # the rest is torn or empty
    records, before, seen = [], "", set[str]()
    for number, line in enumerate(lines, 1):
        record = _parse(where, number, line)
        check = record.pop(CHECK, None)
        if check not in (_check(record, before), _check(record, "")):
            raise ChecksumError(
                f"{where}: line {number} was changed, or lines before it are missing; remove what "
                f"follows line {number - 1}, or restore the file"
            )
        if check in seen:
            raise ChecksumError(
                f"{where}: line {number} repeats an earlier one; remove what follows line {number - 1}"
            )
        seen.add(check)
        records.append(record)
        before = check
    return records


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("rb+") as file:
        check = _last_check(file)
        for record in records:
            line, check = _line(record, check)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: line {number} is not a record ({error}); remove what follows line {number - 1}"
        ) from error
    if not isinstance(record, dict):
        raise FormatError(f"{path}: line {number} is not a record but a {type(record).__name__}")
    return record


def _line(record: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    if CHECK in record:
        raise ValueError(f"a record cannot have a key {CHECK!r}: it is the log's own")
    text = json.dumps(record, allow_nan=False, default=plain_number)
    plain = json.loads(text)  # as it will be read: tuples become lists
    check = _check(plain, before)
    return (json.dumps({**plain, CHECK: check}, allow_nan=False) + "\n").encode(), check


def _check(record: Mapping[str, Any], before: str) -> str:
    text = json.dumps(record, separators=(",", ":"))
    return hashlib.sha256(f"{before}|{text}".encode()).hexdigest()


def _last_check(file: IO[bytes]) -> str:
    """Go to the end, without a torn last line; the checksum of the last whole one, empty without one."""
    end = file.seek(0, os.SEEK_END)
    tail, start = b"", end
    while start > 0 and tail.count(b"\n") < 2:
        step = min(start, 1 << 14)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    whole = tail[: tail.rfind(b"\n") + 1]
    file.seek(start + len(whole))
    file.truncate()
    try:
        return str(json.loads(whole.split(b"\n")[-2])[CHECK])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
