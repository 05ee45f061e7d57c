"""Nested values (numbers, strings, lists, dicts, tensors, registered dataclasses) as one safetensors file.

`pack` turns a value into JSON plus a flat dict of tensors; `unpack` is its inverse and builds nothing that
was not registered by `storable`. `write_value` and `read_value` do the same with a file: the JSON is in its
metadata.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from salgp.io.errors import FormatError, reading
from salgp.io.json_files import check_kind
from salgp.io.json_schema import plain_number
from salgp.io.tensors import read_tensors, tensor_bytes, tensors_from, write_tensors

__all__ = ["pack", "read_value", "storable", "unpack", "value_bytes", "value_from", "write_value"]

T = TypeVar("T", bound=type)
V = TypeVar("V")
_STORABLE: dict[str, type] = {}


def storable(cls: T) -> T:
    """Class decorator: let instances of this dataclass be saved and loaded by name, which must be its own."""
    known = _STORABLE.setdefault(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(
            f"two storable classes called {cls.__name__}, in {known.__module__} and {cls.__module__}"
        )
    _STORABLE[cls.__name__] = cls
    return cls


def write_value(path: str | os.PathLike[str], kind: str, version: int, value: Any) -> Path:
    """Write a nested value as one safetensors file that says what it is."""
    return write_tensors(path, *_described(kind, version, value))


def read_value(path: str | os.PathLike[str], kind: str, version: int) -> Any:
    """Read what `write_value` wrote; anything else is a `FormatError`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_value(write_value(folder + "/x.safetensors", "example", 1, {"rows": 3}), "example", 1)
        {'rows': 3}
    """
    return _value(path, *read_tensors(path), kind, version)


def value_bytes(kind: str, version: int, value: Any) -> bytes:
    """What `write_value` would write."""
    return tensor_bytes(*_described(kind, version, value))


def value_from(data: bytes, kind: str, version: int) -> Any:
    """Inverse of `value_bytes`.

    Example:
        >>> value_from(value_bytes("example", 1, {"rows": 3}), "example", 1)
        {'rows': 3}
    """
    return _value("the bytes", *tensors_from(data), kind, version)


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
        return {"$dict": [_pair(k, v, tensors, f"{path}.{k}" if path else str(k)) for k, v in value.items()]}
    if isinstance(value, tuple | list):
        items = [pack(v, tensors, f"{path}.{i}" if path else str(i)) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return plain_number(value)
    except TypeError as error:
        raise TypeError(f"{path or 'the top'}: {error}") from None


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `pack`; raises `FormatError` for anything that `pack` does not make."""
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return _tensor(value["$tensor"], tensors)
    if "$tuple" in value:
        return tuple(unpack(v, tensors) for v in _as(list, value["$tuple"]))
    if "$dict" in value:
        return _dict(_as(list, value["$dict"]), tensors)
    return _object(value, tensors)


def _described(kind: str, version: int, value: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    packed = json.dumps(pack(value, tensors))
    return tensors, {"format": kind, "format_version": str(version), "value": packed}


def _value(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str],
    kind: str,
    version: int,
) -> Any:
    check_kind(path, header, kind, version)
    with reading(path, "what was written"):
        return unpack(json.loads(header["value"]), tensors)


def _pair(key: Any, value: Any, tensors: dict[str, Tensor], path: str) -> list[Any]:
    plain = key if key is None or isinstance(key, bool | int | float | str) else plain_number(key)
    return [plain, pack(value, tensors, path)]


def _tensor(name: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    if _as(str, name) not in tensors:
        raise FormatError(f"tensor {name!r} is missing; the file is incomplete")
    return tensors[name]


def _dict(pairs: list[Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    found = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], list | dict):
            raise FormatError(f"expected a pair of key and value, got {str(pair)[:80]}")
        found[pair[0]] = unpack(pair[1], tensors)
    return found


def _object(value: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    name = value.get("$class")
    cls = _STORABLE.get(name) if isinstance(name, str) else None
    if cls is None:
        raise FormatError(
            f"unknown kind of value {str(name)[:80]!r}; it was perhaps written by a newer version of salgp"
        )
    fields = {k: unpack(v, tensors) for k, v in _as(dict, value.get("fields")).items()}
    _check_plain(cls, fields)
    try:
        return cls(**fields)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        raise FormatError(f"the fields of {name} do not make one ({error})") from error


def _check_plain(cls: type, fields: Mapping[str, Any]) -> None:
    """Truth values and words must be what they were declared as: anything else would pass for true."""
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        kind = {"bool": bool, "str": str}.get(str(getattr(field.type, "__name__", field.type)))
        if kind is not None and field.name in fields:
            _as(kind, fields[field.name])


def _as(kind: type[V], value: Any) -> V:
    if not isinstance(value, kind):
        raise FormatError(f"expected a {kind.__name__}, got {str(value)[:80]}")
    return value
