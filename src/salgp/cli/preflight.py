"""What is refused before any work is done: inputs that are not there, targets that must not be written."""

from __future__ import annotations

import os
from pathlib import Path

from salgp.cli.console import UsageError
from salgp.file_signatures import is_of_kind, is_ours

__all__ = ["CALIBRATOR", "check_apart", "check_inputs", "check_no_other", "check_suffix", "check_target"]

CALIBRATOR, SHARDS = "calibrator.safetensors", "manifest.json"
"""Files that tell a folder of a calibrator, and one of shards."""


def check_inputs(*paths: Path | None) -> None:
    """Refuse inputs that do not exist."""
    for path in paths:
        if path is not None and not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")


def check_suffix(option: str, path: Path, *suffixes: str) -> None:
    """Refuse a name with any other suffix than these.

    Example:
        >>> check_suffix("--out", Path("a.txt"), ".csv", ".parquet")
        Traceback (most recent call last):
        ...
        salgp.cli.console.UsageError: --out a.txt: expected a name that ends in .csv or .parquet
    """
    if path.suffix not in suffixes:
        *others, last = suffixes
        either = f"{', '.join(others)} or " if others else ""
        raise UsageError(f"{option} {path}: expected a name that ends in {either}{last}")


def check_apart(path: Path, *inputs: Path | None) -> None:
    """Refuse a target that is an input, or inside of one."""
    for other in inputs:
        if other is None:
            continue
        mine, theirs = path.resolve(), other.resolve()
        if mine == theirs:
            raise ValueError(f"{path} is also an input; write the result to another place")
        if theirs in mine.parents and (theirs / SHARDS).is_file():
            raise ValueError(f"{path} is inside the input {other}; write the result elsewhere")


def check_no_other(folder: Path) -> None:
    """Refuse to put files of another kind beside those of a calibrator or a store."""
    if (folder / CALIBRATOR).is_file() or (folder / SHARDS).is_file():
        raise FileExistsError(
            f"{folder} holds a calibrator or shards; it is left alone: choose another folder"
        )


def check_target(path: Path, force: bool, *inputs: Path | None, kind: str | None = None) -> None:
    """Refuse a target that exists, is an input, or cannot be written.

    With ``force`` a file may exist if salgp wrote it, and if it is of the same kind.

    Args:
        path: the target.
        force: replace what is there.
        inputs: what the command reads.
        kind: of the file that is written (`salgp.file_signatures.KINDS`), where its suffix does not tell.
    """
    check_apart(path, *inputs)
    if path.is_symlink():
        raise FileExistsError(
            f"{path} is a symbolic link, and salgp writes to no link; name the target itself"
        )
    if path.exists():
        _check_replaceable(path, force, kind)
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {parent} is a file, not a folder")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: no permission to write in {parent}")


def _check_replaceable(path: Path, force: bool, kind: str | None) -> None:
    if not force:
        raise FileExistsError(f"{path} exists already; choose another name, or pass --force to replace it")
    if not path.is_file():
        if kind is not None:
            raise FileExistsError(f"{path} is no file, and one is to be written; choose another name")
        return
    if kind is not None and is_of_kind(path, kind):
        return
    if not is_ours(path):
        raise FileExistsError(f"{path} was not written by salgp; it is left alone: choose another name")
    if kind is not None:
        raise FileExistsError(f"{path} holds no {kind}; it is left alone: choose another name")
