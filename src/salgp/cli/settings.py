"""Settings of a method as ``NAME=VALUE``, checked against what its constructor declares."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from salgp.cli.console import UsageError, did_you_mean

if TYPE_CHECKING:
    from salgp.calibrators import Calibrator

__all__ = ["settings_of"]


def settings_of(calibrator: Calibrator, given: Sequence[str]) -> dict[str, Any]:
    """Arguments by name; values are JSON or else plain text, whichever is of the declared type.

    Example:
        >>> from salgp.calibrators import get
        >>> settings_of(get("temperature"), ["bounds=[0.5, 2]"])
        {'bounds': [0.5, 2]}
    """
    known = calibrator.get_params(deep=False)
    declared = _declared(type(calibrator).__init__)
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected NAME=VALUE")
        if name not in known:
            raise UsageError(
                f"--set {name}: {calibrator.name} has no such setting; {did_you_mean(name, known)}it has "
                f"{', '.join(known) or 'none'}"
            )
        found[name] = _value(text, value, declared.get(name, Any), known[name])
    return found


def _declared(constructor: Any) -> dict[str, Any]:
    """Types by name; none where a method of another package names some that cannot be found."""
    try:
        return typing.get_type_hints(constructor)
    except NameError:
        return {}


def _value(text: str, value: str, kind: Any, default: Any) -> Any:
    from salgp.io.json_files import fits, type_name

    try:
        readings = [json.loads(value), value]
    except (json.JSONDecodeError, RecursionError):
        readings = [value]
    for reading in readings:
        if fits(reading, kind):
            return reading
    shown = json.dumps(default, default=str)
    raise UsageError(f"--set {text}: expected {type_name(kind)}; the default is {shown}")
