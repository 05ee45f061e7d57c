"""JSON files that say what they are and carry the SHA-256 of their contents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from salgp.io.errors import ChecksumError, FormatError, reading
from salgp.io.files import open_regular, write_whole
from salgp.io.json_schema import plain_number

__all__ = ["CHECK", "check_kind", "check_text", "read_header", "read_json", "write_header", "write_json"]

CHECK = "sha256"
"""Key of the checksum."""


def write_header(path: str | os.PathLike[str], kind: str, version: int, value: Mapping[str, Any]) -> Path:
    """Write ``value`` as JSON under a header that says what it is, with a checksum.

    Args:
        path: of the file.
        kind: what the file is, such as ``"salgp-feature-store"``.
        version: of the format.
        value: what it says; ``format``, ``format_version`` and ``sha256`` are the header's own.
    """
    own = [key for key in ("format", "format_version", CHECK) if key in value]
    if own:
        raise ValueError(f"{path}: {own[0]!r} is written by the header itself; leave it out of the value")
    stored = json.loads(json.dumps(value, default=plain_number))
    plain = {"format": kind, "format_version": version, **stored}
    return write_json(path, {**plain, CHECK: _digest(plain)})


def read_header(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Read what `write_header` wrote; anything else is a `FormatError`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_header(write_header(folder + "/x.json", "example", 1, {"rows": 3}), "example", 1)
        {'rows': 3}
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object of {kind!r}, got a {type(value).__name__}")
    found = value.pop(CHECK, None)
    check_kind(path, value, kind, version)
    if found != _digest(value):
        raise ChecksumError(
            f"{path} is damaged or was edited: its SHA-256 is not the one it carries; restore it "
            f"or write it again"
        )
    return {k: v for k, v in value.items() if k not in ("format", "format_version")}


def check_kind(path: str | os.PathLike[str], header: Mapping[str, Any], kind: str, version: int) -> None:
    """Refuse a header of another kind, or from a newer version."""
    if header.get("format") != kind:
        raise FormatError(f"{path}: expected {kind!r}, got {str(header.get('format'))[:80]!r}")
    found = str(header.get("format_version"))
    if not (found.isascii() and found.isdigit() and len(found) < 10):
        raise FormatError(f"{path}: expected a format version, got {found[:80]!r}")
    if int(found) > version:
        raise FormatError(
            f"{path}: written by a newer version of salgp (format {found}); upgrade salgp to read it"
        )


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write ``value`` as indented JSON."""
    text = check_text(json.dumps(value, indent=1, ensure_ascii=False, default=plain_number), path)
    return write_whole(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; anything else is a `FormatError`."""
    with reading(path, "valid JSON"), open_regular(path) as file:
        return json.loads(file.read())


def check_text(text: str, path: str | os.PathLike[str]) -> str:
    """Refuse text that no UTF-8 file can hold: half of a surrogate pair, as in a name that was cut.

    Example:
        >>> check_text("caf\\ud83d", "names.json")
        Traceback (most recent call last):
        ValueError: names.json: 'caf\\ud83d' holds half a character (a lone surrogate); correct the name
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.end]
        raise ValueError(
            f"{path}: {near!r} holds half a character (a lone surrogate); correct the name"
        ) from None
    return text


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
