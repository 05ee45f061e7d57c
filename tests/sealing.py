"""Edit saved files on purpose and give them the checksums that go with it: what checksums cannot notice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from salgp.storage import digest, read_tensors, write_header, write_json, write_tensors

__all__ = ["edit_header", "edit_json", "edit_tensors", "reseal", "sealed"]


def edit_json(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a plain JSON file of a sealed folder, and seal the folder again."""
    write_json(folder / name, change(json.loads((folder / name).read_text())))
    reseal(folder)


def edit_header(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a JSON file that carries its own checksum."""
    value = change({k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"})
    kind, version = value.pop("format", ""), value.pop("format_version", 1)
    write_header(path, kind, version, value)
    if (path.parent / "contents.json").is_file():
        reseal(path.parent)


def edit_tensors(path: Path, change: Callable[[dict[str, Any], dict[str, str]], Any]) -> None:
    """Change the tensors and metadata of a file in place, and give it new checksums."""
    tensors, metadata = read_tensors(path)
    change(tensors, metadata)
    write_tensors(path, tensors, metadata)
    if (path.parent / "contents.json").is_file():
        reseal(path.parent)


def reseal(folder: Path) -> None:
    """List the files of a folder as they are now."""
    before = json.loads((folder / "contents.json").read_text())
    files = {name: digest(folder / name) for name in before["files"] if (folder / name).is_file()}
    write_header(folder / "contents.json", "salgp-folder", 1, {"kind": before["kind"], "files": files})


def sealed(path: Path, value: Any, whole: Mapping[Path, bytes]) -> dict[Path, bytes]:
    """A changed file as bytes with new checksums, and the list of its folder where there is one.

    Args:
        path: of the file.
        value: its bytes, or the JSON value that it is to hold.
        whole: all files of the folder as they were.
    """
    content = value if isinstance(value, bytes) else _json_bytes(value, b'"sha256"' in whole[path])
    listed = path.parent / "contents.json"
    if listed not in whole:
        return {path: content}
    before = json.loads(whole[listed])
    files = {**before["files"], path.name: hashlib.sha256(content).hexdigest()}
    return {path: content, listed: _json_bytes({**before, "files": files}, True)}


def _json_bytes(value: Any, check: bool) -> bytes:
    if not check or not isinstance(value, dict):
        return json.dumps(value).encode()
    plain = {key: item for key, item in value.items() if key != "sha256"}
    text = json.dumps(plain, separators=(",", ":"))
    return json.dumps({**plain, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()
