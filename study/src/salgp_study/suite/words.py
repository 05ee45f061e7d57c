"""Corruptions of sentences: typing errors, words lost, words exchanged, shouting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

__all__ = ["WORD_CORRUPTIONS"]

Corrupt = Callable[[str, np.random.Generator], str]
KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def typos(sentence: str, random: np.random.Generator, share: float) -> str:
    """A share of the letters hit beside, left out, doubled or exchanged with the next.

    Example:
        >>> typos("what is my balance", np.random.default_rng(0), 0.0)
        'what is my balance'
    """
    letters = list(sentence)
    for i in range(len(letters)):
        if letters[i].isalpha() and random.random() < share:
            letters[i] = _slip(letters, i, int(random.integers(4)), random)
    return "".join(letters)


def drop_words(sentence: str, random: np.random.Generator, share: float) -> str:
    """A share of the words left out; one always stays.

    Example:
        >>> drop_words("balance", np.random.default_rng(0), 0.9)
        'balance'
    """
    words = sentence.split()
    kept = [word for word in words if random.random() >= share]
    return " ".join(kept or [words[int(random.integers(len(words)))]])


def swap_words(sentence: str, random: np.random.Generator) -> str:
    """All words in another order."""
    return " ".join(random.permutation(sentence.split()).tolist())


def spell_out(sentence: str, random: np.random.Generator) -> str:
    """Three words in ten spelled letter by letter, in capitals (which an uncased encoder does not see)."""
    return " ".join(" ".join(word) if random.random() < 0.3 else word for word in sentence.upper().split())


WORD_CORRUPTIONS: dict[str, tuple[Corrupt, int, str | None]] = {
    "typos 6 %": (partial(typos, share=0.06), 1, "token-replace"),
    "typos 12 %": (partial(typos, share=0.12), 2, "token-replace"),
    "typos 25 %": (partial(typos, share=0.25), 3, "token-replace"),
    "words dropped 20 %": (partial(drop_words, share=0.2), 1, "token-drop"),
    "words dropped 40 %": (partial(drop_words, share=0.4), 2, "token-drop"),
    "words swapped": (swap_words, 1, "token-swap"),
    "spaced letters": (spell_out, 2, None),
}
"""Every corruption of sentences: the function, its severity, the family of augmentations it resembles."""


def _slip(letters: list[str], i: int, kind: int, random: np.random.Generator) -> str:
    here = letters[i]
    if kind == 0:
        return ""
    if kind == 1:
        return here + here
    if kind == 2 and i + 1 < len(letters):
        following = letters[i + 1]
        letters[i + 1] = here
        return following
    return _neighbour(here, random)


def _neighbour(letter: str, random: np.random.Generator) -> str:
    """A key beside the one meant."""
    row = next((keys for keys in KEYS if letter.lower() in keys), letter)
    at = row.index(letter.lower()) if letter.lower() in row else 0
    beside = [row[j] for j in (at - 1, at + 1) if 0 <= j < len(row)]
    return beside[int(random.integers(len(beside)))] if beside else letter
