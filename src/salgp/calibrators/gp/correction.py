"""From a conditioned GP to calibrated confidences: the global correction, and that of each layer.

In a stacked structure (one row per sample and layer) the global prediction gives the rows the layer index -1:
what is tied to a layer drops, what all layers share stays (with it the ``a`` of ``B = a 11' + diag(b)``,
unless the structure says otherwise), and the function is averaged over the sample's ``L`` inputs under the
joint posterior. Layer predictions keep their local terms. A structure that shares nothing (``icm``, ``lcm``
of rank 1 and more) averages its layer predictions, again under the joint posterior.
"""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.calibrators.gp.structures import Structure, log_odds_design, rows_of
from salgp.features import Features
from salgp.gp.covariance import Covariance
from salgp.gp.fitting import Fitted
from salgp.gp.kernels import Gaps, Rows, gaps, pairs_of, self_gaps
from salgp.gp.likelihood import sigmoid_moments
from salgp.gp.regression import Posterior, remaining
from salgp.prediction import INTERVAL_SD, LayerTerms, Prediction

__all__ = ["predict_corrections"]

CHUNK_ENTRIES = 1_000_000
"""Covariance entries computed at once during prediction: small enough for the cache, whatever the number of
samples.
"""


def to_prediction(
    structure: Structure,
    fitted: Fitted,
    features: Features,
    design: Tensor | None = None,
    temperature: float = 1.0,
) -> Prediction:
    """Turn the GP's correction into calibrated confidences with intervals and layer terms; the other classes
    share what is left by the softmax of this temperature.
    """
    fitted = fitted.to(features.logits.device)
    mean, variance, layer_mean, layer_variance = predict_corrections(structure, fitted.posterior, features)
    scale = "log-odds" if len(fitted.mean_weights) else "confidence"
    names = structure.terms or structure.layers
    terms = (
        LayerTerms(names, layer_mean, layer_variance.sqrt(), scale, bool(structure.terms))
        if structure.has_layer_terms
        else None
    )
    return corrected(fitted, features, mean, variance, terms, design, temperature)


def corrected(
    fitted: Fitted,
    features: Features,
    mean: Tensor,
    variance: Tensor,
    terms: LayerTerms | None = None,
    design: Tensor | None = None,
    temperature: float = 1.0,
) -> Prediction:
    """Apply a correction of given mean and variance to the network's confidence (Gaussian) or log-odds
    (Bernoulli).
    """
    if len(fitted.mean_weights) == 0:
        return Prediction.from_confidence(
            features,
            features.confidence.double() + mean,
            variance.sqrt(),
            layers=terms,
            temperature=temperature,
        )
    log_odds = (log_odds_design(features) if design is None else design) @ fitted.mean_weights + mean
    confidence, std = sigmoid_moments(log_odds, variance)
    half = INTERVAL_SD * variance.sqrt()
    return Prediction.from_confidence(
        features,
        confidence,
        std,
        (torch.sigmoid(log_odds - half), torch.sigmoid(log_odds + half)),
        layers=terms,
        temperature=temperature,
    )


def predict_corrections(
    structure: Structure, posterior: Posterior, features: Features
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Global mean and variance ``(n,)``, and layer means and variances ``(n, L)``, of the latent
    correction.
    """
    moments = _stacked_moments if structure.stacked else _sample_moments
    return moments(structure, posterior, rows_of(structure, features))


def chunk_size(structure: Structure, fitted: Fitted) -> int:
    """Samples predicted at once so that no more than `CHUNK_ENTRIES` covariances are held."""
    return max(1, CHUNK_ENTRIES // (len(fitted.posterior.alpha) * len(structure.layers)))


def _sample_moments(
    structure: Structure, posterior: Posterior, rows: Rows
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row per sample; the terms of a ``sum`` are independent functions with their own moments."""
    compared, own = gaps(rows, posterior.rows, posterior.covariance), self_gaps(rows, posterior.covariance)
    if not structure.terms:
        mean, variance = posterior.moments(
            posterior.covariance(posterior.theta, compared), posterior.covariance(posterior.theta, own)
        )
        return mean, variance, mean[:, None], variance[:, None]
    terms = posterior.covariance.terms  # type: ignore[attr-defined]
    priors = [term(posterior.theta, own) for term in terms]
    means, reduced = zip(*(posterior.project(term(posterior.theta, compared)) for term in terms), strict=True)
    variances = [remaining(prior, part) for prior, part in zip(priors, reduced, strict=True)]
    return sum(means), remaining(sum(priors), sum(reduced)), torch.stack(means, 1), torch.stack(variances, 1)


def _stacked_moments(
    structure: Structure, posterior: Posterior, rows: Rows
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row per sample and layer."""
    covariance, theta = posterior.covariance, posterior.theta
    free, local = structure.split()
    compared = gaps(rows, posterior.rows, covariance)
    shared = None if free is None else posterior.project(free(theta, compared))
    layers = _added(shared, _of_layers(posterior, local, rows, compared))
    layer_variance = remaining(covariance(theta, self_gaps(rows, covariance)), layers[1])
    whole, seen = layers, rows
    if covariance.shares("layer"):
        seen = rows.ungrouped("layer")
        stays = local if local is not None and local.shares("layer") else None
        whole = _added(shared, _of_layers(posterior, stays, seen, compared))
    within = covariance(theta, gaps(seen, seen, covariance)).mean((-1, -2))
    return whole[0].mean(1), remaining(within, whole[1].mean(1)), layers[0], layer_variance


def _of_layers(
    posterior: Posterior, local: Covariance | None, rows: Rows, compared: Gaps
) -> tuple[Tensor, Tensor] | None:
    """Projection of the part that depends on the layer, under the groups of ``rows``."""
    if local is None:
        return None
    if not local.reads():  # the same for every sample
        rows = rows.map(lambda x: x[:1])
    Kfu = local(posterior.theta, compared.with_pairs(pairs_of(rows, posterior.rows)))
    return posterior.project(Kfu)


def _added(a: tuple[Tensor, Tensor] | None, b: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Sum of two projections, of which one may not be there."""
    if a is None or b is None:
        there = a if b is None else b
        assert there is not None
        return there
    return a[0] + b[0], a[1] + b[1]
