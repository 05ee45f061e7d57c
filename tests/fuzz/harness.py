"""How a mutant is made, read and checked.

The outcome of a mutant is one of: the *same* value as before; *refused* in one sentence that names the file;
*other*, a different value without complaint; *raw*, an error that was meant for programmers. Files of ours
carry checksums, so that nothing but same and refused may come of damage. Edits that renew the checksums, and
formats of others that have none, may give other values, but no raw errors.

Whole files are kept in memory; a mutant is written over one of them and taken back before the next. Two
mutants with the same bytes have the same outcome and are read once.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import random
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutators import mutate_bytes, mutate_json, mutate_tensors
from sealing import sealed

from salgp.io.tensors import tensor_bytes, tensors_from

__all__ = ["Mutants", "Target", "Tried"]


@dataclass(frozen=True)
class Target:
    """One reader under fire.

    Args:
        name: of the reader.
        make: writes whole files into a folder and returns what the reader is given.
        read: the reader.
        files: names of the files that are mutated, within the folder.
        edit: ``"bytes"``; ``"json"``, ``"tensors"`` or ``"value"`` for edits that renew the checksums.
        checked: have the files checksums that cover everything?
        prefix: may a value be the beginning of the whole one (a log after a kill)?
        sentences: what the reader says about the caller's part, where no file is to blame.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    files: tuple[str, ...]
    edit: str = "bytes"
    checked: bool = True
    prefix: bool = False
    sentences: tuple[str, ...] = ()


@dataclass
class Tried:
    """What came of some mutants: how many of each outcome, how many differed, those that must not be."""

    counts: collections.Counter[str]
    distinct: int
    slowest: float
    bad: list[str]


class Mutants:
    """All mutants of one reader, by their seeds.

    Args:
        target: the reader.
        folder: an empty one, best in memory.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.folder = folder / "mutant"
        self.folder.mkdir()
        self.given = target.make(self.folder)
        self.value = summary(target.read(self.given))
        self.whole = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        self.changed: set[Path] = set()
        self.known: dict[bytes, tuple[str, str]] = {}

    def try_all(self, seeds: Iterable[int]) -> Tried:
        """Make, read and check some mutants."""
        tried = Tried(collections.Counter(), 0, 0.0, [])
        before = len(self.known)
        for seed in seeds:
            start = time.perf_counter()
            found, said = self.outcome(seed)
            tried.slowest = max(tried.slowest, time.perf_counter() - start)
            tried.counts[found] += 1
            if found == "raw" or (found == "other" and self.target.checked):
                tried.bad.append(f"seed {seed}: {found} {said[:300]}")
        tried.distinct = len(self.known) - before
        return tried

    def outcome(self, seed: int) -> tuple[str, str]:
        """What came of mutant ``seed``, and what was said."""
        rng = random.Random(f"{self.target.name}|{seed}")
        path = self.folder / rng.choice(self.target.files)
        files = self._mutate(path, rng)
        key = hashlib.sha256(path.name.encode() + files[path]).digest()
        if key not in self.known:
            self._put(files)
            self.known[key] = self._check()
        return self.known[key]

    def _mutate(self, path: Path, rng: random.Random) -> dict[Path, bytes]:
        """The files that differ from whole ones."""
        content = self.whole[path]
        if self.target.edit == "bytes":
            return {path: mutate_bytes(content, rng)}
        if self.target.edit == "json":
            return {path: sealed(mutate_json(json.loads(content), rng))}
        tensors, metadata = _tensors(path, content)
        if self.target.edit == "value":
            edited = json.dumps(mutate_json(json.loads(metadata["value"]), rng))
            return {path: tensor_bytes(tensors, {**metadata, "value": edited})}
        return {path: tensor_bytes(*mutate_tensors(tensors, metadata, rng))}

    def _put(self, files: dict[Path, bytes]) -> None:
        for path in self.changed - set(files):
            path.write_bytes(self.whole[path])
        for path, content in files.items():
            path.write_bytes(content)
        self.changed = set(files) | {path for path in self.whole if path.suffix == ".jsonl"}  # readers append
        for path in list(self.given.iterdir()) if self.given.is_dir() else ():
            if path not in self.whole and path.is_file():
                path.unlink()

    def _check(self) -> tuple[str, str]:
        target = self.target
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = summary(target.read(self.given))
        except (ValueError, TypeError, KeyError, FileNotFoundError) as error:
            said = str(error.args[0]) if error.args and not isinstance(error, OSError) else str(error)
            known = "mutant" in said or any(sentence in said for sentence in target.sentences)
            return ("refused" if known else "raw"), f"{type(error).__name__}: {said}"
        except Exception as error:
            return "raw", f"{type(error).__name__}: {error}"
        same = found == self.value or (target.prefix and found == self.value[: len(found)])
        return ("same" if same else "other"), ""


@functools.lru_cache(maxsize=8)
def _tensors(path: Path, content: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    return tensors_from(content)


def summary(value: Any) -> Any:
    """A comparable digest of what a reader gave; lists stay lists, so that beginnings can be compared."""
    if isinstance(value, list):
        return [summary(part) for part in value]
    found = hashlib.sha256()
    _walk(value, found)
    return found.hexdigest()


def _walk(value: Any, found: hashlib._Hash) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(
            torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1)).view(torch.uint8).numpy()
        )
    elif isinstance(value, np.ndarray):
        found.update(
            f"{value.dtype}{value.shape}{value.tolist() if value.dtype.kind in 'OSU' else ''}".encode()
        )
        found.update(value.tobytes() if value.dtype.kind not in "OSU" else b"")
    elif isinstance(value, dict):
        for key, part in value.items():
            found.update(f"{key!r}:".encode())
            _walk(part, found)
    elif isinstance(value, list | tuple):
        for part in value:
            _walk(part, found)
    elif isinstance(value, bool | int | float | str | bytes | type(None)):
        found.update(f"{value!r};".encode())
    else:
        _walk(vars(value), found)
