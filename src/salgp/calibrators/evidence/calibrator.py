"""Layer evidence: the log-odds of being correct from what every layer has to say, made to hold under shift.

Each layer answers two questions with the training set as reference (`salgp.calibrators.evidence.reference`):
does it agree with the predicted class, and how novel is the input to it? With both standardised on the
calibration set (``A_l``, ``N_l``), and ``t`` the log-odds of the temperature-scaled confidence, correctness
is Bernoulli with log-odds

    f = a + b t + sum_l u_l g(N_l) A_l - sum_l v_l h(P_l) + delta_c,      b, u, v >= 0,

    P_l = min(N_l, ..., N_L),   h(P) = log(1 + softplus(P)),   g(N) = 1 / (1 + 0.3 softplus(N - 1)).

Monotone terms extrapolate sanely: more novelty never raises a confidence, more agreement never lowers it.
What is new to an early layer counts only as far as it persists through all later ones, ``P_l``: a network
that has undone a change of contrast or sharpness is not blamed for it. The agreement of a layer counts less
where that layer has not seen such input. Each predicted class ``c`` is a group with an offset of its own,
``delta_c ~ N(0, class_spread^2)``: networks that are lost tend to fall into the same few classes. The problem
is convex in the weights.

Fitted on the calibration set together with perturbed copies of it (`Features.groups`), original samples carry
most of the weight, which keeps confidences right in domain, and errors among the copies count ``caution``
times: a shift met in the field is rarely one of those rehearsed, and misses the network more often than they
do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.calibrators.baselines.scaling import best_temperature
from salgp.calibrators.evidence.model import (
    EvidenceModel,
    LogOdds,
    Seen,
    copies,
    fit_log_odds,
    leave_group_out,
    log_odds,
    originals,
    sample_weights,
    scaled_design,
    standardised,
)
from salgp.calibrators.evidence.reference import (
    NEAREST,
    WIDTH,
    Evidence,
    Reference,
    layer_evidence,
    make_reference,
)
from salgp.calibrators.evidence.streaming import stream_evidence
from salgp.calibrators.source import Source
from salgp.features import Features, as_labels
from salgp.gp.likelihood import sigmoid_moments
from salgp.gp.updating import spread_choice
from salgp.metrics import ece, nll_correct
from salgp.prediction import LayerTerms, Prediction

__all__ = ["LayerEvidence"]


class LayerEvidence(Calibrator):
    """Log-odds of being correct from agreement and novelty of every layer; our default under shift.

    Give it the training set as ``reference`` and perturbed copies in ``features`` (``extract(...,
    perturb="auto")``). Without a reference, the calibration set serves as one, each sample and its copies
    compared with the others; without copies, it is calibrated in domain and leans on monotonicity alone under
    shift.

    Args:
        k: nearest reference samples averaged over.
        width: principal directions kept per layer.
        reference: what is kept of the training set: ``prototypes``, ``full``, ``sample``, ``herding`` or
            ``statistics`` (`salgp.calibrators.evidence.condense` says what each stores). Without a training
            set the originals are kept whole, except by ``statistics``.
        size: points per class and layer; by default 200, and fewer where there are more than 50 classes.
        precision: in which points are stored: ``half``, ``single`` or ``8-bit``.
        clean: share of the weight given to original samples, where there are copies.
        caution: weight of an error among the copies, relative to a correct prediction.
        ridge: strength of the pull of ``u`` and ``v`` to 0 and of ``b`` to 1.
        class_spread: prior standard deviation of the offset of a predicted class, in log-odds; 0 for no
            offsets.
        looseness: factor on the standard deviation of the log-odds, for what the model does not know about
            itself.
        seed: of the reference's points.

    Attributes:
        evidence_: the fitted model: reference samples, temperature of ``t``, standardisation of the evidence,
            and the posterior of the weights ``a, b, u, v`` and of the offsets of the classes.
        relevance_: layer name -> standard deviation of its term over the calibration data, in log-odds.
        loo_confidence_: ``(n,)`` confidence of each original by the model without it and its copies (one
            Newton step).
        loo_std_: ``(n,)`` its standard deviation.
        seen_: the rows it was fitted on, for `update` and `forget`.
        loo_scores_: ``ece`` and ``nll`` of correctness of ``loo_confidence_``: what to expect on new data of
            the same kind.
        novelty_: ``(n, L)`` standardised novelty of the originals.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(300, 2, generator=g)
        >>> features = Features(3 * x, {"a": x})
        >>> labels = (x + 0.7 * torch.randn(300, 2, generator=g)).argmax(dim=1)
        >>> calibrator = LayerEvidence().fit(
        ...     features[:150], labels[:150], reference=(features[150:], labels[150:])
        ... )
        >>> calibrator.predict(features[:2]).layers.names
        ('confidence', 'predicted class', 'a')
    """

    name: ClassVar[str] = "layer-evidence"
    needs_layers: ClassVar[bool] = True
    uses_copies: ClassVar[bool] = True
    display_name: ClassVar[str] = "layer evidence"

    def __init__(
        self,
        k: int = NEAREST,
        width: int = WIDTH,
        reference: str = "prototypes",
        size: int | None = None,
        precision: str = "half",
        clean: float = 0.8,
        caution: float = 1.25,
        ridge: float = 0.2,
        class_spread: float = 1.0,
        looseness: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.k = k
        self.width = width
        self.reference = reference
        self.size = size
        self.precision = precision
        self.clean = clean
        self.caution = caution
        self.ridge = ridge
        self.class_spread = class_spread
        self.looseness = looseness
        self.seed = seed

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        known, evidence = self.compared(features, labels, reference)
        self.learn(features, labels, evidence, known)

    def compared(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None
    ) -> tuple[Reference, Evidence]:
        """The reference, condensed, and what it says of all rows; the originals serve where there is none,
        each left out of what it and its copies are compared with.
        """
        options: dict[str, Any] = {
            "k": self.k,
            "width": self.width,
            "precision": self.precision,
            "seed": self.seed,
        }
        first, original = originals(features)
        alone = reference is None and self.reference != "statistics"
        base = (features[first], labels[first]) if reference is None else reference
        form = "full" if alone else self.reference
        known = make_reference(*base, form=form, size=self.size, **options)
        return known, layer_evidence(known, features, original if alone else None)

    def fit_stream(self, source: Source) -> Self | None:
        """Fit to all rows of a source that has a reference; None where it has none."""
        if not source.has_reference:
            return None
        rows = stream_evidence(
            source,
            k=self.k,
            width=self.width,
            form=self.reference,
            size=self.size,
            precision=self.precision,
            seed=self.seed,
        )
        self.learn(rows.features, rows.labels, rows.evidence, rows.reference)
        self.n_classes_, self.layer_widths_ = rows.features.n_classes, rows.widths
        return self

    def learn(self, features: Features, labels: Tensor, evidence: Evidence, reference: Reference) -> None:
        """Fit to evidence, against this reference, that is known already."""
        if not 0 < self.clean <= 1 or min(self.caution, self.ridge) <= 0 or self.class_spread < 0:
            got = (
                f"clean={self.clean}, caution={self.caution}, ridge={self.ridge}, "
                f"class_spread={self.class_spread}"
            )
            raise ValueError(f"need 0 < clean <= 1, caution > 0, ridge > 0, class_spread >= 0; got {got}")
        first, original = originals(features)
        label, correct = features.label, features.correct(labels).double()
        temperature = best_temperature(features.logits[first], labels[first], warn=False)[0]
        scales, X = scaled_design(features, evidence, temperature, first)
        self.seen_ = Seen(X, label, correct, copies(features))
        posterior, weight = self._posterior(features.n_classes)
        self.evidence_ = EvidenceModel(reference, temperature, scales, posterior)
        f, variance = (x[first] for x in leave_group_out(X, label, correct, weight, posterior, original))
        self.loo_confidence_, self.loo_std_ = (
            torch.sigmoid(f),
            sigmoid_moments(f, self.looseness**2 * variance)[1],
        )
        self.loo_scores_ = {
            "ece": ece(self.loo_confidence_, correct[first]),
            "nll": nll_correct(self.loo_confidence_, correct[first]),
        }
        self.novelty_ = standardised(evidence, scales)[1][first]
        terms = self._terms(X, features)[0]
        self.relevance_ = dict(
            zip(features.layer_names, terms[:, 2:].std(dim=0, correction=0).tolist(), strict=True)
        )

    def _predict(self, features: Features) -> Prediction:
        return self.from_evidence(features, layer_evidence(self.evidence_.reference, features))

    def predictor(self, layers: bool, precision: str) -> Callable[[Features], Prediction] | None:
        """Neighbours in single precision, without the second look at their distances."""

        @torch.no_grad()
        def predict(features: Features) -> Prediction:
            features = self.check_input(features)
            reference = self.evidence_.reference
            evidence = layer_evidence(reference, features, refine=precision == "double")
            return self.from_evidence(features, evidence)

        return predict

    def from_evidence(self, features: Features, evidence: Evidence) -> Prediction:
        """Prediction from evidence that is known already."""
        X, f, variance = self.evidence_.log_odds(features, evidence)
        variance = self.looseness**2 * variance
        names = ("confidence", "predicted class", *features.layer_names)
        layers = LayerTerms(names, *self._terms(X, features), "log-odds", True)
        novelty = (-X[:, 2 + len(features.layers) :]).mean(dim=1)
        return Prediction.from_log_odds(
            features,
            f,
            variance,
            layers=layers,
            novelty=novelty,
            temperature=self.evidence_.temperature,
        )

    def _chunk(self) -> int:
        return 8192

    def update(self, features: Features, labels: Any) -> Self:
        """Add labelled samples; reference, temperature and scales stay, the weights are those of a fit to all
        rows from scratch.
        """
        self.seen_ = self.seen_.joined(self._observed(features, labels))
        return self._refresh()

    def forget(self, features: Features, labels: Any) -> Self:
        """Take back samples that were added by `update`, or fitted on with a reference of their own."""
        self.seen_ = self.seen_.without(self._observed(features, labels))
        return self._refresh()

    def suggest(self, features: Features, k: int) -> Tensor:
        """Indices of the ``k`` unlabelled samples whose labels would teach most: uncertain, and unlike each
        other.
        """
        std = self.predict(features).std
        assert std is not None
        return spread_choice(features, std, k)

    def _observed(self, features: Features, labels: Any) -> Seen:
        features = self.check_input(features)
        y = as_labels(labels, len(features), self.n_classes_).to(features.logits.device)
        with torch.no_grad():
            X = self.evidence_.log_odds(features)[0]
        return Seen(X, features.label, features.correct(y).double(), copies(features))

    def _refresh(self) -> Self:
        self.evidence_ = replace(self.evidence_, posterior=self._posterior(self.n_classes_)[0])
        return self

    def _posterior(self, n_classes: int) -> tuple[LogOdds, Tensor]:
        seen = self.seen_
        weight = sample_weights(seen.is_copy, seen.correct, self.clean, self.caution)
        return fit_log_odds(
            seen.X, seen.label, seen.correct, weight, n_classes, self.ridge, self.class_spread
        ), weight

    def standard_novelty(self, features: Features) -> Tensor:
        """Novelty of each layer, ``(n, L)``, in standard deviations of the calibration set."""
        return standardised(
            layer_evidence(self.evidence_.reference, self.check_input(features)), self.evidence_.scales
        )[1]

    def _terms(self, X: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """Log-odds added by the confidence, the predicted class and each layer, and their standard
        deviations, ``(n, 2 + L)``.
        """
        L, label, typical, model = (
            len(features.layers),
            features.label,
            self.evidence_.scales.typical.to(X),
            self.evidence_.posterior.to(X),
        )
        moved = X - typical
        moved[:, :2] = X[:, :2]
        w, S, pull = model.weights, model.covariance, model.pull[label]
        picks = [[0, 1], *([2 + j, 2 + L + j] for j in range(L))]
        mean = [moved[:, p] @ w[p] for p in picks]
        mean[0] = mean[0] + typical[2:] @ w[2:] - log_odds(features, 1.0, 20.0)
        variance = [((moved[:, p] @ S[p][:, p]) * moved[:, p]).sum(dim=1) for p in picks]
        mean.insert(1, model.offsets[label])
        variance.insert(1, ((pull @ S) * pull).sum(dim=1) + model.spare[label])
        return torch.stack(mean, dim=1), torch.stack(variance, dim=1).clamp_min(0).sqrt()
