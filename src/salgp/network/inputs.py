"""Where the inputs of a batch are, and a batch with its inputs perturbed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from salgp.network.batches import Batch
from salgp.network.perturb import Family
from salgp.network.signals import Spread, normal
from salgp.network.text import Coder, Tokens, rewrite

__all__ = ["changed", "first_input", "first_tokens", "token_mask", "values_of"]


def changed(
    batch: Batch, family: Family, strength: Tensor, generator: torch.Generator, coder: Coder | None
) -> Batch:
    """The first floating-point input perturbed; further ones of two axes (metadata) get noise of the same
    strength.
    """
    if family.tokens or family.text:
        return _changed_text(batch, family, strength, generator, coder)
    where, x = first_input(batch)
    if where is None:
        raise ValueError(
            f"perturbation {family.name!r} needs a floating-point input tensor, but the batch "
            f"has none; use perturb='tokens'"
        )
    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        new = pack_padded_sequence(
            family(padded, strength, generator), lengths, batch_first=True, enforce_sorted=False
        )
        return batch.with_input(where, new)
    batch = batch.with_input(where, family(x, strength, generator))
    for i, old in enumerate(batch.inputs):
        if i != where and isinstance(old, Tensor) and old.is_floating_point() and old.ndim == 2:
            scale = Spread.of([old], table=False).scale
            batch = batch.with_input(i, old + strength.to(old)[:, None] * scale * normal(old, generator))
    return batch


def _changed_text(
    batch: Batch, family: Family, strength: Tensor, generator: torch.Generator, coder: Coder | None
) -> Batch:
    """Tokens perturbed, and their mask with them."""
    where, ids = first_tokens(batch)
    if where is None:
        raise ValueError(
            f"perturbation {family.name!r} needs tokens, whole numbers (n, T), but the batch has none"
        )
    at, mask = token_mask(batch, ids)
    if family.text:
        return _rewritten(batch, family, strength, generator, coder)
    new = family(ids, strength, generator)
    batch = batch.with_input(where, new)
    padding = family.spread.padding if isinstance(family.spread, Tokens) else None
    if at is None or mask is None or padding is None:
        return batch
    padding_moved = (new == padding).sum(dim=1) != (ids == padding).sum(dim=1)
    return batch.with_input(at, torch.where(padding_moved[:, None], (new != padding).to(mask), mask))


def _rewritten(
    batch: Batch, family: Family, strength: Tensor, generator: torch.Generator, coder: Coder | None
) -> Batch:
    if coder is None:
        raise ValueError(f"perturbation {family.name!r} changes the text: pass tokenizer=...")
    where, ids = first_tokens(batch)
    at, _ = token_mask(batch, ids)
    texts = rewrite(coder.decode(ids), family.disturb, strength, generator)
    found = coder.encode(texts, ids.shape[1])
    names = {"input_ids": where, "attention_mask": at} if isinstance(where, int) else {}
    for name, x in found.items():
        place = names.get(name, name if name in batch.keywords else None)
        batch = batch if place is None else batch.with_input(place, x)
    return batch


def first_input(batch: Batch) -> tuple[int | str | None, Any]:
    """Where the first floating-point input of a batch is, and the tensor; masks are no inputs.

    Example:
        >>> first_input(Batch((), {"attention_mask": torch.ones(2, 3), "x": torch.zeros(2, 4)}))[0]
        'x'
    """
    for i, x in enumerate(batch.inputs):
        if _is_floating(x):
            return i, x
    for key, x in batch.keywords.items():
        if _is_floating(x) and "mask" not in key:
            return key, x
    return None, None


def first_tokens(batch: Batch) -> tuple[int | str | None, Any]:
    """Where the first whole numbers ``(n, T)`` of a batch are, and the tensor; masks and types are no tokens.

    Example:
        >>> ids = torch.ones(2, 3, dtype=torch.long)
        >>> first_tokens(Batch((), {"attention_mask": ids, "input_ids": ids}))[0]
        'input_ids'
    """
    named = {key: x for key, x in batch.keywords.items() if "mask" not in key and "type" not in key}
    parts: list[tuple[int | str, Any]] = [*enumerate(batch.inputs), *named.items()]
    for where, x in parts:
        if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in (torch.int64, torch.int32):
            return where, x
    return None, None


def token_mask(batch: Batch, ids: Tensor) -> tuple[int | str | None, Tensor | None]:
    """Where the mask of the tokens is, and the mask: by name, or zeros and ones of the same shape."""
    for key, x in batch.keywords.items():
        if "mask" in key and isinstance(x, Tensor) and x.shape == ids.shape:
            return key, x
    for i, x in enumerate(batch.inputs):
        same = isinstance(x, Tensor) and x.shape == ids.shape and x is not ids
        if same and bool(((x == 0) | (x == 1)).all()):
            return i, x
    return None, None


def values_of(x: Any) -> Tensor | None:
    """An input as one tensor: a packed sequence padded; None where it is no tensor."""
    if isinstance(x, PackedSequence):
        return pad_packed_sequence(x, batch_first=True)[0]
    return x if isinstance(x, Tensor) else None


def _is_floating(x: Any) -> bool:
    data = x.data if isinstance(x, PackedSequence) else x
    return isinstance(data, Tensor) and data.is_floating_point()
