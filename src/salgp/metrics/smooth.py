"""Smooth calibration error: no bins, and a bandwidth that the data choose.

Blasiok & Nakkiran (2024) smooth the residual ``correct - confidence`` over the confidence axis with a
Gaussian kernel reflected at 0 and 1. A reflected Gaussian is the heat kernel of the interval with insulated
ends, whose eigenfunctions are cosines, so one discrete cosine transform smooths exactly at every bandwidth.
"""

import numpy as np

from salgp.metrics.metric import ArrayLike, FloatArray, as_scored, metric

__all__ = []

_GRID = 2048


@metric(
    "Confidence error without bins",
    "Gap between confidence and accuracy, smoothed instead of binned.",
    larger_is_better=False,
)
def smooth_ece(confidence: ArrayLike, correct: ArrayLike) -> float:
    r"""Smooth expected calibration error, the bandwidth :math:`\sigma` at which the smoothed error equals it.

    :math:`\mathrm{smECE}_\sigma = \int_0^1 |\frac{1}{n} \sum_i K_\sigma(t, s_i) (c_i - s_i)| dt` falls with
    :math:`\sigma`; the value returned solves :math:`\mathrm{smECE}_\sigma = \sigma`. relplot computes the
    same quantity to about three digits (it stops its search there); here it is solved on a grid of 2048
    points.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.

    Returns:
        A value in [0, 1].

    Example:
        >>> round(smooth_ece([0.9] * 10, [1] * 6 + [0] * 4), 2)
        0.3
    """
    from scipy.optimize import brentq

    s, c = as_scored(confidence, correct)
    spectrum = _spectrum(s, c - s)
    if _smoothed_error(spectrum, 0.0) < 1e-12:
        return 0.0
    root = brentq(lambda sigma: _smoothed_error(spectrum, sigma) - sigma, 0.0, 2.0, xtol=1e-10)
    return min(float(root), 1.0)


def _spectrum(confidence: FloatArray, residual: FloatArray) -> FloatArray:
    """Cosine transform of the residuals, shared linearly between the two nearest grid points."""
    from scipy.fft import dct

    place = np.clip(confidence * _GRID - 0.5, 0, _GRID - 1)
    left = np.minimum(place.astype(np.int64), _GRID - 2)
    right_share = place - left
    to_left = np.bincount(left, residual * (1 - right_share), _GRID)
    to_right = np.bincount(left + 1, residual * right_share, _GRID)
    mass = (to_left + to_right) / len(residual)
    return np.asarray(dct(mass, norm="ortho"))


def _smoothed_error(spectrum: FloatArray, sigma: float) -> float:
    from scipy.fft import idct

    width = np.pi * sigma * np.arange(_GRID)
    damping = np.exp(-0.5 * width**2)
    smooth = idct(spectrum * damping, norm="ortho")
    return float(np.abs(smooth).sum())
