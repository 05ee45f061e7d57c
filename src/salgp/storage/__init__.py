"""Files that cannot run code and cannot lie: safetensors, JSON, JSON lines; written whole, checked when read.

Rooms: `files` (one file, whole or untouched), `folders` (several, swapped at once), `values` (nested values
as JSON and tensors), `plain` (dataclasses of plain values), `lines` (append-only logs), `npz` (archives of
any origin), `locks` (one writer per folder), `errors`. Whoever saves or loads anything does it through this
package.
"""

from __future__ import annotations

from salgp.storage.errors import ChecksumError, FormatError, LockedError, RemovedWarning, reading
from salgp.storage.files import (
    check_kind,
    check_size,
    digest,
    read_header,
    read_json,
    read_metadata,
    read_tensors,
    refuse_foreign,
    write_header,
    write_json,
    write_tensors,
    write_whole,
)
from salgp.storage.folders import check_replaceable, read_folder, write_folder
from salgp.storage.lines import append_line, append_lines, read_lines
from salgp.storage.locks import locked
from salgp.storage.npz import read_npz
from salgp.storage.plain import from_json, plain_number, readable
from salgp.storage.values import pack, storable, unpack

__all__ = [
    "ChecksumError",
    "FormatError",
    "LockedError",
    "RemovedWarning",
    "append_line",
    "append_lines",
    "check_kind",
    "check_replaceable",
    "check_size",
    "digest",
    "from_json",
    "locked",
    "pack",
    "plain_number",
    "read_folder",
    "read_header",
    "read_json",
    "read_lines",
    "read_metadata",
    "read_npz",
    "read_tensors",
    "readable",
    "reading",
    "refuse_foreign",
    "storable",
    "unpack",
    "write_folder",
    "write_header",
    "write_json",
    "write_tensors",
    "write_whole",
]
