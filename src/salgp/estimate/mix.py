"""Class mix of an unlabelled batch, and confidences corrected for it.

Under label shift, where only the class mix changes, ``p(y | x)`` becomes ``p(y | x) w_y`` up to a factor,
``w`` = new mix / old mix. The new mix is the likeliest one, found by expectation maximisation on calibrated
probabilities (Saerens, Latinne and Decaestecker 2002). Where the samples themselves shifted this is wrong,
and nothing in an unlabelled batch says so: a correction is asked for by name and never applied silently.

The probabilities of a calibrated *confidence* need not be right for each class: then a mix seems to change
that did not. So every class is first scaled by one factor, which brings its mean probability on the
calibration samples to its share there. Those samples are finitely many. The errors of shares and factors are
part of the deviation of a share (delta method) and of the test: without them every mix "has changed" as soon
as the batch is large enough.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import chdtrc, ndtri
from torch import Tensor

from salgp.logits import log_odds
from salgp.metrics.metric import ArrayLike, FloatArray, to_double
from salgp.prediction import Prediction, checked

__all__ = ["ClassMix", "adapt", "class_mix"]

STEPS, TOLERANCE = 2000, 1e-9
"""Most steps of a search, and the largest change at which it has converged."""


@dataclass(frozen=True, eq=False)
class ClassMix:
    """Shares of the true classes in an unlabelled batch.

    Args:
        share: ``(c,)`` estimated shares; they sum to 1.
        std: ``(c,)`` their standard deviation.
        source: ``(c,)`` shares that the calibrator was fitted for.
        p_value: of "the mix is still the source's"; small means it changed.
        n: samples.
        converged: did the search converge?
    """

    share: FloatArray
    std: FloatArray
    source: FloatArray
    p_value: float
    n: int
    converged: bool

    def interval(self, level: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Lower and upper ends ``(c,)``."""
        half = ndtri((1 + level) / 2) * self.std
        ends = np.clip([self.share - half, self.share + half], 0, 1)
        return ends[0], ends[1]

    def __str__(self) -> str:
        verdict = "has changed" if self.p_value < 0.01 else "has not visibly changed"
        largest = np.argmax(np.abs(self.share - self.source))
        return (
            f"The class mix {verdict} (p = {self.p_value:.2g}, {self.n:,} samples); most: class {largest}, "
            f"from {self.source[largest]:.1%} to {self.share[largest]:.1%} (sd {self.std[largest]:.1%})."
        )


def class_mix(prediction: Prediction, source_mix: ArrayLike, calibration: Prediction) -> ClassMix:
    """Estimate the class mix of an unlabelled batch.

    Args:
        prediction: of the batch.
        source_mix: ``(c,)`` shares of the true classes among the calibration samples, all above 0.
        calibration: prediction, by the same calibrator, of the calibration samples, on which the mix was
            counted.

    Returns:
        Shares, their uncertainty, and a test of "nothing changed". Both contain what the batch does not know,
        and what the calibration samples do not know.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1]] * 30 + [[0.1, 0.9]] * 30)
        >>> p = Prediction(probs.argmax(1), probs, probs.amax(1))
        >>> class_mix(p[:30], [0.5, 0.5], p).share.round(2)
        array([1., 0.])
    """
    probs, at_source = (to_double(checked(each).probs) for each in (prediction, calibration))
    source = _shares(source_mix, probs.shape[1])
    if not len(probs):
        raise ValueError("the class mix of an empty batch is unknown")
    factors = _factors(at_source, source)
    at_source, probs = _scaled(at_source, factors), _scaled(probs, factors)
    ratio = probs / source  # (n, c) likelihood of each class, up to a factor
    share, converged = _likeliest(ratio, source)
    freedom = max(len(source) - 1, 1)
    p_value = float(chdtrc(freedom, _evidence(probs, source, at_source)))
    of_batch = np.diag(_inverse(_information(ratio, share))) / len(ratio)
    variance = of_batch + _source_variance(ratio, share, source, at_source)
    return ClassMix(share, np.sqrt(variance.clip(0)), source, p_value, len(probs), converged)


def _likeliest(ratio: FloatArray, source: FloatArray) -> tuple[FloatArray, bool]:
    """Expectation maximisation; did it converge?"""
    share = source.copy()
    for _ in range(STEPS):
        before, share = share, _scaled(ratio, share).mean(0)
        if np.abs(share - before).max() < TOLERANCE:
            return share, True
    return share, False


def _evidence(probs: FloatArray, source: FloatArray, calibration: FloatArray) -> float:
    """Score test, chi-square with ``c - 1`` degrees of freedom where the mix did not move.

    Mean probabilities of the batch against those of the calibration samples, with the variance of both.
    Errors of the factors cancel in that difference.
    """
    together = np.concatenate([probs, calibration])
    sampling = 1 / len(probs) + 1 / len(calibration)
    variance = _scatter(together - together.mean(0)) * sampling
    difference = probs.mean(0) - source
    return float(difference @ _inverse(variance) @ difference)


def _source_variance(
    ratio: FloatArray, share: FloatArray, source: FloatArray, calibration: FloatArray
) -> FloatArray:
    """``(c,)`` from the samples that source mix and factors come from, by the delta method.

    With ``I`` the information of one sample, ``K`` its inverse where the sum stays 1, ``s`` the shares and
    ``u`` the factors divided by the source mix, ``ds = K (1 - I diag s) d log u``. A count there is the sum
    of the mean probability and of what chance adds to it. Only the second moves the factors, by the inverse
    of its covariance ``V``.
    """
    information = _information(ratio, share)
    inverse = _inverse(information)
    change = inverse - inverse @ information * share  # d share / d log u
    per_count = change / source
    chance = np.diag(calibration.mean(0)) - _scatter(calibration)
    certain = _scatter(calibration - calibration.mean(0))
    per_chance = change @ _inverse(chance) - per_count
    parts = per_chance @ chance @ per_chance.T + per_count @ certain @ per_count.T
    return np.diag(parts) / len(calibration)


def _information(ratio: FloatArray, share: FloatArray) -> FloatArray:
    """``(c, c)`` observed information of one sample."""
    return _scatter(ratio / (ratio @ share)[:, None])


def _inverse(matrix: FloatArray) -> FloatArray:
    """Inverse ``(c, c)`` in the directions that keep the sum of the shares."""
    c = len(matrix)
    q, _ = np.linalg.qr(np.eye(c) - 1 / c)
    along = q[:, : c - 1]  # (c, c - 1) orthonormal, sums to 0
    inside = along.T @ matrix @ along
    return along @ np.linalg.pinv(inside, hermitian=True) @ along.T


def _scatter(rows: FloatArray) -> FloatArray:
    """``(c, c)`` mean of the squares."""
    return rows.T @ rows / len(rows)


def _factors(calibration: FloatArray, source: FloatArray) -> FloatArray:
    """One factor per class ``(c,)`` that brings the mean probability there to the class's share."""
    if calibration.shape[1:] != source.shape or not len(calibration):
        raise ValueError(f"calibration has probabilities {calibration.shape}, the mix {len(source)} classes")
    factors = np.ones_like(source)
    for _ in range(STEPS):
        change = source / _scaled(calibration, factors).mean(0)
        factors *= change
        if np.abs(change - 1).max() < TOLERANCE:
            break
    return factors


def _scaled(probs: FloatArray, factors: FloatArray) -> FloatArray:
    found = probs * factors
    return found / found.sum(1, keepdims=True)


def adapt(prediction: Prediction, mix: ArrayLike, source_mix: ArrayLike) -> Prediction:
    """The prediction corrected for another class mix; the label stays the network's own.

    Every confidence moves by the same log-odds as its label's share against that of the other classes. Where
    another class is more probable than the label afterwards, `Prediction.flips` says so.

    Args:
        prediction: made for ``source_mix``.
        mix: ``(c,)`` shares of the true classes where it is used.
        source_mix: ``(c,)`` shares it was calibrated for.

    Example:
        >>> probs = torch.tensor([[0.6, 0.4]])
        >>> p = Prediction(torch.tensor([0]), probs, probs[:, 0])
        >>> adapt(p, [0.25, 0.75], [0.5, 0.5]).confidence
        tensor([0.3333])
    """
    kind = checked(prediction).probs.dtype
    before = prediction.probs.double()
    after = _reweighted(before, mix, source_mix)
    own = prediction.label[:, None]
    old, confidence = (probs.gather(1, own)[:, 0] for probs in (before, after))
    change = log_odds(confidence) - log_odds(old)
    slope = confidence * (1 - confidence) / (old * (1 - old)).clamp_min(1e-12)
    return replace(
        prediction,
        probs=after.to(kind),
        confidence=confidence.to(kind),
        std=None if prediction.std is None else prediction.std * slope.to(kind),
        lower=_moved(prediction.lower, change, kind),
        upper=_moved(prediction.upper, change, kind),
    )


def _reweighted(probs: Tensor, mix: ArrayLike, source_mix: ArrayLike) -> Tensor:
    n_classes = probs.shape[1]
    weight = _shares(mix, n_classes, zero=True) / _shares(source_mix, n_classes)
    weighted = probs * torch.from_numpy(weight).to(probs.device)
    return weighted / weighted.sum(1, keepdim=True).clamp_min(1e-300)


def _moved(end: Tensor | None, change: Tensor, kind: torch.dtype) -> Tensor | None:
    """One end of the interval after ``change`` in log-odds."""
    if end is None:
        return None
    return torch.sigmoid(log_odds(end.double()) + change).to(kind)


def _shares(mix: ArrayLike, n_classes: int, zero: bool = False) -> FloatArray:
    shares = np.asarray(mix.cpu() if isinstance(mix, Tensor) else mix, dtype=np.float64)
    if shares.shape != (n_classes,):
        raise ValueError(f"a class mix must have {n_classes} shares, one per class, got shape {shares.shape}")
    enough = shares >= 0 if zero else shares > 0
    total = shares.sum()
    if not enough.all() or not abs(total - 1) <= 1e-3:
        raise ValueError(
            f"a class mix must be positive and sum to 1, got {np.round(shares, 4).tolist()}; "
            f"give classes without samples a small share"
        )
    return shares / total
