"""JSON files that say what they are and carry the SHA-256 of their contents, and dataclasses read from them.

JSON knows lists but no tuples, and a file may hold anything under a name. `from_json` gives an instance of a
dataclass, every field of the type it was declared with, or says which field is not what it should be.
`readable` asks the same before anything is written, so that whatever is written can be read again.
"""

import hashlib
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from sys import float_info
from types import NoneType, UnionType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from salgp.io.files import AnyPath, ChecksumError, FormatError, open_regular, reading, write_whole

__all__ = []

T = TypeVar("T")
CHECK = "sha256"
"""Key of the checksum."""


def write_header(path: AnyPath, kind: str, version: int, value: Mapping[str, Any]) -> Path:
    """Write ``value`` as JSON under a header that says what it is, with a checksum.

    Args:
        path: of the file.
        kind: what the file is, such as ``"salgp-feature-store"``.
        version: of the format.
        value: what it says; ``format``, ``format_version`` and ``sha256`` are the header's own.
    """
    plain = {"format": kind, "format_version": version, **as_stored(value)}
    return write_json(path, {**plain, CHECK: _digest(plain)})


def as_stored(value: Any, allow_nan: bool = True) -> Any:
    """The value as JSON gives it back, with lists for tuples."""
    return json.loads(json.dumps(value, allow_nan=allow_nan, default=plain_number))


def read_header(path: AnyPath, kind: str, version: int) -> dict[str, Any]:
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
        why = "its SHA-256 is not the one it carries; restore it or write it again"
        raise ChecksumError(f"{path} is damaged or was edited: {why}")
    del value["format"], value["format_version"]
    return value


def check_kind(path: AnyPath, header: Mapping[str, Any], kind: str, version: int) -> None:
    """Refuse a header of another kind, or from a newer version."""
    if header.get("format") != kind:
        raise FormatError(f"{path}: expected {kind!r}, got {str(header.get('format'))[:80]!r}")
    found = str(header.get("format_version"))
    if not re.fullmatch("[0-9]{1,9}", found):
        raise FormatError(f"{path}: expected a format version, got {found[:80]!r}")
    if int(found) > version:
        newer = f"written by a newer version of salgp (format {found})"
        raise FormatError(f"{path}: {newer}; upgrade salgp to read it")


def write_json(path: AnyPath, value: Any) -> Path:
    """Write ``value`` as indented JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=plain_number) + "\n"
    check_text(text, path)
    return write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def read_json(path: AnyPath) -> Any:
    """Read a JSON file; anything else is a `FormatError`."""
    with reading(path, "valid JSON"), open_regular(path) as file:
        return json.loads(file.read())


def check_text(text: str, path: AnyPath) -> str:
    """Refuse text that no UTF-8 file can hold: half of a surrogate pair, as in a name that was cut.

    Example:
        >>> check_text("caf\\ud83d", "names.json")
        Traceback (most recent call last):
        ValueError: names.json: 'caf\\ud83d' holds half a character (a lone surrogate); correct the name
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.end]
        why = "holds half a character (a lone surrogate); correct the name"
        raise ValueError(f"{path}: {near!r} {why}") from None
    return text


def plain_number(value: Any) -> int | float | str:
    """Python's own number for one of NumPy or a tensor of one element; ``json.dumps(default=plain_number)``.

    Example:
        >>> plain_number(np.int64(20)), plain_number(np.float32(0.5)), plain_number(np.bool_(True))
        (20, 0.5, True)
    """
    if isinstance(value, np.generic | Tensor) and value.ndim == 0:
        found = value.item()
        if isinstance(found, int | float | str):
            return found
    why = "only numbers, strings, lists, dicts and tensors are stored"
    raise TypeError(f"cannot store a {type(value).__name__}: {why}")


def readable(value: T, what: str) -> T:
    """A dataclass of plain values as it will be read again.

    Args:
        value: the instance that is to be written.
        what: it is of, for the sentence.

    Raises:
        ValueError: `from_json` would refuse it, so it must not be written.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Size:
        ...     rows: int
        >>> readable(Size(np.int64(3)), "a table")
        Size(rows=3)
        >>> readable(Size("3"), "a table")
        Traceback (most recent call last):
        ValueError: a table: 'rows' of Size is 3, expected int
    """
    fields = as_stored(asdict(value))  # type: ignore[call-overload]
    try:
        return from_json(type(value), fields, what)
    except FormatError as error:
        raise ValueError(str(error)) from error


def from_json(cls: type[T], value: Any, path: AnyPath) -> T:
    """An instance of a dataclass whose fields are numbers, strings, tuples of those, or None.

    Args:
        cls: the dataclass.
        value: what JSON gave: an object with the fields by name; those with a default may be missing.
        path: of the file, for the sentence.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Size:
        ...     shape: tuple[int, ...]
        ...     unit: str | None = None
        >>> from_json(Size, {"shape": [2, 3]}, "x.json")
        Size(shape=(2, 3), unit=None)
        >>> from_json(Size, {"shape": [2, "3"]}, "x.json")
        Traceback (most recent call last):
        salgp.io.files.FormatError: x.json: 'shape' of Size is [2, '3'], expected tuple[int, ...]
    """
    if not isinstance(value, Mapping):
        raise FormatError(f"{path}: expected the fields of {cls.__name__}, got a {type(value).__name__}")
    kinds = typing.get_type_hints(cls)
    given = {}
    for name, item in value.items():
        if name not in kinds:
            raise FormatError(f"{path}: {cls.__name__} has no field {str(name)[:80]!r}")
        given[name] = _field(item, kinds[name], f"{path}: {name!r} of {cls.__name__}")
    try:
        return cls(**given)
    except TypeError as error:  # a field is missing
        raise FormatError(f"{path}: not a whole {cls.__name__} ({error})") from error


def _field(value: Any, kind: Any, where: str) -> Any:
    """The value with tuples for lists; refused where it is not of the declared type."""
    found = _tuples(value)
    if not _fits(found, kind):
        raise FormatError(f"{where} is {str(value)[:80]}, expected {_called(kind)}")
    return found


def _called(kind: Any) -> str:
    return str(kind if typing.get_args(kind) else kind.__name__)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> bool:
    """Is a value of the declared type? Whole numbers count as numbers, truth values do not; types that JSON
    does not know are not checked.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _items_fit(value, arguments)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_fits(one, arguments[1]) for one in value.values())
    if kind is float:
        return type(value) in (int, float) and abs(value) <= float_info.max
    return type(value) is kind or kind not in (bool, int, str, NoneType)


def _items_fit(values: tuple[Any, ...], kinds: tuple[Any, ...]) -> bool:
    each = kinds[:1] * len(values) if kinds[-1] is Ellipsis else kinds
    return len(values) == len(each) and all(map(_fits, values, each))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
