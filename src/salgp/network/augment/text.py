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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from typing import Any

import torch
from torch import Generator, Tensor

from salgp.network.augment.corruptions import whole

__all__ = ["Tokens", "common_start", "drop", "replace", "swap", "swap_words"]

NEARLY_ALL = 0.95
UNLIMITED = 1_000_000
"""Tokenizers without a length limit name a number beyond this."""
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")

WordChange = Callable[[str, float, random.Random], str]
"""``change(text, strength, chance) -> text``; strength 0 leaves a text as it is."""
Mask = Tensor | None
Masked = tuple[Tensor, Tensor]
"""Tokens ``(n, T)``, and where they are real."""
Places = list[tuple[int, int]]
"""Tokens of a text, each with the position it comes from."""


def rewrite(texts: Sequence[str], change: WordChange, strength: Tensor, generator: Generator) -> list[str]:
    """Every text changed with its own strength.

    Example:
        >>> rewrite(["no", "go on"], lose_words, torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0))
        ['no', 'on']
    """
    rows = zip(texts, strength.tolist(), _seeds(len(texts), generator), strict=True)
    return [_changed(change, *row) for row in rows]


def misspell(text: str, strength: float, chance: random.Random) -> str:
    """Typing errors, up to one letter in five per unit of strength: another key, a letter lost, doubled or
    too early.

    Example:
        >>> misspell("hello", 0.0, random.Random(0)), len(misspell("hello" * 9, 2.0, random.Random(0))) > 20
        ('hello', True)
    """
    letters = list(text)
    places = [i for i, letter in enumerate(letters) if letter.isalpha()]
    places = places or _words(letters)
    for i in reversed(_some(places, 0.2 * strength, chance)):
        letters[i : i + 2] = _slip(letters[i : i + 2], chance)
    return "".join(letters)


def lose_words(text: str, strength: float, chance: random.Random) -> str:
    """Words lost, up to six in ten per unit of strength; never all of them.

    Example:
        >>> lose_words("one two\\nthree", 0.1, random.Random(1))
        'one\\nthree'
    """
    pieces = _pieces(text)
    words = _words(pieces)
    lost = _some(words, 0.6 * strength, chance)
    if lost and len(lost) == len(words):
        lost.remove(chance.choice(lost))
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
    pieces = _pieces(text)
    pairs = list(pairwise(_words(pieces)))
    different = [k for k, (a, b) in enumerate(pairs) if pieces[a] != pieces[b]]
    moved = -1
    for k in _some(different, 0.6 * strength, chance):
        if k > moved:  # nobody moves twice
            a, b = pairs[k]
            pieces[a], pieces[b] = pieces[b], pieces[a]
            moved = k + 1
    return "".join(pieces)


def unknown_words(text: str, strength: float, chance: random.Random) -> str:
    """Words replaced by letters nobody has seen together.

    Example:
        >>> unknown_words("one two", 0.1, random.Random(0))
        'one woj'
    """
    pieces = _pieces(text)
    letters = "".join(KEYBOARD)
    for i in _some(_words(pieces), 0.6 * strength, chance):
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
        each = [x.cpu() for x in ids]
        pairs = list(zip(each, map(real_or_guessed, each, masks), strict=True))
        padding = _most_frequent(torch.cat([x[~real] for x, real in pairs]))
        left = any(bool((~real[:, 0] & real[:, -1]).any()) for _, real in pairs)
        rows = [row for pair in pairs for row in zip(*pair, strict=True)]
        texts = [tokens[real] for tokens, real in rows if real.any()]
        frame = {_common(texts, 0), _common(texts, -1), padding}
        special = sorted(token for token in frame if token is not None)
        every = torch.cat(texts or [torch.zeros(0, dtype=torch.long)]).unique()
        marks = torch.tensor(special, dtype=every.dtype)
        words = every[~torch.isin(every, marks)]
        return Tokens(marks, words, padding, left, *_frame([text.tolist() for text in texts]))

    def ordinary(self, ids: Tensor, real: Tensor) -> Tensor:
        """True where a token may be touched, ``(n, T)``."""
        place = real.cumsum(dim=1)
        last = real.sum(dim=1, keepdim=True) - self.tail
        special = torch.isin(ids, self.special.to(ids.device))
        return real & (place > self.head) & (place <= last) & ~special


def drop(ids: Tensor, strength: Tensor, generator: Generator, tokens: Tokens, real: Mask = None) -> Masked:
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
    lost = _chosen(ids, strength, generator, tokens.ordinary(ids, real))
    lost &= (real & ~lost).any(dim=1, keepdim=True)
    if tokens.padding is None:
        return torch.where(lost, ids.roll(1, 1), ids), real
    left = real & ~lost
    new = torch.where(lost, tokens.padding, ids)
    late = left if tokens.left else ~left
    order = late.byte().argsort(dim=1, stable=True)
    return new.gather(1, order), left.gather(1, order)


def swap(ids: Tensor, strength: Tensor, generator: Generator, tokens: Tokens, real: Mask = None) -> Masked:
    """Neighbouring tokens change places; arguments and result as those of `drop`."""
    real = real_or_guessed(ids, real)
    pairs = tokens.ordinary(ids, real)
    pairs[:, :-1] &= pairs[:, 1:].clone()
    pairs[:, -1:] = False
    first = _chosen(ids, strength, generator, pairs)
    for i in range(1, ids.shape[1]):  # nobody moves twice
        first[:, i] &= ~first[:, i - 1]
    second = first.roll(1, dims=1)
    new = torch.where(second, ids.roll(1, 1), ids)
    return torch.where(first, ids.roll(-1, 1), new), real


def replace(ids: Tensor, strength: Tensor, generator: Generator, tokens: Tokens, real: Mask = None) -> Masked:
    """Tokens replaced by others that occur in the data; arguments and result as those of `drop`."""
    real = real_or_guessed(ids, real)
    n = len(tokens.words)
    if n < 2:
        return ids, real
    draw = whole(n, ids.shape, generator).cpu()
    drawn = tokens.words[draw].to(ids)
    following = tokens.words[(draw + 1) % n].to(ids)
    other = torch.where(drawn == ids, following, drawn)
    chosen = _chosen(ids, strength, generator, tokens.ordinary(ids, real))
    return torch.where(chosen, other, ids), real


def retokenize(
    ids: Tensor,
    real: Tensor,
    tokens: Tokens,
    tokenizer: Any,
    change: WordChange,
    strength: Tensor,
    generator: Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """The words behind tokens ``(n, T)`` changed; frame and special tokens stay, and nothing is cut off.

    A text that would be longer than the tokenizer's limit (than ``T``, where it has none) is changed less.

    Returns:
        The tokens; where they are real; and the position that each of them comes from, for types of tokens
        and the like.
    """
    special = {*tokens.special.tolist(), *tokenizer.all_special_ids}
    words = _Words(tokenizer, special, change)
    limit = _limit(tokenizer, ids.shape[1])
    rows: list[Places] = []
    each = ids.tolist(), real.tolist(), strength.tolist(), _seeds(len(ids), generator)
    for row, mask, share, seed in zip(*each, strict=True):
        text = [(token, place) for place, token in enumerate(row) if mask[place]]
        end = len(text) - tokens.tail
        head, tail = text[: tokens.head], text[end:]
        capacity = limit - len(head) - len(tail)
        middle = words.fitting(text[tokens.head : end], share, seed, capacity)
        rows.append([*head, *middle, *tail])
    padding = tokens.padding
    if padding is None:
        padding = getattr(tokenizer, "pad_token_id", None) or 0
    return _padded(rows, ids, padding, tokens.left)


def _limit(tokenizer: Any, width: int) -> int:
    """Most tokens of a text: the tokenizer's limit, at least the width that texts have."""
    own = int(getattr(tokenizer, "model_max_length", UNLIMITED))
    return max(width, own) if own < UNLIMITED else width


@dataclass(frozen=True)
class _Words:
    """The words behind tokens, changed; special tokens stay."""

    tokenizer: Any
    special: set[int]
    change: WordChange

    def fitting(self, text: Places, strength: float, seed: int, capacity: int) -> Places:
        """Changed less where it would be longer than it may."""
        weaker = [(self.change, strength / 2**k) for k in range(4)]
        for how, share in [*weaker, (lose_words, strength)]:
            new = self.changed(text, how, share, seed)
            if len(new) <= capacity:
                break
        return new[:capacity]

    def changed(self, text: Places, change: WordChange, strength: float, seed: int) -> Places:
        """What stands between special tokens is changed as text."""
        new: Places = []
        for is_special, run in groupby(text, key=lambda pair: pair[0] in self.special):
            part = list(run)
            if not is_special and strength > 0:
                words = self.tokenizer.decode([token for token, _ in part])
                words = _changed(change, words, strength, seed)
                tokens = self.tokenizer.encode(words, add_special_tokens=False)
                part = [(token, part[0][1]) for token in tokens]
            new += part
        return new


def _padded(rows: Sequence[Places], ids: Tensor, padding: int, left: bool) -> tuple[Tensor, Tensor, Tensor]:
    width = max(ids.shape[1], *map(len, rows))
    filled = []
    for row in rows:
        real = [(token, place, 1) for token, place in row]
        rest = [(padding, 0, 0)] * (width - len(row))
        filled.append(rest + real if left else real + rest)
    token, place, one = torch.tensor(filled, dtype=ids.dtype, device=ids.device).unbind(dim=2)
    return token, one.bool(), place.long()


def _common(texts: Sequence[Tensor], at: int) -> int | None:
    """The token that stands at this end of nearly all texts; None where there is none."""
    found = Counter(int(text[at]) for text in texts).most_common(1)
    return next((token for token, count in found if count >= NEARLY_ALL * len(texts)), None)


def _frame(texts: list[list[int]]) -> tuple[int, int]:
    """How many tokens all texts have in common at their beginning and at their end."""
    if all(text == texts[0] for text in texts):
        return 0, 0
    shortest = min(map(len, texts))
    head = len(common_start(texts))
    ends = [text[::-1][: shortest - head] for text in texts]
    return head, len(common_start(ends))


def common_start(texts: Iterable[Sequence[int]]) -> list[int]:
    """The tokens with which all texts begin."""
    columns = zip(*texts, strict=False)
    same = takewhile(lambda column: len(set(column)) == 1, columns)
    return [column[0] for column in same]


def _most_frequent(values: Tensor) -> int | None:
    return int(values.mode().values) if len(values) else None


def real_or_guessed(ids: Tensor, mask: Tensor | None) -> Tensor:
    """True where a token is real; without a mask, what is repeated to the end of a row is padding."""
    if mask is not None:
        return mask.bool()
    last = ids[:, -1:]
    repeated = (ids == last).long()
    run = repeated.flip(1).cumprod(dim=1).flip(1).bool()  # the run at the end of each row
    padding = _most_frequent(last[run.sum(dim=1) > 1, 0])
    if padding is None:
        return torch.ones_like(run)
    return ~(run & (last == padding))


def _chosen(ids: Tensor, strength: Tensor, generator: Generator, among: Tensor) -> Tensor:
    """Tokens to be changed: each by chance, and at least one of a text whose strength is not 0."""
    strength = strength[:, None].to(ids.device)
    draw = torch.rand(ids.shape, generator=generator, device=generator.device)
    draw = draw.to(ids.device).masked_fill(~among, 2.0)
    share = (0.6 * strength).clamp(max=0.9)
    first = draw == draw.amin(dim=1, keepdim=True)
    return among & (share > 0) & ((draw < share) | first)


def _pieces(text: str) -> list[str]:
    """Words and the space between them, in turn."""
    return re.split(r"(\s+)", text)


def _words(pieces: Sequence[str]) -> list[int]:
    """Which of the pieces are no space."""
    return [i for i, piece in enumerate(pieces) if piece.strip()]


def _some(items: list[int], share: float, chance: random.Random) -> list[int]:
    """About this share of the items, at most nine in ten, and at least one unless the share is 0."""
    if share <= 0 or not items:
        return []
    chosen = [item for item in items if chance.random() < min(share, 0.9)]
    return chosen or [chance.choice(items)]


def _slip(pair: list[str], chance: random.Random) -> list[str]:
    letter, rest = pair[0], pair[1:]
    kind = chance.randrange(4)
    if kind == 1:
        return rest
    new = [_neighbour(letter, chance), *rest] if kind == 0 else [*rest, letter]
    return [letter, *pair] if kind == 2 or new == pair else new


def _neighbour(letter: str, chance: random.Random) -> str:
    row = next((row for row in KEYBOARD if letter.lower() in row), "")
    if not row:
        return letter
    at = row.index(letter.lower()) + chance.choice((-1, 1))
    return row[max(0, min(len(row) - 1, at))]


def _seeds(n: int, generator: Generator) -> list[int]:
    """A seed for each of n texts."""
    return whole(1 << 31, (n,), generator).tolist()


def _changed(change: WordChange, text: str, strength: float, seed: int) -> str:
    """The text changed; by a typing error where the change leaves it as it is or leaves nothing."""
    chance = random.Random(seed)
    for how in (change, misspell) if strength > 0 else ():
        new = how(text, strength, chance)
        if new != text and new.strip():
            return new
    return text if strength <= 0 else text + text.strip()[-1:]
