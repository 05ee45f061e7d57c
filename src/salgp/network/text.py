"""Perturbations of the tokens a network is given, and of the words behind them.

Tokens are dropped, swapped and replaced. What belongs to the frame of a text stays: padding, special tokens,
and the tokens with which all texts of the data set begin and end, as those of a prompt do. With the network's
tokenizer the words are perturbed (`salgp.network.words`) and made into tokens again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from salgp.network.words import Change, changed, lose_words

__all__ = [
    "Retokenized",
    "Tokens",
    "checked_tokenizer",
    "drop",
    "real_or_guessed",
    "replace",
    "retokenize",
    "swap",
]

NEARLY_ALL = 0.95
UNLIMITED = 1_000_000
"""Tokenizers without a length limit name a number beyond this."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """What the tokens of a data set are like.

    Args:
        special: tokens that are never touched.
        words: ordinary tokens that occur.
        padding: token that stands for nothing; None where there is none.
        left: does padding stand on the left?
        head: tokens with which all texts begin.
        tail: tokens with which all texts end.

    Example:
        >>> ids = torch.tensor([[101, 7, 8, 102], [101, 9, 102, 0]])
        >>> found = Tokens.of([ids], [ids != 0])
        >>> sorted(found.special.tolist()), found.words.tolist(), found.padding
        ([0, 101, 102], [7, 8, 9], 0)
        >>> found.head, found.tail
        (1, 1)
    """

    special: Tensor
    words: Tensor
    padding: int | None
    left: bool = False
    head: int = 0
    tail: int = 0

    @staticmethod
    def of(ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Tokens:
        """Look at all texts of a data set: tokens ``(n, T)`` and masks, 1 where a token is real."""
        pairs = [(x.cpu(), real_or_guessed(x.cpu(), mask)) for x, mask in zip(ids, masks, strict=True)]
        hidden = torch.cat([x[~real] for x, real in pairs])
        padding = int(hidden.mode().values) if len(hidden) else None
        texts = [x[i][real[i]] for x, real in pairs for i in range(len(x)) if bool(real[i].any())]
        special = {token for at in (0, -1) if (token := _common(texts, at)) is not None}
        special |= set() if padding is None else {padding}
        every = torch.cat(texts).unique() if texts else torch.zeros(0, dtype=torch.long)
        marks = torch.tensor(sorted(special), dtype=every.dtype)
        words = every[~torch.isin(every, marks)]
        left = any(bool((~real[:, 0] & real[:, -1]).any()) for _, real in pairs)
        return Tokens(marks, words, padding, left, *_frame([text.tolist() for text in texts]))

    def ordinary(self, ids: Tensor, real: Tensor) -> Tensor:
        """True where a token may be touched, ``(n, T)``."""
        place = real.cumsum(dim=1)
        inside = (place > self.head) & (place <= real.sum(dim=1, keepdim=True) - self.tail)
        return real & inside & ~torch.isin(ids, self.special.to(ids.device))


def drop(
    ids: Tensor, strength: Tensor, generator: torch.Generator, tokens: Tokens, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens lost, up to six in ten per unit of strength; the others close up, and padding fills the rest.

    Where no token stands for nothing, a lost token becomes that of its neighbour. A text never loses all.

    Args:
        ids: tokens ``(n, T)``.
        strength: of each text ``(n,)``.
        generator: of the random numbers.
        tokens: what the tokens of the data set are like.
        real: ``(n, T)`` true where a token is real; None guesses it from ``ids``.

    Returns:
        The tokens, and where they are real.
    """
    real = real_or_guessed(ids, real)
    lost = _chosen(ids, strength, generator, tokens, real)
    lost &= (real & ~lost).any(dim=1, keepdim=True)
    if tokens.padding is None:
        return torch.where(lost, ids.roll(1, dims=1), ids), real
    left = real & ~lost
    empty = (~left).to(torch.uint8)
    order = (1 - empty if tokens.left else empty).argsort(dim=1, stable=True)
    new = torch.where(lost, tokens.padding, ids)
    return new.gather(1, order), left.gather(1, order)


def swap(
    ids: Tensor, strength: Tensor, generator: torch.Generator, tokens: Tokens, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Neighbouring tokens change places; arguments and result as those of `drop`."""
    real = real_or_guessed(ids, real)
    pairs = tokens.ordinary(ids, real)
    pairs[:, :-1] &= pairs[:, 1:].clone()
    pairs[:, -1:] = False
    first = _chosen(ids, strength, generator, tokens, real, among=pairs)
    for i in range(1, ids.shape[1]):  # nobody moves twice
        first[:, i] &= ~first[:, i - 1]
    second = first.roll(1, dims=1)
    return torch.where(first, ids.roll(-1, dims=1), torch.where(second, ids.roll(1, dims=1), ids)), real


def replace(
    ids: Tensor, strength: Tensor, generator: torch.Generator, tokens: Tokens, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens replaced by others that occur in the data; arguments and result as those of `drop`."""
    real = real_or_guessed(ids, real)
    if len(tokens.words) < 2:
        return ids, real
    draw = torch.randint(len(tokens.words), ids.shape, generator=generator, device=generator.device).cpu()
    drawn, following = (tokens.words[(draw + k) % len(tokens.words)].to(ids) for k in (0, 1))
    other = torch.where(drawn == ids, following, drawn)
    return torch.where(_chosen(ids, strength, generator, tokens, real), other, ids), real


def checked_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, where it has what `retokenize` needs: Hugging Face's have."""
    missing = [name for name in ("encode", "decode", "all_special_ids") if not hasattr(tokenizer, name)]
    if missing:
        raise TypeError(
            f"tokenizer must be a Hugging Face tokenizer, or have encode(text, add_special_tokens=False), "
            f"decode(ids) and all_special_ids as one has; {type(tokenizer).__name__} has no {missing[0]}"
        )
    return tokenizer


@dataclass(frozen=True, eq=False)
class Retokenized:
    """Texts made into tokens again.

    Args:
        ids: tokens ``(n, T)``.
        real: ``(n, T)`` true where a token is real.
        origin: ``(n, T)`` place of the token that each of them comes from, for types of tokens and the like.
    """

    ids: Tensor
    real: Tensor
    origin: Tensor


def retokenize(
    ids: Tensor,
    real: Tensor,
    tokens: Tokens,
    tokenizer: Any,
    change: Change,
    strength: Tensor,
    seeds: list[int],
) -> Retokenized:
    """The words behind tokens ``(n, T)`` changed; frame and special tokens stay, and nothing is cut off.

    A text that would be longer than the tokenizer's limit (than ``T``, where it has none) is changed less.
    """
    own = int(getattr(tokenizer, "model_max_length", UNLIMITED))
    limit = max(ids.shape[1], own) if own < UNLIMITED else ids.shape[1]
    special = {*tokens.special.tolist(), *tokenizer.all_special_ids}
    rows: list[list[tuple[int, int]]] = []
    for row, mask, s, seed in zip(ids.tolist(), real.tolist(), strength.tolist(), seeds, strict=True):
        text = [
            (token, place) for place, (token, is_real) in enumerate(zip(row, mask, strict=True)) if is_real
        ]
        rows.append(_within(text, tokens, special, tokenizer, change, s, seed, limit))
    return _padded(rows, ids, tokens, tokenizer)


def _within(
    text: list[tuple[int, int]],
    tokens: Tokens,
    special: set[int],
    tokenizer: Any,
    change: Change,
    strength: float,
    seed: int,
    limit: int,
) -> list[tuple[int, int]]:
    """A text, tokens with their places, changed so that it stays within the limit."""
    end = len(text) - tokens.tail
    head, middle, tail = text[: tokens.head], text[tokens.head : end], text[end:]
    tries = [(change, strength / 2**k) for k in range(4)] + [(lose_words, strength)]
    for how, s in tries:
        new: list[tuple[int, int]] = []
        for is_special, run in groupby(middle, key=lambda pair: pair[0] in special):
            part = list(run)
            new += part if is_special else _run(part, tokenizer, how, s, random.Random(seed))
        if len(head) + len(new) + len(tail) <= limit:
            break
    return [*head, *new[: limit - len(head) - len(tail)], *tail]


def _run(
    part: list[tuple[int, int]], tokenizer: Any, change: Change, strength: float, chance: random.Random
) -> list[tuple[int, int]]:
    if strength <= 0:
        return part
    text = tokenizer.decode([token for token, _ in part])
    new = tokenizer.encode(changed(text, change, strength, chance), add_special_tokens=False)
    return [(token, part[0][1]) for token in new]


def _padded(rows: list[list[tuple[int, int]]], ids: Tensor, tokens: Tokens, tokenizer: Any) -> Retokenized:
    width = max([ids.shape[1], *map(len, rows)])
    padding = tokens.padding if tokens.padding is not None else getattr(tokenizer, "pad_token_id", None) or 0
    found = torch.tensor(
        [_filled(row, width, (padding, 0), tokens.left) for row in rows], dtype=ids.dtype, device=ids.device
    )  # (n, T, 2)
    real = torch.tensor([_filled([1] * len(row), width, 0, tokens.left) for row in rows], device=ids.device)
    return Retokenized(found[..., 0], real.bool(), found[..., 1].long())


def _filled(row: list[Any], width: int, value: Any, left: bool) -> list[Any]:
    rest = [value] * (width - len(row))
    return [*rest, *row] if left else [*row, *rest]


def _common(texts: Sequence[Tensor], at: int) -> int | None:
    """The token that stands at this end of nearly all texts; None where there is none."""
    found = Counter(int(text[at]) for text in texts)
    token, count = found.most_common(1)[0] if found else (0, 0)
    return token if found and count >= NEARLY_ALL * len(texts) else None


def _frame(texts: list[list[int]]) -> tuple[int, int]:
    """How many tokens all texts have in common at their beginning and at their end."""
    if len(texts) < 2 or all(text == texts[0] for text in texts):
        return 0, 0
    shortest = min(map(len, texts))
    head = _alike([text[:shortest] for text in texts])
    return head, _alike([text[::-1][: shortest - head] for text in texts])


def _alike(texts: list[list[int]]) -> int:
    columns = zip(*texts, strict=True)
    return next((k for k, column in enumerate(columns) if len(set(column)) > 1), len(texts[0]))


def real_or_guessed(ids: Tensor, mask: Tensor | None) -> Tensor:
    """True where a token is real; without a mask, what is repeated to the end of a row is padding."""
    if mask is not None:
        return mask.bool()
    last = ids[:, -1:]
    run = (ids == last).flip(1).long().cumprod(dim=1).flip(1).bool()  # the run at the end of each row
    long = run.sum(dim=1) > 1
    ends = last[long, 0]
    padding = int(ends.mode().values) if len(ends) else None
    if padding is None:
        return torch.ones_like(ids, dtype=torch.bool)
    return ~(run & (last == padding))


def _chosen(
    ids: Tensor,
    strength: Tensor,
    generator: torch.Generator,
    tokens: Tokens,
    real: Tensor,
    among: Tensor | None = None,
) -> Tensor:
    """Tokens to be changed: each by chance, and at least one of a text whose strength is not 0."""
    draw = torch.rand(ids.shape, generator=generator, device=generator.device).to(ids.device)
    draw = draw.masked_fill(~(tokens.ordinary(ids, real) if among is None else among), 2.0)
    share = (0.6 * strength[:, None].to(ids.device)).clamp(max=0.9)
    first = draw == draw.amin(dim=1, keepdim=True)
    return (draw < 2.0) & (share > 0) & ((draw < share) | first)
