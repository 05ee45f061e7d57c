"""What goes wrong with files: one is not what it should be, or another process is writing it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ChecksumError", "FormatError", "LockedError", "reading"]


class FormatError(ValueError):
    """A file is not what it should be: truncated, of another kind, or from a newer version."""


class ChecksumError(FormatError):
    """A file's bytes are not the ones that were written."""


class LockedError(RuntimeError):
    """Another process is writing into the folder."""


@contextmanager
def reading(path: str | os.PathLike[str], expected: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn whatever a parser raises inside the ``with`` block into one `FormatError` with the file's name.

    Args:
        path: of the file.
        expected: what it should be.
        passed: errors that are not the file's fault and go through as they are.

    Example:
        >>> with reading("x.json", "what was written"):
        ...     {}["rows"]
        Traceback (most recent call last):
        salgp.io.errors.FormatError: x.json: not what was written (rows)
        >>> with reading("x.json", "what was written"):
        ...     raise FormatError("no rows")
        Traceback (most recent call last):
        salgp.io.errors.FormatError: x.json: no rows
    """
    clear: tuple[type[Exception], ...] = (FileNotFoundError, ModuleNotFoundError, PermissionError, *passed)
    try:
        yield
    except clear:
        raise
    except FormatError as error:
        folder = os.path.dirname(os.fspath(path))
        if str(path) in str(error) or (folder and folder in str(error)):
            raise
        raise type(error)(f"{path}: {error}") from error  # raised by a part that knows no file
    except Exception as error:  # zipfile, zlib, struct, pyarrow and NumPy each have their own
        came = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        said = textwrap.shorten(came, 300, placeholder=" ...") or type(error).__name__
        raise FormatError(f"{path}: not {expected} ({said})") from error
