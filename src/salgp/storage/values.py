"""Nested values as JSON plus a flat dict of tensors.

A *storable* is a frozen dataclass that was registered by name. `pack` turns a nested value (numbers, strings,
lists, dicts, tensors, storables) into JSON plus a flat dict of tensors; `unpack` is its inverse and builds
nothing that was not registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from salgp.storage.errors import FormatError

__all__ = ["pack", "storable", "unpack"]

T = TypeVar("T", bound=type)
_STORABLE: dict[str, type] = {}


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
