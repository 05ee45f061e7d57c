"""Perturbations of written text as people and keyboards make them: typing errors, lost, swapped and unknown
words. Line breaks stay, and no text comes back as it was.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "Change",
    "changed",
    "lose_words",
    "misspell",
    "rewrite",
    "seeds_for",
    "swap_words",
    "unknown_words",
]

Change = Callable[[str, float, random.Random], str]
"""``change(text, strength, chance) -> text``; strength 0 leaves a text as it is."""
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def rewrite(texts: Sequence[str], change: Change, strength: Tensor, generator: torch.Generator) -> list[str]:
    """Every text changed with its own strength.

    Example:
        >>> rewrite(["no", "go on"], lose_words, torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0))
        ['no', 'on']
    """
    rows = zip(texts, strength.tolist(), seeds_for(len(texts), generator), strict=True)
    return [changed(text, change, s, random.Random(seed)) if s > 0 else text for text, s, seed in rows]


def seeds_for(n: int, generator: torch.Generator) -> list[int]:
    """A seed for each of n texts."""
    seeds: list[int] = torch.randint(1 << 31, (n,), generator=generator, device=generator.device).tolist()
    return seeds


def changed(text: str, change: Change, strength: float, chance: random.Random) -> str:
    """The text changed; by a typing error where the change leaves it as it is or leaves nothing."""
    for how in (change, misspell):
        new = how(text, strength, chance)
        if new != text and new.strip():
            return new
    return text + text.strip()[-1:]


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
