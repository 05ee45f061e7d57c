"""What is refused before any work is done: inputs that are not there, targets that must not be written."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_folder", "check_inputs", "check_target"]

OWN_LISTS = ("contents.json", "manifest.json")
"""Files that tell a folder of ours."""


def check_inputs(*paths: Path | None) -> None:
    """Refuse, before any work is done, inputs that do not exist."""
    for path in paths:
        if path is not None and not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")


def check_target(path: Path, force: bool, *inputs: Path) -> None:
    """Refuse, before any work is done, a target that exists, is an input, or cannot be written."""
    for other in inputs:
        mine, theirs = path.resolve(), other.resolve()
        if mine == theirs:
            raise ValueError(f"{path} is also an input; write the result to another file")
        if theirs in mine.parents and any((theirs / name).is_file() for name in OWN_LISTS):
            raise ValueError(f"{path} is inside the input {other}; write the result elsewhere")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; choose another name, or pass --force to replace it")
    if path.is_symlink():
        raise FileExistsError(
            f"{path} is a symbolic link, and salgp writes to no link; name the target itself"
        )
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {parent} is a file, not a folder")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: no permission to write in {parent}")


def check_folder(path: Path) -> None:
    """Refuse, before any work is done, to put a calibrator where something else is."""
    if not path.exists():
        return
    from salgp.calibrators.saving import KIND
    from salgp.storage import check_replaceable

    check_replaceable(path, KIND)
