"""One writer per folder: the operating system's lock on ``.salgp.lock``, which dies with its owner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from salgp.io.errors import LockedError
from salgp.io.files import make_folder, refuse_special

__all__ = ["LOCK", "lock_file", "locked"]

LOCK = ".salgp.lock"
"""Name of the lock file inside a folder; it may stay behind, and says nothing."""


@contextmanager
def locked(folder: str | os.PathLike[str], wait: float = 0.0) -> Iterator[Path]:
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
        lock.acquire(timeout=wait)
    except Timeout:
        raise LockedError(
            f"{where} is being written by another process or thread; wait for it or choose another folder"
        ) from None
    try:
        yield where
    finally:
        lock.release()


def lock_file(path: Path) -> FileLock:
    """A lock of the operating system under this name, not held yet."""
    refuse_special(path)
    make_folder(path.parent)
    return FileLock(path, thread_local=False, poll_interval=0.01)
