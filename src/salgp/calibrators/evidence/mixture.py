"""The model of layer evidence: two experts, and one shift weight that mixes them.

    f_in     monotone regression on the calibration samples (`salgp.calibrators.evidence.monotone`), or the
             tempered log-odds ``t`` where the layers do not help
    f_shift  the same regression on the augmented samples
    k        shift weight in [0, 1], from a window of ``n >= 1`` samples

    f(x | window) = (f_in + k (f_shift - f_in) - k v r_class) / sqrt(1 + pi/8 k^2 s^2)

Two statistics of each sample tell a shifted window from a difficult sample: the shift score (logistic
regression "augmented or original?" on agreement, novelty and whitened coordinates of every layer) and the
confidence of ``f_shift``. Each is counted from its mean over the calibration samples, in standard deviations.
With ``u`` their mean over the window,

    u' = u^3 / (u^2 + noise / n),      m = sign(u') log(1 + |u'|),      k = w . m,

with ``k`` kept within [0, 1]. The noise is the smallest of 16, 32, 64 ... with which the calibration samples,
one by one, lose next to no confidence.

``r_class`` is the over-prediction of the sample's class in its window: with ``n_c`` of ``n`` samples
predicted as class ``c``, whose share among the calibration samples is ``pi_c``, and ``e_c = 1 + (n - 1)
pi_c``,

    r = max(0, log(n_c / e_c)),      r_class = r^3 / (r^2 + 4 / e_c).

It is 0 for a single sample, which is a window of one. ``w`` and ``v`` are learned on windows of 1 and 50
samples of one family and strength of augmentation, and of calibration samples. ``s^2`` is the variance with
which the families left out of a fit tell the level of ``f_shift``: where they disagree, or are few, the mean
of the probability is nearer to one half than the probability of the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from salgp.calibrators.evidence.layer_spaces import Evidence, Pair, each_field
from salgp.calibrators.evidence.monotone import MonotoneLogistic
from salgp.calibrators.evidence.windows import WindowModel, Windows
from salgp.features import Features
from salgp.io import storable

__all__ = ["Mixture", "Samples", "Scales", "samples_of", "scales_of", "statistics"]

LARGEST_LOG_ODDS = 20.0
"""Log-odds of the network are kept within this bound, where double precision still tells them apart."""
SHORTEST, LONGEST = 1e-300, 1e300
"""Bounds of lengths, and of their ratios, that keep them finite."""


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Location and scale of what is known of a sample, on the calibration samples.

    Args:
        temperature: of the network's confidence.
        agreement: ``(2, L)`` median and standard deviation of the agreement.
        novelty: ``(2, L)`` median and robust standard deviation of the novelty.
        energy: ``(2,)`` median and robust standard deviation of the energy.
        largest_norm: ``()`` largest length of the last layer's features.
    """

    temperature: float
    agreement: Tensor
    novelty: Tensor
    energy: Tensor
    largest_norm: Tensor

    def __post_init__(self) -> None:
        if self.largest_norm.ndim or self.energy.shape != (2,):
            shapes = tuple(self.largest_norm.shape), tuple(self.energy.shape)
            raise ValueError(f"expected a number and a pair as largest norm and energy, got shapes {shapes}")

    @cached_property
    def temperatures(self) -> Tensor:
        """Those of temperature scaling and of the network itself, ``(2,)``."""
        return self.agreement.new_tensor([self.temperature, 1.0])

    @cached_property
    def of_layers(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Location and scale of the agreement and of the novelty, ``(L,)`` each."""
        return self.agreement.unbind(), self.novelty.unbind()


@storable
@dataclass(frozen=True, eq=False)
class Samples:
    """``n`` samples as the model sees them.

    Args:
        top: ``(n, 2)`` logit of the predicted class, tempered and as it is.
        others: ``(n, 2)`` logarithm of the sum over the other classes, likewise.
        agreement: ``(n, L)`` standardised.
        novelty: ``(n, L)`` standardised.
        coordinates: ``(n, q L)`` leading whitened coordinates of every layer.
        norm_excess: ``(n,)`` by how many times the last layer's features are longer than those of any
            calibration sample, at least 1.
        label: ``(n,)`` predicted class.
    """

    top: Tensor
    others: Tensor
    agreement: Tensor
    novelty: Tensor
    coordinates: Tensor
    norm_excess: Tensor
    label: Tensor

    @cached_property
    def t(self) -> Tensor:
        """Tempered log-odds of the network's confidence ``(n,)``."""
        return (self.top[:, 0] - self.others[:, 0]).clamp_max(LARGEST_LOG_ODDS)

    @property
    def network(self) -> Tensor:
        """Log-odds of the network's confidence ``(n,)``."""
        return (self.top[:, 1] - self.others[:, 1]).clamp_max(LARGEST_LOG_ODDS)

    @property
    def energy(self) -> Tensor:
        """Minus the logarithm of the sum over all classes, tempered ``(n,)``."""
        return -torch.logaddexp(self.top[:, 0], self.others[:, 0])

    @cached_property
    def design(self) -> Tensor:
        """Columns ``(n, L + 3)`` of the monotone regression: one, log-odds, agreements, minus the logarithm
        of the last layer's novelty.
        """
        last = self.novelty[:, -1:]
        h = last.clamp_min(0.0).log1p()
        t = self.t[:, None]
        one = torch.ones_like(t)
        return torch.cat([one, t, self.agreement, -h], dim=1)

    @cached_property
    def columns(self) -> Tensor:
        """All columns ``(n, L + 3 + (1 + q) L)``: those of the regression, novelties, coordinates."""
        return torch.cat([self.design, self.novelty, self.coordinates], dim=1)

    @property
    def score_inputs(self) -> Tensor:
        """Columns of the shift score ``(n, 1 + (2 + q) L)``: one, agreements, novelties, coordinates."""
        every = self.columns
        return every[:, _of_score(every.shape[1], self.agreement.shape[1])]

    def ood_score(self, scales: Scales) -> Tensor:
        """One number ``(n,)`` that is large for unknown classes and under shift: energy, mean disagreement
        and the largest novelty, each as far as it is above its median, ``h(z) = log(1 + max(z, 0))``.
        """
        energy = (self.energy - scales.energy[0]) / scales.energy[1]
        a, N = self.agreement.mean(dim=1), self.novelty.amax(dim=1)
        above = torch.stack([energy, -a, N]).clamp_min(0.0)
        e, a, N = above.log1p()
        return e + a + N / 3 + self.norm_excess.log()

    def __getitem__(self, rows: Tensor) -> Samples:
        return each_field(lambda x: x[rows], self)


@dataclass(frozen=True, eq=False)
class LogOdds:
    """Log-odds of being correct.

    Args:
        mean: ``(n,)``.
        shift_weight: ``(n,)``, ``k``.
        context: ``(n,)`` part of the over-prediction; None without a window.
    """

    mean: Tensor
    shift_weight: Tensor
    context: Tensor | None = None


@storable
@dataclass(frozen=True, eq=False)
class Mixture:
    """The fitted model: from samples to log-odds of being correct.

    Args:
        in_domain: monotone regression on the calibration samples, or temperature scaling.
        baseline: ``(p,)`` mean columns of the calibration samples, from which terms are counted.
        shift: monotone regression on the augmented samples; None where there were none.
        score: weights of the shift score; None likewise.
        window: gives the shift weight; None likewise.
        shift_variance: of the log-odds of ``shift`` on a family of augmentations it has not seen.
        level_variance: of its mean over the families.
    """

    in_domain: MonotoneLogistic
    baseline: Tensor
    shift: MonotoneLogistic | None = None
    score: Tensor | None = None
    window: WindowModel | None = None
    shift_variance: float = 0.0
    level_variance: float = 0.0

    @property
    def layers_in_domain(self) -> bool:
        """Does the expert in domain use the layers, or is it temperature scaling?"""
        expert = self.in_domain
        return bool(expert.weights[2:].any() or expert.offsets.any())

    @cached_property
    def experts(self) -> MonotoneLogistic:
        """Both experts as one: in domain and, where there is one, under shift."""
        shift = self.shift or self.in_domain
        return each_field(lambda *x: torch.stack(x), self.in_domain, shift)

    @cached_property
    def heads(self) -> Pair:
        """Weights ``(p, 3)`` of all columns and offsets ``(C, 3)`` of the predicted classes: those of the
        expert in domain, the shift score, and the expert under shift.
        """
        assert self.shift is not None
        assert self.score is not None
        p, first, last = len(self.baseline), self.in_domain, self.shift
        weights = self.score.new_zeros(len(self.score) + 2, 3)
        weights[:p, 0], weights[:p, 2] = first.weights, last.weights
        weights[_of_score(len(weights), p - 3), 1] = self.score
        none = torch.zeros_like(first.offsets)
        return weights, torch.stack([first.offsets, none, last.offsets], dim=1)

    def log_odds(self, samples: Samples) -> Tensor:
        """Log-odds ``(n, 3)`` by the expert in domain, of being augmented, and by the expert under shift."""
        weights, offsets = self.heads
        return samples.columns @ weights + offsets.index_select(0, samples.label)

    def parts(self, samples: Samples) -> Tensor:
        """Contribution of each sample to the sums of its window, ``(n, 2 + C)``."""
        if self.window is None:
            raise ValueError(
                "this calibrator was fitted without augmented samples, so a context tells it nothing; "
                "fit it on extract(..., perturb='auto'), or predict without a context"
            )
        seen = statistics(self.log_odds(samples))
        return self.window.parts(seen, samples.label)

    def __call__(self, samples: Samples, windows: Windows | None = None) -> LogOdds:
        """Log-odds of samples.

        Args:
            samples: ``n`` of them.
            windows: sums ``(w, 2 + C)`` and the window ``(n,)`` of each sample; by default each is a window.
        """
        context, window = None, self.window
        if window is None:
            f = self.in_domain.log_odds(samples.design, samples.label)
            k = torch.zeros_like(f)
        else:
            found = self.log_odds(samples)
            f_in, f_shift = found[:, 0], found[:, 2]
            if windows is None:
                k = window.shift_of_one(statistics(found))
            else:
                m, r = window.describe(*windows, samples.label)
                k = window.weigh(m)
                context = -k * window.over_prediction * r
            f = torch.addcmul(f_in, k, f_shift - f_in)
            f = f if context is None else f + context
            f = moderated(f, self.level_variance * k.square())
        chance = -math.log(max(len(self.in_domain.offsets) - 1, 1))
        return LogOdds(chance + (f - chance) / samples.norm_excess, k, context)

    def variance(self, samples: Samples, k: Tensor) -> Tensor:
        """Variance ``(n,)`` of the log-odds, where the experts are mixed by ``k (n,)``."""
        own, shift = self.experts.variance(samples.design, samples.label).unbind()
        shift = shift + self.shift_variance
        return (1 - k).square() * own + k.square() * shift

    def terms(self, samples: Samples, k: Tensor) -> Tensor:
        """Mean and standard deviation ``(2, n, 1 + L)`` of the part of the predicted class and of each layer,
        where the experts are mixed by ``k (n,)``; counted from the mean sample of the calibration data.
        """
        experts, away = self.experts, samples.design - self.baseline
        levels = experts.levels.index_select(-1, samples.label)
        slope = torch.lerp(experts.slopes[0], experts.slopes[1], k[:, None])
        level = torch.lerp(levels[0], levels[1], k)
        layers = (torch.stack([away, away.abs()]) * slope) @ experts.columns_to_layers
        return torch.cat([level[:, :, None], layers], dim=2)


def statistics(log_odds: Tensor) -> Tensor:
    """Shift score and confidence of the expert under shift ``(n, 2)``, from `Mixture.log_odds`."""
    return torch.sigmoid(log_odds[:, 1:])


def _of_score(n_columns: int, n_layers: int) -> list[int]:
    """Which of all columns are inputs of the shift score: not the log-odds, nor the last novelty's logarithm.

    Example:
        >>> _of_score(8, 2)
        [0, 2, 3, 5, 6, 7]
    """
    return [j for j in range(n_columns) if j not in (1, n_layers + 2)]


def moderated(f: Tensor, variance: Tensor) -> Tensor:
    """Log-odds of the mean probability, where log-odds ``f`` have this normal variance (MacKay, 1992).

    Example:
        >>> moderated(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 4.0]))
        tensor([2.0000, 1.2474])
    """
    return f / (1 + math.pi / 8 * variance).sqrt()


def two_sides(features: Features, temperatures: Tensor) -> Pair:
    """Tempered logit of the predicted class, and the logarithm of the sum over the others, ``(n, k)`` each,
    at ``k`` temperatures.
    """
    top = features.logits.amax(dim=1, keepdim=True).double()
    others = features.other_logits.double()[:, None]
    tempered = others / temperatures[:, None]
    return top / temperatures, tempered.logsumexp(dim=2)


def scales_of(features: Features, evidence: Evidence, temperature: float) -> Scales:
    """Scales of the calibration samples."""
    A = evidence.agreement
    unknown = A.isinf()
    known = A.masked_fill(unknown, torch.nan)
    median = known.nanquantile(0.5, dim=0).nan_to_num(0.0)
    spread = torch.where(unknown, median, A).std(dim=0, correction=0)
    agreement = torch.stack([median, spread.clamp_min(1e-6)])
    largest = evidence.norm.amax().clamp_min(SHORTEST)
    scales = Scales(temperature, agreement, _robust(evidence.novelty), A.new_zeros(2), largest)
    energy = samples_of(features, evidence, scales).energy
    return replace(scales, energy=_robust(energy))


def samples_of(features: Features, evidence: Evidence, scales: Scales) -> Samples:
    """The samples in units of the calibration samples."""
    (median, spread), (centre, width) = scales.of_layers
    A = (evidence.agreement - median) / spread
    A = A.masked_fill(A.eq(torch.inf), 0.0)  # the median, where a class has no points
    N = (evidence.novelty - centre) / width
    top, others = two_sides(features, scales.temperatures)
    excess = (evidence.norm / scales.largest_norm).clamp(1.0, LONGEST)
    return Samples(top, others, A, N, evidence.coordinates, excess, features.label)


def _robust(x: Tensor) -> Tensor:
    """Median and median absolute deviation, as a standard deviation, of the columns of ``x``, ``(2, p)``."""
    median = x.quantile(0.5, dim=0)
    deviation = (x - median).abs().quantile(0.5, dim=0)
    return torch.stack([median, (1.4826 * deviation).clamp_min(1e-6)])
