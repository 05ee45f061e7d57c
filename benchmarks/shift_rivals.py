"""Rivals of the shift benchmark: the library's own calibrators by name, and other libraries' behind the same
two methods.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators import Calibrator, get
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features
from salgp.prediction import Prediction

OURS = "layer evidence"


class Method(Protocol):
    """What the benchmark asks of a method."""

    def fit(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None = None
    ) -> Any: ...
    def predict(self, features: Features) -> Prediction: ...


@dataclass(frozen=True)
class Rival:
    """How a method is built, what it is fitted on, and what it may see.

    Args:
        build: makes it.
        copies: is it fitted on perturbed copies too?
        sees: ``all`` layers, the ``last`` one, or the ``confidence`` as if it were a layer.
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
        from probmetrics.calibrators import get_calibrator
        from probmetrics.distributions import CategoricalLogits

        known = labels >= 0
        self.fitted = get_calibrator(self.name)
        self.fitted.fit_torch(CategoricalLogits(features.logits[known].float()), labels[known])
        return self

    def predict(self, features: Features) -> Prediction:
        """Its probability of the network's own label; labels are kept, as by every method here."""
        from probmetrics.distributions import CategoricalLogits

        probs = torch.as_tensor(
            self.fitted.predict_proba_torch(CategoricalLogits(features.logits.float())).get_probs()
        ).double()
        return Prediction.from_confidence(features, probs.gather(1, features.label[:, None])[:, 0])


class NetcalENIR:
    """Ensemble of near-isotonic regressions of netcal, on the top-label confidence; left as it is where
    netcal cannot fit (few errors).
    """

    def fit(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None = None
    ) -> Self:
        from netcal.binning import ENIR

        self.fitted: Any = ENIR()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                self.fitted.fit(features.confidence.double().numpy(), features.correct(labels).long().numpy())
        except ValueError as error:
            print(f"netcal ENIR cannot be fitted: {error}")
            self.fitted = None
        return self

    def predict(self, features: Features) -> Prediction:
        if self.fitted is None:
            return Prediction.from_confidence(features, features.confidence.double())
        found = np.nan_to_num(
            np.asarray(self.fitted.transform(features.confidence.double().numpy())).reshape(-1), nan=0.5
        )
        return Prediction.from_confidence(features, torch.as_tensor(found).clamp(1e-6, 1 - 1e-6))


def named(name: str, **settings: Any) -> Callable[[], Calibrator]:
    return lambda: get(name, **settings)


RIVALS: dict[str, Rival] = {
    "uncalibrated": Rival(named("uncalibrated")),
    "temperature": Rival(named("temperature")),
    "perturbed temperature": Rival(named("perturbed-temperature"), copies=True),
    "ensemble temperature": Rival(named("ensemble-temperature")),
    "isotonic": Rival(named("isotonic")),
    "beta": Rival(named("beta")),
    "Dirichlet": Rival(named("dirichlet")),
    "latent GP (GPcalib)": Rival(named("latent-gp")),
    "density-aware": Rival(named("density-aware")),
    "density-aware, on copies": Rival(named("density-aware"), copies=True),
    "Trust Score": Rival(named("trust-score")),
    "Trust Score, on copies": Rival(named("trust-score"), copies=True),
    "deep k-NN": Rival(named("deep-knn")),
    "netcal ENIR": Rival(NetcalENIR),
    "probmetrics SMS": Rival(lambda: Probmetrics("sms")),
    "probmetrics TS-mix": Rival(lambda: Probmetrics("ts-mix")),
    "GP on the confidence alone": Rival(named("residual-gp", form="feature"), sees="confidence"),
    "GP on the last layer alone": Rival(named("residual-gp", form="feature"), sees="last"),
    "RIO, last layer": Rival(named("residual-gp", form="rio"), sees="last"),
    "RED, last layer": Rival(named("residual-gp", form="red", max_steps=100), sees="last"),
    "SAL-GP ML (paper)": Rival(named("sal-gp", covariance="ml", objective="evidence")),
    "SAL-GP HL (paper)": Rival(named("sal-gp", covariance="hl", objective="evidence")),
    "SAL-GP sum": Rival(named("sal-gp", covariance="sum")),
}

ABLATIONS: dict[str, Rival] = {
    OURS: Rival(LayerEvidence, copies=True),
    "- without copies": Rival(LayerEvidence),
    "- without caution": Rival(lambda: LayerEvidence(caution=1.0), copies=True),
    "- without class offsets": Rival(lambda: LayerEvidence(class_spread=0.0), copies=True),
    "- 20 prototypes per class": Rival(lambda: LayerEvidence(size=20), copies=True),
    "- last layer only": Rival(LayerEvidence, copies=True, sees="last"),
    "- layers chosen by their worth": Rival(LayerEvidence, copies=True, sees="chosen"),
    "- Gaussian residual instead of Bernoulli": Rival(
        named("sal-gp", covariance="sum", inputs="evidence", n_inducing=64, max_steps=30), copies=True
    ),
    "+ layer GPs on top": Rival(
        named(
            "sal-gp", covariance="sum", likelihood="bernoulli", inputs="evidence", n_inducing=64, max_steps=30
        ),
        copies=True,
    ),
}
"""Ours, and what each of its ingredients gives."""
