"""Families of perturbations, from which augmented samples are made.

A `Family` perturbs a batch with a strength of its own for each sample. Input families change what the network
sees; layer families change the output of a randomly chosen tapped layer while the network runs, and so work
for any input. `KINDS` is the one place that says which families are used for which kind of input.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from salgp.network.augment import corruptions
from salgp.network.augment.corruptions import Spread
from salgp.network.batches import Batch, are_numbers
from salgp.network.taps import Change

if TYPE_CHECKING:
    from salgp.network.augment.text import Tokens

__all__ = ["FAMILIES", "KINDS", "Family", "families_for", "layer_change", "perturbed_batch", "real_tokens"]

Disturbance = Callable[..., Any]
"""``disturb(x, strength, generator) -> x`` with ``x (n, ...)`` and ``strength (n,)``; of a measured family,
``disturb(x, strength, generator, spread) -> x``; of a measured token family, ``disturb(ids, strength,
generator, tokens, real) -> (ids, real)``; of a text family, ``disturb(text, strength, chance) ->
text``; of one that acts on all inputs together, ``disturb(inputs, strength, generator) -> inputs`` with a
tuple of inputs, or a dictionary where they have names.
"""


Input = Tensor | list[str] | None


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
            (`salgp.network.augment.text.Tokens`)?
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

    def __call__(self, x: Tensor, strength: Tensor, generator: Generator) -> Tensor:
        strength = strength.to(x.device if self.tokens else x)
        if not self.measured:
            return self.disturb(x, strength, generator)
        if self.tokens:
            return self.on_tokens(x, strength, generator)[0]
        spread = self.spread or Spread.of([x], table=not self.inside)
        new = self.disturb(x, strength, generator, spread)
        if isinstance(spread, Spread):
            new = spread.swapped(x, new, strength, generator)
        return new

    def on_tokens(
        self, ids: Tensor, strength: Tensor, generator: Generator, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens ``(n, T)`` perturbed, and where they are real, ``(n, T)`` or None."""
        if not self.measured:
            return self.disturb(ids, strength, generator), real
        from salgp.network.augment.text import Tokens  # of text alone

        return self.disturb(ids, strength, generator, self.spread or Tokens.of([ids], [real]), real)

    def on(self, spread: Spread | Tokens | None) -> Family:
        """The same family for data of this spread."""
        return replace(self, spread=spread)


def families_for(
    choice: str | Sequence[str | Family], x: Input = None, with_text: bool = False
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
        return tuple(FAMILIES[name] for name in _names(choice, x, with_text))
    for f in choice:
        if isinstance(f, str) and f not in FAMILIES:
            raise KeyError(f"no family of perturbations called {f!r}; known: {', '.join(FAMILIES)}")
    return tuple(f if isinstance(f, Family) else FAMILIES[f] for f in choice)


def _names(choice: str, x: Input, with_text: bool) -> tuple[str, ...]:
    kind = kind_of(x, with_text) if choice == "auto" else choice
    if kind not in KINDS:
        raise ValueError(
            f"perturb must be 'auto', one of {', '.join(KINDS)}, or a list of families; got {choice!r}"
        )
    return KINDS[kind]


def kind_of(x: Input, with_text: bool = False) -> str:
    """Kind of input by its axes: images (4), sequences (3), tabular (2); tokens where it is not floating
    point, or text where their text is known; strings where it is text itself; ``"other"`` for all else.

    Example:
        >>> kind_of(torch.zeros(2, 1, 8, 8)), kind_of(torch.zeros(2, 8, dtype=torch.long))
        ('images', 'tokens')
    """
    if not isinstance(x, Tensor):
        return "other" if x is None else "strings"
    kinds = _BY_AXES if x.is_floating_point() else {2: "text" if with_text else "tokens"}
    return kinds.get(x.ndim, "other")


_BY_AXES = {4: "images", 3: "sequences", 2: "tabular"}


def layer_change(
    family: Family, spreads: Sequence[Spread], layer: Tensor, strength: Tensor, generator: Generator
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
        if len(rows) != len(x) or not rows.any():
            return x
        disturbed = family.on(spreads[j])(x, strength, generator)
        return torch.where(corruptions.per(rows, x), disturbed.to(x), x)

    return change


def perturbed_batch(
    batch: Batch, family: Family, strength: Tensor, generator: Generator, tokenizer: Any
) -> Batch:
    """The first floating-point input perturbed; further ones of two axes (metadata) get noise of the same
    strength. A family that acts on all inputs together gets them all.
    """
    if family.together:
        return _perturbed_together(batch, family, strength, generator)
    if family.tokens or family.text:
        return _perturbed_text(batch, family, strength, generator, tokenizer)
    where, x = batch.numbers
    if where is None:
        raise ValueError(
            f"perturbation {family.name!r} needs a floating-point input tensor, but the batch "
            f"has none; use perturb='tokens'"
        )
    batch = batch.with_input(where, family(x, strength, generator))
    for i, old in enumerate(batch.inputs):
        if i != where and are_numbers(old) and old.ndim == 2:
            spread = Spread.of([old], table=False)
            new = corruptions.noise(old, strength.to(old), generator, spread)
            batch = batch.with_input(i, new)
    return batch


def _perturbed_together(batch: Batch, family: Family, strength: Tensor, generator: Generator) -> Batch:
    """All inputs perturbed by one function: a tuple of them, or a dictionary where they have names."""
    numbers = batch.numbers[1]
    own = strength if numbers is None else strength.to(numbers)
    old: Any = batch.inputs or dict(batch.keywords)
    found = family.disturb(old, own, generator)
    if _shapes(found) != _shapes(old):
        raise ValueError(
            f"perturbation {family.name!r} must return its inputs as it got them, {_shapes(old)}; "
            f"got {_shapes(found)}"
        )
    named = isinstance(old, Mapping)
    return replace(batch, keywords=dict(found)) if named else replace(batch, inputs=tuple(found))


def _shapes(found: Any) -> Any:
    """Shapes of inputs, by name where they have names."""
    if isinstance(found, Mapping):
        return {name: _shapes(x) for name, x in found.items()}
    if isinstance(found, tuple | list):
        return [_shapes(x) for x in found]
    return tuple(found.shape) if hasattr(found, "shape") else type(found).__name__


def _perturbed_text(
    batch: Batch, family: Family, strength: Tensor, generator: Generator, tokenizer: Any
) -> Batch:
    """Tokens perturbed, and their mask with them."""
    at, texts = batch.texts
    if family.text and at is not None:
        from salgp.network.augment import text  # of text alone

        return batch.with_input(at, text.rewrite(texts, family.disturb, strength, generator))
    where, ids = batch.tokens
    if where is None:
        raise ValueError(
            f"perturbation {family.name!r} needs tokens, whole numbers (n, T), but the batch has none"
        )
    if family.text:
        return _retokenized(batch, family, strength, generator, tokenizer)
    real = real_tokens(batch, ids)
    new, real = family.on_tokens(ids, strength, generator, real)
    return _with_mask(batch, ids, real).with_input(where, new)


def _with_mask(batch: Batch, ids: Tensor, real: Tensor | None) -> Batch:
    """The batch with a mask that tells which tokens are real, in the mask's own terms."""
    at, mask = _token_mask(batch, ids)
    if mask is None or real is None:
        return batch
    return batch.with_input(at, (real ^ _marks_padding(ids, mask)).to(mask))


def _retokenized(
    batch: Batch, family: Family, strength: Tensor, generator: Generator, tokenizer: Any
) -> Batch:
    """The words behind the tokens perturbed; types of tokens follow their words."""
    if tokenizer is None:
        raise ValueError(
            f"perturbation {family.name!r} changes the text: pass reader=salgp.Reader(tokenizer=...)"
        )
    from salgp.network.augment import text

    where, ids = batch.tokens
    assert where is not None
    real = text.real_or_guessed(ids, real_tokens(batch, ids))
    tokens: Any = family.spread or text.Tokens.of([ids], [real])
    new, real, origin = text.retokenize(ids, real, tokens, tokenizer, family.disturb, strength, generator)
    for name, x in _beside(batch, ids).items():
        if "type" not in name:
            raise ValueError(f"input {name!r} stands beside the tokens and cannot follow changed words")
        batch = batch.with_input(name, x.gather(1, origin))
    return _with_mask(batch, ids, real).with_input(where, new)


def _beside(batch: Batch, ids: Tensor) -> dict[str, Tensor]:
    """Further inputs by name with a number for each token; their mask is none."""
    named = {name: x for name, x in batch.keywords.items() if _is_like(x, ids)}
    named.pop(_token_mask(batch, ids)[0], None)
    return named


def _is_like(x: Any, ids: Tensor) -> bool:
    """Is it another tensor of the same shape?"""
    return isinstance(x, Tensor) and x.shape == ids.shape and x is not ids


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
    return mask.bool() ^ _marks_padding(ids, mask)


def _marks_padding(ids: Tensor, mask: Tensor) -> bool:
    """Are the ones of a mask at padding? Then they all stand at the same token, or there are none."""
    one, zero = (len(ids[here].unique()) for here in (mask.bool(), ~mask.bool()))
    return one == 0 or (one == 1 and zero > 1)


def _token_mask(batch: Batch, ids: Tensor) -> tuple[Any, Tensor | None]:
    """Where the mask of the tokens is, and the mask: by name, or zeros and ones of the same shape."""
    for key, x in batch.keywords.items():
        if "mask" in key and _is_like(x, ids):
            return key, x
    for i, x in enumerate(batch.inputs):
        if _is_like(x, ids) and bool(((x == 0) | (x == 1)).all()):
            return i, x
    return None, None


def _text(name: str) -> Callable[..., Any]:
    """A function of `salgp.network.augment.text`, which is loaded only where text is perturbed."""
    return lambda *given: getattr(importlib.import_module("salgp.network.augment.text"), name)(*given)


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("noise", corruptions.noise, measured=True),
        Family("gain", corruptions.gain, 2.0, measured=True),
        Family("affine", corruptions.affine, 2.0),
        Family("mixup", corruptions.mixup, 1.0, measured=True),
        Family("blur", corruptions.blur, 2.0),
        Family("channel-gain", corruptions.channel_gain, 2.0, measured=True),
        Family("pixelate", corruptions.pixelate, 2.0),
        Family("occlude", corruptions.occlude, 1.8, measured=True),
        Family("quantise", corruptions.quantise, 2.0, measured=True),
        Family("time-warp", corruptions.time_warp, 2.0),
        Family("token-drop", _text("drop"), 1.5, tokens=True, measured=True),
        Family("token-swap", _text("swap"), 1.5, tokens=True, measured=True),
        Family("token-replace", _text("replace"), 1.5, tokens=True, measured=True),
        Family("typos", _text("misspell"), 2.0, text=True),
        Family("words-dropped", _text("lose_words"), 1.5, text=True),
        Family("words-swapped", _text("swap_words"), 1.5, text=True),
        Family("words-unknown", _text("unknown_words"), 1.5, text=True),
        Family("layer-noise", corruptions.noise, 4.0, inside=True, measured=True),
        Family("layer-gain", corruptions.channel_gain, 4.0, inside=True, measured=True),
        Family("layer-mixup", corruptions.mixup, 1.0, inside=True, measured=True),
    )
}
"""Every family by name."""

_CAMERA = ("blur", "pixelate", "occlude", "quantise", "channel-gain")
_WORDS = ("typos", "words-dropped", "words-swapped", "words-unknown")
_INSIDE = ("layer-noise", "layer-gain", "layer-mixup")
KINDS: dict[str, tuple[str, ...]] = {
    "images": ("noise", "gain", "affine", "mixup", "layer-noise", *_CAMERA),
    "sequences": ("noise", "gain", "time-warp", "mixup", "layer-noise"),
    "tabular": ("noise", "gain", "mixup", "layer-noise"),
    "tokens": ("token-drop", "token-swap", "token-replace", *_INSIDE),
    "text": (*_WORDS, "token-replace", *_INSIDE),
    "strings": (*_WORDS, *_INSIDE),
    "other": _INSIDE,
}
"""Families used for each kind of input."""
