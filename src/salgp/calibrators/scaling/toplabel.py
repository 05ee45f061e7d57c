"""Inputs of top-label methods: the label, its confidence, and the mass of all other classes.

The entry of the softmax at the label is the confidence ``s``, the sum of the others is ``1 - s`` without
cancellation, so the log-odds are exact where ``s`` rounds to 1. `from_top_label` makes the calibrated
confidence a prediction again.

The share of correct samples in each bin of the confidence: histogram binning.

Reference: Zadrozny and Elkan, Obtaining calibrated probability estimates, ICML 2001.

The best monotone step function: isotonic regression of *correct* on the confidence.

Plain isotonic regression maps the ends of the confidence range to exactly 0 and 1 whenever the samples there
agree, and one sample that does not makes the log-likelihood infinite. Here two pseudo-samples are added, a
correct one with the lowest confidence seen and a wrong one with the highest: the outer blocks become ``1 / (k
+ 1)`` or more and ``k / (k + 1)`` or less, monotony is kept, and a set without errors gives Laplace's ``(n +
1) / (n + 2)``. Apart from that the result is scikit-learn's, with the same linear interpolation between the
blocks. Reference: Zadrozny and Elkan, KDD 2002.

Smooth monotone maps: Platt scaling and beta calibration.

Both are logistic regressions on one or two functions of the confidence ``s`` with the target *correct*. They
work on the log-odds ``u = log s - log(1 - s)``, which stay exact where ``s`` itself rounds to 1.
Targets are smoothed as Platt does, ``(n_1 + 1) / (n_1 + 2)`` and ``1 / (n_0 + 2)``, so that a calibration set
without errors, or one that a threshold separates, still has a finite optimum.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.base import Calibrator, Training
from salgp.features import Features
from salgp.gp.optimise import logistic
from salgp.logits import at_class, at_least_single, row_chunks
from salgp.prediction import Prediction

__all__ = ["TopLabel", "fit_logistic", "from_top_label", "platt_targets", "with_constant"]


@dataclass(frozen=True, eq=False)
class TopLabel:
    """Label, confidence and the mass of the other classes, ``(n,)`` each.

    Example:
        >>> top = top_label(Features(torch.tensor([[100.0, 0.0], [1.0, 1.0]])))
        >>> top.confidence, top.log_odds.round(decimals=2)
        (tensor([1.0000, 0.5000]), tensor([87.3400,  0.0000], dtype=torch.float64))
    """

    label: Tensor
    confidence: Tensor
    rest: Tensor

    @property
    def log_odds(self) -> Tensor:
        """``log s - log(1 - s)`` in double precision, finite: ``1 - s`` counts as the smallest normal number
        where it vanishes.
        """
        tiny = torch.finfo(self.rest.dtype).tiny
        return self.confidence.double().clamp_min(tiny).log() - self.rest.double().clamp_min(tiny).log()


def top_label(features: Features) -> TopLabel:
    """Label, confidence and rest of all samples, in chunks: no second matrix of the size of the logits.

    Example:
        >>> top_label(Features(torch.tensor([[2.0, 0.0, 0.0]]))).label
        tensor([0])
    """
    label, confidence, rest = features.label, [], []
    one_piece = torch.compiler.is_compiling() or not len(features)  # a graph must not depend on the batch
    for rows in [slice(None)] if one_piece else row_chunks(*features.logits.shape):
        probs = torch.softmax(at_least_single(features.logits[rows]), dim=1)
        confidence.append(at_class(probs, label[rows]))
        rest.append(probs.scatter_(1, label[rows, None], 0.0).sum(dim=1))
    return TopLabel(label, torch.cat(confidence), torch.cat(rest))


def from_top_label(features: Features, confidence: Tensor, temperature: float) -> Prediction:
    """A prediction from the calibrated confidence, in the precision of the logits.

    Args:
        features: what was predicted on.
        confidence: ``(n,)``.
        temperature: of the other classes, a calibrator's ``rest_temperature_``.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0, 0.0]]))
        >>> from_top_label(f, torch.tensor([0.4], dtype=torch.float64), 1.0).probs
        tensor([[0.4000, 0.3000, 0.3000]])
    """
    dtype = torch.promote_types(features.logits.dtype, torch.float32)
    return Prediction.from_confidence(features, confidence.to(dtype), temperature=temperature)


class TopLabelCalibrator(Calibrator):
    """Learns a map from the top label's confidence to another one."""

    gives_confidence_only: ClassVar[bool] = True

    @abstractmethod
    def _learn(self, top: TopLabel, correct: Tensor) -> None:
        """Learn the map from samples of which ``correct`` says whether their label is the true class."""

    @abstractmethod
    def _confidence(self, top: TopLabel) -> Tensor:
        """Calibrated confidence of each sample."""

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        top = top_label(features)
        self._learn(top, top.label == labels)

    def _predict(self, features: Features) -> Prediction:
        return from_top_label(features, self._confidence(top_label(features)), self.rest_temperature_)


@dataclass(repr=False, eq=False)
class HistogramBinning(TopLabelCalibrator):
    """Replace the confidence by the share of correct calibration samples in its bin.

    A bin with ``k`` correct of ``m`` samples gets ``(k + smoothing * centre) / (m + smoothing)``: an empty
    bin keeps its centre, and no bin is exactly 0 or 1 unless ``smoothing`` is 0. Confidences of exactly 0 and
    1 belong to the first and the last bin.

    Args:
        n_bins: number of bins of equal width on [0, 1].
        smoothing: pseudo-samples at the bin's centre.

    Attributes:
        edges_: ``(n_bins + 1,)`` bin edges from 0 to 1; a bin holds its lower edge.
        values_: ``(n_bins,)`` calibrated confidence of each bin.

    Example:
        >>> f = Features(torch.tensor([[3.0, 0.0]]).repeat(9, 1))
        >>> histogram = HistogramBinning(n_bins=1).fit(f, [0] * 7 + [1] * 2)
        >>> histogram.values_  # (7 + 0.5) / (9 + 1)
        tensor([0.7500], dtype=torch.float64)
    """

    name: ClassVar[str] = "histogram"

    n_bins: int = 15
    smoothing: float = 1.0

    def _learn(self, top: TopLabel, correct: Tensor) -> None:
        if self.n_bins < 1:
            raise ValueError(f"n_bins must be at least 1, got {self.n_bins}")
        if self.smoothing < 0:
            raise ValueError(f"smoothing must not be negative, got {self.smoothing}")
        edges = torch.linspace(0, 1, self.n_bins + 1, dtype=torch.float64, device=correct.device)
        bins = _bin_of(top.confidence.double(), edges)
        hits = torch.bincount(bins, correct.double(), minlength=self.n_bins)
        size = torch.bincount(bins, minlength=self.n_bins) + self.smoothing
        centre = (edges[1:] + edges[:-1]) / 2
        values = (hits + self.smoothing * centre) / size
        self.edges_, self.values_ = edges, values.where(size > 0, centre)

    def _confidence(self, top: TopLabel) -> Tensor:
        return self.values_[_bin_of(top.confidence.double(), self.edges_)]


def _bin_of(score: Tensor, edges: Tensor) -> Tensor:
    """Bin number of each score; the outer bins reach beyond their edges."""
    inner = edges[1:-1].contiguous()
    return torch.searchsorted(inner, score, right=True)


class IsotonicRegression(TopLabelCalibrator):
    """Monotone step function of the confidence, never exactly 0 or 1.

    Attributes:
        x_: ``(m,)`` knots.
        y_: ``(m,)`` values there.

    Example:
        >>> f = Features(torch.tensor([[0.2, 0.0], [1.0, 0.0], [3.0, 0.0]]).repeat(30, 1))
        >>> iso = IsotonicRegression().fit(f, torch.tensor([1, 0, 0]).repeat(30))
        >>> iso.predict(f[:3]).confidence
        tensor([0.0323, 0.9836, 0.9836])
    """

    name: ClassVar[str] = "isotonic"
    suits_few_values: ClassVar[bool] = True

    def _learn(self, top: TopLabel, correct: Tensor) -> None:
        knots = monotone_fit(top.confidence.cpu().numpy(), correct.cpu().numpy())
        self.x_, self.y_ = map(torch.tensor, knots)

    def _confidence(self, top: TopLabel) -> Tensor:
        return interpolate(top.confidence, self.x_, self.y_)


class PlattScaling(TopLabelCalibrator):
    """A sigmoid of the top label's log-odds, ``sigmoid(a u + b)``.

    Attributes:
        slope_: ``a``.
        intercept_: ``b``.

    Reference: Platt, Probabilistic outputs for support vector machines, 1999.

    Example:
        >>> f = Features(torch.tensor([[3.0, 0.0]]).repeat(98, 1))
        >>> platt = PlattScaling().fit(f, [0] * 68 + [1] * 30)
        >>> platt.predict(f[:1]).confidence  # close to the 68 / 98 that are right
        tensor([0.6935])
    """

    name: ClassVar[str] = "platt"

    def _learn(self, top: TopLabel, correct: Tensor) -> None:
        found = fit_logistic(with_constant(top.log_odds), platt_targets(correct))
        self.slope_, self.intercept_ = found.tolist()

    def _confidence(self, top: TopLabel) -> Tensor:
        return torch.sigmoid(self.slope_ * top.log_odds + self.intercept_)


class BetaCalibration(TopLabelCalibrator):
    """A likelihood ratio of two beta distributions, ``sigmoid(a log s - b log(1 - s) + d)`` with ``a, b >=
    0``.

    Unlike the sigmoid it holds the identity (``a = b = 1, d = 0``) and S-shaped maps both ways; the
    constraint keeps it monotone. Reference: Kull, Silva Filho and Flach, Beta calibration, AISTATS 2017.

    Attributes:
        a_: weight of ``log s``.
        b_: weight of ``-log(1 - s)``.
        intercept_: ``d``.

    Example:
        >>> f = Features(torch.tensor([[3.0, 0.0], [1.0, 0.0]]).repeat(50, 1))
        >>> beta = BetaCalibration().fit(f, [0, 1] * 30 + [0, 0] * 20)
        >>> beta.a_ >= 0 and beta.b_ >= 0
        True
    """

    name: ClassVar[str] = "beta"

    def _learn(self, top: TopLabel, correct: Tensor) -> None:
        X = _beta_inputs(top.log_odds)
        lower = X.new_tensor([0.0, 0.0, -torch.inf])
        found = fit_logistic(X, platt_targets(correct), lower)
        self.a_, self.b_, self.intercept_ = found.tolist()

    def _confidence(self, top: TopLabel) -> Tensor:
        X = _beta_inputs(top.log_odds)
        learned = [self.a_, self.b_, self.intercept_]
        weights = torch.tensor(learned, dtype=X.dtype)
        return torch.sigmoid(X @ weights.to(X.device))


def monotone_fit(score: np.ndarray, hit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots ``(x, y)`` of the isotonic regression of ``hit`` on ``score``, with the two pseudo-samples.

    Args:
        score: ``(n,)`` larger means more likely a hit.
        hit: ``(n,)`` booleans.

    Returns:
        Both ends of every constant piece, and the values there.

    Example:
        >>> monotone_fit(np.array([0.5, 0.9, 0.9]), np.array([True, True, True]))  # Laplace: 4 / 5
        (array([0.5, 0.9]), array([0.8, 0.8]))
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(score)
    x = np.pad(score[order].astype(np.float64), 1, mode="edge")
    y = np.hstack([1.0, hit[order], 0.0])
    first = np.flatnonzero(np.diff(x, prepend=-np.inf))  # start of each run of equal scores
    weight = np.diff(first, append=len(x))
    fit = isotonic_regression(np.add.reduceat(y, first) / weight, weights=weight)
    knots = np.union1d(fit.blocks[:-1], fit.blocks[1:] - 1)
    return x[first][knots], fit.x[knots]


def interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear function through ``(x, y)``, constant beyond the ends, in the precision of ``at``.

    Args:
        at: ``(n,)`` where to evaluate.
        x: ``(m,)`` knots, increasing; equal ones make a step.
        y: ``(m,)`` values there.

    Returns:
        ``(n,)`` values.

    Example:
        >>> interpolate(torch.tensor([0.0, 1.5, 9.0]), torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
        tensor([10., 15., 20.])
    """
    x, y = x.to(at), y.to(at)
    if len(x) == 1:
        return y.expand_as(at).clone()
    width = x.diff()
    slope = torch.where(width > 0, y.diff() / width, 0.0)
    inside = at.clamp(x[0], x[-1])
    piece = torch.searchsorted(x[1:-1].contiguous(), inside)
    return y[piece] + slope[piece] * (inside - x[piece])


def platt_targets(correct: Tensor) -> Tensor:
    """Smoothed targets ``(n_1 + 1) / (n_1 + 2)`` for correct samples and ``1 / (n_0 + 2)`` for wrong ones.

    Example:
        >>> platt_targets(torch.tensor([True, True, False]))
        tensor([0.7500, 0.7500, 0.3333], dtype=torch.float64)
    """
    right = int(correct.sum())
    wrong = len(correct) - right
    return torch.where(correct, (right + 1) / (right + 2), 1 / (wrong + 2)).double()


def fit_logistic(X: Tensor, targets: Tensor, lower: Tensor | None = None, ridge: float = 1e-9) -> Tensor:
    """Coefficients of a logistic regression of few columns, by projected Newton steps.

    Minimises ``mean(softplus(X w) - t X w) + ridge |scale * w|^2 / 2`` subject to ``w >= lower``. Columns are
    scaled first, so that large scores are no problem; the small ridge decides where the data do not.

    Args:
        X: ``(n, k)`` inputs, including the constant column if there is to be one.
        targets: ``(n,)`` in [0, 1].
        lower: ``(k,)`` smallest allowed coefficients; each 0 or minus infinity.
        ridge: weight of the penalty.

    Returns:
        ``(k,)`` coefficients on the scale of ``X``.

    Example:
        >>> fit_logistic(
        ...     torch.ones(4, 1).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
        ... ).exp()  # odds 3 : 1
        tensor([3.0000], dtype=torch.float64)
    """
    scale = X.abs().amax(dim=0).clamp_min(1e-30)
    prior = torch.full_like(scale, ridge * len(X))
    weight = torch.ones_like(targets)
    return logistic(X / scale, targets, weight, prior, lower=lower) / scale


def with_constant(x: Tensor) -> Tensor:
    """Columns ``x`` and 1."""
    return torch.stack([x, torch.ones_like(x)], dim=1)


def _beta_inputs(u: Tensor) -> Tensor:
    """Columns ``log s``, ``-log(1 - s)`` and 1, from the log-odds."""
    return torch.stack([-softplus(-u), softplus(u), torch.ones_like(u)], dim=1)
