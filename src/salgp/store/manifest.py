"""A folder of files that are each whole or absent, and the one list that says which are finished.

Files appear by rename, so a killed process leaves either a whole file or none under its name. The manifest
lists a file, its rows and its SHA-256 after the file is in place; what it does not list is made again and
comes out the same. There are no times or host names in it: two runs of the same job leave the same bytes,
however often they were killed.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.storage import ChecksumError, FormatError, digest, read_header, write_header, write_whole
from salgp.storage.locks import LOCK

__all__ = ["ChecksumError", "Entry", "Manifest", "claim", "sweep", "update_digest", "write_durably"]

NAME = "manifest.json"
FORMAT_VERSION = 1
_LEFT_BEHIND = re.compile(r"\..{1,40}\.[0-9a-f]{12}\.part")
"""Names of what `salgp.storage` writes before it takes its place."""


@dataclass(frozen=True)
class Entry:
    """One finished file.

    Args:
        file: name within the folder.
        rows: samples in it.
        sha256: of its bytes.
        data: digest of what it was made from, where that is known.
    """

    file: str
    rows: int
    sha256: str
    data: str = ""

    def listed(self) -> dict[str, Any]:
        """As it stands in the list; an unknown digest is left out."""
        return {key: value for key, value in asdict(self).items() if value != "" or key != "data"}

    def check_data(self, folder: Path, found: str) -> None:
        """Refuse to continue with other data than the file was made from."""
        if found != self.data:
            raise ValueError(
                f"{folder} was made from other data: the samples of {self.file} are not those it was made "
                f"from; choose another folder or delete this one"
            )

    def check(self, folder: Path) -> None:
        """Raise `ChecksumError`, naming the file, where its bytes changed."""
        path = folder / self.file
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is listed in {NAME} but missing; restore it or write the folder again"
            )
        if path.is_symlink():
            raise FormatError(f"{path} is a symbolic link; shards are plain files inside the folder")
        found = digest(path)
        if found != self.sha256:
            raise ChecksumError(
                f"{path} is damaged: SHA-256 is {found[:12]}..., expected "
                f"{self.sha256[:12]}...; restore this file or write it again"
            )


class Manifest:
    """The list of finished files of one job; opening an existing one continues the job.

    Args:
        folder: where the files are.
        kind: what they are, such as ``"salgp-features"``.
        header: what the job is; a folder that holds another job is refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = Manifest(folder, "example", {"job": 1})
        ...     manifest.add(0, Entry("a", 10, "..."))
        ...     manifest.finish()
        ...     again = Manifest.read(folder, "example")
        >>> again.complete, again.rows, again.header
        (True, 10, {'job': 1})
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str, header: Mapping[str, Any]) -> None:
        self.folder, self.kind, self.header = Path(folder), kind, dict(header)
        self.entries: dict[int, Entry] = {}
        self.complete = False
        self._pause, self._saved = 0.0, 0.0

    @staticmethod
    def read(folder: str | os.PathLike[str], kind: str) -> Manifest:
        """Read the manifest of a folder; `FileNotFoundError` where there is none."""
        path = Path(folder) / NAME
        if not path.is_file():
            raise FileNotFoundError(f"{folder}: no {NAME} here; expected a folder of kind {kind!r}")
        value = read_header(path, kind, FORMAT_VERSION)
        complete, header, shards = (value.get(key) for key in ("complete", "header", "shards"))
        if not isinstance(complete, bool) or not isinstance(header, dict) or not isinstance(shards, list):
            raise FormatError(f"{path}: expected 'complete', 'header' and 'shards', got {str(value)[:80]}")
        manifest = Manifest(folder, kind, header)
        for shard in shards:
            manifest.entries.update([_entry(path, shard)])
        if len(manifest.entries) < len(shards):
            raise FormatError(f"{path}: a shard is listed twice")
        if complete and sorted(manifest.entries) != list(range(len(shards))):
            raise FormatError(f"{path}: said to be complete, but shards are missing from the list")
        manifest.complete = complete
        return manifest

    @staticmethod
    def open(folder: str | os.PathLike[str], kind: str, header: Mapping[str, Any]) -> Manifest:
        """Continue the job of a folder, or begin it; a folder with another job is refused."""
        if not (Path(folder) / NAME).is_file():
            manifest = Manifest(folder, kind, header)
            manifest.save()
            return manifest
        manifest = Manifest.read(folder, kind)
        manifest.check_job(header)
        return manifest

    def check_job(self, header: Mapping[str, Any]) -> None:
        """Refuse to continue another job."""
        differing = _differing(header, self.header)
        if differing:
            raise ValueError(
                f"{self.folder} holds the output of another job: {', '.join(differing)} differ; "
                f"choose another folder or delete this one"
            )

    @property
    def rows(self) -> int:
        """Samples in all finished files."""
        return sum(entry.rows for entry in self.entries.values())

    def add(self, index: int, entry: Entry) -> None:
        """List a finished file; it is on disk at the latest by `finish`, and at most 5 % of the time goes
        into saving.
        """
        self.entries[index] = entry
        if time.monotonic() - self._saved >= self._pause:
            self.save()

    def check_end(self, count: int) -> None:
        """Refuse data that ended after ``count`` shards where more were finished before."""
        if any(index >= count for index in self.entries):
            raise ValueError(self._other_length("end before the last"))

    def check_more(self) -> None:
        """Refuse a new shard of a finished job."""
        if self.complete:
            raise ValueError(self._other_length("go on after the last"))

    def _other_length(self, what: str) -> str:
        return (
            f"{self.folder} was made from other data: it has {len(self.entries)} shards, and the data "
            f"{what}; choose another folder or delete this one"
        )

    def finish(self) -> None:
        """Mark the job complete."""
        self.complete = True
        self.save()

    def save(self) -> None:
        """Write the list."""
        start = time.monotonic()
        shards = [{"index": index, **self.entries[index].listed()} for index in sorted(self.entries)]
        value = {
            "complete": self.complete,
            "header": self.header,
            "shards": shards,
        }
        write_header(self.folder / NAME, self.kind, FORMAT_VERSION, value)
        self._saved = time.monotonic()
        self._pause = 20.0 * (self._saved - start)


def write_durably(path: Path, write: Callable[[Path], None]) -> str:
    """Write a file whole, on disk before its name appears; returns its SHA-256."""
    found = ""

    def write_and_flush(part: Path) -> None:
        nonlocal found
        write(part)
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        found = digest(part)

    write_whole(path, write_and_flush)
    return found


def update_digest(found: hashlib._Hash, value: Any) -> None:
    """Add the contents of a batch (nested arrays, numbers, strings) to a digest.

    Example:
        >>> a, b = hashlib.sha256(), hashlib.sha256()
        >>> update_digest(a, {"x": [1, 2.5], "y": "text"})
        >>> update_digest(b, {"x": [1, 2.5], "y": "texts"})
        >>> a.hexdigest() == b.hexdigest()
        False
    """
    if isinstance(value, Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().reshape(-1)
        plain = flat if flat.stride(0) == 1 else flat.new_empty(len(flat)).copy_(flat)
        found.update(plain.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            update_digest(found, str(key))
            update_digest(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(f"{len(value)} parts".encode())
        for part in value:
            update_digest(found, part)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        found.update(f"{type(value).__name__}{value!r};".encode())
    else:
        update_digest(found, dict(vars(value)) if hasattr(value, "__dict__") else type(value).__name__)


def claim(folder: str | os.PathLike[str], ours: Callable[[Path], bool] = lambda path: False) -> None:
    """Refuse a folder with somebody else's files in it; remove what killed writers left behind.

    Only while nobody else writes into the folder.

    Args:
        folder: where a job begins or goes on.
        ours: which files may be there before there is a manifest.
    """
    where = Path(folder)
    found = sorted(where.iterdir()) if where.is_dir() else []
    foreign = [path for path in found if path.name != LOCK and not _LEFT_BEHIND.fullmatch(path.name)]
    if not (where / NAME).is_file() and not all(map(ours, foreign)):
        name = next(path.name for path in foreign if not ours(path))
        raise FileExistsError(
            f"{folder} holds {name!r}, and no job of salgp; it is left alone: choose an empty or a new folder"
        )
    sweep(where)


def sweep(folder: Path) -> None:
    """Remove what killed writers left behind; only while nobody else writes into the folder."""
    for path in folder.glob(".*.part"):
        if _LEFT_BEHIND.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Keys under which two headers differ, down to the entries of nested ones."""
    found = []
    for key in {**mine, **theirs}:
        a, b = mine.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differing(a, b)
        elif a != b:
            found.append(key)
    return found


def _entry(path: Path, shard: Any) -> tuple[int, Entry]:
    """Index and entry of one listed file; a file outside the folder, or a number that is none, is refused."""
    expected = {"index": int, "file": str, "rows": int, "sha256": str}
    kinds = {key: type(value) for key, value in shard.items()} if isinstance(shard, dict) else {}
    if kinds not in (expected, {**expected, "data": str}):
        raise FormatError(f"{path}: expected a shard with {', '.join(expected)}, got {str(shard)[:80]}")
    name, index, rows = shard["file"], shard["index"], shard["rows"]
    if Path(name).name != name or name in ("", ".", ".."):
        raise FormatError(f"{path}: expected the name of a file inside the folder, got {name[:80]!r}")
    if index < 0 or rows < 0:
        raise FormatError(f"{path}: shard {index} of {rows} rows; both must be 0 or more")
    return index, Entry(name, rows, shard["sha256"], shard.get("data", ""))
