"""SAL-GP: Gaussian processes on the pooled features of every layer, with structured kernels.

The paper regresses the softmax residual ``r = correct - s`` on the layers (``likelihood="gaussian"``); the
calibrated confidence is ``s + mean`` with the posterior variance. ``likelihood="bernoulli"`` models the
log-odds of being correct instead, ``f = a + b logit(s) + g``, so that no clipping is needed.

Global and layer predictions. In a stacked structure (one row per sample and layer) the global prediction
gives the rows the layer index -1: terms tied to a layer drop, the shared function is evaluated at the
sample's ``L`` inputs and averaged under the joint posterior. Layer predictions keep their local terms. A
structure without a shared part (``icm``, ``lcm``) averages its layer predictions, again under the joint
posterior. In ``sum`` the layer terms add up to the whole correction exactly, each with its own variance.

``inputs="evidence"`` puts the Gaussian processes on what the layers say of a prediction
(`salgp.calibrators.evidence.calibrator`: agreement and novelty, two numbers per layer) instead of on their
features; with a Bernoulli likelihood the mean is then ``a + b f``, ``f`` the monotone log-odds of layer
evidence, and the processes take what is not monotone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator, check_features
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.layerwise.streaming import fit_rows, take_learned
from salgp.calibrators.layerwise.structures import Structure, log_odds_design, rows_of, structure
from salgp.calibrators.source import Source
from salgp.features import Features, as_labels
from salgp.gp.covariance import Rows, gaps, self_gaps
from salgp.gp.fast import plan_of
from salgp.gp.fitting import Fitted, Settings, fit_bernoulli, fit_gaussian
from salgp.gp.likelihood import Sites, sigmoid_moments
from salgp.gp.regression import Posterior, remaining
from salgp.gp.updating import extend, new_sites, retract, spread_choice
from salgp.prediction import LayerTerms, Prediction

__all__ = ["SALGP", "corrected", "predict_corrections", "to_prediction"]

CHUNK_ENTRIES = 1_000_000
"""Covariance entries computed at once during prediction: small enough for the cache, whatever the number of
samples.
"""


class SALGP(Calibrator):
    """Layerwise Gaussian process calibration (SAL-GP): the paper's structured kernels and ours.

    Args:
        covariance: ``sum`` (ours), ``ml``, ``hl`` (the paper's), ``additive``, ``icm``, ``lcm``, ``nested``,
            ``concat``.
        likelihood: ``gaussian`` on the softmax residual, or ``bernoulli`` on correctness.
        kernel: base kernel: ``matern52``, ``matern32``, ``matern12``, ``rbf``.
        inference: ``exact``, ``inducing``, or ``auto`` by the number of rows.
        n_inducing: number of inducing rows. Stacked covariances on wide raw features may need 512 or more to
            match exact inference; the study's approximation table says how far off fewer are.
        rank: of ``B = W W' + diag(v)``; 0 is the paper's ``a 11' + diag(b)`` (``ml``), or 1 (``icm``,
            ``lcm``).
        n_latent: number of terms of ``lcm``.
        groups: group levels of ``nested``: ``layer``, ``class``, ``layer/class``.
        tempering: weigh each of a sample's ``L`` stacked rows by ``1/L``, since they repeat one observation;
            without it the variance is too small by about that factor.
        optimizer: ``lbfgs``, or ``adam`` for the paper's recipe.
        max_steps: of the optimiser.
        learning_rate: of Adam.
        restarts: further optimisations from random starting points; the best evidence wins.
        seed: of the restarts.
        inputs: ``features`` of each layer (the paper), or their ``evidence``; perturbed copies then count for
            the GP as much as originals.
        objective: learn hyperparameters by ``evidence`` (the paper), by ``leave-one-out`` density of each
            sample given the others, or ``auto``: leave-one-out where a Gaussian likelihood sees each sample's
            residual once per layer, which the evidence takes for so many independent observations.

    Attributes:
        fitted_: the conditioned GP.
        structure_: covariance and row layout.
        evidence_: where ``inputs="evidence"``, the monotone model below the GP.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> features = Features(torch.randn(60, 3, generator=g), {"a": torch.randn(60, 4, generator=g)})
        >>> prediction = SALGP().fit(features, torch.arange(60) % 3).predict(features)
        >>> prediction.confidence.shape, prediction.layers.names
        (torch.Size([60]), ('a', 'confidence'))
    """

    name: ClassVar[str] = "sal-gp"
    gives_confidence_only: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = True

    def __init__(
        self,
        covariance: str = "sum",
        likelihood: str = "gaussian",
        kernel: str = "matern52",
        inference: str = "auto",
        n_inducing: int = 256,
        rank: int = 0,
        n_latent: int = 2,
        groups: Sequence[str] = ("layer",),
        tempering: bool = False,
        optimizer: str = "lbfgs",
        max_steps: int | None = None,
        learning_rate: float = 5e-3,
        restarts: int = 0,
        seed: int = 0,
        inputs: str = "features",
        objective: str = "auto",
    ) -> None:
        self.covariance = covariance
        self.likelihood = likelihood
        self.kernel = kernel
        self.inference = inference
        self.n_inducing = n_inducing
        self.rank = rank
        self.n_latent = n_latent
        self.groups = groups
        self.tempering = tempering
        self.optimizer = optimizer
        self.max_steps = max_steps
        self.learning_rate = learning_rate
        self.restarts = restarts
        self.seed = seed
        self.inputs = inputs
        self.objective = objective

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        how = (
            self.inference,
            self.n_inducing,
            self.optimizer,
            self.max_steps,
            self.learning_rate,
            self.restarts,
            self.seed,
        )
        settings = Settings(*how, self.objective)
        if self.inputs not in ("features", "evidence"):
            raise ValueError(f"inputs must be 'features' or 'evidence', got {self.inputs!r}")
        self.evidence_ = (
            LayerEvidence(seed=self.seed).fit(features, labels, reference).evidence_
            if self.inputs == "evidence"
            else None
        )
        seen, design = self._seen(features)
        self.structure_ = structure(
            self.covariance,
            seen.widths,
            seen.n_classes,
            kernel=self.kernel,
            rank=self.rank,
            n_latent=self.n_latent,
            groups=tuple(self.groups),
        )
        self.fitted_ = fit_structure(
            self.structure_, seen, labels, self.likelihood, settings, self.tempering, design
        )

    def _predict(self, features: Features) -> Prediction:
        return to_prediction(self.structure_, self.fitted_, *self._seen(features), self.rest_temperature_)

    def _seen(self, features: Features) -> tuple[Features, Tensor]:
        """What the GP sees of the samples, and the columns of its parametric mean."""
        if self.evidence_ is None:
            return features, log_odds_design(features)
        X, f, _ = self.evidence_.log_odds(features)
        L = len(features.layers)
        pairs = {name: X[:, [2 + j, 2 + L + j]] for j, name in enumerate(features.layer_names)}
        return replace(features, layers=pairs), torch.stack([torch.ones_like(f), f], dim=1)

    def _chunk(self) -> int:
        return chunk_size(self.structure_, self.fitted_)

    def fit_stream(self, source: Source) -> Self | None:
        """Fit to all rows of a source; None for ``inputs="evidence"``, which needs them in memory."""
        if self.inputs == "evidence":
            return None
        return take_learned(self, fit_rows(self, source))

    def predictor(self, layers: bool, precision: str) -> Callable[[Features], Prediction] | None:
        """The fast path of sums of stationary terms."""
        return None if self.evidence_ is not None else fast_predictor(self, layers, precision)

    def update(self, features: Features, labels: Any) -> Self:
        """Add labelled samples without learning the hyperparameters again; the same as conditioning on all
        from scratch.
        """
        self.fitted_ = extend(self.fitted_, *self._observed(features, labels))
        return self

    def forget(self, features: Features, labels: Any) -> Self:
        """Take back samples that were fitted on or added (with a Gaussian likelihood, whose sites do not
        depend on the rest).
        """
        if self.likelihood != "gaussian":
            raise ValueError(
                "forget needs likelihood='gaussian': Bernoulli sites depend on every sample; "
                "fit again on what is to be kept"
            )
        self.fitted_ = retract(self.fitted_, *self._observed(features, labels))
        return self

    def suggest(self, features: Features, k: int) -> Tensor:
        """Indices of the ``k`` unlabelled samples whose labels would teach most: uncertain, and unlike each
        other.
        """
        std = self.predict(features).std
        assert std is not None
        return spread_choice(features, std, k)

    def _observed(self, features: Features, labels: Any) -> tuple[Rows, Sites]:
        self._check_fitted()
        check_features(features, with_layers=True)
        y = as_labels(labels, len(features), self.n_classes_).to(features.logits.device)
        features, design = self._seen(features.select(list(self.layer_widths_)))
        repeats = len(self.structure_.layers) if self.structure_.stacked else 1
        rows = rows_of(self.structure_, features)
        rows = rows.flatten() if self.structure_.stacked else rows
        weight = 1.0 / repeats if self.tempering else 1.0
        with torch.no_grad():
            if self.likelihood == "gaussian":
                return rows, new_sites(
                    self.fitted_, rows, features.residual(y).double().repeat_interleave(repeats), None, weight
                )
            offset = (design @ self.fitted_.mean_weights).repeat_interleave(repeats)
            return rows, new_sites(
                self.fitted_, rows, features.correct(y).double().repeat_interleave(repeats), offset, weight
            )

    @property
    def coregionalisation_(self) -> Tensor | None:
        """The learned layer matrix ``B`` (of the first latent process), where the covariance has one."""
        from salgp.gp.covariance import Index, Product, Sum

        covariance = self.structure_.covariance
        terms = covariance.terms if isinstance(covariance, Sum) else (covariance,)
        parts = [f for t in terms for f in (t.factors if isinstance(t, Product) else (t,))]
        index = [part for part in parts if isinstance(part, Index)]
        return index[0].matrix(self.fitted_.posterior.theta) if index else None


def fit_structure(
    structure: Structure,
    features: Features,
    labels: Tensor,
    likelihood: str,
    settings: Settings,
    tempering: bool = False,
    design: Tensor | None = None,
) -> Fitted:
    """Fit a structure's GP to the residuals (Gaussian) or to correctness (Bernoulli, with ``design`` the
    columns of its mean).
    """
    rows = rows_of(structure, features)
    repeats = len(structure.layers) if structure.stacked else 1
    rows = (rows.flatten() if structure.stacked else rows).map(
        lambda x: x.clone(memory_format=torch.contiguous_format)
    )
    weight = 1.0 / repeats if tempering else 1.0
    settings = replace(
        settings,
        repeats=repeats,
        objective="evidence" if tempering and settings.objective == "auto" else settings.objective,
    )
    if likelihood == "gaussian":
        target = features.residual(labels).double().repeat_interleave(repeats)
        return fit_gaussian(structure.covariance, rows, target, settings, weight)
    if likelihood == "bernoulli" and settings.objective == "leave-one-out":
        raise ValueError(
            "objective='leave-one-out' needs likelihood='gaussian'; a Bernoulli likelihood learns by evidence"
        )
    if likelihood == "bernoulli":
        correct = features.correct(labels).double().repeat_interleave(repeats)
        columns = log_odds_design(features) if design is None else design
        return fit_bernoulli(
            structure.covariance, rows, correct, columns.repeat_interleave(repeats, 0), settings, weight
        )
    raise ValueError(f"likelihood must be 'gaussian' or 'bernoulli', got {likelihood!r}")


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
    half = 1.6448536269514722 * variance.sqrt()
    return Prediction.from_confidence(
        features,
        confidence,
        std,
        (torch.sigmoid(log_odds - half), torch.sigmoid(log_odds + half)),
        layers=terms,
        temperature=temperature,
    )


def fast_predictor(calibrator: Any, layers: bool, precision: str) -> Callable[[Features], Prediction] | None:
    """A function that predicts like a fitted ``calibrator`` with ``structure_`` and ``fitted_``, by
    `salgp.gp.fast`; None where its covariance is not a sum of stationary terms on one row per sample.
    """
    structure, fitted = calibrator.structure_, calibrator.fitted_
    dtype = torch.float32 if precision == "single" else torch.float64
    plan = None if structure.stacked else plan_of(fitted.posterior, dtype)
    if plan is None:
        return None

    @torch.no_grad()
    def predict(features: Features) -> Prediction:
        features = calibrator.check_input(features)
        wanted = layers and bool(structure.terms)
        mean, variance, layer_mean, layer_variance = plan.moments(rows_of(structure, features), wanted)
        terms = None
        if layers:
            if layer_mean is None or layer_variance is None:
                layer_mean, layer_variance = mean[:, None], variance[:, None]
            scale = "log-odds" if len(fitted.mean_weights) else "confidence"
            names = structure.terms or structure.layers
            terms = LayerTerms(names, layer_mean, layer_variance.sqrt(), scale, bool(structure.terms))
        return corrected(fitted, features, mean, variance, terms)

    return predict


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
    """One row per sample and layer; the global function is the shared one, averaged over the
    sample's inputs.
    """
    shared, local = structure.split()
    theta, formula = posterior.theta, posterior.covariance if shared is None else shared
    compared = gaps(rows, posterior.rows, posterior.covariance)
    within = formula(theta, gaps(rows, rows, formula)).mean((-1, -2))
    mean, reduced = posterior.project(formula(theta, compared))  # (n, L), (n, L, r)
    layer_mean, layer_reduced = mean, reduced
    if shared is not None and local is not None:
        if not local.reads():  # the same for every sample
            compared = gaps(rows.map(lambda x: x[:1]), posterior.rows, local)
        own_mean, own_reduced = posterior.project(local(theta, compared))
        layer_mean, layer_reduced = mean + own_mean, reduced + own_reduced
    layer_variance = remaining(
        posterior.covariance(theta, self_gaps(rows, posterior.covariance)), layer_reduced
    )
    return mean.mean(1), remaining(within, reduced.mean(1)), layer_mean, layer_variance
