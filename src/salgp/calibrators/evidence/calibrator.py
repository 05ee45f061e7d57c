"""Layer evidence, the default: log-odds of being correct from every layer, right in domain and under shift.

Each layer is compared with the training set (`salgp.calibrators.evidence.layer_spaces`): does it agree with
the predicted class, and how novel is the input to it? A monotone logistic regression on the answers
(`salgp.calibrators.evidence.monotone`) is fitted twice, in domain and to augmented samples, and one shift
weight mixes both (`salgp.calibrators.evidence.mixture`). Every fit measures itself
(`salgp.calibrators.evidence.diagnostics`). The whole model is on one page: ``docs/how-it-works.md``.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator, Source, Training, chunks, one_at_a_time
from salgp.calibrators.checks import misaligned
from salgp.calibrators.evidence.class_probabilities import class_log_distances, fit_classes, rows_at_once
from salgp.calibrators.evidence.cross_fitting import MANY, fold_references, own_reference, split_reference
from salgp.calibrators.evidence.diagnostics import (
    HeldOut,
    check_answers,
    check_fit,
    family_variance,
    held_out,
    verdict,
)
from salgp.calibrators.evidence.fitting import TrainingRows, fit_mixture, training_rows
from salgp.calibrators.evidence.layer_spaces import (
    WIDTH,
    Evidence,
    Reference,
    ReferenceSettings,
    evidence_at_once,
    layer_evidence,
    make_reference,
)
from salgp.calibrators.evidence.mixture import LogOdds, Mixture, Samples, Scales, samples_of, scales_of
from salgp.calibrators.evidence.windows import Context, Windows, window_numbers, window_sums
from salgp.features import Features
from salgp.gp.linalg import threads_for
from salgp.labels import as_labels
from salgp.logits import shrunk_temperature
from salgp.neighbours import spread_choice
from salgp.prediction import LayerTerms, Prediction, spread_confidence

__all__ = ["LayerEvidence"]

ClassRows = tuple[Tensor, Tensor, Tensor]
"""Logits ``(m, C)``, log distances ``(L, m, C)`` to the classes and labels ``(m,)`` of some samples."""
COLUMNS = 16
"""About so many numbers of a row matter to a fit."""


class LayerEvidence(Calibrator):
    """Log-odds of being correct from agreement and novelty of the layers; our default.

    Give it the training set as ``reference`` and augmented samples in ``features`` (``extract(...,
    perturb="auto")``). Without a reference the calibration set serves as one, each sample compared with
    others. Without augmented samples it is calibrated in domain only.

    Args:
        width: principal directions kept per layer.
        size: reference points per class and layer; by default 200, and fewer where there are more than 50
            classes.
        layers_in_domain: use the layers in domain, or temperature scaling? None: the layers where samples
            left out show that they help.
        over_prediction: in a context, lower the confidence of a class that is predicted far more often than
            in calibration? False where the mix of classes varies from one context to the next.
        seed: of the reference points and the windows.

    Attributes:
        reference_: points and spaces of the layers.
        scales_: location and scale of the calibration samples.
        mixture_: the fitted model.
        classes_model_: class probabilities for `predict_classes`.
        training_rows_: the rows it was fitted on, for `update`.
        check_: scores on samples and families left out of the fit, beside the network's own and temperature
            scaling's; and how often network and nearest class answer rightly.
        verdict_: the same in a few sentences.
        relevance_: layer name -> standard deviation of its term over the calibration data, in log-odds.

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
    uses_reference: ClassVar[bool] = True
    uses_augmented: ClassVar[bool] = True
    takes_context: ClassVar[bool] = True

    def __init__(
        self,
        width: int = WIDTH,
        size: int | None = None,
        layers_in_domain: bool | None = None,
        over_prediction: bool = True,
        seed: int = 0,
    ) -> None:
        self.width = width
        self.size = size
        self.layers_in_domain = layers_in_domain
        self.over_prediction = over_prediction
        self.seed = seed

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        self._check_settings()
        if reference is None and len(features.originals[0]) > MANY:
            known, rows = split_reference(features)
            reference = (features[known], labels[known])
            features, labels = features[rows], labels[rows]
        if reference is None:
            points, evidence = own_reference(features, labels, self._reference_settings)
            classes = self._own_class_rows(points, features, labels)
        else:
            points = make_reference(*reference, self._reference_settings)
            evidence = layer_evidence(points, features)
            classes = _class_rows(points, features, labels)
        self._learn(features, labels, evidence, points, classes)

    def fit_stream(self, source: Source) -> Self | None:
        """Fit to all rows of a source that has a reference; None where it has none."""
        if not source.has_reference:
            return None
        self._check_settings()
        from salgp.calibrators.evidence.streaming import stream_evidence  # of stores alone

        found = stream_evidence(source, self._reference_settings)
        self._learn_zero_logits(found.features)
        features = self.floor_zeros(found.features)
        some, labels = source.subset()
        classes = _class_rows(found.reference, self.floor_zeros(some), labels)
        self._learn(features, found.labels, found.evidence, found.reference, classes)
        self.n_classes_, self.layer_widths_ = features.n_classes, found.widths
        return self

    @property
    def _reference_settings(self) -> ReferenceSettings:
        return ReferenceSettings(self.width, self.size, self.seed)

    def _check_settings(self) -> None:
        if self.layers_in_domain not in (None, False, True):
            raise ValueError(f"layers_in_domain must be True, False or None, got {self.layers_in_domain!r}")

    def _own_class_rows(self, reference: Reference, features: Features, labels: Tensor) -> ClassRows:
        """Those of `_class_rows`, each sample compared with the points of other folds."""
        some = _some_originals(reference, features)
        found = []
        for other, samples, rows in fold_references(features, labels, self._reference_settings):
            here = torch.isin(rows, some)
            distance = class_log_distances(other, samples[here])
            found.append((samples.logits[here], distance, labels[rows[here]]))
        logits, distances, truth = zip(*found, strict=True)
        return torch.cat(logits), torch.cat(distances, dim=1), torch.cat(truth)

    def _learn(
        self, features: Features, labels: Tensor, evidence: Evidence, reference: Reference, classes: ClassRows
    ) -> None:
        with threads_for(len(features) * COLUMNS):
            self.reference_ = reference
            found = self._checked_model(features, labels, evidence)
            self.scales_, self.training_rows_, self.mixture_, parts = found
            self.classes_model_ = fit_classes(*classes, self.scales_.temperature)
        self.check_ = check_fit(parts, self.display_name) | check_answers(*classes)
        first, _ = features.originals
        self.verdict_ = verdict(
            self.check_,
            self.mixture_.layers_in_domain,
            self.display_name,
            errors=int((~features.correct(labels)[first]).sum()),
            warning=misaligned(Features(features.logits[first]), labels[first]),
        )
        samples = self.training_rows_.samples
        k = self.mixture_(samples).shift_weight
        terms, _ = self.mixture_.terms(samples, k)
        spread = terms[:, 1:].std(dim=0, correction=0).tolist()
        self.relevance_ = dict(zip(reference.spaces, spread, strict=True))

    def _model(
        self, features: Features, labels: Tensor, evidence: Evidence
    ) -> tuple[Scales, Mixture, TrainingRows]:
        """Scales and mixture fitted to some rows, and what the mixture was fitted to."""
        first, _ = features.originals
        temperature = shrunk_temperature(features.logits[first], labels[first])
        scales = scales_of(features[first], evidence[first], temperature)
        samples = samples_of(features, evidence, scales)
        rows = training_rows(features, samples, features.correct(labels))
        return scales, self._mixture(rows, features.n_classes), rows

    def _checked_model(
        self, features: Features, labels: Tensor, evidence: Evidence
    ) -> tuple[Scales, TrainingRows, Mixture, list[HeldOut]]:
        """The model with the variance between families, and its scores on what was left out of the fit."""
        scales, mixture, rows = self._model(features, labels, evidence)
        parts = held_out(features, labels, evidence, self._model)
        variance, level = family_variance(parts)
        mixture = replace(mixture, shift_variance=variance, level_variance=level)
        return scales, rows, mixture, [part.moderated(level) for part in parts]

    def _mixture(self, rows: TrainingRows, n_classes: int) -> Mixture:
        found = fit_mixture(rows, n_classes, layers_in_domain=self.layers_in_domain, seed=self.seed)
        if found.window is None or self.over_prediction:
            return found
        return replace(found, window=replace(found.window, over_prediction=0.0))

    def predict(self, features: Features, context: Any = None) -> Prediction:
        """Calibrated confidences for new samples.

        Args:
            features: of the samples.
            context: what the samples have in common. None predicts each by itself, whatever stands beside it.
                ``"all"``: these samples were met together, and nothing else is known. A number: windows of
                so many consecutive samples. ``(n,)`` integers or names: the environment of each sample. A
                `Context` from `context`, or the `Features` of other samples met at the same place and time.
        """
        features = self.check_input(features)
        away, home = features.logits.device, self.reference_.points.device
        if away != home:
            return self.predict(features.to(home), context).to(away)
        with torch.no_grad():
            samples = self._samples(features)
            windows = None if context is None else self._windows(samples, context)
            found = self.mixture_(samples, windows)
            return self._prediction(features, samples, found)

    def _accepted(self, features: Features) -> Features:
        """The features, checked, where the reference is."""
        features = self.check_input(features)
        device = self.reference_.points.device
        return features if features.logits.device == device else features.to(device)

    def _predict(self, features: Features) -> Prediction:
        samples = self._samples_at_once(features)
        return self._prediction(features, samples, self.mixture_(samples))

    def _samples(self, features: Features) -> Samples:
        return samples_of(features, layer_evidence(self.reference_, features), self.scales_)

    def _samples_at_once(self, features: Features) -> Samples:
        """The same without a loop over chunks, for exported graphs."""
        return samples_of(features, evidence_at_once(self.reference_, features), self.scales_)

    def _windows(self, samples: Samples, context: Any) -> Windows:
        """Sums of the windows, and the window of each sample."""
        parts = self.mixture_.parts(samples)
        context = self.context(context) if isinstance(context, Features) else context
        if not isinstance(context, Context):
            return window_sums(parts, window_numbers(context, samples.t))
        return self._one_window(parts, context.total)

    def _one_window(self, parts: Tensor, total: Tensor) -> Windows:
        """Windows of samples that share these sums ``(2 + C,)``; each is a window where these are empty."""
        if total.shape != parts.shape[1:]:
            raise ValueError(
                f"a context of this calibrator holds {parts.shape[1]} sums, two and one for each class; "
                f"got {tuple(total.shape)}: was it made by another calibrator?"
            )
        total = total.to(parts)
        is_known = total[2:].sum() > 0
        sums = torch.where(is_known, total, parts)
        return sums, torch.arange(parts.shape[0], device=parts.device)

    def _prediction(self, features: Features, samples: Samples, found: LogOdds) -> Prediction:
        return Prediction.from_log_odds(
            features,
            found.mean,
            partial(self.mixture_.variance, samples, found.shift_weight),
            layers=partial(_terms, features.layer_names, samples, found, self.mixture_),
            novelty=partial(samples.ood_score, self.scales_),
            temperature=self.scales_.temperature,
        )

    def predict_classes(self, features: Features, context: Any = None) -> Prediction:
        """The prediction with all classes on equal terms, for prediction sets (`salgp.sets`).

        Label, confidence and error bars are those of `predict`. ``probs`` come from logits and layers
        together (`salgp.calibrators.evidence.class_probabilities`); another class than the label may have
        most of the mass. As far as the shift weight goes, the label's share is its confidence.

        Args:
            features: of the samples.
            context: as in `predict`.
        """
        away, features = features.logits.device, self._accepted(features)
        with torch.no_grad():
            samples = self._samples(features)
            windows = None if context is None else self._windows(samples, context)
            odds = self.mixture_(samples, windows)
            found = self._prediction(features, samples, odds)
            probs = self._class_probs(features)
            confidence = found.confidence.to(probs)
            spread = spread_confidence(probs, found.label, confidence, allow_flips=True)
            k = torch.maximum(odds.shift_weight, 1 - 1 / samples.norm_excess)
            found = replace(found, probs=torch.lerp(probs, spread, k[:, None]))
        return found if found.label.device == away else found.to(away)

    def _class_probs(self, features: Features) -> Tensor:
        """Class probabilities ``(n, C)`` from logits and layers, some samples at a time."""
        reference, model = self.reference_, self.classes_model_
        few = chunks(features, rows_at_once(reference))
        return torch.cat([model(some.logits, class_log_distances(reference, some)) for some in few])

    def context(self, features: Features) -> Context:
        """Context of unlabelled samples that were met together: their sums; contexts add up.

        Example:
            >>> g = torch.Generator().manual_seed(0)
            >>> x = torch.randn(300, 2, generator=g)
            >>> both = Features(
            ...     3 * torch.cat([x, x + 1]),
            ...     {"a": torch.cat([x, x + 1])},
            ...     torch.arange(300).repeat(2),
            ...     torch.arange(600) // 300,
            ... )
            >>> labels = (x + 0.7 * torch.randn(300, 2, generator=g)).argmax(dim=1).repeat(2)
            >>> calibrator = LayerEvidence().fit(both, labels)
            >>> calibrator.context(both[300:]).count
            300
        """
        features = self._accepted(features)
        with torch.no_grad():
            parts = self.mixture_.parts(self._samples(features))
            return Context(parts.sum(dim=0))

    def predict_in_window(self, features: Features, window: Tensor) -> tuple[Prediction, Tensor]:
        """Prediction in a window of which only the sums are known, see `Calibrator.predict_in_window`."""
        samples = self._samples_at_once(features)
        parts = self.mixture_.parts(samples)
        found = self.mixture_(samples, self._one_window(parts, window))
        return self._prediction(features, samples, found), parts

    @one_at_a_time
    def update(self, features: Features, labels: Any) -> Self:
        """Add labelled samples; reference, temperature and scales stay, the mixture is that of a fit to all
        rows. ``check_``, ``verdict_`` and ``relevance_`` stay those of the fit.
        """
        more = self._observed(features, labels)
        return self._refit(self.training_rows_.joined(more))

    def _observed(self, features: Features, labels: Any) -> TrainingRows:
        """New samples as the model sees them, on the device of those it knows."""
        features = self._accepted(features)
        y = as_labels(labels, len(features), self.n_classes_)
        with torch.no_grad():
            return training_rows(features, self._samples(features), features.correct(y))

    def _refit(self, rows: TrainingRows) -> Self:
        """Fit the mixture to other rows; where that fails, all stays as it was."""
        old = self.mixture_
        with torch.no_grad():
            found = self._mixture(rows, self.n_classes_)
        self.training_rows_ = rows
        self.mixture_ = replace(found, shift_variance=old.shift_variance, level_variance=old.level_variance)
        return self

    def suggest(self, features: Features, k: int) -> Tensor:
        """Indices of the ``k`` unlabelled samples whose labels would teach most: uncertain, and unlike each
        other.
        """
        std = self.predict(features).std
        assert std is not None
        return spread_choice(features, std, k)

    def standard_novelty(self, features: Features) -> Tensor:
        """Novelty of each layer, ``(n, L)``, in standard deviations of the calibration set."""
        return self._samples(self._accepted(features)).novelty


def _some_originals(reference: Reference, features: Features) -> Tensor:
    """Rows of as many calibration samples as `fit_classes` is given."""
    first, _ = features.originals
    n = min(len(first), rows_at_once(reference))
    return first[torch.linspace(0, len(first) - 1, n).long()]


def _class_rows(reference: Reference, features: Features, labels: Tensor) -> ClassRows:
    """Logits, log distances to the classes and labels of some calibration samples."""
    some = _some_originals(reference, features)
    return features.logits[some], class_log_distances(reference, features[some]), labels[some]


def _terms(layers: tuple[str, ...], samples: Samples, found: LogOdds, mixture: Mixture) -> LayerTerms:
    """Terms that add up to the change of the log-odds; what is left belongs to the confidence."""
    names = ("confidence", "predicted class", *layers)
    terms = mixture.terms(samples, found.shift_weight)
    if found.context is not None:
        names = (*names, "context")
        part = _column(found.context, torch.zeros_like(found.context))
        terms = torch.cat([terms, part], dim=2)
    mean, std = terms
    rest = found.mean - samples.network - mean.sum(dim=1)
    variance = mixture.variance(samples, found.shift_weight) - std.square().sum(dim=1)
    confidence = _column(rest, variance.clamp_min(0.0).sqrt())
    mean, std = torch.cat([confidence, terms], dim=2)
    return LayerTerms(names, mean, std, "log-odds", True)


def _column(mean: Tensor, std: Tensor) -> Tensor:
    """One more term ``(2, n, 1)``."""
    return torch.stack([mean, std]).unsqueeze(2)
