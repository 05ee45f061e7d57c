"""Fit the model of layer evidence: both experts, the layer weight, the shift score, the shift weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.evidence.mixture import Mixture, Samples, ShiftScore, score_inputs
from salgp.calibrators.evidence.monotone import fit_monotone, leave_group_out
from salgp.calibrators.evidence.windows import WindowModel, window_sums
from salgp.calibrators.rows import is_augmented, originals
from salgp.features import Features
from salgp.gp.likelihood import logistic
from salgp.gp.linalg import cholesky, inverse_positive
from salgp.io import storable

__all__ = ["fit_in_domain", "training_rows"]

LAYER_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the layers in domain that are compared."""
FEWEST_ERRORS = 10
"""With fewer errors among the calibration samples, the layers get no weight in domain."""
SCORE_RIDGE = 20.0
"""Prior precision of the weights of the shift score, on inputs of unit variance."""
AUGMENTED_SHARE = 0.1
"""Share of augmented samples in the weight of rows, for the expert in domain and for the shift score."""
SCORE_ROWS = 6000
"""Most rows that the shift score is fitted to: more do not move its weights."""
FOLDS = 3
"""Parts of the calibration samples; the shift score of each part comes from a fit to the others."""
SIZES = (1, 10, 50)
"""Samples per window when the shift weight is learned."""
CLASS_PRIOR = 10.0
"""Samples by which the mean statistics of a predicted class are drawn to those of all classes: with few
samples per class, their own mean would make new samples look shifted.
"""
DRAWS = 6
"""Draws of 50 samples from each family and strength."""


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
        return TrainingRows(*(getattr(self, f.name)[rows] for f in fields(self)))

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
        first = int(self.group.max()) + 1 if len(self) else 0
        pairs = zip(self._columns(), more._columns(first), strict=True)
        columns = [torch.cat(pair) for pair in pairs]
        return TrainingRows(Samples(*columns[:-4]), *columns[-4:])

    def without(self, some: TrainingRows) -> TrainingRows:
        """These rows without some of them, each taken once."""
        keep = torch.ones(len(self), dtype=torch.bool, device=self.correct.device)
        mine, gone = self._numbers(), some._numbers().to(self.correct)
        for x in gone:
            same = keep & torch.isclose(mine, x, rtol=1e-5, atol=1e-5).all(dim=1)
            if not bool(same.any()):
                raise ValueError(
                    "a sample to forget is not among those the calibrator was fitted on, or its label was "
                    "another"
                )
            keep[same.nonzero()[0, 0]] = False
        if not bool((keep & self.original).any()):
            raise ValueError("cannot forget every sample a calibrator knows")
        return self[keep.nonzero()[:, 0]]

    def _columns(self, first_group: int = 0) -> list[Tensor]:
        own = [getattr(self.samples, f.name) for f in fields(Samples)]
        return [*own, self.correct, self.group + first_group, self.family, self.strength]

    def _numbers(self) -> Tensor:
        s = self.samples
        return torch.cat([s.design, torch.stack([s.label.to(s.t), self.correct], dim=1)], dim=1)


def training_rows(features: Features, samples: Samples, correct: Tensor) -> TrainingRows:
    """Samples with their answers; augmented ones of unknown family are of family 1 and strength 1."""
    group = originals(features)[1]
    augmented = is_augmented(features)
    family = augmented.long() if features.families is None else features.families.to(group.device)
    strength = augmented.double() if features.strengths is None else features.strengths.to(group.device)
    return TrainingRows(samples, correct, group, family, strength.double())


def fit_mixture(
    rows: TrainingRows, n_classes: int, *, class_sd: float, layer_weight: float | None, seed: int
) -> Mixture:
    """The mixture of the largest posterior.

    Args:
        rows: calibration samples, and augmented ones where there are any.
        n_classes: the network knows.
        class_sd: prior standard deviation of the offset of a predicted class, in log-odds.
        layer_weight: of the layers in domain; None to choose it.
        seed: of the windows.
    """
    inside = fit_in_domain(rows, n_classes, class_sd, layer_weight)
    return inside if not rows.families else fit_shift(inside, rows, n_classes, class_sd, seed)


def fit_in_domain(rows: TrainingRows, n_classes: int, class_sd: float, layer_weight: float | None) -> Mixture:
    """The expert in domain, fitted to the calibration samples, with a little weight of augmented ones."""
    X, t, label, first = rows.samples.design, rows.samples.t, rows.samples.label, rows.original
    weight = _weights(first, AUGMENTED_SHARE)
    found = fit_monotone(X, label, rows.correct, weight, n_classes, class_sd)
    if layer_weight is None:
        f, _ = leave_group_out(X, label, rows.correct, weight, found, rows.group)
        layer_weight = choose_layer_weight(t[first], f[first], rows.correct[first])
    plain = _plain_covariance(torch.stack([torch.ones_like(t[first]), t[first]], dim=1))
    return Mixture(found, layer_weight, plain, X[first].mean(dim=0))


def fit_shift(inside: Mixture, rows: TrainingRows, n_classes: int, class_sd: float, seed: int) -> Mixture:
    """The mixture with what augmented samples teach."""
    label, first = rows.samples.label, rows.original
    weight = (~first).to(rows.correct) * (first.sum() / (~first).sum())
    shift = fit_monotone(rows.samples.design, label, rows.correct, weight, n_classes, class_sd)
    score, left_out = fit_score(rows)
    f_in, f_shift = inside.inside(rows.samples), shift.log_odds(rows.samples.design, label)
    statistics = torch.sigmoid(torch.stack([left_out, f_shift], dim=1))
    window = fit_window(rows, statistics, f_in, f_shift, n_classes, seed)
    return Mixture(inside.in_domain, inside.layer_weight, inside.plain, inside.usual, shift, score, window)


def choose_layer_weight(t: Tensor, layers: Tensor, correct: Tensor) -> float:
    """Smallest weight of the layers whose likelihood is within one standard error of the best one's.

    It is 0 with fewer than `FEWEST_ERRORS` errors, and where the best weight does not beat a fitted constant
    and slope of ``t`` by a standard error.

    Args:
        t: ``(n,)`` log-odds by temperature scaling.
        layers: ``(n,)`` log-odds by the layers, each sample left out of the fit.
        correct: ``(n,)`` 0 or 1.

    Example:
        >>> right = (torch.arange(100) % 4 > 0).double()
        >>> choose_layer_weight(torch.full((100,), 1.1).double(), 4 * (2 * right - 1), right)
        1.0
        >>> choose_layer_weight(torch.full((100,), 1.1).double(), torch.full((100,), 1.0).double(), right)
        0.0
    """
    if int((correct == 0).sum()) < FEWEST_ERRORS:
        return 0.0
    mixed = torch.stack([torch.lerp(t, layers, b) for b in LAYER_WEIGHTS], dim=1)
    loss = softplus(mixed) - correct[:, None] * mixed
    mean, root_n = loss.mean(dim=0), len(t) ** 0.5
    best = int(mean.argmin())
    gain = _platt_loss(t, correct) - loss[:, best]
    if float(gain.mean()) < float(gain.std()) / root_n:
        return 0.0
    error = (loss - loss[:, best : best + 1]).std(dim=0) / root_n
    return LAYER_WEIGHTS[int((mean <= mean[best] + error.nan_to_num(0.0)).nonzero()[0, 0])]


def fit_score(rows: TrainingRows) -> tuple[ShiftScore, Tensor]:
    """The shift score, and the log-odds ``(n,)`` of every row by a score fitted without its group."""
    x, first = score_inputs(rows.samples), rows.original
    centre, scale = x[first].mean(dim=0), x[first].std(dim=0, correction=0).clamp_min(1e-6)
    score = ShiftScore(centre, scale, torch.zeros_like(x[0]))
    x = torch.cat([torch.ones_like(x[:, :1]), score.inputs(rows.samples)], dim=1)
    fold = _folds(rows)
    weights = _score_weights(x, rows, torch.arange(len(rows), device=fold.device))
    left_out = x @ weights
    for k in range(FOLDS):
        others = (fold != k).nonzero()[:, 0]
        if len(others):  # a single sample has no others
            left_out[fold == k] = x[fold == k] @ _score_weights(x, rows, others, weights)
    return replace(score, weights=weights), left_out


def fit_window(
    rows: TrainingRows, statistics: Tensor, f_in: Tensor, f_shift: Tensor, n_classes: int, seed: int
) -> WindowModel:
    """How the shift weight follows from windows of samples.

    Args:
        rows: calibration samples and augmented ones.
        statistics: ``(n, 2)`` of every row.
        f_in: ``(n,)`` log-odds by the expert in domain.
        f_shift: ``(n,)`` log-odds by the expert for shift.
        n_classes: the network knows.
        seed: of the windows.
    """
    label, first = rows.samples.label, rows.original
    count = torch.bincount(label[first], minlength=n_classes).to(statistics)
    mean = statistics[first].mean(dim=0)
    total = statistics.new_zeros(n_classes, 2).index_add_(0, label[first], statistics[first] - mean)
    centre = mean + total / (count + CLASS_PRIOR)[:, None]
    scale = (statistics - centre[label])[first].std(dim=0, correction=0).clamp_min(1e-6)
    shares = (count + 0.5) / (count + 0.5).sum()
    start = WindowModel(centre, scale, torch.zeros_like(scale), shares, 0.0)
    drawn = _drawn_rows(rows, seed)
    parts = start.parts(statistics, label)
    place = torch.arange(len(drawn), device=drawn.device)
    seen = [start.describe(*window_sums(parts[drawn], place // size), label[drawn]) for size in SIZES]
    m, r = torch.cat([m for m, _ in seen]), torch.cat([r for _, r in seen])
    drawn = drawn.repeat(len(SIZES))
    gap, correct, base = (f_shift - f_in)[drawn], rows.correct[drawn], f_in[drawn]
    w = _window_weights(m * gap[:, None], correct, base)
    k = (m @ w).clamp(0.0, 1.0)
    v = _window_weights((-k * r)[:, None], correct, base + k * gap)
    return WindowModel(centre, scale, w, shares, min(max(float(v), 0.0), 1.0))


def _platt_loss(t: Tensor, correct: Tensor) -> Tensor:
    """Loss ``(n,)`` of a fitted constant and slope of ``t``, each sample left out."""
    X, one = torch.stack([torch.ones_like(t), t], dim=1), torch.ones_like(t)
    label, group = torch.zeros_like(t).long(), torch.arange(len(t), device=t.device)
    model = fit_monotone(X, label, correct, one, 1, 0.0)
    f = leave_group_out(X, label, correct, one, model, group)[0]
    return softplus(f) - correct * f


def _plain_covariance(ones: Tensor) -> Tensor:
    """Covariance ``(2, 2)`` of a constant and a slope by which temperature scaling may be off: its curvature
    on the calibration samples ``(n, 2)``, and a prior of standard deviation 1/2 for each.
    """
    p = torch.sigmoid(ones[:, 1])
    curvature = ones.T @ ((p * (1 - p))[:, None] * ones) + 4.0 * torch.eye(2).to(ones)
    return inverse_positive(cholesky(curvature))


def _score_weights(x: Tensor, rows: TrainingRows, some: Tensor, start: Tensor | None = None) -> Tensor:
    """Weights of the shift score from some rows: all originals, and as many augmented ones as are of use."""
    augmented = some[~rows.original[some]]
    order = _by_confidence(rows, augmented)
    n = len(some) - len(order)
    step = -(-len(order) // max(SCORE_ROWS - n, n, 1))
    used = torch.cat([some[rows.original[some]], order[:: max(step, 1)]])
    y = (~rows.original[used]).to(x)
    among = y.mean().clamp(1e-6, 1 - 1e-6)
    weight = torch.where(y > 0, AUGMENTED_SHARE / among, (1 - AUGMENTED_SHARE) / (1 - among))
    prior = x.new_full((x.shape[1],), SCORE_RIDGE)
    prior[0] = 1e-3
    return logistic(x[used], y, weight, prior, start=start)


def _folds(rows: TrainingRows) -> Tensor:
    """Fold ``(n,)`` of each row: groups are dealt out in the order of their originals' confidence."""
    first = rows.original.nonzero()[:, 0]
    fold = torch.zeros(int(rows.group.max()) + 1, dtype=torch.long, device=first.device)
    order = _by_confidence(rows, first)
    fold[rows.group[order]] = torch.arange(len(order), device=first.device) % FOLDS
    return fold[rows.group]


def _drawn_rows(rows: TrainingRows, seed: int) -> Tensor:
    """Rows in runs of 50 of one family and strength, and as many runs of calibration samples."""
    generator = torch.Generator().manual_seed(seed)
    original, *augmented = _environments(rows)
    drawn = []
    for members in [*[original] * max(len(augmented), 1), *augmented]:
        for _ in range(DRAWS):
            drawn.append(members[_draw(len(members), max(SIZES), generator).to(members.device)])
    return torch.cat(drawn)


def _environments(rows: TrainingRows) -> Iterator[Tensor]:
    """Rows of every family and strength, sorted by confidence, so that the order of rows does not matter."""
    for family in [0, *rows.families]:
        here = rows.family == family
        for strength in rows.strength[here].unique():
            members = (here & (rows.strength == strength)).nonzero()[:, 0]
            yield _by_confidence(rows, members)


def _by_confidence(rows: TrainingRows, some: Tensor) -> Tensor:
    """Some rows, sorted by confidence and, where that is at its bound, by energy."""
    order = some[rows.samples.energy[some].argsort(stable=True)]
    return order[rows.samples.t[order].argsort(stable=True)]


def _draw(n: int, size: int, generator: torch.Generator) -> Tensor:
    if n >= size:
        return torch.randperm(n, generator=generator)[:size]
    return torch.randint(n, (size,), generator=generator)


def _window_weights(X: Tensor, correct: Tensor, offset: Tensor) -> Tensor:
    """Weights ``(p,)`` of columns added to log-odds."""
    scale = X.square().mean(dim=0).sqrt().clamp_min(1e-6)
    prior = X.new_full((X.shape[1],), 1e-6 * len(X))
    return logistic(X / scale, correct, torch.ones_like(correct), prior, offset) / scale


def _weights(original: Tensor, share: float) -> Tensor:
    """Weights ``(n,)`` with which augmented samples have this share of the total; originals weigh 1."""
    n = original.sum().double()
    each = share / (1 - share) * n / (len(original) - n).clamp_min(1)
    return torch.where(original, 1.0, each)
