"""Families of perturbations, from which augmented samples are made.

A `Family` perturbs a batch with a strength of its own for each sample. Input families change what the network
sees; layer families change the output of a randomly chosen tapped layer while the network runs, and so work
for any input. `KINDS` is the one place that says which families are used for which kind of input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from salgp.network import text, words
from salgp.network.augment import corruptions
from salgp.network.augment.corruptions import Spread
from salgp.network.taps import Change
from salgp.network.text import Tokens

__all__ = ["FAMILIES", "KINDS", "Family", "families_for", "kind_of", "layer_change"]

Disturbance = Callable[..., Any]
"""``disturb(x, strength, generator) -> x`` with ``x (n, ...)`` and ``strength (n,)``; of a measured family,
``disturb(x, strength, generator, spread) -> x``; of a measured token family, ``disturb(ids, strength,
generator, tokens, real) -> (ids, real)``; of a text family, ``disturb(text, strength, chance) ->
text``; of one that acts on all inputs together, ``disturb(inputs, strength, generator) -> inputs`` with a
tuple of inputs, or a dictionary where they have names.
"""


@dataclass(frozen=True)
class Family:
    """One kind of perturbation.

    Args:
        name: of the family.
        disturb: the perturbation; strength 0 leaves a sample as it is.
        largest: strength beyond which it is not scaled up.
        inside: does it act on the output of a layer, and not on the input?
        tokens: does it act on whole numbers ``(n, T)`` that stand for words?
        text: does it act on the text behind the tokens, which needs the tokenizer?
        measured: does it need to know what the data are like: how large numbers are
            (`salgp.network.augment.corruptions.Spread`), which tokens there are
            (`salgp.network.text.Tokens`)?
        spread: that, measured on all calibration data; where it is missing, each batch is measured by itself.
        together: does it act on all inputs of a batch at once, because they change together: an image and the
            exposure time beside it?

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> FAMILIES["noise"](torch.arange(4.0)[:, None], torch.tensor([0.0, 0.0, 1.0, 1.0]), g)[:2, 0]
        tensor([0., 1.])
    """

    name: str
    disturb: Disturbance
    largest: float = 4.0
    inside: bool = False
    tokens: bool = False
    text: bool = False
    measured: bool = False
    spread: Spread | Tokens | None = None
    together: bool = False

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        others = (self.inside, self.tokens, self.text, self.measured)
        if self.together and any(others):
            raise ValueError(
                f"family {self.name!r} acts on all inputs together; it cannot act inside the network, on "
                "tokens or on text besides, nor be measured"
            )

    def __call__(self, x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
        strength = strength.to(x.device) if self.tokens else strength.to(x)
        if not self.measured:
            plain: Tensor = self.disturb(x, strength, generator)
            return plain
        if self.tokens:
            return self.on_tokens(x, strength, generator)[0]
        spread = self.spread or Spread.of([x], table=not self.inside)
        new: Tensor = self.disturb(x, strength, generator, spread)
        return spread.swapped(x, new, strength, generator) if isinstance(spread, Spread) else new

    def on_tokens(
        self, ids: Tensor, strength: Tensor, generator: torch.Generator, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens ``(n, T)`` perturbed, and where they are real, ``(n, T)`` or None."""
        if not self.measured:
            return self.disturb(ids, strength, generator), real
        found: tuple[Tensor, Tensor] = self.disturb(
            ids, strength, generator, self.spread or Tokens.of([ids], [real]), real
        )
        return found

    def on(self, spread: Spread | Tokens | None) -> Family:
        """The same family for data of this spread."""
        return replace(self, spread=spread)


def families_for(
    choice: str | Sequence[str | Family], x: Tensor | list[str] | None = None, with_text: bool = False
) -> tuple[Family, ...]:
    """The families meant by ``choice``: ``"auto"`` (by the kind of input), a kind out of `KINDS`, or names
    and families.

    Args:
        choice: what is asked for.
        x: the input.
        with_text: is there a tokenizer that leads from tokens to their text?

    Example:
        >>> [f.name for f in families_for("auto", torch.zeros(2, 7))]
        ['noise', 'gain', 'mixup', 'layer-noise']
        >>> [f.name for f in families_for(["blur", FAMILIES["noise"]])]
        ['blur', 'noise']
    """
    if isinstance(choice, str):
        kind = kind_of(x) if choice == "auto" else choice
        kind = "text" if choice == "auto" and kind == "tokens" and with_text else kind
        if kind not in KINDS:
            raise ValueError(
                f"perturb must be 'auto', one of {', '.join(KINDS)}, or a list of families; got {choice!r}"
            )
        return tuple(FAMILIES[name] for name in KINDS[kind])
    unknown = [f for f in choice if isinstance(f, str) and f not in FAMILIES]
    if unknown:
        raise KeyError(f"no family of perturbations called {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    return tuple(f if isinstance(f, Family) else FAMILIES[f] for f in choice)


def kind_of(x: Tensor | list[str] | None) -> str:
    """Kind of input by its axes: images (4), sequences (3), tabular (2); tokens where it is not floating
    point; strings where it is text; ``"other"`` for all else.

    Example:
        >>> kind_of(torch.zeros(2, 1, 8, 8)), kind_of(torch.zeros(2, 8, dtype=torch.long))
        ('images', 'tokens')
    """
    if x is None:
        return "other"
    if not isinstance(x, Tensor):
        return "strings"
    if not x.is_floating_point():
        return "tokens" if x.ndim == 2 else "other"
    return {4: "images", 3: "sequences", 2: "tabular"}.get(x.ndim, "other")


def layer_change(
    family: Family,
    spreads: Sequence[Spread],
    layer: Tensor,
    strength: Tensor,
    generator: torch.Generator,
) -> Change:
    """Sample ``i`` has the output of tapped layer ``layer[i]`` disturbed with ``strength[i]``.

    Args:
        family: a layer family.
        spreads: of the tapped layers.
        layer: ``(n,)`` position among the taps.
        strength: ``(n,)``.
        generator: of the perturbation.
    """

    def change(j: int, x: Tensor) -> Tensor:
        rows = (layer == j).to(x.device)
        if len(rows) != len(x) or not bool(rows.any()):
            return x
        new = x.clone()
        new[rows] = family.on(spreads[j])(x, strength, generator)[rows]
        return new

    return change


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("noise", corruptions.noise, measured=True),
        Family("gain", corruptions.gain, 2.0, measured=True),
        Family("affine", corruptions.affine, 2.0),
        Family("mixup", corruptions.mixup, 1.0, measured=True),
        Family("blur", corruptions.blur, 2.0),
        Family("speckle", corruptions.speckle, 2.0, measured=True),
        Family("channel-gain", corruptions.channel_gain, 2.0, measured=True),
        Family("pixelate", corruptions.pixelate, 2.0),
        Family("occlude", corruptions.occlude, 1.8, measured=True),
        Family("patch-mix", corruptions.patch_mix, 1.8),
        Family("quantise", corruptions.quantise, 2.0, measured=True),
        Family("time-warp", corruptions.time_warp, 2.0),
        Family("token-drop", text.drop, 1.5, tokens=True, measured=True),
        Family("token-swap", text.swap, 1.5, tokens=True, measured=True),
        Family("token-replace", text.replace, 1.5, tokens=True, measured=True),
        Family("typos", words.misspell, 2.0, text=True),
        Family("words-dropped", words.lose_words, 1.5, text=True),
        Family("words-swapped", words.swap_words, 1.5, text=True),
        Family("words-unknown", words.unknown_words, 1.5, text=True),
        Family("layer-noise", corruptions.noise, 4.0, inside=True, measured=True),
        Family("layer-gain", corruptions.channel_gain, 4.0, inside=True, measured=True),
        Family("layer-mixup", corruptions.mixup, 1.0, inside=True, measured=True),
    )
}
"""Every family by name."""

KINDS: dict[str, tuple[str, ...]] = {
    "images": (
        "noise",
        "gain",
        "affine",
        "mixup",
        "layer-noise",
        "blur",
        "pixelate",
        "occlude",
        "quantise",
        "channel-gain",
    ),
    "sequences": ("noise", "gain", "time-warp", "mixup", "layer-noise"),
    "tabular": ("noise", "gain", "mixup", "layer-noise"),
    "tokens": ("token-drop", "token-swap", "token-replace", "layer-noise", "layer-gain", "layer-mixup"),
    "text": (
        "typos",
        "words-dropped",
        "words-swapped",
        "words-unknown",
        "token-replace",
        "layer-noise",
        "layer-gain",
        "layer-mixup",
    ),
    "strings": (
        "typos",
        "words-dropped",
        "words-swapped",
        "words-unknown",
        "layer-noise",
        "layer-gain",
        "layer-mixup",
    ),
    "other": ("layer-noise", "layer-gain", "layer-mixup"),
}
"""Families used for each kind of input."""
