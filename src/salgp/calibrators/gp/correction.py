"""From a conditioned GP to calibrated confidences: the global correction, and that of each layer.

In a stacked structure (one row per sample and layer) the global prediction gives the rows the layer index -1:
what is tied to a layer drops, what all layers share stays (with it the ``a`` of ``B = a 11' + diag(b)``,
unless the structure says otherwise), and the function is averaged over the sample's ``L`` inputs under the
joint posterior. Layer predictions keep their local terms. A structure that shares nothing (``icm``, ``lcm``
of rank 1 and more) averages its layer predictions, again under the joint posterior.
"""

from dataclasses import replace

import torch
from torch import Tensor

from salgp.calibrators.gp.structures import Structure, rows_of
from salgp.features import Features
from salgp.gp.covariance import Sum, gaps
from salgp.gp.fitting import Fitted
from salgp.gp.kernels import Rows, pairs_of
from salgp.gp.regression import Posterior, remaining
from salgp.prediction import LayerTerms, Prediction

__all__ = ["predict_corrections"]

Moments = tuple[Tensor, Tensor, Tensor, Tensor]
"""Global mean and variance ``(n,)``, and layer means and variances ``(n, L)``."""

CHUNK_ENTRIES = 1_000_000
"""Covariance entries computed at once during prediction: small enough for the cache, whatever the number of
samples.
"""


def to_prediction(structure: Structure, fitted: Fitted, features: Features, temperature: float) -> Prediction:
    """Turn the GP's correction into calibrated confidences with error bars and layer terms.

    Args:
        structure: covariance and row layout.
        fitted: the GP.
        features: of the samples.
        temperature: by which the other classes share what is left.
    """
    mean, variance, *of_layers = predict_corrections(structure, fitted.posterior, features)
    corrected, std = features.confidence.double() + mean, variance.sqrt()
    terms = _terms(structure, *of_layers)
    return Prediction.from_confidence(features, corrected, std, layers=terms, temperature=temperature)


def _terms(structure: Structure, mean: Tensor, variance: Tensor) -> LayerTerms | None:
    """Corrections of each layer or term, where they have their own."""
    names = structure.terms or structure.layers
    if mean.shape[1] != len(names):
        return None
    return LayerTerms(names, mean, variance.sqrt(), "confidence", additive=bool(structure.terms))


def predict_corrections(structure: Structure, posterior: Posterior, features: Features) -> Moments:
    """Moments of the latent correction."""
    moments = _stacked_moments if structure.stacked else _sample_moments
    return moments(structure, posterior, rows_of(structure, features))


def chunk_size(structure: Structure, fitted: Fitted) -> int:
    """Samples predicted at once so that no more than `CHUNK_ENTRIES` covariances are held."""
    of_one = len(fitted.posterior.alpha) * len(structure.layers)
    return max(1, CHUNK_ENTRIES // of_one)


def _sample_moments(structure: Structure, posterior: Posterior, rows: Rows) -> Moments:
    """One row per sample; the terms of a ``sum`` are independent functions with their own moments."""
    covariance, theta = posterior.covariance, posterior.theta
    if not isinstance(covariance, Sum) or not structure.terms:
        mean, variance = posterior(rows)
        return mean, variance, mean[:, None], variance[:, None]
    compared, single = gaps(rows, posterior.rows, covariance), rows.single()
    own = gaps(single, single, covariance)
    terms = covariance.terms
    projected = [posterior.project(term(theta, compared)) for term in terms]
    means, reduced = zip(*projected, strict=True)
    priors = [term(theta, own).flatten() for term in terms]
    variances = list(map(remaining, priors, reduced))
    variance = remaining(sum(priors[1:], priors[0]), sum(reduced[1:], reduced[0]))
    return sum(means), variance, torch.stack(means, 1), torch.stack(variances, 1)


def _stacked_moments(structure: Structure, posterior: Posterior, rows: Rows) -> Moments:
    """One row per sample and layer."""
    covariance, theta = posterior.covariance, posterior.theta
    compared = gaps(rows, posterior.rows, covariance)
    layer_mean, layer_reduced = posterior.project(covariance(theta, compared))
    layer_variance = remaining(covariance.variance(theta, rows), layer_reduced)
    mean, reduced, seen = layer_mean, layer_reduced, rows
    if covariance.shares("layer"):
        seen = rows.ungrouped("layer")
        compared = replace(compared, pairs=pairs_of(seen, posterior.rows))
        mean, reduced = posterior.project(covariance(theta, compared))
    within = covariance.between(theta, seen, seen).mean((-1, -2))
    variance = remaining(within, reduced.mean(1))
    return mean.mean(1), variance, layer_mean, layer_variance
