"""Checks before any work is done: inputs must exist, and targets must be free or of the same kind."""

from __future__ import annotations

import os
from pathlib import Path

from salgp.cli.console import UsageError
from salgp.file_signatures import refuse_foreign

__all__ = []

CALIBRATOR, SHARDS = "calibrator.safetensors", "manifest.json"
"""Files that tell a folder of a calibrator, and one of shards."""


def check_inputs(*paths: Path | None) -> None:
    """Refuse inputs that do not exist."""
    for path in filter(None, paths):
        if not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")


def check_suffix(path: Path, *suffixes: str) -> None:
    """Refuse a target with any other suffix than these.

    Example:
        >>> check_suffix(Path("a.txt"), ".csv", ".parquet")
        Traceback (most recent call last):
        ...
        salgp.cli.console.UsageError: --out a.txt: expected a name that ends in .csv or .parquet
    """
    if path.suffix not in suffixes:
        raise UsageError(f"--out {path}: expected a name that ends in {' or '.join(suffixes)}")


def check_apart(path: Path, *inputs: Path | None) -> None:
    """Refuse a target that is an input, or inside of a folder of shards that is one."""
    for other in filter(None, inputs):
        if path.resolve() == other.resolve():
            raise ValueError(f"{path} is also an input; write the result to another place")
        if other.resolve() in path.resolve().parents and (other / SHARDS).is_file():
            raise ValueError(f"{path} is inside the input {other}; write the result elsewhere")


def check_no_other(folder: Path) -> None:
    """Refuse to put files of another kind beside those of a calibrator or a store."""
    if (folder / CALIBRATOR).is_file() or (folder / SHARDS).is_file():
        why = "holds a calibrator or shards; it is left alone: choose another folder"
        raise FileExistsError(f"{folder} {why}")


def check_target(path: Path, kind: str, force: bool, *inputs: Path | None) -> None:
    """Refuse a target that is an input, cannot be written, or exists: with ``force`` only one that salgp did
    not write, or as something else.

    Args:
        path: the target.
        kind: of the file that is written, one of `salgp.file_signatures.KINDS`.
        force: replace what is there.
        inputs: what the command reads.
    """
    check_apart(path, *inputs)
    refuse_foreign(path, kind)
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; choose another name, or pass --force to replace it")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {parent} is a file, not a folder")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: no permission to write in {parent}")
