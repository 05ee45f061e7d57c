"""Single-layer residual Gaussian processes: feature only, RIO and RED.

All regress the softmax residual ``r = correct - s`` with one row per sample. RIO (Qiu et al. 2020) adds a
kernel on the confidence; RED (Qiu & Miikkulainen 2022) uses ARD kernels on the features and on the whole
softmax vector, from several random starting points. The best restart is chosen by evidence, never by test
labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from salgp.calibrators.base import Calibrator, Source
from salgp.calibrators.gp.correction import chunk_size, to_prediction
from salgp.calibrators.gp.salgp import fit_structure, paper_settings, settings_of
from salgp.calibrators.gp.streaming import fit_rows
from salgp.calibrators.gp.structures import structure
from salgp.features import Features
from salgp.gp.fitting import EXACT_LIMIT
from salgp.prediction import Prediction

__all__ = ["ResidualGP"]

FORMS = {"feature": "single", "rio": "rio", "red": "red"}


@dataclass(repr=False, eq=False)
class ResidualGP(Calibrator):
    """Residual GP on one layer: feature-only, RIO (input + output kernel) or RED (ARD) form.

    Args:
        form: ``feature``, ``rio`` or ``red``.
        layer: name or position of the layer; the last one by default.
        likelihood: ``gaussian`` on the residual, or ``bernoulli`` on correctness.
        kernel: base kernel (``red`` always uses RBF, as its authors do).
        inference: ``exact``, ``inducing`` or ``auto``.
        n_inducing: number of inducing rows.
        optimizer: ``lbfgs``, or ``adam`` with the starting points and steps of GPyTorch.
        max_steps: of the optimiser.
        learning_rate: of Adam.
        restarts: further random starts; 9 for RED's ten.
        seed: of the restarts.
        exact_limit: rows up to which ``inference="auto"`` is exact.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(40, 3, generator=g)
        >>> features, labels = Features(3 * x, {"a": x}), (x + torch.randn(40, 3, generator=g)).argmax(dim=1)
        >>> calibrator = ResidualGP("rio", likelihood="bernoulli").fit(features, labels)
        >>> calibrator.predict(features).std.shape
        torch.Size([40])
    """

    name: ClassVar[str] = "residual-gp"
    gives_confidence_only: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = True

    form: str = "rio"
    layer: str | int = -1
    likelihood: str = "gaussian"
    kernel: str = "matern52"
    inference: str = "auto"
    n_inducing: int = 256
    optimizer: str = "lbfgs"
    max_steps: int | None = None
    learning_rate: float = 5e-3
    restarts: int = 0
    seed: int = 0
    exact_limit: int = EXACT_LIMIT

    @classmethod
    def paper(
        cls, form: str = "rio", layer: str | int = -1, recipe: str = "converged", **changes: Any
    ) -> ResidualGP:
        """The paper's single-layer GP: see `salgp.SALGP.paper` for the settings and recipes.

        Example:
            >>> ResidualGP.paper(layer=0, recipe="adam-mstar").max_steps
            2000
        """
        return cls(**{"form": form, "layer": layer, **paper_settings(recipe), **changes})

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        self.layer_ = _layer_name(features, self.layer)
        one = features.select([self.layer_])
        self.structure_ = structure(FORMS[self.form], one.widths, one.n_classes, kernel=self.kernel)
        self.fitted_ = fit_structure(self.structure_, one, labels, self.likelihood, settings_of(self))

    def _predict(self, features: Features) -> Prediction:
        one = features.select([self.layer_])
        return to_prediction(self.structure_, self.fitted_, one, temperature=self.rest_temperature_)

    def _chunk(self) -> int:
        return chunk_size(self.structure_, self.fitted_)

    def fit_stream(self, source: Source) -> Self | None:
        """Fit to all rows of a source."""
        fit_rows(self, source)
        return self


def _layer_name(features: Features, layer: str | int) -> str:
    L = len(features.layer_names)
    if isinstance(layer, str):
        return layer
    if not -L <= layer < L:
        raise ValueError(
            f"layer {layer} does not exist, the features have {L} layers: {', '.join(features.layer_names)}"
        )
    return features.layer_names[layer]
