"""Settings of a method as ``NAME=VALUE``, checked against what its constructor declares."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from salgp.cli.shell import UsageError, did_you_mean

__all__ = ["settings_of"]

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


def settings_of(
    method: str, constructor: Any, known: Mapping[str, Any], given: Sequence[str]
) -> dict[str, Any]:
    """Arguments by name, from ``NAME=VALUE``.

    Args:
        method: name of the calibrator, for sentences.
        constructor: whose declared types the values must have.
        known: settings of the method, with their defaults.
        given: as typed.
    """
    kinds = _declared(constructor)
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected NAME=VALUE")
        if name not in known:
            raise UsageError(
                f"--set {name}: {method} has no such setting; {did_you_mean(name, known)}it has "
                f"{', '.join(known) or 'none'}"
            )
        found[name] = _value(value, kinds.get(name, Any), f"--set {text}: {method} wants", known[name])
    return found


def _declared(constructor: Any) -> dict[str, Any]:
    """Types by name; none where a method from elsewhere names some that cannot be found."""
    try:
        return typing.get_type_hints(constructor)
    except NameError:
        return {}


def _value(text: str, kind: Any, wants: str, default: Any) -> Any:
    """JSON, or else plain text, whichever is of the kind."""
    for value in _readings(text):
        if _fits(value, kind):
            return value
    raise UsageError(f"{wants} {_words(kind)} there; the default is {json.dumps(default, default=str)}")


def _readings(text: str) -> list[Any]:
    try:
        return [json.loads(text), text]
    except (json.JSONDecodeError, RecursionError):
        return [text]


def _fits(value: Any, kind: Any) -> bool:
    """Can a value from JSON stand where ``kind`` is declared? What is declared otherwise is not judged.

    Example:
        >>> _fits(3, float), _fits("3", int), _fits(True, int), _fits([1, 2], tuple[float, float])
        (True, False, False, True)
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (tuple, Sequence, list):
        return isinstance(value, list) and _each_fits(value, arguments)
    if origin in (Mapping, dict):
        return isinstance(value, dict) and all(_fits(one, arguments[1]) for one in value.values())
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind if kind in WORDS else True


def _each_fits(values: list[Any], kinds: tuple[Any, ...]) -> bool:
    if len(kinds) == 1 or kinds[-1] is Ellipsis:
        return all(_fits(value, kinds[0]) for value in values)
    return len(values) == len(kinds) and all(map(_fits, values, kinds))


def _words(kind: Any) -> str:
    """A declared type for people.

    Example:
        >>> _words(int | None), _words(tuple[float, float]), _words(typing.Literal["a", "b"])
        ('a whole number or null', 'a list of 2', 'one of a, b')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)}"
    if origin in (tuple, Sequence, list):
        return "a list"
    return "an object" if origin in (Mapping, dict) else WORDS.get(kind, str(kind))
