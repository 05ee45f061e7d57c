"""Nested values (numbers, strings, lists, dicts, tensors, registered dataclasses) as one safetensors file.

`pack` turns a value into JSON plus a flat dict of tensors; `unpack` is its inverse and builds nothing that
was not registered by `storable`. `write_value` and `read_value` do the same with a file: the JSON is in its
metadata.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from salgp.io.files import AnyPath, FormatError, open_regular, reading
from salgp.io.json_files import check_kind, plain_number
from salgp.io.tensors import tensor_bytes, tensors_from, write_tensors

__all__ = []

T = TypeVar("T", bound=type)
Prepare = Callable[[Any], object] | None
Tensors = dict[str, Tensor]
_STORABLE: dict[str, type] = {}
_PLAIN = int | float | str | None


def storable(cls: T) -> T:
    """Class decorator: let instances of this dataclass be saved and loaded by name, which must be its own."""
    known = _STORABLE.setdefault(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        places = f"{known.__module__} and {cls.__module__}"
        raise TypeError(f"two storable classes called {cls.__name__}, in {places}")
    _STORABLE[cls.__name__] = cls
    return cls


def write_value(path: AnyPath, kind: str, version: int, value: Any) -> Path:
    """Write a nested value as one safetensors file that says what it is."""
    return write_tensors(path, *_described(kind, version, value))


def read_value(path: AnyPath, kind: str, version: int, prepare: Prepare = None) -> Any:
    """Read what `write_value` wrote; anything else is a `FormatError`.

    Args:
        path: of the file.
        kind: that it must be of.
        version: of the format that is known.
        prepare: given the packed value, before any object is built: it may import what registers its types.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_value(write_value(folder + "/x.safetensors", "example", 1, {"rows": 3}), "example", 1)
        {'rows': 3}
    """
    with open_regular(path) as file:
        return value_from(file.read(), kind, version, path, prepare)


def value_bytes(kind: str, version: int, value: Any) -> bytes:
    """The bytes that `write_value` writes."""
    return tensor_bytes(*_described(kind, version, value))


def value_from(
    data: bytes, kind: str, version: int, path: AnyPath = "the bytes", prepare: Prepare = None
) -> Any:
    """Inverse of `value_bytes`; see `read_value`.

    Example:
        >>> value_from(value_bytes("example", 1, {"rows": 3}), "example", 1)
        {'rows': 3}
    """
    tensors, header = tensors_from(data, path)
    check_kind(path, header, kind, version)
    with reading(path, "what was written"):
        packed = json.loads(header["value"])
        if prepare is not None:
            prepare(packed)
        return unpack(packed, tensors)


def pack(value: Any, tensors: Tensors, path: str = "") -> Any:
    """Turn ``value`` into JSON, moving every tensor into ``tensors`` under its path."""

    def inner(name: object, part: Any) -> Any:
        return pack(part, tensors, f"{path}.{name}" if path else str(name))

    if isinstance(value, Tensor):
        return {"$tensor": _moved(value, tensors, path)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: inner(name, getattr(value, name)) for name in _fields(value)}
        return {"$class": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"$dict": [[_plain(key, path), inner(key, part)] for key, part in value.items()]}
    if isinstance(value, tuple | list):
        items = [inner(i, part) for i, part in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    return _plain(value, path)


def _moved(x: Tensor, tensors: Tensors, path: str) -> str:
    """The name under which a tensor now stands among the tensors."""
    while path in tensors:  # {"a": {"b": x}, "a.b": y}
        path += "'"
    tensors[path] = x.detach().contiguous().cpu()
    return path


def _fields(value: Any) -> list[str]:
    """Names of the fields of a dataclass; refused where it was not registered."""
    if type(value) not in _STORABLE.values():
        raise TypeError(f"{type(value).__name__} is not storable")
    return [field.name for field in dataclasses.fields(value)]


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `pack`; raises `FormatError` for anything that `pack` does not make."""
    match value:
        case list():
            return [unpack(part, tensors) for part in value]
        case {"$tensor": str(name)}:
            return _found(name, tensors)
        case {"$tuple": list(items)}:
            return tuple(unpack(part, tensors) for part in items)
        case {"$dict": list(pairs)}:
            return dict(_pair(pair, tensors) for pair in pairs)
        case {"$class": str(name), "fields": dict(fields)} if name in _STORABLE:
            return _object(_STORABLE[name], {k: unpack(part, tensors) for k, part in fields.items()})
        case dict():
            found = str(value.get("$class", value))[:80]
            why = "it was perhaps written by a newer version of salgp"
            raise FormatError(f"unknown kind of value {found!r}; {why}")
    return value


def _found(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise FormatError(f"tensor {name!r} is missing; the file is incomplete")
    return tensors[name]


def _described(kind: str, version: int, value: Any) -> tuple[Tensors, dict[str, str]]:
    tensors: Tensors = {}
    packed = json.dumps(pack(value, tensors))
    return tensors, {"format": kind, "format_version": str(version), "value": packed}


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, _PLAIN):
        return value
    try:
        return plain_number(value)
    except TypeError as error:
        raise TypeError(f"{path or 'the top'}: {error}") from None


def _pair(pair: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    match pair:
        case [key, value] if isinstance(key, _PLAIN):
            return key, unpack(value, tensors)
    raise FormatError(f"expected a pair of key and value, got {str(pair)[:80]}")


def _object(cls: type, fields: Mapping[str, Any]) -> Any:
    _check_fields(cls, fields)
    try:
        return cls(**fields)
    except Exception as error:  # a constructor may raise any
        raise FormatError(f"the fields of {cls.__name__} do not make one ({error})") from error


def _check_fields(cls: type, fields: Mapping[str, Any]) -> None:
    """Refuse truth values and words that are not what they were declared as, and would pass for true."""
    for field in dataclasses.fields(cls):
        declared = str(getattr(field.type, "__name__", field.type))
        kind = {"bool": bool, "str": str}.get(declared, object)
        value = fields.get(field.name)
        if field.name in fields and not isinstance(value, kind):
            raise FormatError(f"expected a {kind.__name__}, got {str(value)[:80]}")
