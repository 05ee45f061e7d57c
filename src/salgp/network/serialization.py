"""Which network it is and what is read from it, as JSON and back; functions are never stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from salgp.network.batches import KnownInputs
from salgp.network.frozen_copy import fingerprint
from salgp.network.layers import Poolings, pooling_for
from salgp.network.reader import Forward, Reader
from salgp.network.taps import Layout, Tap

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "LostFunctionError",
    "module_header",
    "reader_from",
    "reader_header",
]

FORMAT = "salgp-module"
FORMAT_VERSION = 2
NOTHING = type(None)
READER_TYPES = {
    "output": (str, NOTHING),
    "max_width": (int, NOTHING),
    "seed": (int,),
    "needs_forward": (bool,),
    "labels_at": (int, str, NOTHING),
    "form": (str, NOTHING),
    "layers": (str, int, list),
    "taps": (list, NOTHING),
    "columns": (int,),
    "classes": (list,),
}
TAP_TYPES = {"name": (str,), "module": (str,), "call": (int,), "depth": (int, NOTHING), "leads": (bool,)}
INPUTS_TYPES = {"count": (int,), "names": (list,), "labels_at": (int, str, NOTHING)}
LAYOUT_TYPES = {"channels": (str,), "width": (int, NOTHING), "recurrent": (bool,), "batch_axis": (int,)}
"""What JSON gives for each field of a reader, a tap, its inputs and a layout."""


class LostFunctionError(ValueError):
    """A function is part of the reader, and code is never stored: it must be given again."""


def module_header(model: nn.Module, taps: Reader) -> dict[str, Any]:
    """The part ``network`` of a saved calibrator: which network it is, and what is read from it.

    Example:
        >>> module_header(nn.Linear(4, 3), Reader(layers=()))["layers"]
        []
    """
    return {"fingerprint": dataclasses.asdict(fingerprint(model)), **reader_header(taps)}


def reader_header(reader: Reader) -> dict[str, Any]:
    """A reader as JSON; pooling functions become None, and whether there was a forward function is kept.

    Example:
        >>> reader_header(Reader(layers=()))["layers"]
        []
    """
    layers = reader.layers if isinstance(reader.layers, str | int) else list(reader.layers)
    taps = reader.taps and [{**dataclasses.asdict(t), "pooling": _named(t.pooling)} for t in reader.taps]
    return {
        "output": reader.output,
        "max_width": reader.max_width,
        "seed": reader.seed,
        "needs_forward": reader.forward is not None,
        "labels_at": reader.labels_at,
        "form": reader.form,
        "layers": layers,
        "pooling": _pooling_names(reader.pooling),
        "taps": None if taps is None else list(taps),
        **({} if reader.inputs is None else {"inputs": dataclasses.asdict(reader.inputs)}),
        **({} if reader.columns is None else {"columns": reader.columns}),
        **({} if reader.classes is None else {"classes": list(reader.classes)}),
    }


def reader_from(header: Mapping[str, Any], pooling: Poolings | None, forward: Forward | None) -> Reader:
    """The reader that `reader_header` described, with the functions it was made with.

    Example:
        >>> reader_from(reader_header(Reader(output="probabilities")), None, None).output
        'probabilities'
    """
    if header["needs_forward"] and forward is None:
        raise LostFunctionError(
            "this classifier was made with a forward function; pass it again: load(folder, "
            "model, forward=...)"
        )
    _check_types(header, READER_TYPES)
    stored = header["taps"]
    taps = None if stored is None else tuple(_tap(tap, pooling) for tap in stored)
    asked = _stored_pooling(header["pooling"]) if pooling is None else pooling
    if taps is None and (asked is None or (isinstance(asked, dict) and None in asked.values())):
        raise LostFunctionError(_LOST_POOLING)
    layers = header["layers"] if isinstance(header["layers"], str | int) else tuple(header["layers"])
    return Reader(
        layers,
        asked if asked is not None else "auto",
        forward=forward,
        taps=taps,
        inputs=_inputs(header.get("inputs")),
        columns=header.get("columns"),
        classes=tuple(map(str, header["classes"])) if "classes" in header else None,
        **{name: header[name] for name in ("output", "max_width", "seed", "labels_at", "form")},
    )


def _inputs(stored: Mapping[str, Any] | None) -> KnownInputs | None:
    """The inputs of calibration; None where they were not kept, as in earlier versions."""
    if stored is None:
        return None
    _check_types(stored, INPUTS_TYPES)
    if not all(isinstance(name, str) for name in stored["names"]):
        raise TypeError(f"expected names of inputs, got {str(stored['names'])[:80]!r}")
    return KnownInputs(stored["count"], tuple(stored["names"]), stored["labels_at"])


def _stored_pooling(stored: Any) -> Any:
    names = list(stored.values()) if isinstance(stored, dict) else [stored]
    if not all(name is None or isinstance(name, str) for name in names):
        raise TypeError(f"expected the name of a pooling, got {stored!r}")
    return stored


def _tap(stored: Mapping[str, Any], pooling: Poolings | None) -> Tap:
    how = stored["pooling"] if pooling is None else pooling_for(stored["name"], pooling)
    if how is not None and not isinstance(how, str) and not callable(how):
        raise TypeError(f"expected the name of a pooling, got {how!r}")
    if how is None:
        raise LostFunctionError(_LOST_POOLING)
    _check_types(stored, TAP_TYPES)
    _check_types(stored["layout"], LAYOUT_TYPES)
    return Tap(**{**stored, "pooling": how, "layout": Layout(**stored["layout"])})


def _check_types(stored: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    for name, kinds in types.items():
        if name in stored and type(stored[name]) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{name!r} is {str(stored[name])[:80]!r}, expected {expected}")


_LOST_POOLING = (
    "this classifier was made with a pooling function, and code is never stored; pass it again: "
    "load(folder, model, pooling=...)"
)


def _pooling_names(pooling: Poolings) -> Any:
    if not isinstance(pooling, Mapping):
        return _named(pooling)
    return {rule: _named(how) for rule, how in pooling.items()}


def _named(pooling: Any) -> str | None:
    return pooling if isinstance(pooling, str) else None
