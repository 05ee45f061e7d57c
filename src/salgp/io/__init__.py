"""Files that cannot run code and notice damage: safetensors, JSON and JSON lines, written whole.

Modules: `files` (one file, whole or untouched; one writer per folder), `tensors` (safetensors), `json_files`
(JSON with a checksum, dataclasses read from it), `serialize` (nested values as one safetensors file), `jsonl`
(append-only logs). What people bring: `arrays`, `class_scores`, `loader`, `weights`; `tables` are written.
"""

from salgp.io.files import (
    ChecksumError,
    FormatError,
    LockedError,
    check_size,
    digest,
    locked,
    open_regular,
    reading,
    refuse_foreign,
    write_whole,
)
from salgp.io.json_files import (
    check_kind,
    from_json,
    plain_number,
    read_header,
    read_json,
    readable,
    write_header,
    write_json,
)
from salgp.io.jsonl import append_line, read_lines
from salgp.io.serialize import pack, read_value, storable, unpack, value_bytes, value_from, write_value
from salgp.io.tensors import read_tensors, write_tensors

__all__ = [
    "ChecksumError",
    "FormatError",
    "LockedError",
    "append_line",
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
