"""Files that cannot run code and notice damage: safetensors, JSON and JSON lines, written whole.

Modules: `files` (one file, whole or untouched), `tensors` (safetensors), `json_files` (JSON with a checksum),
`serialize` (nested values as one safetensors file), `json_schema` (dataclasses of plain values from JSON),
`jsonl` (append-only logs), `npz` (archives of any origin), `locks` (one writer per folder), `errors`.
"""

from __future__ import annotations

from salgp.io.errors import ChecksumError, FormatError, LockedError, reading
from salgp.io.files import check_size, digest, open_regular, refuse_foreign, write_whole
from salgp.io.json_files import check_kind, read_header, read_json, write_header, write_json
from salgp.io.json_schema import from_json, plain_number, readable
from salgp.io.jsonl import append_line, append_lines, read_lines
from salgp.io.locks import locked
from salgp.io.npz import read_npz
from salgp.io.serialize import pack, read_value, storable, unpack, value_bytes, value_from, write_value
from salgp.io.tensors import read_metadata, read_tensors, write_tensors

__all__ = [
    "ChecksumError",
    "FormatError",
    "LockedError",
    "append_line",
    "append_lines",
    "check_kind",
    "check_size",
    "digest",
    "from_json",
    "locked",
    "open_regular",
    "pack",
    "plain_number",
    "read_header",
    "read_json",
    "read_lines",
    "read_metadata",
    "read_npz",
    "read_tensors",
    "read_value",
    "readable",
    "reading",
    "refuse_foreign",
    "storable",
    "unpack",
    "value_bytes",
    "value_from",
    "write_header",
    "write_json",
    "write_tensors",
    "write_value",
    "write_whole",
]
