"""Append-only logs: one JSON object per line, each with a checksum that also covers the line before.

A line is written whole and synced before the next begins; a last line torn by a kill is cut off on the next
write and ignored by the reader. The checksum of a line is that of its record and of the previous checksum, so
that a changed, dropped, doubled or exchanged line is noticed; only the newest lines can be missing, as after
a kill. Logs may be concatenated: the first line of a log follows nothing. Several processes may append.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

from salgp.io.files import (
    AnyPath,
    ChecksumError,
    FormatError,
    lock_file,
    open_regular,
    refuse_special,
    writing,
)
from salgp.io.json_files import CHECK, as_stored

__all__ = []


def append_line(path: AnyPath, record: Mapping[str, Any]) -> None:
    """Add one record, after cutting off a torn last line if there is one.

    Args:
        path: of the log; created where missing.
        record: an object of numbers, strings, lists and objects; no NaN, and no key ``sha256``.
    """
    if CHECK in record:
        raise ValueError(f"a record cannot have a key {CHECK!r}: it is the log's own")
    plain = as_stored(record, allow_nan=False)
    where = Path(path)
    refuse_special(where)
    lock = lock_file(where.with_name(f".{where.name}.lock"))
    with writing(where), lock, where.open("ab+") as file:
        line, end = _last_line(file)
        file.truncate(end)
        before = str(_parse(line).get(CHECK, ""))
        sealed = {**plain, CHECK: _check(plain, before)}
        file.write((json.dumps(sealed) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: AnyPath) -> list[dict[str, Any]]:
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
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(_whole_lines(where), 1):
        record = _parse(line)
        check = record.pop(CHECK, None)
        before = next(reversed(records), "")
        wrong = _fault(record, check, before, records)
        if wrong:
            kind = FormatError if check is None else ChecksumError
            advice = f"remove what follows line {number - 1}, or restore the file"
            raise kind(f"{where}: line {number} {wrong}; {advice}")
        records[check] = record
    return list(records.values())


def _whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with open_regular(path) as file:
        return file.read().split(b"\n")[:-1]  # the rest is torn or empty


def _fault(record: Mapping[str, Any], check: Any, before: str, earlier: Mapping[str, Any]) -> str:
    """Why a line cannot follow the earlier ones, by their checksums; empty where it can."""
    if check is None:
        return "is not a record"
    if check not in (_check(record, before), _check(record, "")):
        return "was changed, or lines before it are missing"
    return "repeats an earlier one" if check in earlier else ""


def _parse(line: bytes) -> dict[str, Any]:
    """The record of a line; empty where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _check(record: Mapping[str, Any], before: str) -> str:
    text = json.dumps(record, separators=(",", ":"))
    return hashlib.sha256(f"{before}|{text}".encode()).hexdigest()


def _last_line(file: IO[bytes]) -> tuple[bytes, int]:
    """The last whole line and where it ends; what is before it is not read."""
    if not file.seek(0, os.SEEK_END):
        return b"", 0
    with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
        return content[start:end], end
