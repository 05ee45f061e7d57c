"""Fit the model of layer evidence: both experts, the shift score, and the shift weight of windows.

`layers_help` decides whether the layers are used in domain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.evidence.layer_spaces import each_field, joined
from salgp.calibrators.evidence.mixture import Mixture, Samples, statistics
from salgp.calibrators.evidence.monotone import RIDGE, MonotoneLogistic, fit_monotone, leave_group_out
from salgp.calibrators.evidence.windows import WindowModel, window_sums
from salgp.features import Features
from salgp.gp.linalg import cholesky, inverse_positive
from salgp.gp.optimise import logistic
from salgp.io import storable

__all__ = ["fit_in_domain", "training_rows"]

FEWEST_ERRORS = 10
"""With fewer errors among the calibration samples, the expert in domain is temperature scaling."""
SCORE_RIDGE = 20.0
"""Prior precision of the weights of the shift score: it has many inputs."""
AUGMENTED_SHARE = 0.1
"""Share of augmented samples in the weight of rows, for the expert in domain and for the shift score."""
SCORE_ROWS = 6000
"""Most rows that the shift score is fitted to: more do not change its weights."""
NOISE = (16.0, 32.0, 64.0, 128.0)
"""Window means count from the root of one of these standard errors on: see `fit_window`."""
LOST = 0.003
"""Confidence that calibration samples may lose on average where each is a window of its own."""
SIZES = (1, 50)
"""Samples per window when the shift weight is learned."""
DRAWS = 6
"""Runs of 50 samples drawn from each family and strength."""


@storable
@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows a mixture is fitted to.

    Args:
        samples: calibration samples and augmented ones.
        correct: ``(n,)`` 0 or 1.
        group: ``(n,)`` number of the calibration sample that a row is made from.
        family: ``(n,)`` of augmentations, 0 for calibration samples.
        strength: ``(n,)`` of the augmentation.
    """

    samples: Samples
    correct: Tensor
    group: Tensor
    family: Tensor
    strength: Tensor

    def __len__(self) -> int:
        return len(self.correct)

    def __getitem__(self, rows: Tensor) -> TrainingRows:
        return each_field(lambda x: x[rows], self)

    @property
    def original(self) -> Tensor:
        """Which rows are calibration samples as they came, ``(n,)``."""
        return self.family == 0

    @property
    def families(self) -> list[int]:
        """Families of augmentations."""
        return sorted(set(self.family.tolist()) - {0})

    def joined(self, more: TrainingRows) -> TrainingRows:
        """These rows and more, whose groups are new ones."""
        first = int(self.group.max()) + 1
        more = replace(more, group=more.group + first)
        return each_field(joined, self, more)


def training_rows(features: Features, samples: Samples, correct: Tensor) -> TrainingRows:
    """Samples with their answers; augmented ones of unknown family are of family 1 and strength 1."""
    _, group = features.originals
    known = features.is_augmented if features.strengths is None else features.strengths
    strength = known.to(group.device).double()
    return TrainingRows(samples, correct.double(), group, families_of(features), strength)


def families_of(features: Features) -> Tensor:
    """Family of each row; augmented samples of unknown family are of family 1."""
    known = features.is_augmented if features.families is None else features.families
    return known.to(features.logits.device).long()


def fit_mixture(rows: TrainingRows, n_classes: int, *, layers_in_domain: bool | None, seed: int) -> Mixture:
    """The mixture of the largest posterior.

    Args:
        rows: calibration samples, and augmented ones where there are any.
        n_classes: the network knows.
        layers_in_domain: use the layers in domain? None to choose.
        seed: of the windows.
    """
    first = rows.original
    in_domain = fit_in_domain(rows, n_classes, layers_in_domain)
    baseline = rows.samples.design[first].mean(dim=0)
    if not rows.families:
        return Mixture(in_domain, baseline)
    X, label = rows.samples.design, rows.samples.label
    augmented = ~first
    weight = augmented.to(rows.correct) * (first.sum() / augmented.sum())
    shift = fit_monotone(X, label, rows.correct, weight, n_classes)
    experts = Mixture(in_domain, baseline, shift, fit_score(rows))
    window = fit_window(rows, experts.log_odds(rows.samples), n_classes, seed)
    return replace(experts, window=window)


def fit_in_domain(
    rows: TrainingRows, n_classes: int, layers: bool | None, offsets: bool = True
) -> MonotoneLogistic:
    """The expert in domain: fitted to the calibration samples with a little weight of augmented ones, or
    temperature scaling where the layers do not help.
    """
    X, label, first = rows.samples.design, rows.samples.label, rows.original
    weight = _weights(first)
    found = fit_monotone(X, label, rows.correct, weight, n_classes, offsets)
    if layers is None:
        f, _ = leave_group_out(X, label, rows.correct, weight, found, rows.group)
        layers = layers_help(rows.samples.t[first], f[first], rows.correct[first])
    return found if layers else temperature_scaling(X[first], n_classes)


def layers_help(t: Tensor, layers: Tensor, correct: Tensor) -> bool:
    """Do the layers beat a fitted constant and slope of ``t`` by one standard error of the likelihood?

    Never with fewer than `FEWEST_ERRORS` errors.

    Args:
        t: ``(n,)`` log-odds by temperature scaling.
        layers: ``(n,)`` log-odds by the layers, each sample left out of the fit.
        correct: ``(n,)`` 0 or 1.

    Example:
        >>> right = (torch.arange(100) % 4 > 0).double()
        >>> layers_help(torch.full((100,), 1.1).double(), 4 * (2 * right - 1), right)
        True
        >>> layers_help(torch.full((100,), 1.1).double(), torch.full((100,), -1.0).double(), right)
        False
    """
    if int((correct == 0).sum()) < FEWEST_ERRORS:
        return False
    gain = _loss(_platt(t, correct), correct) - _loss(layers, correct)
    error = float(gain.std()) / len(t) ** 0.5
    return float(gain.mean()) > error


def temperature_scaling(X: Tensor, n_classes: int) -> MonotoneLogistic:
    """The expert that says ``t``. Its covariance is that of a constant and a slope by which temperature
    scaling may be off: their curvature on the calibration samples ``(n, p)``, and a prior of standard
    deviation 1/2 for each.
    """
    p = torch.sigmoid(X[:, 1])
    ones, weight = X[:, :2], (p * (1 - p))[:, None]
    curvature = ones.T @ (weight * ones) + 4.0 * torch.eye(2).to(X)
    covariance = X.new_zeros(X.shape[1], X.shape[1])
    covariance[:2, :2] = inverse_positive(cholesky(curvature))
    weights, none = torch.zeros_like(covariance[0]), X.new_zeros(n_classes)
    weights[1] = 1.0
    return MonotoneLogistic(weights, none, covariance, torch.outer(none, weights), none)


def fit_score(rows: TrainingRows) -> Tensor:
    """Weights of the shift score: logistic regression "augmented or original?"."""
    first = rows.original.nonzero()[:, 0]
    augmented = _by_confidence(rows, ~rows.original)
    most = max(SCORE_ROWS - len(first), len(first))
    step = math.ceil(len(augmented) / most)
    used = torch.cat([first, augmented[::step]])
    original = rows.original[used]
    X = rows.samples[used].score_inputs
    prior = X.new_full((X.shape[1],), SCORE_RIDGE)
    prior[0] = RIDGE / 40
    return logistic(X, (~original).to(X), _weights(original), prior)


def fit_window(rows: TrainingRows, log_odds: Tensor, n_classes: int, seed: int) -> WindowModel:
    """Learn the shift weight from windows of samples.

    Of all `NOISE` it takes the first with which the calibration samples, each a window of its own, lose at
    most `LOST` of confidence on average; the last where none does.

    Args:
        rows: calibration samples and augmented ones.
        log_odds: ``(n, 3)`` of every row, from `Mixture.log_odds`.
        n_classes: the network knows.
        seed: of the windows.
    """
    first = rows.original
    seen = statistics(log_odds)
    here = seen[first]
    f_in, _, f_shift = log_odds[first].unbind(dim=1)
    scale = here.std(dim=0, correction=0).clamp_min(1e-6)
    label = rows.samples.label[first]
    count = torch.bincount(label, minlength=n_classes).to(seen) + 0.5
    none, shares = torch.zeros_like(scale), count / count.sum()
    drawn = _drawn_rows(rows, seed)
    wanted = torch.sigmoid(f_in).mean() - LOST
    for noise in NOISE:
        start = WindowModel(here.mean(dim=0), scale, none, noise, shares, 0.0)
        found = _fit_weights(start, rows[drawn], log_odds[drawn])
        mixed = torch.lerp(f_in, f_shift, found.shift_of_one(here))
        if torch.sigmoid(mixed).mean() >= wanted:
            break
    return found


def _fit_weights(start: WindowModel, rows: TrainingRows, log_odds: Tensor) -> WindowModel:
    """The weights of both statistics and of over-prediction, from windows of consecutive rows."""
    label, n = rows.samples.label, len(rows)
    parts = start.parts(statistics(log_odds), label)
    place = torch.arange(n, device=label.device)
    windows = [window_sums(parts, place // size) for size in SIZES]
    seen = [start.describe(*window, label) for window in windows]
    m, r = map(torch.cat, zip(*seen, strict=True))
    f_in, _, f_shift = log_odds.repeat(len(SIZES), 1).unbind(dim=1)
    correct, gap = rows.correct.repeat(len(SIZES)), f_shift - f_in
    weights = _window_weights(m * gap[:, None], correct, f_in)
    learned = replace(start, weights=weights)
    k = learned.weigh(m)
    lowered = (-k * r)[:, None]
    v = _window_weights(lowered, correct, f_in + k * gap)
    return replace(learned, over_prediction=min(max(float(v), 0.0), 1.0))


def _platt(t: Tensor, correct: Tensor) -> Tensor:
    """Log-odds ``(n,)`` by a fitted constant and slope of ``t``, each sample left out."""
    one, label = torch.ones_like(t), torch.zeros_like(t).long()
    X = torch.stack([one, t], dim=1)
    group = torch.arange(len(t), device=t.device)
    model = fit_monotone(X, label, correct, one, 1, offsets=False)
    return leave_group_out(X, label, correct, one, model, group)[0]


def _loss(f: Tensor, correct: Tensor) -> Tensor:
    return softplus(f) - correct * f


def _drawn_rows(rows: TrainingRows, seed: int) -> Tensor:
    """Rows in runs of 50: `DRAWS` runs of each family and strength, and of the calibration samples."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat(
        [
            members[_draw(len(members), max(SIZES), generator)]
            for members in _environments(rows)
            for _ in range(DRAWS)
        ]
    )


def _environments(rows: TrainingRows) -> Iterator[Tensor]:
    """Rows of every family and strength, sorted by confidence, so that the order of rows does not matter."""
    for family in [0, *rows.families]:
        here = rows.family == family
        for strength in rows.strength[here].unique():
            yield _by_confidence(rows, here & (rows.strength == strength))


def _by_confidence(rows: TrainingRows, mask: Tensor) -> Tensor:
    """Some rows, sorted by confidence and, where that is at its bound, by energy."""
    some = mask.nonzero()[:, 0]
    order = some[rows.samples.energy[some].argsort(stable=True)]
    return order[rows.samples.t[order].argsort(stable=True)]


def _draw(n: int, size: int, generator: torch.Generator) -> Tensor:
    if n >= size:
        return torch.randperm(n, generator=generator)[:size]
    return torch.randint(n, (size,), generator=generator)


def _window_weights(X: Tensor, correct: Tensor, offset: Tensor) -> Tensor:
    """Weights ``(p,)`` of columns added to log-odds."""
    square, one = X.square().mean(dim=0), torch.ones_like(correct)
    scale = square.sqrt().clamp_min(1e-6)
    prior = torch.full_like(scale, 1e-6 * len(X))
    return logistic(X / scale, correct, one, prior, offset) / scale


def _weights(original: Tensor) -> Tensor:
    """Weights ``(n,)`` with which augmented samples have their share of the total; originals weigh 1."""
    n = original.sum().double()
    augmented = (len(original) - n).clamp_min(1)
    each = AUGMENTED_SHARE / (1 - AUGMENTED_SHARE) * n / augmented
    return torch.where(original, 1.0, each)
