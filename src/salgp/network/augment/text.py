"""Perturbations of text: of the words people write, and of the tokens a network is given.

Words get typing errors, are lost, swapped and replaced by unknown ones; line breaks stay, and no text comes
back as it was. Tokens are dropped, swapped and replaced. What belongs to the frame of a text stays: padding,
special tokens, and the tokens with which all texts of the data set begin and end, as those of a prompt do.
With the network's tokenizer the words behind the tokens are perturbed and made into tokens again.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

__all__ = ["Tokens", "drop", "replace", "swap", "swap_words"]

NEARLY_ALL = 0.95
UNLIMITED = 1_000_000
"""Tokenizers without a length limit name a number beyond this."""
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")

WordChange = Callable[[str, float, random.Random], str]
"""``change(text, strength, chance) -> text``; strength 0 leaves a text as it is."""
Places = list[tuple[int, int]]
"""Tokens of a text, each with the position it comes from."""


def rewrite(
    texts: Sequence[str], change: WordChange, strength: Tensor, generator: torch.Generator
) -> list[str]:
    """Every text changed with its own strength.

    Example:
        >>> rewrite(["no", "go on"], lose_words, torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0))
        ['no', 'on']
    """
    rows = zip(texts, strength.tolist(), _seeds(len(texts), generator), strict=True)
    return [_changed(text, change, s, random.Random(seed)) if s > 0 else text for text, s, seed in rows]


def misspell(text: str, strength: float, chance: random.Random) -> str:
    """Typing errors, up to one letter in five per unit of strength: another key, a letter lost, doubled or
    too early.

    Example:
        >>> misspell("hello", 0.0, random.Random(0)), len(misspell("hello" * 9, 2.0, random.Random(0))) > 20
        ('hello', True)
    """
    letters = list(text)
    places = [i for i, letter in enumerate(letters) if letter.isalpha()]
    places = places or [i for i, letter in enumerate(letters) if not letter.isspace()]
    for i in reversed(_some(places, 0.2 * strength, chance)):
        letters[i : i + 2] = _slip(letters[i : i + 2], chance)
    return "".join(letters)


def lose_words(text: str, strength: float, chance: random.Random) -> str:
    """Words lost, up to six in ten per unit of strength; never all of them.

    Example:
        >>> lose_words("one two\\nthree", 0.1, random.Random(1))
        'one\\nthree'
    """
    pieces, words = _split(text)
    lost = _some(words, 0.6 * strength, chance)
    if len(lost) == len(words):
        lost.remove(chance.choice(lost)) if lost else None
    for i in lost:
        pieces[i] = ""
        gap = i - 1 if i > words[0] else i + 1
        if "\n" not in pieces[gap]:
            pieces[gap] = ""
    return "".join(pieces)


def swap_words(text: str, strength: float, chance: random.Random) -> str:
    """Neighbouring words change places; the space between them stays.

    Example:
        >>> swap_words("one\\ntwo", 1.0, random.Random(0))
        'two\\none'
    """
    pieces, words = _split(text)
    different = [k for k in range(len(words) - 1) if pieces[words[k]] != pieces[words[k + 1]]]
    moved = -1
    for k in _some(different, 0.6 * strength, chance):
        if k > moved:  # nobody moves twice
            a, b = words[k], words[k + 1]
            pieces[a], pieces[b] = pieces[b], pieces[a]
            moved = k + 1
    return "".join(pieces)


def unknown_words(text: str, strength: float, chance: random.Random) -> str:
    """Words replaced by letters nobody has seen together.

    Example:
        >>> unknown_words("one two", 0.1, random.Random(0))
        'one woj'
    """
    pieces, words = _split(text)
    letters = "".join(KEYBOARD)
    for i in _some(words, 0.6 * strength, chance):
        pieces[i] = "".join(chance.choice(letters) for _ in pieces[i])
    return "".join(pieces)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Properties of the tokens of a data set.

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


def retokenize(
    ids: Tensor,
    real: Tensor,
    tokens: Tokens,
    tokenizer: Any,
    change: WordChange,
    strength: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """The words behind tokens ``(n, T)`` changed; frame and special tokens stay, and nothing is cut off.

    A text that would be longer than the tokenizer's limit (than ``T``, where it has none) is changed less.

    Returns:
        The tokens; where they are real; and the position that each of them comes from, for types of tokens
        and the like.
    """
    own = int(getattr(tokenizer, "model_max_length", UNLIMITED))
    limit = max(ids.shape[1], own) if own < UNLIMITED else ids.shape[1]
    special = {*tokens.special.tolist(), *tokenizer.all_special_ids}
    rows: list[Places] = []
    seeds = _seeds(len(ids), generator)
    for row, mask, s, seed in zip(ids.tolist(), real.tolist(), strength.tolist(), seeds, strict=True):
        text = [(token, place) for place, token in enumerate(row) if mask[place]]
        end = len(text) - tokens.tail
        head, middle, tail = text[: tokens.head], text[tokens.head : end], text[end:]
        capacity = limit - len(head) - len(tail)
        for how, weaker in [*((change, s / 2**k) for k in range(4)), (lose_words, s)]:
            new = _changed_places(middle, special, tokenizer, how, weaker, seed)
            if len(new) <= capacity:
                break
        rows.append([*head, *new[:capacity], *tail])
    return _padded(rows, ids, tokens, tokenizer)


def _changed_places(
    text: Places, special: set[int], tokenizer: Any, change: WordChange, strength: float, seed: int
) -> Places:
    """Tokens with their places; what stands between special tokens is changed as text."""
    new: Places = []
    for is_special, run in groupby(text, key=lambda pair: pair[0] in special):
        part = list(run)
        if not is_special and strength > 0:
            words = tokenizer.decode([token for token, _ in part])
            words = _changed(words, change, strength, random.Random(seed))
            part = [(token, part[0][1]) for token in tokenizer.encode(words, add_special_tokens=False)]
        new += part
    return new


def _padded(rows: list[Places], ids: Tensor, tokens: Tokens, tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
    width = max([ids.shape[1], *map(len, rows)])
    padding = tokens.padding if tokens.padding is not None else getattr(tokenizer, "pad_token_id", None) or 0
    filled = []
    for row in rows:
        real = [(token, place, 1) for token, place in row]
        rest = [(padding, 0, 0)] * (width - len(row))
        filled.append([*rest, *real] if tokens.left else [*real, *rest])
    found = torch.tensor(filled, dtype=ids.dtype, device=ids.device)  # (n, T, 3)
    return found[..., 0], found[..., 2].bool(), found[..., 1].long()


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


def _split(text: str) -> tuple[list[str], list[int]]:
    """Words and the space between them, in turn, and which of these pieces are words."""
    pieces = re.split(r"(\s+)", text)
    return pieces, [i for i, piece in enumerate(pieces) if piece.strip()]


def _some(items: list[int], share: float, chance: random.Random) -> list[int]:
    """About this share of the items, at most nine in ten, and at least one unless the share is 0."""
    if share <= 0 or not items:
        return []
    share = min(share, 0.9)
    return [item for item in items if chance.random() < share] or [chance.choice(items)]


def _slip(pair: list[str], chance: random.Random) -> list[str]:
    letter, rest = pair[0], pair[1:]
    kind = chance.randrange(4)
    if kind == 1:
        return rest
    new = [_neighbour(letter, chance), *rest] if kind == 0 else [*rest, letter]
    return [letter, *pair] if kind == 2 or new == pair else new


def _neighbour(letter: str, chance: random.Random) -> str:
    for row in KEYBOARD:
        at = row.find(letter.lower())
        if at >= 0:
            return row[max(0, min(len(row) - 1, at + chance.choice((-1, 1))))]
    return letter


def _seeds(n: int, generator: torch.Generator) -> list[int]:
    """A seed for each of n texts."""
    seeds: list[int] = torch.randint(1 << 31, (n,), generator=generator, device=generator.device).tolist()
    return seeds


def _changed(text: str, change: WordChange, strength: float, chance: random.Random) -> str:
    """The text changed; by a typing error where the change leaves it as it is or leaves nothing."""
    for how in (change, misspell):
        new = how(text, strength, chance)
        if new != text and new.strip():
            return new
    return text + text.strip()[-1:]
