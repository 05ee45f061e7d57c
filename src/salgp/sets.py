"""Prediction sets: the classes that remain possible, with a stated coverage of the true class.

Split conformal prediction. A score ``s(x, y)`` says how badly class ``y`` fits sample ``x``. With the scores
of ``n`` labelled samples, ``q`` their ``ceil((n + 1) coverage)``-th smallest, the set ``{y : s(x, y) <= q}``
contains the true class of a new sample with at least the probability ``coverage``: whatever the probabilities
are worth, as long as new samples come from where the labelled ones come from. Scores:

- ``"lac"``: ``1 - p_y``; the smallest sets on average, some of them empty (Sadinle et al. 2019);
- ``"aps"``: the mass of the classes that fit at least as well as ``y`` (Romano et al. 2020);
- ``"raps"``: the same and ``penalty`` for every class beyond ``rank`` (Angelopoulos et al. 2021).

``by`` asks for the same coverage in every group: of each true ``"class"``, or of samples of similar
``"confidence"`` or ``"novelty"``. The last two see the hidden layers through the calibrator. Familiar samples
get small sets; samples that are novel, as most are under shift, get the sets that novel samples need.
`AdaptiveCoverage` holds the coverage over time where labels come later.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from salgp.io import FormatError, read_value, reading, refuse_foreign, storable, write_value
from salgp.labels import as_labels
from salgp.prediction import Prediction, checked

__all__ = ["AdaptiveCoverage", "PredictionSets", "fit_sets"]

SCORES = ("lac", "aps", "raps")
GROUPS = ("all", "class", "confidence", "novelty")
_ROUNDING = 1e-8
"""Two scores that differ by less are equal; at a tie the class is in."""


@storable
@dataclass(frozen=True, eq=False)
class PredictionSets:
    """Fitted prediction sets: call them on a prediction.

    Args:
        score: ``"lac"``, ``"aps"`` or ``"raps"``.
        coverage: promised probability that the set contains the true class.
        by: what the promise holds for: ``"all"`` samples together, each true ``"class"``, or each band of
            ``"confidence"`` or ``"novelty"``.
        scores: ``(n,)`` scores of the labelled samples' true classes; infinite for an unknown class.
        group: ``(n,)`` group of each.
        edges: inner edges of the bands.
        n_groups: how many groups there are.
        penalty: of ``"raps"``.
        rank: of ``"raps"``.
    """

    score: str
    coverage: float
    by: str
    scores: Tensor = field(repr=False)
    group: Tensor = field(repr=False)
    edges: Tensor = field(repr=False)
    n_groups: int
    penalty: float = 0.0
    rank: int = 0

    @property
    def quantile(self) -> Tensor:
        """``(n_groups,)`` the largest score that is still in the set; infinite where a group has too few
        samples.
        """
        return torch.stack([self._limit(g) for g in range(self.n_groups)])

    def __call__(self, prediction: Prediction, generator: torch.Generator | None = None) -> Tensor:
        """Boolean ``(n, c)``: is the class in the set?

        Args:
            prediction: of new samples.
            generator: draws whether the last class is in, which makes the coverage of ``"aps"`` and
                ``"raps"`` exact; by default it always is.
        """
        probs = checked(prediction).probs.detach().cpu().double()
        if self.by == "class" and probs.shape[1] != self.n_groups:
            raise ValueError(f"fitted on {self.n_groups} classes, got {probs.shape[1]}")
        limit = self.quantile
        if self.by != "class":
            limit = limit[_groups(prediction, self.by, self.edges), None]
        draws = None
        if generator is not None and self.score != "lac":
            draws = _uniform(len(probs), generator)
        return self._matrix(probs, draws) <= limit + _ROUNDING

    def at(self, coverage: float) -> PredictionSets:
        """The same with another coverage, from 0 to 1; one that takes more labelled samples than there are
        gives every class.
        """
        return replace(self, coverage=_checked(coverage, closed=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as one safetensors file.

        Sets that are there already are replaced; any other file is left alone with a `FileExistsError`.
        """
        refuse_foreign(path, "prediction sets")
        write_value(path, "salgp-sets", 1, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PredictionSets:
        """Read what `save` wrote."""
        value = read_value(path, "salgp-sets", 1)
        with reading(path, "whole prediction sets"):
            if not isinstance(value, PredictionSets):
                raise FormatError(f"{path}: expected PredictionSets, got {type(value).__name__}")
            _check_loaded(value)
        return value

    def _limit(self, g: int) -> Tensor:
        """The ``ceil((n + 1) coverage)``-th smallest score; infinite where there are too few."""
        scores = self.scores[self.group == g].sort().values
        k = math.ceil((len(scores) + 1) * self.coverage - 1e-9)
        limits = pad(scores, (1, 0), value=-math.inf)
        return pad(limits, (0, 1), value=math.inf)[k]

    def _matrix(self, probs: Tensor, draws: Tensor | None) -> Tensor:
        """``(n, c)`` score of every class; ``draws`` in [0, 1] say how much of its own mass counts.

        Without draws what the classes before this one have reached; nothing before the first. That is never
        above the score of the class, whatever its draw: where the score is covered, the class is in, also if
        its own probability is too small to count. ``"lac"`` draws nothing.
        """
        if self.score == "lac":
            return 1 - probs
        order = probs.sort(dim=1, descending=True)
        place = torch.arange(probs.shape[1]).double()
        penalties = self.penalty * (place + 1 - self.rank).clamp_min(0)
        reached = order.values.cumsum(1)
        if draws is None:
            reached = pad(reached + penalties, (1, -1))
        else:
            reached = reached - draws[:, None] * order.values + penalties
        return torch.empty_like(probs).scatter_(1, order.indices, reached)


def fit_sets(
    prediction: Prediction,
    labels: Any,
    coverage: float = 0.9,
    score: str = "lac",
    by: str = "all",
    *,
    bands: int = 5,
    penalty: float = 0.01,
    rank: int = 2,
    seed: int = 0,
) -> PredictionSets:
    """Fit prediction sets on labelled samples that the calibrator was not fitted on.

    Args:
        prediction: of the labelled samples.
        labels: ``(n,)`` true classes; -1 for a class the network does not know, which no set contains.
        coverage: probability that the set contains the true class.
        score: ``"lac"``, ``"aps"`` or ``"raps"``.
        by: ``"all"``, ``"class"``, ``"confidence"`` or ``"novelty"``.
        bands: number of bands of equally many labelled samples, for the last two; fewer where a band would
            hold too few samples for the coverage.
        penalty: of ``"raps"``, for every class beyond ``rank``.
        rank: of ``"raps"``.
        seed: of the random part of ``"aps"`` and ``"raps"``.

    Returns:
        The sets, to be called on new predictions.

    Example:
        >>> probs = torch.tensor([[0.8, 0.15, 0.05], [0.5, 0.4, 0.1], [0.6, 0.3, 0.1], [0.9, 0.05, 0.05]])
        >>> p = Prediction(probs.argmax(1), probs, probs.amax(1))
        >>> sets = fit_sets(p, [0, 1, 0, 0], coverage=0.75)
        >>> sets(p).long().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    """
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    if by not in GROUPS:
        raise ValueError(f"by must be one of {', '.join(GROUPS)}, got {by!r}")
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty must be 0 or more, got {penalty}; one below 0 breaks the coverage")
    probs = checked(prediction).probs.detach().cpu().double()
    if not len(prediction):
        raise ValueError("prediction sets need labelled samples, got none")
    y = as_labels(labels, *probs.shape).cpu()
    coverage = _checked(coverage)
    few = max(int(len(prediction) * (1 - coverage) / 2), 1)
    edges = _edges(prediction, by, bands, few)
    group, n_groups = y, probs.shape[1]
    if by != "class":
        group, n_groups = _groups(prediction, by, edges), len(edges) + 1
    raps = (float(penalty), index(rank)) if score == "raps" else (0.0, 0)
    blank = PredictionSets(score, coverage, by, torch.empty(0), group, edges, n_groups, *raps)
    draws = _uniform(len(y), torch.Generator().manual_seed(seed))
    matrix = blank._matrix(probs, draws)
    own = matrix[torch.arange(len(y)), y.clamp_min(0)]
    sets = replace(blank, scores=own.masked_fill_(y < 0, math.inf))
    _check_enough(sets)
    return sets


@dataclass(frozen=True)
class AdaptiveCoverage:
    """Coverage that is held over time, whatever the data do (Gibbs and Candes 2021).

    After every labelled sample the level moves by ``rate`` towards larger sets if the set issued for it
    missed, and a little towards smaller ones if not. Labels may come late, and for some samples only. If
    never more than ``D`` sets wait for a label that comes later, the share of misses after ``T`` labels is
    within

        (max(level, 1 - level) + rate D) / (rate T)

    of ``1 - target``, ``level`` being that at the start, for any sequence at all: the level moves by ``rate``
    times the excess of misses. Above 1 sets hold every class and below 0 none, so that only sets issued
    before can push it further, at most ``D`` of them. ``D`` is 1 where each label comes before the next set
    is issued, and the size of a batch where a batch is answered at once.

    A sample of a class that the network does not know (label -1) is in no set, whatever the level: leave it
    out of `update`. Given as a miss it counts as one, and the bound does not hold any more.

    Args:
        target: coverage wanted in the long run.
        rate: step; larger follows faster and swings more.
        level: coverage to ask of the sets now; may leave [0, 1].
        seen: labels so far.
        missed: sets that did not contain the true class.

    Example:
        >>> adaptive = AdaptiveCoverage(0.9, rate=0.05)
        >>> round(adaptive.update([False, False]).coverage, 3)
        0.99
    """

    target: float = 0.9
    rate: float = 0.01
    level: float | None = None
    seen: int = 0
    missed: int = 0

    def __post_init__(self) -> None:
        _checked(self.target)
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be above 0, got {self.rate}")

    @property
    def coverage(self) -> float:
        """Coverage to ask of the sets now: ``sets.at(adaptive.coverage)``."""
        return min(max(self.target if self.level is None else self.level, 0.0), 1.0)

    def update(self, covered: Sequence[bool] | Tensor) -> AdaptiveCoverage:
        """After labels came in: did the sets issued then contain the true class? One answer each."""
        given = np.asarray(covered.cpu() if isinstance(covered, Tensor) else covered)
        if given.ndim != 1 or not np.isin(given, (0, 1)).all():
            expected = "True or False for each set (did it contain the true class?)"
            raise ValueError(f"expected {expected}, got {given.tolist()!r:.60}")
        n, hits = len(given), int(given.sum())
        misses = n - hits
        level = self.target if self.level is None else self.level
        level += self.rate * (self.target * misses - (1 - self.target) * hits)
        return replace(self, level=level, seen=self.seen + n, missed=self.missed + misses)


def _check_loaded(sets: PredictionSets) -> None:
    """Refuse values that `fit_sets` never gives."""
    numbers = (sets.coverage, sets.penalty, sets.rank, sets.n_groups)
    plain = all(type(x) in (int, float) for x in numbers)
    if sets.score not in SCORES or sets.by not in GROUPS or not plain:
        raise FormatError(f"score {sets.score!r} by {sets.by!r} with numbers {numbers!r}")
    _checked(sets.coverage, closed=True)
    _check_tensors(sets)


def _check_tensors(sets: PredictionSets) -> None:
    s, group = sets.scores, sets.group
    typed = s.is_floating_point() and not group.is_floating_point()
    shaped = s.ndim == sets.edges.ndim == 1 and group.shape == s.shape
    if not (typed and shaped) or s.isnan().any():
        raise FormatError(f"{len(s)} scores of shape {tuple(s.shape)}, groups {tuple(group.shape)}")
    if sets.by != "class" and sets.n_groups != len(sets.edges) + 1:
        raise FormatError(f"{sets.n_groups} groups with {len(sets.edges)} edges")
    beyond = (group < -1) | (group >= sets.n_groups)
    if not 0 <= sets.penalty < math.inf or beyond.any():
        raise FormatError(f"groups beyond {sets.n_groups}, or a penalty of {sets.penalty}")


def _check_enough(sets: PredictionSets) -> None:
    """Too few samples make an infinite quantile: then every set holds every class."""
    coverage, by = sets.coverage, sets.by
    short = (sets.quantile == math.inf).nonzero()[:, 0].tolist()
    if len(short) == sets.n_groups:
        raise ValueError(f"no set but that of all classes has {coverage:.4g} coverage: {_lacking(sets)}")
    if short:
        every = "every set holds these classes" if by == "class" else "their sets hold every class"
        few = f"{len(short)} of {sets.n_groups} groups by {by} have fewer than the {_needed(coverage)}"
        needed = f"labelled samples that {coverage:.4g} coverage needs (first: {by} {short[0]})"
        warnings.warn(f"{few} {needed}: {every}", stacklevel=3)


def _lacking(sets: PredictionSets) -> str:
    """Why the promise cannot be made: too few samples, or too many of a class that no set can contain."""
    needed = _needed(sets.coverage)
    n_unknown = int(sets.scores.isinf().sum())
    most = max(int((sets.group == g).sum()) for g in range(sets.n_groups))
    each = "" if sets.by == "all" else f" of one {sets.by}"
    if most < needed:
        return f"it needs at least {needed} labelled samples{each}, got {most}; give more, or ask for less"
    unknown = "a class that the network does not know (label -1), which no set contains"
    found = f"{n_unknown:,} of {len(sets.scores):,} labelled samples are of {unknown}"
    return f"{found}; ask for less, or leave them out"


def _needed(coverage: float) -> int:
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def _edges(prediction: Prediction, by: str, bands: int, most: int) -> Tensor:
    if by in ("all", "class"):
        return torch.zeros(0, dtype=torch.float64)
    if bands < 2:
        raise ValueError(f"bands must be at least 2, got {bands}")
    values, n_bands = _values(prediction, by), min(bands, most)
    shares = torch.linspace(0, 1, n_bands + 1, dtype=torch.float64)
    return torch.quantile(values, shares[1:-1]).unique()


def _groups(prediction: Prediction, by: str, edges: Tensor) -> Tensor:
    if by in ("all", "class"):
        return torch.zeros(len(prediction), dtype=torch.long)
    return torch.searchsorted(edges, _values(prediction, by))


def _values(prediction: Prediction, by: str) -> Tensor:
    values = prediction.novelty if by == "novelty" else prediction.confidence
    if values is None:
        other = "one that compares with training data, such as layer evidence"
        raise ValueError(f'this calibrator gives no novelty; use by="confidence", or {other}')
    return values.detach().cpu().double()


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64).cpu()


def _checked(coverage: float, closed: bool = False) -> float:
    inside = 0 <= coverage <= 1 if closed else 0 < coverage < 1
    if not inside:
        raise ValueError(f"coverage must be between 0 and 1, got {coverage}")
    return float(coverage)
