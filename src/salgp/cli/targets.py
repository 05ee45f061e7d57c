"""What is refused before any work is done: inputs that are not there, targets that must not be written."""

from __future__ import annotations

import os
from pathlib import Path

from salgp.marks import is_of_kind, is_ours

__all__ = ["check_apart", "check_folder", "check_inputs", "check_no_other", "check_store", "check_target"]

OWN_LISTS = ("contents.json", "manifest.json")
"""Files that tell a folder of ours."""


def check_inputs(*paths: Path | None) -> None:
    """Refuse, before any work is done, inputs that do not exist."""
    for path in paths:
        if path is not None and not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")


def check_apart(path: Path, *inputs: Path | None) -> None:
    """Refuse a target that is an input, or inside of one."""
    for other in inputs:
        if other is None:
            continue
        mine, theirs = path.resolve(), other.resolve()
        if mine == theirs:
            raise ValueError(f"{path} is also an input; write the result to another place")
        if theirs in mine.parents and _has_list(theirs):
            raise ValueError(f"{path} is inside the input {other}; write the result elsewhere")


def check_no_other(folder: Path) -> None:
    """Refuse to put files of another kind beside those of a calibrator or a store."""
    if _has_list(folder):
        raise FileExistsError(
            f"{folder} holds a calibrator or shards; it is left alone: choose another folder"
        )


def check_target(path: Path, force: bool, *inputs: Path | None, kind: str | None = None) -> None:
    """Refuse, before any work is done, a target that exists, is an input, or cannot be written.

    With ``force`` a file may exist if salgp wrote it, and if it is of the same kind.

    Args:
        path: the target.
        force: replace what is there.
        inputs: what the command reads.
        kind: of the file that is written (`salgp.marks.KINDS`), where its suffix alone does not tell.
    """
    check_apart(path, *inputs)
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; choose another name, or pass --force to replace it")
    if path.is_symlink():
        raise FileExistsError(
            f"{path} is a symbolic link, and salgp writes to no link; name the target itself"
        )
    if kind is not None and path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no file, and one is to be written; choose another name")
    of_kind = kind is not None and path.is_file() and is_of_kind(path, kind)
    if path.is_file() and not of_kind and not is_ours(path):
        raise FileExistsError(f"{path} was not written by salgp; it is left alone: choose another name")
    if path.is_file() and kind is not None and not of_kind:
        raise FileExistsError(
            f"{path} is of salgp, but of another kind; it is left alone: choose another name"
        )
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {parent} is a file, not a folder")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: no permission to write in {parent}")


def check_store(path: Path, *inputs: Path | None) -> None:
    """Refuse, before any work is done, to begin or continue a folder of shards where a file is."""
    check_apart(path, *inputs)
    if path.exists() and not path.is_dir():
        raise FileExistsError(
            f"{path} is no folder, and one of Parquet shards is to be written; choose another name, or one "
            f"that ends in .safetensors for a single file"
        )


def check_folder(path: Path) -> None:
    """Refuse, before any work is done, to put a calibrator where something else is."""
    if not path.exists():
        return
    from salgp.calibrators.saving import check_place

    check_place(path)


def _has_list(folder: Path) -> bool:
    return any((folder / name).is_file() for name in OWN_LISTS)
