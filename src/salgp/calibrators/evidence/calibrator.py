"""Layer evidence: the log-odds of being correct from what every layer has to say, right in domain and under
shift.

Each layer answers two questions with the training set as reference (`salgp.calibrators.evidence.reference`):
does it agree with the predicted class, and how novel is the input to it? With both standardised on the
calibration set (``A_l``, ``N_l``), and ``t`` the log-odds of the temperature-scaled confidence, an expert is

    f = a + b t + s t' + sum_l u_l g(N_l) A_l - sum_l v_l h(N_l) + delta_c,      b, s, u, v >= 0,

    h(N) = log(1 + softplus(N)),   g(N) = 1 / (1 + 0.3 softplus(N - 1)),

with an offset ``delta_c`` for each predicted class. ``t'`` are the log-odds that the network would give if
the features of its last layer had their usual length: a dim image has short features, and so a low
confidence, however clear the answer is. Monotone terms extrapolate sanely: more novelty never
raises a confidence, more agreement never lowers it.

One expert cannot serve data as they were and data that have moved, since distance does not tell *shifted*
from *difficult*. So there are two (`salgp.calibrators.evidence.experts`): ``f_in`` for data like the
calibration set, which is plain temperature scaling unless the layers clearly help, and ``f_shift``, fitted to
perturbed copies. Who is heard is decided by a gate on the single sample
(`salgp.calibrators.evidence.gate`), and where other samples are known by their environment too
(`salgp.calibrators.evidence.environment`: ``predict(features, context=...)``). Every fit measures itself
(`salgp.calibrators.evidence.check`) and keeps the table as ``check_``. Features much longer than those of any
original are beyond all experts: their log-odds fall back to chance
(`salgp.calibrators.evidence.model.beyond`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.alignment import misaligned
from salgp.calibrators.base import Calibrator, chunks
from salgp.calibrators.copies import originals
from salgp.calibrators.evidence.check import (
    check_table,
    leave_families_out,
    unseen_spread,
    verdict,
)
from salgp.calibrators.evidence.classes import (
    ClassModel,
    farness,
    fit_classes,
    rows_at_once,
    some_originals,
)
from salgp.calibrators.evidence.environment import Context, Surroundings, fit_environment
from salgp.calibrators.evidence.experts import InDomain, fit_in_domain, fit_shift
from salgp.calibrators.evidence.gate import fit_gate
from salgp.calibrators.evidence.judging import EvidenceModel
from salgp.calibrators.evidence.left_out import OwnReference
from salgp.calibrators.evidence.model import beyond, log_odds, scales_of, standardised
from salgp.calibrators.evidence.reference import (
    FEW_ROWS,
    NEAREST,
    WIDTH,
    Evidence,
    Reference,
    layer_evidence,
    make_reference,
)
from salgp.calibrators.evidence.rows import LARGEST, FittedRows, View, rows_of, view_of
from salgp.calibrators.evidence.strangeness import energy, fit_strangeness
from salgp.calibrators.evidence.streaming import stream_evidence
from salgp.calibrators.labelling import spread_choice
from salgp.calibrators.source import Source
from salgp.calibrators.temperature import careful_temperature
from salgp.features import Features
from salgp.gp.threads import threads_for
from salgp.labels import as_labels
from salgp.logits import plain_array
from salgp.metrics import ece, nll_correct
from salgp.prediction import LayerTerms, Prediction, spread_confidence

__all__ = ["LayerEvidence"]

COLUMNS = 16
"""About so many numbers of a row matter to a fit."""


class LayerEvidence(Calibrator):
    """Log-odds of being correct from agreement and novelty of every layer; our default.

    Give it the training set as ``reference`` and perturbed copies in ``features`` (``extract(...,
    perturb="auto")``). Without a reference, the calibration set serves as one, each sample and its copies
    compared with the others. Without copies it is calibrated in domain only.

    Args:
        k: nearest reference samples averaged over.
        width: principal directions kept per layer.
        reference: what is kept of the training set: ``prototypes``, ``full``, ``sample``, ``herding`` or
            ``statistics`` (`salgp.calibrators.evidence.condense` says what each stores). Without a training
            set the originals are kept whole, except by ``statistics``.
        size: points per class and layer; by default 200, and fewer where there are more than 50 classes.
        precision: in which points are stored: ``half``, ``single`` or ``8-bit``.
        clean: share of the weight given to original samples by the expert in domain, where there are copies.
        caution: weight of an error among the copies, relative to a correct prediction, for the expert for
            shift.
        ridge: strength of the pull of ``s``, ``u`` and ``v`` to 0 and of ``b`` to 1.
        class_spread: prior standard deviation of the offset of a predicted class in domain, in log-odds; 0
            for no offsets.
        trust: weight of the layers in domain, from 0 (temperature scaling) to 1; None to choose it.
        gated: ask the expert for shift about single samples that look disturbed?
        guard: share of originals that the gate must leave as they are; None for 99 of 100, or fewer where
            handing more of them over clearly helps them.
        window: samples per window when environments are learned.
        crowding: in a context, doubt a class that is predicted far more often than usual? False where the mix
            of classes varies from one context to the next.
        looseness: factor on the standard deviation of the log-odds, for what the model does not know about
            itself.
        seed: of the reference's points and the windows.

    Attributes:
        evidence_: the fitted model.
        check_: scores in domain and on left-out families beside the network's own and temperature scaling's.
        verdict_: the same in one sentence.
        relevance_: layer name -> standard deviation of its term over the calibration data, in log-odds.
        loo_confidence_: ``(n,)`` confidence of each original by the model without it and its copies.
        loo_std_: ``(n,)`` its standard deviation.
        loo_scores_: ``ece`` and ``nll`` of correctness of ``loo_confidence_``: what to expect on new data of
            the same kind.
        seen_: the rows it was fitted on, for `update` and `forget`.
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
    uses_reference: ClassVar[bool] = True
    uses_copies: ClassVar[bool] = True
    takes_context: ClassVar[bool] = True
    display_name: ClassVar[str] = "layer evidence"

    def __init__(
        self,
        k: int = NEAREST,
        width: int = WIDTH,
        reference: str = "prototypes",
        size: int | None = None,
        precision: str = "half",
        clean: float = 0.9,
        caution: float = 1.25,
        ridge: float = 0.2,
        class_spread: float = 0.5,
        trust: float | None = None,
        gated: bool = True,
        guard: float | None = None,
        window: int = 50,
        crowding: bool = True,
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
        self.trust = trust
        self.gated = gated
        self.guard = guard
        self.window = window
        self.crowding = crowding
        self.looseness = looseness
        self.seed = seed

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        first, _ = originals(features)
        alone = reference is None
        form = "full" if alone and self.reference != "statistics" else self.reference
        base = reference or (features[first], labels[first])
        known = make_reference(*base, form=form, **self._options())
        own = OwnReference(features, labels, known, form=form, **self._options()) if alone else None
        evidence = layer_evidence(known, features) if own is None else own.evidence()
        self.learn(features, labels, evidence, known)
        self._learn_classes(features, labels, own)

    def fit_stream(self, source: Source) -> Self | None:
        """Fit to all rows of a source that has a reference; None where it has none."""
        if not source.has_reference:
            return None
        rows = stream_evidence(source, form=self.reference, **self._options())
        self._learn_zeros(rows.features)
        self.learn(self.lifted(rows.features), rows.labels, rows.evidence, rows.reference)
        some, labels = source.subset()
        self._learn_classes(self.lifted(some), labels)
        self.n_classes_, self.layer_widths_ = rows.features.n_classes, rows.widths
        return self

    def _options(self) -> dict[str, Any]:
        names = ("k", "width", "size", "precision", "seed")
        return {name: getattr(self, name) for name in names}

    def learn(self, features: Features, labels: Tensor, evidence: Evidence, reference: Reference) -> None:
        """Fit to evidence, against this reference, that is known already."""
        self._check_settings()
        with threads_for(len(features) * COLUMNS):
            self._learn(features, labels, evidence, reference)

    def _learn(self, features: Features, labels: Tensor, evidence: Evidence, reference: Reference) -> None:
        first, _ = originals(features)
        temperature = careful_temperature(features.logits[first], labels[first])
        scales = scales_of(evidence[first])
        view = view_of(features, evidence, temperature, scales)
        self.seen_ = rows_of(features, view, features.correct(labels).double())
        inside, f, variance = self._in_domain(self.seen_, features.n_classes)
        usual = fit_strangeness(view[first], energy(features.logits[first], temperature))
        self.evidence_ = EvidenceModel(reference, temperature, scales, usual, inside)
        self._judge_itself(f, variance)
        families = {}
        if bool(self.seen_.is_copy.any()):
            families = self._learn_shift(features.n_classes, evidence.place, f)
        raw = log_odds(features, 1.0, LARGEST)
        self.check_ = check_table(self.seen_, raw, f, families, self.display_name)
        errors = int((self.seen_.correct[first] == 0).sum())
        doubt = misaligned(Features(features.logits[first]), labels[first])
        self.verdict_ = verdict(self.check_, inside.trust, self.display_name, errors, doubt)
        self.novelty_ = view.novelty[first]
        self.relevance_ = self._relevance(features, view, evidence)

    def _check_settings(self) -> None:
        if not 0 < self.clean <= 1 or min(self.caution, self.ridge) <= 0 or self.class_spread < 0:
            got = (
                f"clean={self.clean}, caution={self.caution}, ridge={self.ridge}, "
                f"class_spread={self.class_spread}"
            )
            raise ValueError(f"need 0 < clean <= 1, caution > 0, ridge > 0, class_spread >= 0; got {got}")
        if self.trust is not None and not 0 <= self.trust <= 1:
            raise ValueError(f"trust must be None or between 0 and 1, got {self.trust}")
        if (self.guard is not None and not 0 <= self.guard <= 1) or self.window < 2:
            raise ValueError(
                f"need 0 <= guard <= 1 or None, and window >= 2; got guard={self.guard}, window={self.window}"
            )

    def _learn_classes(self, features: Features, labels: Tensor, own: OwnReference | None = None) -> None:
        """Fit the probabilities of all classes to originals, which may be their own reference."""
        first, _ = originals(features)
        known = self.evidence_.reference
        some = some_originals(len(first), len(known.layers), features.n_classes).to(first.device)
        rows = first[some]
        far = farness(known, features[rows]) if own is None else own.farness(some)
        classes = fit_classes(features.logits[rows], far, labels[rows], self.evidence_.temperature)
        self.evidence_ = replace(self.evidence_, classes=classes)

    def _in_domain(self, rows: FittedRows, n_classes: int) -> tuple[InDomain, Tensor, Tensor]:
        return fit_in_domain(
            rows,
            n_classes,
            clean=self.clean,
            ridge=self.ridge,
            class_spread=self.class_spread,
            trust=self.trust,
        )

    def _judge_itself(self, f: Tensor, variance: Tensor) -> None:
        """Keep what leaving each original out says; ``f`` and its variance are of all rows."""
        first = ~self.seen_.is_copy
        sd = self.looseness * variance[first].sqrt()
        mean, correct = f[first], self.seen_.correct[first]
        self.loo_confidence_ = torch.sigmoid(mean)
        self.loo_std_ = (torch.sigmoid(mean + sd) - torch.sigmoid(mean - sd)) / 2
        self.loo_scores_ = {
            "ece": ece(self.loo_confidence_, correct),
            "nll": nll_correct(self.loo_confidence_, correct),
        }

    def _learn_shift(self, n_classes: int, place: Tensor, left_out_one: Tensor) -> dict[int, Any]:
        """Fit what copies teach, and return what leaving each family of them out says.

        Args:
            n_classes: the network knows.
            place: ``(n, q L)`` whitened coordinates.
            left_out_one: ``(n,)`` log-odds in domain of every row without its group.
        """
        rows, inside = self.seen_, self.evidence_.inside
        shared: dict[str, Any] = {"caution": self.caution, "ridge": self.ridge}
        windows: dict[str, Any] = {"window": self.window, "seed": self.seed, "crowding": self.crowding}
        shift = fit_shift(rows, n_classes, **shared)
        f_in, f_shift = inside.log_odds(rows.view), shift.log_odds(rows.view)
        families = leave_families_out(rows, inside, n_classes, **shared, **windows)
        self.evidence_ = replace(
            self.evidence_,
            shift=shift,
            gate=fit_gate(rows, place, left_out_one, f_shift, self.guard) if self.gated else None,
            environment=fit_environment(rows, f_in, f_shift, n_classes, **windows),
            unseen=unseen_spread(rows, families),
        )
        return families

    def predict(self, features: Features, context: Any = None) -> Prediction:
        """Calibrated confidences for new samples.

        Args:
            features: of the samples.
            context: what the samples have in common. None judges each by itself, whatever stands beside it.
                ``"all"``: these samples were met together, and nothing else is known. A number: windows of
                so many consecutive samples. ``(n,)`` integers or names: the environment of each sample. A
                `Context` from `context`, or the `Features` of other samples met at the same place and time.
        """
        self._check_fitted()
        if context is None and self._alone(features):
            return self._judged_alone(self.check_input(features))
        with threads_for(len(features) * self.evidence_.reference.n_entries):
            return self._predicted(features, context)

    def _alone(self, features: Features) -> bool:
        """Is it a single sample that can be judged by itself, at once? The number of threads stays as it is:
        changing it costs the network's next pass more than all the rest.
        """
        if not isinstance(features, Features) or len(features) != 1 or torch.compiler.is_exporting():
            return False
        known = all(map(plain_array, (features.logits, *features.layers.values())))
        return known and self.evidence_.single is not None

    def _predicted(self, features: Features, context: Any) -> Prediction:
        if context is None and len(features) > FEW_ROWS:
            return super().predict(features)
        features = self.check_input(features)
        if context is None:
            _ = features.label, self.evidence_.ready  # what stays must be ordinary tensors
            fast = features.logits.is_cpu  # starting an operation costs a fifth less
            with torch.no_grad(), torch.inference_mode(fast):
                found = self._predict(features)
            return found.copy()
        with torch.no_grad():
            evidence = layer_evidence(self.evidence_.reference, features)
            return self.from_evidence(features, evidence, self._seen(features, evidence, context))

    def predict_classes(self, features: Features, context: Any = None) -> Prediction:
        """The prediction with all classes on equal terms, for prediction sets (`salgp.sets`).

        Label, confidence and error bars are those of `predict`. ``probs`` are those of
        `salgp.calibrators.evidence.classes`, by logits and layers together; another class than the label may
        have most of the mass. As far as the expert for shift is heard on a sample, the label's share is its
        confidence.

        Args:
            features: of the samples.
            context: as in `predict`.
        """
        features = self.check_input(features)
        model = self.evidence_
        if model.classes is None:
            raise ValueError("this calibrator knows nothing of the other classes; fit it anew")
        with torch.no_grad(), threads_for(len(features) * model.reference.n_entries):
            parts = chunks(features, self._chunk()) if context is None else [features]
            found = [self._among_classes(part, model.classes, context) for part in parts]
            return found[0] if len(found) == 1 else Prediction.concatenate(found)

    def _among_classes(self, features: Features, classes: ClassModel, context: Any) -> Prediction:
        model = self.evidence_
        evidence = layer_evidence(model.reference, features)
        seen = None if context is None else self._seen(features, evidence, context)
        found = self.from_evidence(features, evidence, seen)
        few = chunks(features, rows_at_once(len(model.reference.layers), features.n_classes))
        probs = torch.cat([classes(part.logits, farness(model.reference, part)) for part in few])
        moved = spread_confidence(probs, found.label, found.confidence.to(probs), allow_flips=True)
        lean = model.heard(model.view(features, evidence), evidence, seen)
        return replace(found, probs=torch.lerp(probs, moved, lean[:, None]))

    def _judged_alone(self, features: Features) -> Prediction:
        assert self.evidence_.single is not None
        found = self.evidence_.single(features)
        names = ("confidence", "predicted class", *features.layer_names)
        mean, std = (torch.from_numpy(x[None]) for x in (found.terms, np.sqrt(found.term_variance)))
        return Prediction.of_one(
            features.label,
            found.odds,
            found.mean,
            self.looseness**2 * found.variance,
            layers=LayerTerms(names, mean, std, "log-odds", True),
            novelty=found.novelty,
        )

    def context(self, features: Features) -> Context:
        """What unlabelled samples that were met together tell of their environment; contexts add up.

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
        features = self.check_input(features)
        with torch.no_grad():
            model, one = self.evidence_, torch.zeros_like(features.label)
            opinions = model.opinions(features, layer_evidence(model.reference, features))
            return Context(model.known_environment().sums(opinions, features.label, one, 1)[0])

    def _seen(self, features: Features, evidence: Evidence, context: Any) -> Surroundings:
        """What the environment of each sample shows."""
        context = self.context(context) if isinstance(context, Features) else context
        return self.evidence_.surroundings(features, evidence, context)

    def predict_in_window(self, features: Features, window: Tensor) -> tuple[Prediction, Tensor]:
        """Prediction in a window of which only the sums are known, see `Calibrator.predict_in_window`."""
        model, evidence = self.evidence_, layer_evidence(self.evidence_.reference, features)
        own = model.known_environment().parts(model.opinions(features, evidence), features.label)
        return self.from_evidence(features, evidence, model.in_one_window(features, window)), own

    def _predict(self, features: Features) -> Prediction:
        return self.from_evidence(features, layer_evidence(self.evidence_.reference, features))

    def prepare_export(self) -> None:
        """Work out what the graph holds of the reference."""
        _ = self.evidence_.ready, self.evidence_.reference.ready_for_graph

    def predictor(self, layers: bool, precision: str) -> Callable[[Features], Prediction] | None:
        """Neighbours in single precision, without the second look at their distances."""

        @torch.no_grad()
        def predict(features: Features) -> Prediction:
            features = self.check_input(features)
            reference = self.evidence_.reference
            evidence = layer_evidence(reference, features, refine=precision == "double")
            return self.from_evidence(features, evidence)

        return predict

    def from_evidence(
        self, features: Features, evidence: Evidence, seen: Surroundings | None = None
    ) -> Prediction:
        """Prediction from evidence that is known already.

        Args:
            features: of the samples.
            evidence: of their layers.
            seen: what their environment shows, see `salgp.calibrators.evidence.environment`; None to judge
                each sample by itself.
        """
        view = self.evidence_.view(features, evidence)
        f, variance, terms = self.evidence_.judged(features, view, evidence, seen)
        strange = self.evidence_.usual(view, energy(features.logits, self.evidence_.temperature))
        return Prediction.from_log_odds(
            features,
            f,
            self.looseness**2 * variance,
            layers=terms,
            novelty=strange + beyond(evidence, self.evidence_.scales).log(),
            temperature=self.evidence_.temperature,
        )

    def _relevance(self, features: Features, view: View, evidence: Evidence) -> dict[str, float]:
        terms = self.evidence_.judged(features, view, evidence, None)[2].mean[:, 2:]
        return dict(zip(features.layer_names, terms.std(dim=0, correction=0).tolist(), strict=True))

    def _chunk(self) -> int:
        return 8192

    def update(self, features: Features, labels: Any) -> Self:
        """Add labelled samples; reference, temperature, scales, gate and environment stay, the experts are
        those of a fit to all rows from scratch. ``check_``, ``verdict_`` and ``relevance_`` tell of the fit.
        """
        more = self._observed(features, labels)
        return self._refresh(self.seen_.joined(more))

    def forget(self, features: Features, labels: Any) -> Self:
        """Take back samples that were added by `update`, or fitted on with a reference of their own."""
        some = self._observed(features, labels)
        return self._refresh(self.seen_.without(some))

    def suggest(self, features: Features, k: int) -> Tensor:
        """Indices of the ``k`` unlabelled samples whose labels would teach most: uncertain, and unlike each
        other.
        """
        std = self.predict(features).std
        assert std is not None
        return spread_choice(features, std, k)

    def _observed(self, features: Features, labels: Any) -> FittedRows:
        """New samples as the model sees them, on the device of those it knows."""
        features = self.check_input(features).to(self.seen_.correct.device)
        y = as_labels(labels, len(features), self.n_classes_).to(features.logits.device)
        with torch.no_grad():
            view = self.evidence_.view(features, layer_evidence(self.evidence_.reference, features))
        return rows_of(features, view, features.correct(y).double())

    def _refresh(self, rows: FittedRows) -> Self:
        """Fit the experts to other rows; where that fails, all stays as it was."""
        with torch.no_grad():
            inside, f, variance = self._in_domain(rows, self.n_classes_)
            shift = self.evidence_.shift
            if shift is not None:
                shift = fit_shift(rows, self.n_classes_, caution=self.caution, ridge=self.ridge)
            self.seen_, self.evidence_ = rows, replace(self.evidence_, inside=inside, shift=shift)
            self._judge_itself(f, variance)
        return self

    def standard_novelty(self, features: Features) -> Tensor:
        """Novelty of each layer, ``(n, L)``, in standard deviations of the calibration set."""
        features = self.check_input(features)
        found = layer_evidence(self.evidence_.reference, features)
        return standardised(found, self.evidence_.scales)[1]
