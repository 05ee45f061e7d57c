"""Perturbations of texts: of the tokens a network is given, and of the words behind them.

Tokens are dropped, swapped and replaced inside the attention mask; tokens that mark the beginning, the end or
padding stay. What they are is seen from the data: a token at which nearly all texts begin or end, and the one
that stands where the mask is 0. With the network's tokenizer the text itself is disturbed as people and
keyboards do it: typing errors, lost, swapped and unknown words; then it is made into tokens again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Coder",
    "Tokens",
    "coder_for",
    "drop",
    "lose_words",
    "misspell",
    "replace",
    "rewrite",
    "swap",
    "swap_words",
    "unknown_words",
]

KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEARLY_ALL = 0.95


@dataclass(frozen=True, eq=False)
class Tokens:
    """What the tokens of a data set are like.

    Args:
        special: tokens that are never touched.
        words: ordinary tokens that occur.
        padding: token that stands for nothing; None where there is none.
        left: does padding stand on the left?

    Example:
        >>> ids = torch.tensor([[101, 7, 8, 102], [101, 9, 102, 0]])
        >>> found = Tokens.of([ids], [ids != 0])
        >>> sorted(found.special.tolist()), found.words.tolist(), found.padding
        ([0, 101, 102], [7, 8, 9], 0)
    """

    special: Tensor
    words: Tensor
    padding: int | None
    left: bool = False

    @staticmethod
    def of(ids: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Tokens:
        """Look at all texts of a data set: tokens ``(n, T)`` and masks, 1 where a token is real."""
        pairs = [(x.cpu(), _real(x.cpu(), mask)) for x, mask in zip(ids, masks, strict=True)]
        hidden = torch.cat([x[~real] for x, real in pairs])
        padding = int(hidden.mode().values) if len(hidden) else None
        texts = [x[i][real[i]] for x, real in pairs for i in range(len(x)) if bool(real[i].any())]
        special = {token for at in (0, -1) if (token := _common(texts, at)) is not None}
        special |= set() if padding is None else {padding}
        every = torch.cat(texts).unique() if texts else torch.zeros(0, dtype=torch.long)
        marks = torch.tensor(sorted(special), dtype=every.dtype)
        words = every[~torch.isin(every, marks)]
        left = any(bool((~real[:, 0] & real[:, -1]).any()) for _, real in pairs)
        return Tokens(marks, words, padding, left)

    def ordinary(self, ids: Tensor) -> Tensor:
        """True where a token may be touched, ``(n, T)``."""
        return ~torch.isin(ids, self.special.to(ids.device))


def drop(ids: Tensor, strength: Tensor, generator: torch.Generator, tokens: Tokens) -> Tensor:
    """Tokens lost, up to six in ten per unit of strength; the others close up, and padding fills the rest.

    Where no token stands for nothing, a lost token becomes that of its neighbour. A text never loses all.
    """
    lost = _chosen(ids, strength, generator, tokens)
    stays = ~lost if tokens.padding is None else ~lost & (ids != tokens.padding)
    lost &= stays.any(dim=1, keepdim=True)
    if tokens.padding is None:
        return torch.where(lost, ids.roll(1, dims=1), ids)
    new = torch.where(lost, tokens.padding, ids)
    empty = (new == tokens.padding).to(torch.uint8)
    order = (1 - empty if tokens.left else empty).argsort(dim=1, stable=True)
    return new.gather(1, order)


def swap(ids: Tensor, strength: Tensor, generator: torch.Generator, tokens: Tokens) -> Tensor:
    """Neighbouring tokens change places."""
    first = _chosen(ids, strength, generator, tokens)
    first[:, -1:] = False
    first[:, :-1] &= tokens.ordinary(ids)[:, 1:]
    first[:, 1:] &= ~first[:, :-1].clone()  # nobody moves twice
    second = first.roll(1, dims=1)
    return torch.where(first, ids.roll(-1, dims=1), torch.where(second, ids.roll(1, dims=1), ids))


def replace(ids: Tensor, strength: Tensor, generator: torch.Generator, tokens: Tokens) -> Tensor:
    """Tokens replaced by others that occur in the data."""
    if len(tokens.words) == 0:
        return ids
    draw = torch.randint(len(tokens.words), ids.shape, generator=generator, device=generator.device)
    other = tokens.words[draw.cpu()].to(ids)
    return torch.where(_chosen(ids, strength, generator, tokens), other, ids)


@dataclass(frozen=True)
class Coder:
    """How a network's texts become tokens, and back.

    Args:
        decode: tokens ``(n, T)`` to texts.
        encode: texts and a width ``T`` to tensors by name, ``input_ids`` among them.
    """

    decode: Callable[[Tensor], list[str]]
    encode: Callable[[list[str], int], dict[str, Tensor]]


def coder_for(tokenizer: Any) -> Coder:
    """A `Coder` as it is, or that of a Hugging Face tokenizer."""
    if isinstance(tokenizer, Coder):
        return tokenizer
    if not callable(tokenizer) or getattr(tokenizer, "batch_decode", None) is None:
        raise TypeError(
            f"tokenizer must be a Hugging Face tokenizer or a salgp.network.text.Coder(decode, encode), got "
            f"{type(tokenizer).__name__}"
        )

    def encode(texts: list[str], width: int) -> dict[str, Tensor]:
        found = tokenizer(texts, padding="max_length", truncation=True, max_length=width, return_tensors="pt")
        return dict(found)

    return Coder(lambda ids: list(tokenizer.batch_decode(ids, skip_special_tokens=True)), encode)


def rewrite(
    texts: Sequence[str],
    change: Callable[[str, float, random.Random], str],
    strength: Tensor,
    generator: torch.Generator,
) -> list[str]:
    """Every text changed with its own strength; an empty result is not taken."""
    seeds = torch.randint(1 << 31, (len(texts),), generator=generator, device=generator.device).tolist()
    rows = zip(texts, strength.tolist(), seeds, strict=True)
    return [change(text, s, random.Random(seed)) or text for text, s, seed in rows]


def misspell(text: str, strength: float, chance: random.Random) -> str:
    """Typing errors, up to one letter in five per unit of strength: another key, a letter lost, doubled or
    too early.

    Example:
        >>> misspell("hello", 0.0, random.Random(0)), len(misspell("hello" * 9, 2.0, random.Random(0))) > 20
        ('hello', True)
    """
    letters = list(text)
    for i in range(len(letters) - 1, -1, -1):
        if letters[i].isalpha() and chance.random() < 0.2 * strength:
            letters[i : i + 2] = _slip(letters[i : i + 2], chance)
    return "".join(letters)


def lose_words(text: str, strength: float, chance: random.Random) -> str:
    """Words lost, up to six in ten per unit of strength."""
    return " ".join(word for word in text.split() if chance.random() >= 0.6 * strength)


def swap_words(text: str, strength: float, chance: random.Random) -> str:
    """Neighbouring words change places."""
    words = text.split()
    for i in range(len(words) - 1):
        if chance.random() < 0.6 * strength:
            words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def unknown_words(text: str, strength: float, chance: random.Random) -> str:
    """Words replaced by letters nobody has seen together."""
    letters = "".join(KEYBOARD)

    def strange(word: str) -> str:
        return "".join(chance.choice(letters) for _ in word)

    return " ".join(strange(word) if chance.random() < 0.6 * strength else word for word in text.split())


def _slip(pair: list[str], chance: random.Random) -> list[str]:
    letter, rest = pair[0], pair[1:]
    kind = chance.randrange(4)
    if kind == 0:
        return [_neighbour(letter, chance), *rest]
    if kind == 1:
        return rest
    return [letter, letter, *rest] if kind == 2 else [*rest, letter]


def _neighbour(letter: str, chance: random.Random) -> str:
    for row in KEYBOARD:
        at = row.find(letter.lower())
        if at >= 0:
            return row[max(0, min(len(row) - 1, at + chance.choice((-1, 1))))]
    return letter


def _common(texts: Sequence[Tensor], at: int) -> int | None:
    """The token that stands at this end of nearly all texts; None where there is none."""
    found = Counter(int(text[at]) for text in texts)
    token, count = found.most_common(1)[0] if found else (0, 0)
    return token if found and count >= NEARLY_ALL * len(texts) else None


def _real(ids: Tensor, mask: Tensor | None) -> Tensor:
    """True where a token is real; without a mask, what is repeated to the end of a row is padding."""
    if mask is not None:
        return mask.cpu().bool()
    last = ids[:, -1:]
    run = (ids == last).flip(1).long().cumprod(dim=1).flip(1).bool()  # the run at the end of each row
    long = run.sum(dim=1) > 1
    ends = last[long, 0]
    padding = int(ends.mode().values) if len(ends) else None
    if padding is None:
        return torch.ones_like(ids, dtype=torch.bool)
    return ~(run & (last == padding))


def _chosen(ids: Tensor, strength: Tensor, generator: torch.Generator, tokens: Tokens) -> Tensor:
    draw = torch.rand(ids.shape, generator=generator, device=generator.device).to(ids.device)
    return (draw < (0.6 * strength[:, None].to(ids.device)).clamp(max=0.9)) & tokens.ordinary(ids)
