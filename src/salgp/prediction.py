"""What a calibrator returns: calibrated confidence, its uncertainty, and each layer's part in the correction.

The label is always the network's own. ``probs`` puts the calibrated confidence on that label and shares the
rest among the other classes by the tempered softmax, none of them getting more than the label. Only where the
confidence is below ``1 / c`` can no sharing keep the label on top; `Prediction.flips` says where that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from salgp.extras import as_frame
from salgp.features import Features

__all__ = ["INTERVAL_SD", "LayerTerms", "Prediction", "checked", "confidence_of", "spread_confidence"]

INTERVAL = 0.90
"""Probability mass of the interval ``[lower, upper]``."""
INTERVAL_SD = 1.6448536269514722
"""Half its width in standard deviations of a normal distribution: the quantile of ``(1 + INTERVAL) / 2``."""

_STEPS = torch.tensor([[0.0], [-1.0], [1.0], [-INTERVAL_SD], [INTERVAL_SD]], dtype=torch.float64)
"""Standard deviations from the median to both ends of the standard deviation and of the interval."""
_ROUNDING = 1e-5
"""By which probabilities in single precision may exceed 1."""
_PER_SAMPLE = ("label", "probs", "confidence", "std", "lower", "upper", "novelty", "clipped")
_SHOWN = 10  # samples shown in a terminal or notebook
_STRICTLY = 1e-5  # the others stay this share below the label, so that rounding makes no ties
_REQUIRED: Any = object()
T = TypeVar("T")


class Later(Generic[T]):
    """Field of a dataclass that may be given as a function, which is called when the field is first read."""

    def __init__(self, default: T = _REQUIRED) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, found: Any, owner: type | None = None) -> T:
        if found is None:  # how a dataclass asks for the default
            if self._default is _REQUIRED:
                raise AttributeError(self._name)
            return self._default
        value = vars(found)[self._name]
        if callable(value):
            value = vars(found)[self._name] = value()
        return value  # type: ignore[no-any-return]

    def __set__(self, found: Any, value: T | Callable[[], T]) -> None:
        vars(found)[self._name] = value


@dataclass(frozen=True, eq=False, repr=False)
class LayerTerms:
    """Per-layer correction: mean and standard deviation, ``(n, L)``.

    Args:
        names: layer (or other term) names, length ``L``.
        mean: ``(n, L)`` correction attributed to each layer.
        std: ``(n, L)`` its posterior standard deviation, or None.
        scale: unit of ``mean`` and ``std``: ``"confidence"`` points or ``"log-odds"``.
        additive: do the terms add up to the whole correction (`sum`), or is each a whole prediction of its
            own?
    """

    names: tuple[str, ...]
    mean: Tensor
    std: Tensor | None = None
    scale: str = "confidence"
    additive: bool = False

    def __repr__(self) -> str:
        adding = ", adding up to the correction" if self.additive else ""
        return f"LayerTerms({len(self.mean):,} samples: {', '.join(self.names)}; in {self.scale}{adding})"


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """Calibrated output for ``n`` samples.

    All but label and confidence may be given as functions and are then worked out when they are first read:
    who acts on confidences alone does not wait for the rest.

    Args:
        label: ``(n,)`` the network's own label.
        probs: ``(n, c)`` class probabilities; rows sum to 1.
        confidence: ``(n,)`` calibrated probability that ``label`` is correct.
        std: ``(n,)`` standard deviation of the confidence, or None where the method has none.
        lower: ``(n,)`` lower end of the 90 % interval of the confidence, inside [0, 1]: the true accuracy of
            samples of about the same confidence lies in the interval 90 % of the time.
        upper: ``(n,)`` upper end.
        layers: per-layer corrections where the method has them.
        novelty: ``(n,)`` larger means less like the data the calibrator has seen, where the method has it.
        clipped: ``(n,)`` where the confidence had to be clipped into [eps, 1 - eps]; `n_clipped` counts them.

    Example:
        >>> import torch
        >>> f = Features(torch.tensor([[2.0, 0.0, 0.0]]))
        >>> p = Prediction.from_confidence(f, torch.tensor([0.4]))
        >>> p.label, p.probs, p.flips
        (tensor([0]), tensor([[0.4000, 0.3000, 0.3000]]), tensor([False]))
        >>> p
        Prediction(1 sample, 3 classes, mean confidence 0.400)
        >>> print(p)
          label confidence
        0     0      0.400
    """

    label: Tensor
    probs: Later[Tensor] = Later()
    confidence: Tensor  # type: ignore[misc]
    std: Later[Tensor | None] = Later(None)
    lower: Later[Tensor | None] = Later(None)
    upper: Later[Tensor | None] = Later(None)
    layers: Later[LayerTerms | None] = Later(None)
    novelty: Later[Tensor | None] = Later(None)
    clipped: Tensor | None = None

    def __len__(self) -> int:
        return len(self.label)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self) -> str:
        samples = f"{len(self):,} sample{'' if len(self) == 1 else 's'}"
        mean = f", mean confidence {float(self.confidence.mean()):.3f}" if len(self) else ""
        return f"Prediction({samples}, {self.probs.shape[1]:,} classes{mean})"

    def __str__(self) -> str:
        """A table of the first samples."""
        columns = {"": list(map(str, range(min(len(self), _SHOWN)))), **self._shown()}
        padded = []
        for name, cells in columns.items():
            width = max(map(len, (name, *cells)))
            padded.append([cell.rjust(width) for cell in (name, *cells)])
        lines = [" ".join(row) for row in zip(*padded, strict=True)]
        if len(self) > _SHOWN:
            lines.append(f"... {len(self):,} samples")
        return "\n".join(lines)

    @property
    def flips(self) -> Tensor:
        """Boolean ``(n,)``: another class has more probability than the (kept) label."""
        least = self.confidence * (1 + 1e-6) + 1e-12
        return self.probs.amax(dim=1) > least

    @property
    def n_clipped(self) -> int:
        """How many confidences had to be clipped into [eps, 1 - eps]."""
        return 0 if self.clipped is None else int(self.clipped.sum())

    def __getitem__(self, rows: slice | Tensor | np.ndarray) -> Prediction:
        return _each_tensor(lambda x: x[rows], self)

    def to(self, device: torch.device | str) -> Prediction:
        """The same prediction with every tensor on ``device``."""
        return _each_tensor(lambda x: x.to(device), self)

    def numpy(self) -> Mapping[str, np.ndarray]:
        """The per-sample arrays as NumPy, keyed by field name; absent ones are left out."""
        every = {name: getattr(self, name) for name in _PER_SAMPLE}
        return {name: x.cpu().numpy() for name, x in every.items() if x is not None}

    @staticmethod
    def concatenate(parts: Sequence[Prediction]) -> Prediction:
        """Stack predictions of the same calibrator."""
        return _each_tensor(lambda *pieces: torch.cat(pieces), *parts)

    @staticmethod
    def from_probs(features: Features, probs: Tensor) -> Prediction:
        """A method that gives a whole distribution: the confidence is the mass on the network's label."""
        label = features.label
        confidence = probs.gather(1, label[:, None])
        return Prediction(label, probs, confidence[:, 0])

    @staticmethod
    def from_confidence(
        features: Features,
        confidence: Tensor,
        std: Tensor | None = None,
        interval: tuple[Tensor, Tensor] | None = None,
        *,
        layers: LayerTerms | Callable[[], LayerTerms] | None = None,
        novelty: Tensor | Callable[[], Tensor] | None = None,
        temperature: float = 1.0,
        eps: float = 1e-6,
    ) -> Prediction:
        """A method that gives the confidence only: the other classes share the rest, see `spread_confidence`.

        Args:
            features: what was predicted on.
            confidence: ``(n,)``; values outside [eps, 1 - eps] are clipped and counted.
            std: ``(n,)`` its standard deviation.
            interval: lower and upper end, inside [0, 1]; by default the Gaussian one around ``confidence``.
            layers: per-layer corrections, or a function that gives them.
            novelty: ``(n,)`` novelty score, or a function that gives it.
            temperature: of the softmax by which the others share; a calibrator's ``rest_temperature_``.
            eps: distance kept from 0 and 1.
        """
        inside = confidence.clamp(eps, 1 - eps)
        if interval is None and std is not None:
            half = INTERVAL_SD * std
            interval = (confidence - half).clamp(0, 1), (confidence + half).clamp(0, 1)
        low = None if interval is None else interval[0].minimum(inside)
        high = None if interval is None else interval[1].maximum(inside)
        label, others = features.label, features.other_logits
        probs = partial(_probs, others, temperature, label, inside)
        return Prediction(label, probs, inside, std, low, high, layers, novelty, inside != confidence)

    @staticmethod
    def from_log_odds(
        features: Features, log_odds: Tensor, variance: Tensor | Callable[[], Tensor], **more: Any
    ) -> Prediction:
        """A method that gives a normal distribution of the log-odds: confidence, standard deviation and
        interval are all of that one distribution, see `confidence_of`.

        Args:
            features: what was predicted on.
            log_odds: ``(n,)`` mean.
            variance: ``(n,)``, or a function that gives it.
            more: ``layers``, per-layer corrections; ``novelty``, ``(n,)``; ``temperature`` of the softmax by
                which the other classes share the rest.

        Example:
            >>> f = Features(torch.tensor([[2.0, 0.0]]))
            >>> p = Prediction.from_log_odds(f, torch.tensor([5.0]), torch.tensor([9.0]))
            >>> p.confidence, p.std, p.lower, p.upper
            (tensor([0.9933]), tensor([0.0594]), tensor([0.5164]), tensor([1.0000]))
        """
        found = Prediction.from_confidence(features, torch.sigmoid(log_odds), **more)
        bars = cache(partial(_error_bars, log_odds, variance, found.confidence))
        # not by `replace`, which reads every field
        vars(found).update(std=lambda: bars()[0], lower=lambda: bars()[1], upper=lambda: bars()[2])
        return found

    def with_probs(
        self, features: Features, temperature: float = 1.0, *, allow_flips: bool = False
    ) -> Prediction:
        """The same confidences, with what they leave shared anew among the other classes.

        Args:
            features: what was predicted on.
            temperature: of the softmax by which the others share; a calibrator's ``rest_temperature_``.
            allow_flips: may another class get more than the label?

        Example:
            >>> f = Features(torch.tensor([[2.0, 1.5, 0.0]]))
            >>> p = Prediction.from_confidence(f, torch.tensor([0.4]))
            >>> p.probs.argmax(), p.with_probs(f, allow_flips=True).probs.argmax()
            (tensor(0), tensor(1))
        """
        others = features.other_logits
        probs = _probs(others, temperature, self.label, self.confidence, allow_flips)
        return replace(self, probs=probs)

    def to_frame(self) -> Any:
        """One row per sample: label, confidence, its error bar, and the terms of the layers.

        Returns:
            A pandas data frame; where pandas is not installed a pyarrow table, and without that a mapping
            from column name to NumPy array.

        Example:
            >>> f = Features(torch.tensor([[2.0, 0.0]]))
            >>> list(Prediction.from_confidence(f, torch.tensor([0.8])).to_frame())
            ['label', 'confidence', 'clipped', 'probs.0', 'probs.1']
        """
        columns = dict(self.numpy())
        probs = columns.pop("probs")
        columns |= {f"probs.{k}": probs[:, k] for k in range(probs.shape[1])}
        if self.layers is not None:
            mean = self.layers.mean.cpu().numpy()
            names = [f"{self.layers.scale}.{name}" for name in self.layers.names]
            columns |= zip(names, mean.T, strict=True)
        return as_frame(columns)

    def _repr_html_(self) -> str:
        """A table of the first samples, for notebooks."""
        shown = self._shown()
        head = "".join(f"<th>{name}</th>" for name in ("", *shown))
        rows = ""
        for i, row in enumerate(zip(*shown.values(), strict=True)):
            cells = "".join(f"<td>{cell}</td>" for cell in row)
            rows += f"<tr><th>{i}</th>{cells}</tr>"
        more = f"<p>{len(self):,} samples</p>" if len(self) > _SHOWN else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"

    def _shown(self) -> dict[str, list[str]]:
        """Columns of text for people: the first samples, without class probabilities."""
        columns = {k: x[:_SHOWN] for k, x in self.numpy().items() if k not in ("probs", "clipped")}
        return {name: list(map(_cell, column.tolist())) for name, column in columns.items()}


def _cell(x: float | int) -> str:
    return f"{x:.3f}" if isinstance(x, float) else str(x)


def _each_tensor(function: Callable[..., Tensor], *parts: T) -> T:
    """The first part with ``function`` of all parts' tensors in place of each of its own."""
    first: Any = parts[0]
    changed = {}
    for field in fields(first):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], Tensor):
            changed[field.name] = function(*values)
        elif isinstance(values[0], LayerTerms):
            changed[field.name] = _each_tensor(function, *values)
    made: T = replace(first, **changed)
    return made


def checked(prediction: Any) -> Prediction:
    """A prediction whose confidences and class probabilities are some; anything else is refused, before
    anybody acts on it.

    Numbers alone are not taken: they do not say whether they are logits, probabilities or confidences.

    Example:
        >>> checked(torch.tensor([0.9]))
        Traceback (most recent call last):
        ...
        TypeError: expected a salgp.Prediction, as calibrator.predict(features) gives it, got a Tensor
        >>> checked(Prediction(torch.zeros(1).long(), torch.ones(1, 2), torch.tensor([1.5])))
        Traceback (most recent call last):
        ...
        ValueError: expected confidences between 0 and 1, got 1.5 for sample 0
    """
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"expected a salgp.Prediction, as calibrator.predict(features) gives it, got a "
            f"{type(prediction).__name__}"
        )
    _check_inside("confidences", prediction.confidence)
    _check_inside("class probabilities", prediction.probs)
    return prediction


def _check_inside(what: str, values: Tensor) -> None:
    outside = ~((values >= 0) & (values <= 1 + _ROUNDING))
    if outside.any():
        place = outside.nonzero()[0]
        value = float(values[tuple(place)])
        raise ValueError(f"expected {what} between 0 and 1, got {value:.4g} for sample {place[0]}")


def confidence_of(log_odds: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Confidence, standard deviation and both ends of the interval, ``(n,)`` each, by normal distributions of
    the log-odds.

    The confidence is the median, ``sigmoid(log_odds)``; the ends of the interval are the 5 % and 95 % points;
    the standard deviation is half the way between the points one standard deviation below and above, so that
    it never reaches beyond what is possible.

    Example:
        >>> confidence_of(torch.tensor([0.0]), torch.tensor([1.0]))
        (tensor([0.5000]), tensor([0.2311]), tensor([0.1618]), tensor([0.8382]))
    """
    sd = variance.clamp_min(0).sqrt()
    at = torch.sigmoid(torch.addcmul(log_odds, _STEPS.to(sd), sd))
    confidence, below, above, low, high = (at[i] for i in range(5))  # unbinding makes graphs longer
    return confidence, (above - below) / 2, low, high


def _error_bars(
    log_odds: Tensor, variance: Tensor | Callable[[], Tensor], confidence: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard deviation of confidences and both ends of their interval, which holds them."""
    _, std, low, high = confidence_of(log_odds, variance() if callable(variance) else variance)
    return std, low.minimum(confidence), high.maximum(confidence)


def spread_confidence(probs: Tensor, label: Tensor, confidence: Tensor, allow_flips: bool = False) -> Tensor:
    """Put ``confidence`` on ``label`` and share the rest among the other classes; rows sum to 1.

    The others keep their proportions ``q`` as far as none of them exceeds the label. Where one would, their
    shares are mixed with even ones, ``(1 - w) q + w / (c - 1)``, with the smallest ``w`` that keeps the label
    on top. With a confidence below ``1 / c`` that is impossible: "not this one". The others, even at
    ``1 / c``, then return to their proportions, ``w`` being the confidence over the even share of the rest,
    so that nothing jumps and their order stays. They share evenly where they have no mass at all.

    Args:
        probs: ``(n, c)`` class probabilities, whose entries off the label are the proportions.
        label: ``(n,)``.
        confidence: ``(n,)``.
        allow_flips: keep the proportions even where another class overtakes the label.

    Example:
        >>> probs, label = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([0])
        >>> spread_confidence(probs, label, torch.tensor([0.8]))
        tensor([[0.8000, 0.1500, 0.0500]])
        >>> spread_confidence(probs, label, torch.tensor([0.4]))
        tensor([[0.4000, 0.4000, 0.2000]])
        >>> spread_confidence(probs, label, torch.tensor([0.4]), allow_flips=True)
        tensor([[0.4000, 0.4500, 0.1500]])
    """
    others = probs.scatter(1, label[:, None], 0.0)
    rest, tiny = others.sum(dim=1, keepdim=True), torch.finfo(others.dtype).tiny
    even = 1.0 / max(others.shape[1] - 1, 1)
    shares = torch.where(rest > math.sqrt(tiny), others / rest, even)
    return _shared(shares, label, confidence, allow_flips)


def _probs(
    others: Tensor, temperature: float, label: Tensor, confidence: Tensor, allow_flips: bool = False
) -> Tensor:
    """Class probabilities from the logits of the other classes, which share what the confidence leaves."""
    shares = torch.softmax(others.to(confidence.dtype) / temperature, dim=1)
    return _shared(shares, label, confidence, allow_flips)


def _shared(others: Tensor, label: Tensor, confidence: Tensor, allow_flips: bool) -> Tensor:
    """`spread_confidence` by proportions ``(n, c)`` whose entries off the label add up to 1."""
    label, confidence = label[:, None], confidence[:, None]  # everything below is a column, (n, 1)
    tiny, left = torch.finfo(others.dtype).tiny, 1 - confidence
    if not allow_flips:
        most = confidence * (1 - _STRICTLY) / left.clamp_min(tiny)
        others = _capped(others, most)
    found = (others * left).clamp_min(tiny)  # no class is impossible: every log-likelihood is finite
    return found.scatter(1, label, confidence)


def _capped(others: Tensor, most: Tensor) -> Tensor:
    """Proportions mixed with even ones, as little as keeps each below ``most``."""
    even = 1 / max(others.shape[1] - 1, 1)
    above = others.amax(dim=1, keepdim=True) - even
    tiny = torch.finfo(others.dtype).tiny
    keep = ((most - even) / above.clamp_min(tiny)).clamp_max(1)  # share of the proportions, 1 - w
    keep = torch.maximum(keep, 1 - most / even)  # of both, the one that is not negative
    return (others - even) * keep + even
