"""What comes out of a network: class scores, found in any output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["FORWARD", "named_fields", "raw_logits", "shape_of"]

FORWARD = "pass forward=lambda model, batch: ... to return the logits yourself"
"""What to do where an output holds no class scores."""


def raw_logits(output: Any) -> Tensor:
    """Find the class scores in whatever a network returned.

    A tensor is taken as it is; a mapping, dataclass or named tuple must have ``logits``. A plain tuple or
    list must hold one floating-point tensor ``(n, c)`` or ``(n,)``. Where it holds several, as ``(features,
    logits)`` does, nothing tells which are the scores: it is refused.

    Example:
        >>> import torch
        >>> raw_logits({"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3)}).shape
        torch.Size([2, 3])
        >>> raw_logits((torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(2, 7, 5))).shape
        torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    fields = dict(named_fields(output))
    if isinstance(fields.get("logits"), Tensor):
        return fields["logits"]
    if fields:
        raise ValueError(
            f"the network returned {type(output).__name__} without 'logits' (it has "
            f"{', '.join(map(str, fields))}); {FORWARD}"
        )
    found = dict(_score_like(output)) if isinstance(output, tuple | list) else {}
    if len(found) > 1:
        raise ValueError(_which(type(output).__name__, found))
    if not found:
        raise ValueError(f"found no logits in the {type(output).__name__} the network returned; {FORWARD}")
    return next(iter(found.values()))


def named_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a mapping, dataclass or named tuple; nothing for any other value."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, tuple):
        yield from zip(getattr(value, "_fields", ()), value, strict=False)


def shape_of(x: Any) -> str:
    """Shape and type in words; the samples are ``n``, since a few of them may have been taken.

    Example:
        >>> import torch
        >>> shape_of(torch.zeros(5, 3))
        '(n, 3) of torch.float32'
    """
    if not isinstance(x, Tensor | np.ndarray):
        return f"a {type(x).__name__}"
    axes = ["n", *map(str, x.shape[1:])] if x.ndim else []
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''}) of {x.dtype}"


def _score_like(output: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
    """What could be class scores, ``(n, c)`` or of a binary network ``(n,)``, by position."""
    for i, x in enumerate(output):
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim in (1, 2):
            yield i, x


def _which(kind: str, found: Mapping[int, Tensor]) -> str:
    listed = " and ".join(f"[{i}] {shape_of(x)}" for i, x in found.items())
    return (
        f"the network returned a {kind} in which {len(found)} tensors could be the class scores, {listed}; "
        f"say which, for batches (x, y): forward=lambda model, batch: model(batch[0])[{max(found)}]"
    )
