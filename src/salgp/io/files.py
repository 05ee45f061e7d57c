"""One file: written whole or left untouched, read only where it is a regular file of a plausible size."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from salgp.file_signatures import is_of_kind
from salgp.io.errors import FormatError

__all__ = [
    "LEFT_BEHIND",
    "check_size",
    "digest",
    "make_folder",
    "open_regular",
    "refuse_foreign",
    "refuse_link",
    "refuse_special",
    "write_whole",
]

LEFT_BEHIND = re.compile(r"\..{1,40}\.[0-9a-f]{12}\.part")
"""Names of the temporary files that `write_whole` renames; a killed writer may leave one."""
LARGE = 256 * 2**20
"""Bytes of memory that any file may ask for."""
RATIO = 200
"""Times its own size that a larger file may ask for."""


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], object]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then rename it: the target is whole or
    untouched.
    """
    target = Path(path)
    refuse_special(target)
    make_folder(target.parent)
    part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.part")
    try:
        with _naming(target):
            part.touch(exist_ok=False)
            write(part)
            os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return target


def make_folder(path: Path) -> None:
    """Make a folder and those around it where they are missing; refused where something else has the name.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     try:
        ...         make_folder(Path(file.name))
        ...     except FileExistsError as error:
        ...         print(str(error).removeprefix(file.name))
         is no folder, and one is to be written; choose another name
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        wrong = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
        raise FileExistsError(
            f"{wrong} is no folder, and one is to be written; choose another name"
        ) from error


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading; folders, devices and pipes, which may never end, are refused.

    Example:
        >>> open_regular("/dev/null")
        Traceback (most recent call last):
        salgp.io.errors.FormatError: /dev/null is not a regular file
    """
    try:
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise FormatError(f"{path} is a folder, not a regular file") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FormatError(f"{path} is not a regular file")
    return file


def refuse_link(path: Path) -> None:
    """Refuse to write through or over a symbolic link: what it points to is somebody else's."""
    if path.is_symlink():
        raise FileExistsError(f"{path} is a symbolic link; salgp writes to no link, name the target itself")


def refuse_special(path: Path) -> None:
    """Refuse links, folders, devices and pipes: a rename would take the place even of ``/dev/null``."""
    refuse_link(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is a folder, a device or a pipe, not a file; choose another name")


def refuse_foreign(path: str | os.PathLike[str], kind: str) -> None:
    """Refuse to replace a file that salgp did not write, or wrote as something else.

    Args:
        path: of the file that is to be written; missing and empty ones may be replaced.
        kind: what is to be written, one of `salgp.file_signatures.KINDS`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "rule.json")
        ...     _ = path.write_text("mine")
        ...     try:
        ...         refuse_foreign(path, "rule")
        ...     except FileExistsError as error:
        ...         print(str(error).removeprefix(f"{path} "))
        exists and holds no rule that salgp wrote; it is left alone: choose another name
    """
    target = Path(path)
    refuse_special(target)
    if target.is_file() and not is_of_kind(target, kind):
        raise FileExistsError(
            f"{target} exists and holds no {kind} that salgp wrote; it is left alone: choose another name"
        )


def check_size(path: str | os.PathLike[str], announced: int) -> None:
    """Refuse, before any memory is taken, a file that says it becomes far larger than a file of its size can.

    Args:
        path: of the file.
        announced: bytes it says it needs in memory.
    """
    size = os.path.getsize(path)
    if announced > max(LARGE, RATIO * size):
        raise FormatError(
            f"{path}: {size:,} bytes that say they become {announced:,}; that is refused as damaged "
            f"or hostile (limit: {RATIO} times the file)"
        )


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for somebody to write into a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give errors of the system, such as a full disk, the name of the file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error
