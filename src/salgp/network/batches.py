"""What goes into a network and what comes out: batches of any form, and logits from any output.

Whether an output is a logit, a probability or its logarithm is never guessed from the values: the caller says
so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["OUTPUTS", "Batch", "as_logits", "raw_logits"]

OUTPUTS = ("logits", "probabilities", "log-probabilities")
"""What the numbers a network returns can mean."""


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


def as_logits(raw: Tensor, output: str = "logits") -> Tensor:
    """Turn class scores into logits ``(n, c)`` with at least single precision.

    A binary network with one column gives ``z``, the log-odds of class 1: its logits are ``[0, z]``, and with
    ``p`` in place of ``z`` they are ``[log(1 - p), log p]``.

    Args:
        raw: ``(n, c)``, or ``(n,)`` / ``(n, 1)`` for a binary network.
        output: what the numbers are, one of `OUTPUTS`. Nothing is guessed from their range.

    Example:
        >>> as_logits(torch.tensor([2.0, -1.0]))
        tensor([[ 0.,  2.],
                [ 0., -1.]])
        >>> as_logits(torch.tensor([[0.5, 0.5]]), "probabilities").exp()
        tensor([[0.5000, 0.5000]])
    """
    if output not in OUTPUTS:
        raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {output!r}")
    if not raw.is_floating_point() or raw.ndim not in (1, 2) or 0 in raw.shape[1:]:
        raise ValueError(
            f"expected class scores of shape (n, c) or, for a binary network, (n,) or (n, 1); "
            f"got {raw.dtype} {tuple(raw.shape)}. {_FORWARD}"
        )
    z = raw.float() if raw.dtype in (torch.float16, torch.bfloat16) else raw
    binary = z.ndim == 1 or z.shape[1] == 1
    if output == "logits":
        return torch.stack([torch.zeros_like(z.reshape(-1)), z.reshape(-1)], dim=1) if binary else z
    p = z.exp() if output == "log-probabilities" else z
    p = torch.stack([1 - p.reshape(-1), p.reshape(-1)], dim=1) if binary else p
    _check_probabilities(p, output)
    return z if output == "log-probabilities" and not binary else p.clamp_min(torch.finfo(p.dtype).tiny).log()


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


def _check_probabilities(p: Tensor, output: str) -> None:
    tolerance = 1e-2
    off = (p.sum(dim=1) - 1).abs() > tolerance
    if bool((p < 0).any()) or bool(off.any()):
        raise ValueError(
            f"output={output!r} was given, but the rows are not distributions (smallest "
            f"{float(p.min()):.3g}); are they logits?"
        )
