"""One file: written whole or left untouched, read only where it is a regular file of a plausible size.

A folder has one writer at a time: the operating system's lock on ``.salgp.lock``, which dies with its owner.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from textwrap import shorten

from filelock import FileLock, Timeout

from salgp.file_signatures import refuse_foreign, refuse_link, refuse_special

__all__ = ["AnyPath", "LEFT_BEHIND", "LOCK", "refuse_foreign", "refuse_link", "refuse_special"]

LOCK = ".salgp.lock"
"""Name of the lock file inside a folder; it may stay behind, and says nothing."""
LEFT_BEHIND = re.compile(r"\..{1,40}\.[0-9a-f]{12}\.part")
"""Names of the temporary files that `write_whole` renames; a killed writer may leave one."""
LARGE = 256 * 2**20
"""Bytes of memory that any file may ask for."""
RATIO = 200
"""Times its own size that a larger file may ask for."""


AnyPath = str | os.PathLike[str]


class FormatError(ValueError):
    """A file is not what it should be: truncated, of another kind, or from a newer version."""


class ChecksumError(FormatError):
    """A file's bytes are not the ones that were written."""


class LockedError(RuntimeError):
    """Another process is writing into the folder."""


@contextmanager
def reading(path: AnyPath, expected: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn whatever a parser raises inside the ``with`` block into one `FormatError` with the file's name.

    Args:
        path: of the file.
        expected: what it should be.
        passed: errors that are not the file's fault and go through as they are.

    Example:
        >>> with reading("x.json", "what was written"):
        ...     {}["rows"]
        Traceback (most recent call last):
        salgp.io.files.FormatError: x.json: not what was written (rows)
        >>> with reading("x.json", "what was written"):
        ...     raise FormatError("no rows")
        Traceback (most recent call last):
        salgp.io.files.FormatError: x.json: no rows
    """
    clear: tuple[type[Exception], ...] = (FileNotFoundError, ModuleNotFoundError, PermissionError, *passed)
    try:
        yield
    except clear:
        raise
    except FormatError as error:
        place = os.path.dirname(path) or str(path)
        if place in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error  # raised by a part that knows no file
    except Exception as error:  # zipfile, zlib, struct, pyarrow and NumPy each have their own
        raise FormatError(f"{path}: not {expected} ({_cause(error)})") from error


def _cause(error: Exception) -> str:
    """What a parser says, in at most 300 characters."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    return shorten(str(said), 300, placeholder=" ...") or type(error).__name__


def write_whole(path: AnyPath, write: Callable[[Path], object]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then rename it: the target is whole or
    untouched.
    """
    target = Path(path)
    refuse_special(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.part")
    try:
        with writing(target):
            part.touch(exist_ok=False)
            write(part)
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


@contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Give errors of the system, such as a full disk, the name of the file that was to be written."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_regular(path: AnyPath) -> BufferedReader:
    """Open a file for reading; folders, devices and pipes, which may never end, are refused.

    Example:
        >>> open_regular("/dev/null")
        Traceback (most recent call last):
        salgp.io.files.FormatError: /dev/null is not a regular file
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


def check_size(path: AnyPath, announced: int) -> None:
    """Refuse, before any memory is taken, a file that says it becomes far larger than a file of its size can.

    Args:
        path: of the file.
        announced: bytes it says it needs in memory.
    """
    size = os.path.getsize(path)
    if announced > max(LARGE, RATIO * size):
        why = f"that is refused as damaged or hostile (limit: {RATIO} times the file)"
        raise FormatError(f"{path}: {size:,} bytes that say they become {announced:,}; {why}")


def digest(path: AnyPath) -> str:
    """SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: AnyPath, wait: float = 0.0) -> Iterator[Path]:
    """Be the only writer of ``folder`` (created where missing) inside the ``with`` block.

    Not reentrant: a second `locked` of the same folder is refused, in another process, in another thread or
    in this one.

    Args:
        folder: to write into.
        wait: seconds to wait for another writer before giving up.

    Raises:
        LockedError: somebody else writes into the folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, locked(folder):
        ...     try:
        ...         with locked(folder):
        ...             pass
        ...     except LockedError as error:
        ...         print(str(error).removeprefix(folder))
         is being written by another process or thread; wait for it or choose another folder
    """
    where = Path(folder)
    lock = lock_file(where / LOCK)
    try:
        held = lock.acquire(timeout=wait)
    except Timeout:
        why = "is being written by another process or thread; wait for it or choose another folder"
        raise LockedError(f"{where} {why}") from None
    with held:
        yield where


def lock_file(path: Path) -> FileLock:
    """A lock of the operating system under this name, not held yet."""
    refuse_special(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, thread_local=False, poll_interval=0.01)


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for somebody to write into a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
