"""Where a study keeps what it has done: append-only records, and stages cached by the content of their
configuration.

A record is one JSON object per line. Each is written whole and synced before the next begins; a last line
torn by a kill is cut off on the next write and ignored by the reader. Several processes may write into one
folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from salgp.storage import FormatError

__all__ = ["append_record", "content_key", "fingerprint", "read_records"]

RECORDS = "records.jsonl"


def content_key(config: Mapping[str, Any]) -> str:
    """A short name for a configuration: equal configurations have equal keys, whatever the order of their
    entries.

    Example:
        >>> content_key({"a": 1, "b": (2, 3)}) == content_key({"b": [2, 3], "a": 1})
        True
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint(*paths: Path) -> str:
    """Digest of the contents of some files."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole records of a study folder, in the order written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     append_record(folder, {"ece": 0.1})
        ...     with Path(folder, RECORDS).open("a") as file:
        ...         _ = file.write('{"ece": 0.')  # torn by a kill
        ...     append_record(folder, {"ece": 0.2})
        ...     read_records(folder)
        [{'ece': 0.1}, {'ece': 0.2}]
    """
    path = Path(folder) / RECORDS
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is torn or empty
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise FormatError(
                f"{path}: line {number} is not a record ({error}); remove it and run the study again"
            ) from error
    return records


def append_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add one record, after cutting off a torn last line if there is one."""
    path = Path(folder) / RECORDS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        _lock(file)
        _cut_torn_line(path, file.seek(0, os.SEEK_END))
        file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def _lock(file: IO[bytes]) -> None:
    """Wait until no other process is writing; released when the file is closed."""
    if os.name == "posix":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _cut_torn_line(path: Path, size: int) -> None:
    if size == 0:
        return
    with path.open("rb+") as file:
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
