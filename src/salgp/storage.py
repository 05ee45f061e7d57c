"""Files that cannot run code: safetensors for arrays, JSON for the rest, written whole or not at all.

A *storable* is a frozen dataclass that was registered by name. `pack` turns a nested value (numbers, strings,
lists, dicts, tensors, storables) into JSON plus a flat dict of tensors; `unpack` is its inverse and builds
nothing that was not registered.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

__all__ = [
    "FormatError",
    "pack",
    "read_json",
    "read_tensors",
    "storable",
    "unpack",
    "write_json",
    "write_tensors",
    "write_whole",
]

T = TypeVar("T", bound=type)
_STORABLE: dict[str, type] = {}


class FormatError(ValueError):
    """A file is not what it should be: truncated, of another kind, or from a newer version."""


def storable(cls: T) -> T:
    """Class decorator: let instances of this dataclass be saved and loaded by name."""
    _STORABLE[cls.__name__] = cls
    return cls


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Turn ``value`` into JSON, moving every tensor into ``tensors`` under its path."""
    if isinstance(value, Tensor):
        while path in tensors:  # {"a": {"b": x}, "a.b": y}
            path += "'"
        tensors[path] = value.detach().contiguous().cpu()
        return {"$tensor": path}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if _STORABLE.get(name) is not type(value):
            raise TypeError(f"{name} is not storable")
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {
            "$class": name,
            "fields": {k: pack(v, tensors, f"{path}.{k}" if path else k) for k, v in fields.items()},
        }
    if isinstance(value, Mapping):
        return {"$dict": [[k, pack(v, tensors, f"{path}.{k}" if path else str(k))] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        items = [pack(v, tensors, f"{path}.{i}" if path else str(i)) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"cannot store a {type(value).__name__} at {path or 'the top'!r}: only numbers, "
        f"strings, lists, dicts and tensors are stored"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        if value["$tensor"] not in tensors:
            raise FormatError(f"tensor {value['$tensor']!r} is missing; the file is incomplete")
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(unpack(v, tensors) for v in value["$tuple"])
    if "$dict" in value:
        return {k: unpack(v, tensors) for k, v in value["$dict"]}
    cls = _STORABLE.get(value.get("$class", ""))
    if cls is None:
        raise FormatError(
            f"unknown kind of value {value.get('$class')!r}; it was perhaps written by a newer "
            f"version of salgp"
        )
    return cls(**{k: unpack(v, tensors) for k, v in value["fields"].items()})


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then rename it: the target is whole or
    untouched.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Path:
    """Write tensors and string metadata as one safetensors file."""
    from safetensors.torch import save_file

    whole = {k: v.detach().contiguous().cpu().clone() for k, v in tensors.items()}
    return write_whole(path, lambda part: save_file(whole, str(part), metadata=dict(metadata)))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            # a copy, because the file's memory is not aligned and BLAS rounds differently on such addresses
            return {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise FormatError(f"{path}: not a whole safetensors file ({error})") from error


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write ``value`` as indented JSON."""
    text = json.dumps(value, indent=1, allow_nan=True)

    def write(part: Path) -> None:
        part.write_text(text + "\n", encoding="utf-8")

    return write_whole(path, write)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file, with a clear error when it is cut short."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
