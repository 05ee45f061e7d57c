"""One writer per folder: a lock file that says who holds it, and that dies with its owner.

The lock is the operating system's (``flock``), so a killed process leaves none; the file ``.salgp.lock`` only
says who holds it. A file whose owner lived on this machine and is gone is *stale*: it is taken over
without a word. One that was left on another machine cannot be judged from here and is refused; the sentence
says what to remove. The machine is written as a hash, never by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from salgp.storage.errors import LockedError
from salgp.storage.files import make_folder, refuse_special

__all__ = ["LOCK", "NO_LINK", "hold_file", "locked"]

LOCK = ".salgp.lock"
"""Name of the lock file inside a folder; it is gone when nobody writes."""
MOMENT = 0.3
"""Seconds in which an owner that comes or goes is waited for, so that the refusal can name it."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""Flag with which opening a symbolic link fails: what it points to is somebody else's."""


@contextmanager
def locked(folder: str | os.PathLike[str], wait: float = 0.0) -> Iterator[Path]:
    """Be the only writer of ``folder`` (created where missing) inside the ``with`` block.

    Not reentrant: a second `locked` of the same folder is refused, in another process, in another thread or
    in this one.

    Args:
        folder: to write into.
        wait: seconds to wait for another writer before giving up.

    Raises:
        LockedError: another process writes into the folder; one sentence says which and since when.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, locked(folder):
        ...     try:
        ...         with locked(folder):
        ...             pass
        ...     except LockedError as error:
        ...         print("process" in str(error))
        True
    """
    path = Path(folder) / LOCK
    refuse_special(path)
    make_folder(path.parent)
    file = _acquire(path, time.monotonic() + wait)
    try:
        yield path.parent
    finally:
        _release(path, file)


def hold_file(file: IO[bytes], wait: bool = True) -> bool:
    """Take the operating system's lock of an open file; it ends when the file is closed.

    Args:
        file: open for writing.
        wait: until it is free; else give False at once where it is not.
    """
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # a byte that nobody reads: Windows would not let others read a locked one
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _acquire(path: Path, deadline: float) -> IO[bytes]:
    patience = time.monotonic() + MOMENT
    while True:
        file = _try(path)
        if file is not None:
            return file
        now, owner = time.monotonic(), _owner(path)
        if now >= deadline and (owner or now >= patience):
            raise LockedError(_refusal(path, owner))
        time.sleep(0.01)


def _try(path: Path) -> IO[bytes] | None:
    """The open and held lock file with our name in it, or None where somebody else has it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666), "rb+")
    if not hold_file(file, wait=False):
        file.close()
        return None
    if not _is_current(path, file) or _foreign(_owner(path)):
        file.close()
        return None
    file.seek(0)
    file.truncate()
    file.write(json.dumps(_me()).encode())
    file.flush()
    return file


def _is_current(path: Path, file: IO[bytes]) -> bool:
    """Is the file still the one under this name? Its last owner may have removed it since it was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _release(path: Path, file: IO[bytes]) -> None:
    if sys.platform != "win32" and _is_current(path, file):  # while held: nobody can hold a removed one
        path.unlink(missing_ok=True)
    file.close()
    if sys.platform == "win32":
        path.unlink(missing_ok=True)


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": _host(), "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _host() -> str:
    return hashlib.sha256(f"salgp|{platform.node()}".encode()).hexdigest()[:16]


def _owner(path: Path) -> dict[str, Any]:
    """What the lock file says of its owner; nothing where it is empty, torn or gone."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _foreign(owner: dict[str, Any]) -> bool:
    return owner.get("host", _host()) != _host()


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    where = "on another machine " if _foreign(owner) else ""
    who = f"process {owner.get('pid', '?')} {where}since {owner.get('since', 'a moment ago')}"
    advice = f"; if it is gone, remove {path}" if _foreign(owner) else ""
    return f"{path.parent} is being written by {who}; wait for it or choose another folder{advice}"
