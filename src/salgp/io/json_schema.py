"""Dataclasses of plain values read back from JSON, every field of the type it was declared with.

JSON knows lists but no tuples, and a file may hold anything under a name. `from_json` gives an instance, or
says which field is not what it should be. `readable` asks the same before anything is written, so that
whatever is written can be read again. `plain_number` is the one place where numbers of NumPy and PyTorch
become Python's, which JSON knows.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from salgp.io.errors import FormatError

__all__ = ["fits", "from_json", "plain_number", "readable", "type_name"]

T = TypeVar("T")


def plain_number(value: Any) -> bool | int | float | str:
    """Python's own number for one of NumPy or a tensor of one element; ``json.dumps(default=plain_number)``.

    Example:
        >>> plain_number(np.int64(20)), plain_number(np.float32(0.5)), plain_number(np.bool_(True))
        (20, 0.5, True)
    """
    if isinstance(value, np.generic | Tensor) and value.ndim == 0:
        found = value.item()
        if isinstance(found, bool | int | float | str):
            return found
    raise TypeError(
        f"cannot store a {type(value).__name__}: only numbers, strings, lists, dicts and tensors are stored"
    )


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
    written = json.dumps(asdict(value), default=plain_number)  # type: ignore[call-overload]
    try:
        return from_json(type(value), json.loads(written), what)
    except FormatError as error:
        raise ValueError(str(error)) from error


def from_json(cls: type[T], value: Any, path: str | os.PathLike[str]) -> T:
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
        salgp.io.errors.FormatError: x.json: 'shape' of Size is [2, '3'], expected tuple[int, ...]
    """
    if not isinstance(value, Mapping):
        raise FormatError(f"{path}: expected the fields of {cls.__name__}, got a {type(value).__name__}")
    kinds = typing.get_type_hints(cls)
    given = {}
    for name, item in value.items():
        if name not in kinds:
            raise FormatError(f"{path}: {cls.__name__} has no field {str(name)[:80]!r}")
        given[name] = _tuples(item)
        if not fits(given[name], kinds[name]):
            expected = type_name(kinds[name])
            raise FormatError(f"{path}: {name!r} of {cls.__name__} is {str(item)[:80]}, expected {expected}")
    try:
        return cls(**given)
    except TypeError as error:  # a field is missing
        raise FormatError(f"{path}: not a whole {cls.__name__} ({error})") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def type_name(kind: Any) -> str:
    """A declared type, as a message names it.

    Example:
        >>> type_name(int), type_name(tuple[float, float])
        ('int', 'tuple[float, float]')
    """
    plain = isinstance(kind, type) and not typing.get_args(kind)
    return kind.__name__ if plain else str(kind).replace("typing.", "")


def fits(value: Any, kind: Any) -> bool:
    """Is a value from JSON of the declared type? Lists count as tuples, whole numbers as numbers, truth
    values do not; types that JSON does not know are not judged.

    Example:
        >>> fits(3, float), fits("3", int), fits(True, int), fits([1, 2], tuple[float, float])
        (True, False, False, True)
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (tuple, list, Sequence):
        return isinstance(value, list | tuple) and _each_fits(value, arguments)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(fits(one, arguments[1]) for one in value.values())
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind if kind in (bool, int, str, types.NoneType) else True


def _each_fits(values: Sequence[Any], kinds: tuple[Any, ...]) -> bool:
    each = kinds if len(kinds) > 1 and kinds[-1] is not Ellipsis else kinds[:1] * len(values)
    return len(values) == len(each) and all(map(fits, values, each))
