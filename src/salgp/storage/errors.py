"""What goes wrong with files, in two words: the file is not what it should be, or somebody else has it."""

from __future__ import annotations

__all__ = ["ChecksumError", "FormatError", "LockedError"]


class FormatError(ValueError):
    """A file is not what it should be: truncated, of another kind, or from a newer version."""


class ChecksumError(FormatError):
    """A file's bytes are not the ones that were written."""


class LockedError(RuntimeError):
    """Another process is writing into the folder."""
