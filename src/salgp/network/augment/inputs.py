"""Where the inputs of a batch are, and a batch with its inputs perturbed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from salgp.network.augment.corruptions import Spread, normal
from salgp.network.augment.families import Family
from salgp.network.batches import Batch
from salgp.network.text import Tokens, real_or_guessed, retokenize
from salgp.network.words import rewrite, seeds_for

__all__ = ["first_input", "first_texts", "first_tokens", "perturbed_batch", "real_tokens", "values_of"]


def perturbed_batch(
    batch: Batch, family: Family, strength: Tensor, generator: torch.Generator, tokenizer: Any
) -> Batch:
    """The first floating-point input perturbed; further ones of two axes (metadata) get noise of the same
    strength. A family that acts on all inputs together gets them all.
    """
    if family.together:
        return _perturbed_together(batch, family, strength, generator)
    if family.tokens or family.text:
        return _perturbed_text(batch, family, strength, generator, tokenizer)
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


def _perturbed_together(batch: Batch, family: Family, strength: Tensor, generator: torch.Generator) -> Batch:
    """All inputs perturbed by one function: a tuple of them, or a dictionary where they have names."""
    numbers = first_input(batch)[1]
    own = strength if numbers is None else strength.to(numbers.data)
    if batch.inputs:
        found: Any = family.disturb(batch.inputs, own, generator)
        right, form = isinstance(found, tuple | list), "tuple"
    else:
        found = family.disturb(dict(batch.keywords), own, generator)
        right, form = isinstance(found, Mapping), "dictionary"
    old: dict[Any, Any] = dict(enumerate(batch.inputs)) if batch.inputs else dict(batch.keywords)
    if not right or len(found) != len(old):
        raise ValueError(
            f"perturbation {family.name!r} must return its inputs as it got them, a {form} of {len(old)}; "
            f"got {_made(found)}"
        )
    new = dict(enumerate(found)) if batch.inputs else dict(found)
    for where, x in old.items():
        if getattr(new.get(where), "shape", None) != getattr(x, "shape", None):
            raise ValueError(
                f"perturbation {family.name!r} must return input {where!r} in its shape "
                f"{tuple(getattr(x, 'shape', ()))}; got {_made(new.get(where))}"
            )
        batch = batch.with_input(where, new[where])
    return batch


def _made(found: Any) -> str:
    """What a user's function returned, in words."""
    if isinstance(found, Tensor):
        return f"a tensor {tuple(found.shape)}"
    return f"{type(found).__name__} of {len(found)}" if hasattr(found, "__len__") else type(found).__name__


def _perturbed_text(
    batch: Batch, family: Family, strength: Tensor, generator: torch.Generator, tokenizer: Any
) -> Batch:
    """Tokens perturbed, and their mask with them."""
    at, texts = first_texts(batch)
    if family.text and texts is not None:
        return batch.with_input(at, rewrite(texts, family.disturb, strength, generator))
    where, ids = first_tokens(batch)
    if where is None:
        raise ValueError(
            f"perturbation {family.name!r} needs tokens, whole numbers (n, T), but the batch has none"
        )
    if family.text:
        return _retokenized(batch, family, strength, generator, tokenizer)
    new, real = family.on_tokens(ids, strength, generator, real_tokens(batch, ids))
    return _with_mask(batch, ids, real).with_input(where, new)


def _with_mask(batch: Batch, ids: Tensor, real: Tensor | None) -> Batch:
    """The batch with a mask that tells which tokens are real, in the mask's own terms."""
    at, mask = _token_mask(batch, ids)
    if at is None or mask is None or real is None:
        return batch
    marked = ~real if _marks_padding(ids, mask) else real
    return batch.with_input(at, marked.to(mask))


def _retokenized(
    batch: Batch, family: Family, strength: Tensor, generator: torch.Generator, tokenizer: Any
) -> Batch:
    """The words behind the tokens perturbed; types of tokens follow their words."""
    if tokenizer is None:
        raise ValueError(f"perturbation {family.name!r} changes the text: pass tokenizer=...")
    where, ids = first_tokens(batch)
    assert where is not None
    real = real_or_guessed(ids, real_tokens(batch, ids))
    tokens = family.spread if isinstance(family.spread, Tokens) else Tokens.of([ids], [real])
    seeds = seeds_for(len(ids), generator)
    found = retokenize(ids, real, tokens, tokenizer, family.disturb, strength, seeds)
    mask_at = _token_mask(batch, ids)[0]
    for name, x in batch.keywords.items():
        if name not in (where, mask_at) and isinstance(x, Tensor) and x.shape == ids.shape:
            if "type" not in name:
                raise ValueError(f"input {name!r} stands beside the tokens and cannot follow changed words")
            batch = batch.with_input(name, x.gather(1, found.origin))
    return _with_mask(batch, ids, found.real).with_input(where, found.ids)


def first_texts(batch: Batch) -> tuple[int | str, list[str] | None]:
    """Where the first raw texts of a batch are, and the texts; None where it has none.

    Example:
        >>> first_texts(Batch((["play", "stop"],)))
        (0, ['play', 'stop'])
    """
    parts: list[tuple[int | str, Any]] = [*enumerate(batch.inputs), *batch.keywords.items()]
    for where, x in parts:
        if isinstance(x, list | tuple) and x and all(isinstance(text, str) for text in x):
            return where, list(x)
    return 0, None


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


def real_tokens(batch: Batch, ids: Tensor) -> Tensor | None:
    """True where a token is real, by the mask of the batch; None where it has none.

    A mask may say which tokens count, as in Hugging Face's networks, or which are padding, as in PyTorch's.

    Example:
        >>> ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
        >>> real_tokens(Batch((ids, ids == 0)), ids).tolist()
        [[True, True, False], [True, False, False]]
    """
    mask = _token_mask(batch, ids)[1]
    if mask is None:
        return None
    return ~mask.bool() if _marks_padding(ids, mask) else mask.bool()


def _marks_padding(ids: Tensor, mask: Tensor) -> bool:
    """Are the ones of a mask at padding? Then they all stand at the same token, or there are none."""
    one, zero = ids[mask.bool()], ids[~mask.bool()]
    if len(one) == 0 or len(zero) == 0:
        return len(one) == 0
    return bool((one == one[0]).all()) and not bool((zero == zero[0]).all())


def _token_mask(batch: Batch, ids: Tensor) -> tuple[int | str | None, Tensor | None]:
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
