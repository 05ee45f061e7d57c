"""Edit saved files on purpose and give them the checksums that go with it: what checksums cannot notice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from salgp.io import read_tensors, write_header, write_tensors

__all__ = ["edit_header", "edit_tensors", "edit_value", "sealed"]


def edit_header(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a JSON file that carries its own checksum."""
    value = change({k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"})
    kind, version = value.pop("format", ""), value.pop("format_version", 1)
    write_header(path, kind, version, value)


def edit_tensors(path: Path, change: Callable[[dict[str, Any], dict[str, str]], Any]) -> None:
    """Change the tensors and metadata of a file in place, and give it a new checksum."""
    tensors, metadata = read_tensors(path)
    change(tensors, metadata)
    write_tensors(path, tensors, metadata)


def edit_value(path: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change one packed part, such as ``network``, of the value that a file holds."""

    def edit(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        pairs = dict(json.loads(metadata["value"])["$dict"])
        part = dict(pairs[name]["$dict"])
        change(part)
        pairs[name] = {"$dict": [list(pair) for pair in part.items()]}
        metadata["value"] = json.dumps({"$dict": [list(pair) for pair in pairs.items()]})

    edit_tensors(path, edit)


def sealed(value: Any) -> bytes:
    """A JSON value as bytes with the checksum that goes with it."""
    if not isinstance(value, dict):
        return json.dumps(value).encode()
    plain = {key: item for key, item in value.items() if key != "sha256"}
    text = json.dumps(plain, separators=(",", ":"))
    return json.dumps({**plain, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()
