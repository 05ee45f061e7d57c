"""Every method of the suite by name: the library's calibrators, other libraries' behind the same two methods,
and ours with each ingredient taken away.

An `Entry` says how a method is built, whether it is fitted on augmented samples, and which layers it may see.
Ours can also look at a window of unlabelled samples; `predict_windows` is the one place that calls it so.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from salgp.calibrators import Calibrator, get
from salgp.calibrators.gp.salgp import SALGP
from salgp.estimate import class_mix
from salgp.features import Features
from salgp.logits import tempered_softmax
from salgp.prediction import Prediction
from salgp_study.lascal import label_shift_temperature

__all__ = [
    "ABLATIONS",
    "Entry",
    "GROUPS",
    "METHODS",
    "OURS",
    "BASELINES",
    "WINDOWS",
    "predict_windows",
    "takes_context",
]

OURS = "layer evidence"
FEWER_ROWS: dict[str, Any] = {"inference": "inducing", "n_inducing": 256}
"""The paper's models predict some hundred thousand samples here, which by exact inference takes hours. How
far they are from exact is measured by the preset ``exact`` of the study; their names say what they are.
"""
WINDOWS = (10, 20, 50, 200)
"""Sizes of the windows of unlabelled samples that ours is given."""


class Method(Protocol):
    """What the suite asks of a method."""

    def fit(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None = None
    ) -> Any: ...
    def predict(self, features: Features) -> Prediction: ...


@dataclass(frozen=True)
class Entry:
    """How a method is built, what it is fitted on, and what it may see.

    Args:
        build: makes it.
        copies: is it fitted on augmented samples too?
        sees: ``all``, the ``last`` layer, the ``confidence`` as if it were a layer; of these ``half`` of
            the families, ``one``, or ``two strengths`` of each.
    """

    build: Callable[[], Method]
    copies: bool = False
    sees: str = "all"


class Probmetrics:
    """A calibrator of probmetrics, fitted on the logits."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fit(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None = None
    ) -> Self:
        """Fit on the samples of known classes."""
        from probmetrics.calibrators import get_calibrator
        from probmetrics.distributions import CategoricalLogits

        known = labels >= 0
        self.fitted = get_calibrator(self.name)
        self.fitted.fit_torch(CategoricalLogits(features.logits[known].float()), labels[known])
        return self

    def predict(self, features: Features) -> Prediction:
        """Its probability of the network's own label; labels are kept, as by every method here."""
        from probmetrics.distributions import CategoricalLogits

        found = self.fitted.predict_proba_torch(CategoricalLogits(features.logits.float()))
        probs = torch.as_tensor(found.get_probs()).double()
        return Prediction.from_confidence(features, probs.gather(1, features.label[:, None])[:, 0])


class NetcalENIR:
    """Near-isotonic regressions of netcal on the top-label confidence; nothing is changed where netcal cannot
    fit (few errors).
    """

    def fit(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None = None
    ) -> Self:
        """Fit on confidence and correctness."""
        from netcal.binning import ENIR

        self.fitted: Any = ENIR()
        confidence = features.confidence.double().numpy()
        correct = features.correct(labels).long().numpy()
        silence = io.StringIO()
        try:
            with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
                self.fitted.fit(confidence, correct)
        except ValueError:
            self.fitted = None
        return self

    def predict(self, features: Features) -> Prediction:
        """Its confidence, kept inside (0, 1)."""
        confidence = features.confidence.double()
        if self.fitted is None:
            return Prediction.from_confidence(features, confidence)
        found = np.asarray(self.fitted.transform(confidence.numpy())).reshape(-1)
        clean = torch.as_tensor(np.nan_to_num(found, nan=0.5))
        return Prediction.from_confidence(features, clean.clamp(1e-6, 1 - 1e-6))


class LaSCal:
    """One temperature for each test set, see `salgp_study.lascal`: all samples of the set are its unlabelled
    target.

    The weights of the classes come from `salgp.estimate.class_mix` (expectation maximisation on tempered
    probabilities, with a factor for each class); the authors estimate them by RLLS. A class without
    calibration samples counts as if it had one.
    """

    def fit(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None = None
    ) -> Self:
        """Keep the samples of known classes, and temper them."""
        known = labels >= 0
        self.features, self.labels = Features(features.logits[known]), labels[known]
        self.tempered = get("temperature").fit(self.features, self.labels)
        return self

    def predict(self, features: Features) -> Prediction:
        """Tempered probabilities; the network's label is kept."""
        temperature = label_shift_temperature(
            self.features.logits, self.labels, features.logits, self.weights(features)
        )
        return Prediction.from_probs(features, tempered_softmax(features.logits, temperature))

    def weights(self, features: Features) -> NDArray[np.float64]:
        """``(c,)`` estimated share of each class here over its share among the calibration samples."""
        count = self.labels.bincount(minlength=features.logits.shape[1]).clamp_min(1).double()
        here, there = (self.tempered.predict(Features(f.logits)) for f in (features, self.features))
        mix = class_mix(here, count / count.sum(), calibration=there)
        return mix.share / mix.source


def takes_context(method: Method) -> bool:
    """Can the method look at a window of unlabelled samples?"""
    return bool(getattr(method, "takes_context", False))


def predict_windows(method: Any, features: Features, window: int) -> Prediction:
    """Predictions in windows of consecutive rows, each its own context; 0 is sample by sample.

    Args:
        method: fitted.
        features: rows in random order.
        window: rows per window; what is left over at the end joins the last one.
    """
    if window == 0:
        return method.predict(features)
    last = max(len(features) // window - 1, 0)
    numbers = (torch.arange(len(features)) // window).clamp(max=last)
    return method.predict(features, context=numbers)


def named(name: str, **settings: Any) -> Callable[[], Calibrator]:
    """Build a calibrator of the library by name."""
    return lambda: get(name, **settings)


def ours(**settings: Any) -> Entry:
    """Layer evidence with some settings, fitted on augmented samples; unknown settings are refused."""
    known = get("layer-evidence").get_params(deep=False)
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise TypeError(f"layer evidence has no setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return Entry(named("layer-evidence", **settings), copies=True)


BASELINES: dict[str, Entry] = {
    "uncalibrated": Entry(named("uncalibrated")),
    "temperature": Entry(named("temperature")),
    "perturbed temperature": Entry(named("perturbed-temperature"), copies=True),
    "ensemble temperature": Entry(named("ensemble-temperature")),
    "isotonic": Entry(named("isotonic")),
    "beta": Entry(named("beta")),
    "Dirichlet": Entry(named("dirichlet")),
    "latent GP (GPcalib)": Entry(named("latent-gp")),
    "density-aware": Entry(named("density-aware")),
    "density-aware, on copies": Entry(named("density-aware"), copies=True),
    "Trust Score": Entry(named("trust-score")),
    "Trust Score, on copies": Entry(named("trust-score"), copies=True),
    "deep k-NN": Entry(named("deep-knn")),
    "netcal ENIR": Entry(NetcalENIR),
    "probmetrics SMS": Entry(lambda: Probmetrics("sms")),
    "probmetrics TS-mix": Entry(lambda: Probmetrics("ts-mix")),
    "LaSCal, whole test set": Entry(LaSCal),
    "GP on the confidence alone": Entry(named("residual-gp", form="feature"), sees="confidence"),
    "GP on the last layer alone": Entry(named("residual-gp", form="feature"), sees="last"),
    "RIO, last layer": Entry(named("residual-gp", form="rio"), sees="last"),
    "RED, last layer": Entry(named("residual-gp", form="red", max_steps=100), sees="last"),
    "SAL-GP ML (256 inducing rows)": Entry(lambda: SALGP.paper("ml", **FEWER_ROWS)),
    "SAL-GP HL (256 inducing rows)": Entry(lambda: SALGP.paper("hl", **FEWER_ROWS)),
    "SAL-GP ML (256 inducing rows), scaled prior": Entry(
        lambda: SALGP.paper("ml", prior="dimension-scaled", **FEWER_ROWS)
    ),
    "SAL-GP sum": Entry(named("sal-gp", covariance="sum")),
    "SAL-GP sum, scaled prior": Entry(named("sal-gp", covariance="sum", prior="dimension-scaled")),
}
"""Everything ours is compared with."""

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature in domain": {"layers_in_domain": False},
    "layers in domain": {"layers_in_domain": True},
    "without over-prediction": {"over_prediction": False},
    "whole training set as reference": {"size": 1_000_000},
}
"""Settings of layer evidence to try in place of its own."""

ABLATIONS: dict[str, Entry] = {
    "without copies": Entry(named("layer-evidence")),
    "half of the families": Entry(named("layer-evidence"), copies=True, sees="half"),
    "one family": Entry(named("layer-evidence"), copies=True, sees="one"),
    "two strengths of each family": Entry(named("layer-evidence"), copies=True, sees="two strengths"),
    "last layer only": Entry(named("layer-evidence"), copies=True, sees="last"),
    **{name: ours(**found) for name, found in SETTINGS.items()},
}
"""Ours with one ingredient taken away or changed."""

METHODS: dict[str, Entry] = {OURS: ours(), **BASELINES, **ABLATIONS}
"""Every method by name."""

GROUPS: dict[str, tuple[str, ...]] = {
    "ours": (OURS,),
    "baselines": tuple(BASELINES),
    "ablations": tuple(ABLATIONS),
    "few": (
        OURS,
        "uncalibrated",
        "temperature",
        "perturbed temperature",
        "density-aware, on copies",
        "Trust Score, on copies",
    ),
}
"""Names that stand for several methods."""
