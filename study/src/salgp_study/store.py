"""Where a study keeps what it has done: append-only records, and stages cached by the content of their
configuration.

Records are an append-only log (`salgp.io.jsonl`): several processes may write into one folder, and a
changed or missing line is noticed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from salgp.io import append_line, read_lines, write_whole

__all__ = ["append_record", "content_key", "fingerprint", "read_archive", "read_records", "write_archive"]

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
        ...     append_record(folder, {"ece": 0.2})
        ...     read_records(folder)
        [{'ece': 0.1}, {'ece': 0.2}]
    """
    return read_lines(Path(folder) / RECORDS)


def append_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add one record, after cutting off a torn last line if there is one."""
    append_line(Path(folder) / RECORDS, record)


def write_archive(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write records as compressed JSON lines, to be committed; the same records give the same bytes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_archive(write_archive([{"ece": 0.1}], Path(folder) / "records.jsonl.gz"))
        [{'ece': 0.1}]
    """
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda part: part.write_bytes(gzip.compress(lines.encode(), mtime=0)) and None)
    return path


def read_archive(path: Path) -> list[dict[str, Any]]:
    """The records of an archive."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}; it is looked for from the root of the repository")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
