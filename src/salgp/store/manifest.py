"""The list of finished shards of a folder, each with its rows and SHA-256; a later run makes the rest.

A shard appears by rename and is listed afterwards, so a killed process leaves only whole shards in the list.
A folder that holds another job, or was made from other data, is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.io import ChecksumError, FormatError, digest, from_json, locked, read_header, write_header
from salgp.io.files import LEFT_BEHIND, LOCK, AnyPath
from salgp.store.columns import write_table

__all__ = []

NAME = "manifest.json"
FORMAT_VERSION = 3

Header = Mapping[str, Any]


@dataclass(frozen=True)
class Shard:
    """One finished file; its name follows from its place in the list.

    Args:
        rows: samples in it.
        sha256: of its bytes.
        data: `content_digest` of what it was made from, where that is known.
    """

    rows: int
    sha256: str
    data: str = ""

    @staticmethod
    def write(folder: Path, index: int, table: Any, data: str = "") -> Shard:
        """Write an Arrow table as shard ``index`` of a folder."""
        path = write_table(table, _place(folder, index))
        return Shard(table.num_rows, digest(path), data)


class Manifest:
    """The finished shards of one job.

    Args:
        folder: where the files are.
        kind: what they are, such as ``"salgp-scores"``.
        header: what the job is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = Manifest.open(folder, "example")
        ...     manifest.add(0, Shard(10, "..."), {"job": 1})
        ...     manifest.finish(1)
        ...     again = Manifest.read(folder, "example")
        >>> again.complete, again.rows, again.header
        (True, 10, {'job': 1})
    """

    def __init__(self, folder: AnyPath, kind: str, header: Header) -> None:
        self.folder, self.kind, self.header = Path(folder), kind, header
        self.shards: list[Shard] = []
        self.complete = False

    @staticmethod
    def read(folder: AnyPath, kind: str, *, unfinished: bool = False) -> Manifest:
        """Read the manifest of a folder; refused where its job is not finished, unless that is asked for."""
        path = Path(folder) / NAME
        if not path.exists():
            raise FileNotFoundError(f"{folder}: no {NAME} here; expected a folder of kind {kind!r}")
        value = read_header(path, kind, FORMAT_VERSION)
        header, shards = value.get("header"), value.get("shards")
        if not isinstance(header, dict) or not isinstance(shards, list):
            raise FormatError(f"{path}: expected 'header' and 'shards', got {str(value)[:80]}")
        manifest = Manifest(folder, kind, header)
        manifest.complete = value.get("complete") is True
        manifest.shards = [from_json(Shard, shard, path) for shard in shards]
        if any(shard.rows < 0 for shard in manifest.shards):
            raise FormatError(f"{path}: a shard of less than 0 rows")
        if manifest.complete and len(list(manifest.folder.glob("part-*"))) > len(shards):
            raise FormatError(f"{path}: said to be complete, but shards are missing from the list")
        if not manifest.complete and not unfinished:
            raise ValueError(
                f"{folder} is not finished ({manifest.rows} rows so far); call again what writes it, "
                f"it continues"
            )
        return manifest

    @staticmethod
    def open(folder: AnyPath, kind: str, header: Header | None = None) -> Manifest:
        """Continue the job of a folder that `writing` holds, or begin it; another job is refused, but not one
        that ended before its first shard.

        Without a header, the first shard says what the job is.
        """
        where = Path(folder)
        _sweep(where)
        begun = (where / NAME).exists()
        if begun:
            manifest = Manifest.read(folder, kind, unfinished=True)
            if not manifest.shards and not manifest.complete:
                manifest.header = {}
        else:
            manifest = Manifest(folder, kind, {})
        manifest.describe(header)
        if not begun:
            manifest.save()
        return manifest

    @property
    def rows(self) -> int:
        """Samples in all finished shards."""
        return sum(shard.rows for shard in self.shards)

    def file(self, index: int) -> Path:
        """A finished file; raises `ChecksumError`, naming it, where its bytes changed."""
        path = _place(self.folder, index)
        if not path.exists():
            raise FileNotFoundError(f"{path} is listed in {NAME} but missing; restore it")
        if path.is_symlink():
            raise FormatError(f"{path} is a symbolic link; shards are plain files inside the folder")
        if digest(path) != self.shards[index].sha256:
            raise ChecksumError(f"{path} is damaged: its SHA-256 is not the one in {NAME}; restore it")
        return path

    def describe(self, header: Header | None) -> None:
        """Say what the job is, where that was not known yet; refuse another one."""
        stored = json.loads(json.dumps(header or {}))  # tuples become lists
        self.header = self.header or stored
        known = {key: x for key, x in self.header.items() if key in stored}
        differing = _differing("", stored, known)
        if differing:
            raise ValueError(
                f"{self.folder} holds the output of another job: {', '.join(differing)} differ; "
                f"choose another folder or delete this one"
            )

    def needs(self, index: int) -> bool:
        """Is this shard still to be made? Refused where the job was finished without it."""
        missing = index >= len(self.shards)
        self._check_data(not (self.complete and missing))
        return missing

    def add(self, index: int, shard: Shard, header: Header | None = None) -> None:
        """List the next finished shard, or refuse a listed one that was made from other data."""
        self.describe(header)
        if self.needs(index):
            self.shards.append(shard)
            self.save()
        self._check_data(self.shards[index].data == shard.data)

    def finish(self, count: int) -> None:
        """Mark the job complete; refused where the data ended after fewer shards than are listed."""
        self._check_data(len(self.shards) <= count)
        _sweep(self.folder)
        if not self.complete:
            self.complete = True
            self.save()

    def save(self) -> None:
        """Write the list."""
        value = {"complete": self.complete, "header": self.header, "shards": list(map(asdict, self.shards))}
        write_header(self.folder / NAME, self.kind, FORMAT_VERSION, value)

    def _check_data(self, same: bool) -> None:
        if not same:
            raise ValueError(
                f"{self.folder} was made from other data than these; choose another folder or delete this one"
            )


@contextmanager
def writing(folder: AnyPath) -> Iterator[Path]:
    """Be the only writer of a folder of shards; one that holds something else is refused, untouched."""
    _refuse_foreign(Path(folder))
    with locked(folder) as where:
        yield where


def content_digest(*values: Any) -> str:
    """SHA-256 of the contents of batches: nested arrays, numbers, strings and objects of those.

    Example:
        >>> content_digest({"x": [1, 2.5]}) == content_digest({"x": [1, 2.6]})
        False
    """
    found = hashlib.sha256()
    for value in values:
        _update(found, value)
    return found.hexdigest()


def _update(found: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        value = _as_array(value)
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(value.tobytes())
    elif isinstance(value, Mapping | list | tuple):
        found.update(f"{len(value)} parts".encode())
        for part in value.items() if isinstance(value, Mapping) else value:
            _update(found, part)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        found.update(f"{type(value).__name__}{value!r};".encode())
    else:
        _update(found, dict(vars(value)) if hasattr(value, "__dict__") else type(value).__name__)


def _as_array(x: Tensor) -> np.ndarray:
    x = x.detach().cpu()
    if x.dtype is torch.bfloat16:  # which NumPy has not
        x = x.view(torch.uint8)
    return x.numpy()


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds files, but no manifest."""
    if not folder.is_dir() or (folder / NAME).exists():
        return
    for name in sorted(path.name for path in folder.iterdir()):
        if name != LOCK and not LEFT_BEHIND.fullmatch(name):
            raise FileExistsError(
                f"{folder} holds {name!r}, and no job of salgp; it is left alone: choose an empty or a "
                f"new folder"
            )


def _sweep(folder: Path) -> None:
    """Remove the temporary files of killed writers."""
    for path in folder.iterdir():
        if LEFT_BEHIND.fullmatch(path.name):
            path.unlink()


def _differing(key: str, mine: Any, theirs: Any) -> list[str]:
    """The key, or the keys of nested values, under which two headers differ."""
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return [] if mine == theirs else [key]
    pairs = [(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}]
    return [name for pair in pairs for name in _differing(*pair)]


def _place(folder: Path, index: int) -> Path:
    return folder / f"part-{index:06d}.parquet"
