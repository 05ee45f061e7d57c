"""Folders that are written whole, swapped at once, and never take the user's files with them.

`write_folder` fills a new folder beside the target and exchanges the two; a reader sees the old one or the
new one. ``contents.json`` lists every file with its SHA-256: `read_folder` compares them, and a folder may be
replaced only where that list shows that salgp wrote it, and nothing else is in it. A *guest* is a file of
ours that was put there later and has a meaning beside these very contents only, as a rule beside its
calibrator.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from salgp.storage.errors import ChecksumError, FormatError, RemovedWarning
from salgp.storage.files import digest, make_folder, name_beside, read_header, refuse_link, write_header

__all__ = ["CONTENTS", "check_replaceable", "read_folder", "write_folder"]

CONTENTS = "contents.json"
"""The list of a folder's files."""
FORMAT_VERSION = 1
TURNS = 50
"""Times that a folder may be exchanged by others before a writer gives up."""
T = TypeVar("T")


def write_folder(
    path: str | os.PathLike[str],
    write: Callable[[Path], object],
    kind: str,
    guests: Collection[str] = (),
) -> Path:
    """Let ``write`` fill a folder that then takes the place of ``path``, all of it or nothing.

    Args:
        path: missing, empty, or a folder of the same kind that salgp wrote itself; anything else is refused.
        write: puts files (no sub-folders) into the empty folder it is given.
        kind: what the folder is, such as ``"salgp-calibrator"``.
        guests: kinds of JSON files (`salgp.storage.write_header`) that may have been put beside the contents.
            They stay where the new contents are the old ones byte for byte; else they go with the old ones,
            and a `RemovedWarning` names them.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as t:
        ...     folder = write_folder(t + "/x", lambda part: (part / "a").write_text("hi"), "example")
        ...     read_folder(folder, "example", lambda part: (part / "a").read_text())
        'hi'
    """
    target = Path(os.path.abspath(path))
    check_replaceable(target, kind, guests)
    make_folder(target.parent)
    part = name_beside(target)
    part.mkdir()
    try:
        write(part)
        files = {file.name: digest(file) for file in sorted(part.iterdir()) if file.name != CONTENTS}
        write_header(part / CONTENTS, "salgp-folder", FORMAT_VERSION, {"kind": kind, "files": files})
        if _contents(target).get("files") == files:
            _copy_guests(target, part, guests)
        _take_place(part, target, kind, guests)
        lost = _guests(part, guests) - _guests(target, guests)
    finally:
        _remove(part, guests)
    if lost:
        warnings.warn(_farewell(target, lost), RemovedWarning, stacklevel=4)
    return Path(path)


def read_folder(path: str | os.PathLike[str], kind: str, read: Callable[[Path], T]) -> T:
    """What ``read`` makes of the folder, after comparing the checksum of every file.

    A folder that is exchanged for a new one meanwhile is read again.
    """
    where = Path(path)
    if not where.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")
    if not (where / CONTENTS).is_file():
        raise FormatError(f"{path}: no {CONTENTS} here; expected a folder of kind {kind!r}, written by salgp")
    while True:
        before = _identity(where)
        try:
            _check_files(where, kind)
            value = read(where)
        except Exception:
            if _identity(where) == before:
                raise
        else:
            if _identity(where) == before:
                return value


def check_replaceable(path: Path, kind: str, guests: Collection[str] = ()) -> None:
    """Refuse, in one sentence, a target that is not missing, empty, or ours alone but for its guests.

    A folder that another writer exchanges meanwhile is looked at again.
    """
    while True:
        before = _identity(path)
        try:
            return _check_ours(path, kind, guests)
        except (FileExistsError, FileNotFoundError):
            if _identity(path) == before:
                raise


def _check_ours(path: Path, kind: str, guests: Collection[str]) -> None:
    refuse_link(path)
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file, and a folder is to be written; choose another name")
    found = sorted(file.name for file in path.iterdir())
    if not found:
        return
    known = _own_files(path, kind)
    if known is None:
        raise FileExistsError(
            f"{path} holds {found[0]!r} and is no folder of kind {kind!r} that salgp wrote; it is "
            f"left alone: choose another folder"
        )
    known |= _guests(path, guests)
    foreign = [name for name in found if name not in known or not _is_plain(path / name)]
    if foreign:
        raise FileExistsError(
            f"{path} also holds {foreign[0]!r}, which is no part of it; it is left alone: move that away or "
            f"choose another folder"
        )


def _own_files(path: Path, kind: str) -> set[str] | None:
    """Names of the files that salgp wrote here; None where it did not write this folder."""
    header = _contents(path)
    return {CONTENTS, *header["files"]} if header.get("kind") == kind else None


def _guests(folder: Path, kinds: Collection[str]) -> set[str]:
    """Names of the files of these kinds, whole and unchanged, that are not in the folder's list."""
    listed = _contents(folder).get("files", ())
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        found = [path for path in folder.iterdir() if path.name not in (CONTENTS, *listed)]
    return {path.name for path in found if _is_plain(path) and _is_of(path, kinds)}


def _is_of(path: Path, kinds: Collection[str]) -> bool:
    for kind in kinds:
        with contextlib.suppress(OSError, FormatError):
            read_header(path, kind, FORMAT_VERSION)
            return True
    return False


def _copy_guests(folder: Path, part: Path, kinds: Collection[str]) -> None:
    for name in _guests(folder, kinds):
        with contextlib.suppress(FileNotFoundError):  # taken away meanwhile
            shutil.copy2(folder / name, part / name)


def _farewell(folder: Path, names: Collection[str]) -> str:
    gone = " and ".join(map(repr, sorted(names)))
    return (
        f"{gone} in {folder} belonged to the contents that were replaced, and went with them; "
        f"make it anew for the new ones"
    )


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _check_files(folder: Path, kind: str) -> None:
    header = read_header(folder / CONTENTS, "salgp-folder", FORMAT_VERSION)
    files = header.get("files")
    if header.get("kind") != kind or not isinstance(files, dict):
        raise FormatError(
            f"{folder}: expected a folder of kind {kind!r}, got {str(header.get('kind'))[:80]!r}"
        )
    for name, expected in files.items():
        if Path(name).name != name:
            raise FormatError(f"{folder / CONTENTS}: expected names of files, got {name[:80]!r}")
        if not (folder / name).is_file():
            raise FormatError(f"{folder / name} is missing; restore it or write the folder again")
        if digest(folder / name) != expected:
            raise ChecksumError(
                f"{folder / name} is damaged: its SHA-256 is not the one in {CONTENTS}; restore it "
                f"or write the folder again"
            )


def _identity(folder: Path) -> tuple[int, ...] | None:
    """What differs between two folders under one name, also where they say the same; None where none is."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_ino, found.st_dev, found.st_mtime_ns


def _take_place(part: Path, target: Path, kind: str, guests: Collection[str]) -> None:
    """Let ``part`` take the place of ``target``; again where another writer was first."""
    for turn in range(TURNS):
        check_replaceable(target, kind, guests)
        try:
            _swap(part, target)
            break
        except OSError:  # another writer's folder came or went between the two
            if turn == TURNS - 1 or not part.is_dir():
                raise


def _swap(part: Path, target: Path) -> None:
    """Exchange the two folders; afterwards ``part`` is the old one, or gone."""
    if not target.exists() or not any(target.iterdir()):
        os.replace(part, target)
    elif not _exchange(part, target):
        old = part.with_suffix(".old")
        os.rename(target, old)
        try:
            os.rename(part, target)
        except BaseException:
            os.rename(old, target)
            raise
        os.rename(old, part)


def _exchange(part: Path, target: Path) -> bool:
    """Let two names change places at once, where the system can (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    at_cwd, exchange = -100, 2
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(at_cwd, os.fsencode(part), at_cwd, os.fsencode(target), exchange) == 0)


def _remove(folder: Path, guests: Collection[str]) -> None:
    """Remove a folder of plain files that is ours, guests included; what appeared in it meanwhile stays."""
    if not folder.is_dir():
        return
    listed = _contents(folder).get("files")  # an old folder has a list; a new one that failed has none
    ours = {CONTENTS, *(listed or ()), *_guests(folder, guests)}
    for file in list(folder.iterdir()):
        if _is_plain(file) and (listed is None or file.name in ours):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _contents(folder: Path) -> dict[str, Any]:
    """The list of a folder's files; empty where there is none that can be read."""
    try:
        header = read_header(folder / CONTENTS, "salgp-folder", FORMAT_VERSION)
    except (OSError, FormatError):
        return {}
    return header if isinstance(header.get("files"), dict) else {}
