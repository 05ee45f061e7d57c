"""What goes into a network and what comes out: batches of any form, and class scores from any output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Batch", "named_fields", "raw_logits"]


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass and, where known, their labels.

    Args:
        inputs: positional arguments of the network.
        keywords: keyword arguments of the network.
        labels: true classes.
    """

    inputs: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    labels: Any = None

    @staticmethod
    def of(item: Any) -> Batch:
        """Read what a loader yields.

        ``x`` alone has no labels; of a tuple or list the last element is the labels and the others are the
        inputs; a mapping gives keyword arguments, and its ``labels`` (or ``label``) are the labels.

        Example:
            >>> Batch.of((torch.zeros(2, 3), torch.tensor([0, 1]))).labels
            tensor([0, 1])
            >>> sorted(Batch.of({"input_ids": torch.zeros(2, 3), "labels": [0, 1]}).keywords)
            ['input_ids']
        """
        if isinstance(item, Mapping):
            return _from_mapping(item)
        if not isinstance(item, tuple | list) or isinstance(item, PackedSequence):
            return Batch((item,))
        if len(item) == 0:
            raise ValueError(
                "the loader gave an empty tuple; expected (inputs, labels), inputs alone, or a mapping"
            )
        *inputs, labels = item if len(item) > 1 else (item[0], None)
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            inner = _from_mapping(inputs[0])
            return Batch((), inner.keywords, inner.labels if labels is None else labels)
        return Batch(tuple(inputs), {}, labels)

    @property
    def mask(self) -> Tensor | None:
        """The ``attention_mask`` ``(N, T)``, where the batch has one."""
        mask = self.keywords.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Batch:
        """Inputs on ``device``, floating-point ones as ``dtype`` (None: as they are)."""
        return Batch(
            _moved(self.inputs, device, dtype), _moved(dict(self.keywords), device, dtype), self.labels
        )


def raw_logits(output: Any) -> Tensor:
    """Find the class scores in whatever a network returned.

    A tensor is taken as it is; a mapping, dataclass or named tuple must have ``logits``; of a plain tuple or
    list the first floating-point tensor with two axes is taken.

    Example:
        >>> raw_logits({"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3)}).shape
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
            f"{', '.join(map(str, fields))}); {_FORWARD}"
        )
    if isinstance(output, tuple | list):
        floats = [x for x in output if isinstance(x, Tensor) and x.is_floating_point()]
        for x in [x for x in floats if x.ndim == 2] + [x for x in floats if x.ndim == 1]:
            return x
    raise ValueError(f"found no logits in the {type(output).__name__} the network returned; {_FORWARD}")


def named_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a mapping, dataclass or named tuple; nothing for any other value."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, tuple):
        yield from zip(getattr(value, "_fields", ()), value, strict=False)


_FORWARD = "pass forward=lambda model, x: ... to return the logits yourself"


def _from_mapping(item: Mapping[str, Any]) -> Batch:
    keywords = dict(item)
    plural, singular = keywords.pop("labels", None), keywords.pop("label", None)
    return Batch((), keywords, singular if plural is None else plural)


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(
            device=device, dtype=dtype if dtype is not None and value.is_floating_point() else value.dtype
        )
    if isinstance(value, PackedSequence):
        return value._replace(data=_moved(value.data, device, dtype))
    if isinstance(value, Mapping):
        return {k: _moved(v, device, dtype) for k, v in value.items()}
    if isinstance(value, list):
        return [_moved(v, device, dtype) for v in value]
    if isinstance(value, tuple):
        parts = [_moved(v, device, dtype) for v in value]
        return tuple(parts) if getattr(value, "_fields", None) is None else type(value)(*parts)
    return value
