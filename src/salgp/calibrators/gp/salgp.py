"""SAL-GP: Gaussian processes on the pooled features of every layer, with structured kernels.

The softmax residual ``r = correct - s`` is regressed on the layers; the calibrated confidence is ``s + mean``
with the posterior variance.

Global and layer predictions: see `salgp.calibrators.gp.correction`. In ``sum`` the layer terms add up
to the whole correction exactly, each with its own variance.

`ResidualGP` sees a single layer, one row per sample. RIO (Qiu et al. 2020) adds a kernel on the confidence;
RED (Qiu & Miikkulainen 2022) uses ARD kernels on the features and on the whole softmax vector, from several
random starting points. The best restart is chosen by evidence, never by test labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator, Training, labels_of, one_at_a_time
from salgp.calibrators.gp.correction import chunk_size, to_prediction
from salgp.calibrators.gp.structures import Structure, observe, structure
from salgp.features import Features
from salgp.gp.fitting import Fitted, Settings, extend, fit_gp
from salgp.gp.linalg import threads_for
from salgp.neighbours import spread_choice
from salgp.prediction import Prediction

__all__ = ["SALGP", "LayerwiseGP", "ResidualGP", "fit_structure", "settings_of"]

PAPER: dict[str, dict[str, Any]] = {
    "ml": {"covariance": "ml"},
    "hl": {"covariance": "hl", "restarts": 2},
    "additive": {"covariance": "additive"},
    "icm": {"covariance": "icm", "rank": 1},
    "reduced-icm": {"covariance": "icm", "rank": 0},
    "lcm": {"covariance": "lcm", "rank": 1, "n_latent": 2},
    "class-agnostic-global": {"covariance": "global"},
    "class-agnostic-layer-wise": {"covariance": "hl", "restarts": 2},
    "class-specific-global": {"covariance": "class"},
    "class-specific-layer-wise": {"covariance": "nested", "groups": ("layer", "layer/class")},
}
"""The paper's covariances by its own names."""

PAPER_INDUCING = 512
"""Inducing rows of the paper's models where exact inference does not fit; fewer are another model."""

RECIPES: dict[str, dict[str, Any]] = {
    "converged": {"optimizer": "lbfgs"},
    "adam-mstar": {"optimizer": "adam", "max_steps": 2000, "learning_rate": 5e-3},
    "adam-plasticc": {"optimizer": "adam", "max_steps": 2500, "learning_rate": 2e-3},
}
"""How the hyperparameters are searched for: to convergence, or by the paper's recipe for its data sets."""


FORMS = {"feature": "single", "rio": "rio", "red": "red"}
"""Covariances of a single layer by the names of their authors."""


@dataclass(repr=False, eq=False)
class LayerwiseGP(Calibrator):
    """What `SALGP` and `ResidualGP` have in common: how they learn, and predictions by ``structure_`` and
    ``fitted_``.
    """

    gives_confidence_only: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = True

    _: KW_ONLY
    kernel: str = "matern52"
    inference: str = "auto"
    n_inducing: int = 256
    optimizer: str = "lbfgs"
    max_steps: int | None = None
    learning_rate: float = 5e-3
    restarts: int = 0
    seed: int = 0
    exact_limit: int = Settings.exact_limit

    def _predict(self, features: Features) -> Prediction:
        seen = self._seen(features)
        return to_prediction(self.structure_, self.fitted_, seen, self.rest_temperature_)

    def _seen(self, features: Features) -> Features:
        """Inputs of the GP; by default the features themselves."""
        return features

    def _chunk(self) -> int:
        return chunk_size(self.structure_, self.fitted_)


@dataclass(repr=False, eq=False)
class SALGP(LayerwiseGP):
    """Layerwise Gaussian process calibration (SAL-GP): the paper's structured kernels and ours.

    Args:
        covariance: ``sum`` (ours), ``ml``, ``hl`` (the paper's), ``additive``, ``icm``, ``lcm``, ``nested``,
            ``global``, ``class``, ``concat``.
        kernel: base kernel: ``matern52``, ``matern32``, ``matern12``, ``rbf``, ``linear``.
        inference: ``exact``, ``inducing``, or ``auto`` by the number of rows.
        n_inducing: number of inducing rows. Stacked covariances on wide raw features may need 512 or more to
            match exact inference; the study's approximation table says how far off fewer are.
        rank: of ``B = W W' + diag(v)``; 0 is the paper's ``a 11' + diag(b)``. By default 0 in ``ml``, 1 in
            ``icm`` and ``lcm``.
        n_latent: number of terms of ``lcm``.
        groups: group levels of ``nested``: ``layer``, ``class``, ``layer/class``.
        optimizer: ``lbfgs``, or ``adam`` with the starting points and steps of GPyTorch.
        max_steps: of the optimiser.
        learning_rate: of Adam.
        restarts: further optimisations from random starting points; the best evidence wins.
        seed: of the restarts.
        objective: learn hyperparameters by ``evidence`` (the paper), by ``leave-one-out`` density of each
            sample given the others, or ``auto``: leave-one-out where the rows repeat each sample's
            residual once per layer, which the evidence takes for so many independent observations.
        shared_offset: does the global prediction of ``ml`` keep the offset ``a`` that all layers share? The
            paper calls it global; without it, only ``k(f, f') + k(s, s')`` is left.
        exact_limit: rows up to which ``inference="auto"`` is exact.
        prior: of the lengthscales: None for bounds alone, or ``dimension-scaled``: log-normal with location
            ``log sqrt(D) + sqrt(2)`` and scale ``sqrt(3)`` in units of the data's standard deviation, for
            layers of hundreds of dimensions; hyperparameters are then those of the largest posterior.

    Attributes:
        fitted_: the conditioned GP.
        structure_: covariance and row layout.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(150, 3, generator=g)
        >>> labels = (x + torch.randn(150, 3, generator=g)).argmax(dim=1)
        >>> features = Features(3 * x, {"a": x})
        >>> prediction = SALGP().fit(features, labels).predict(features)
        >>> prediction.confidence.shape, prediction.layers.names
        (torch.Size([150]), ('a', 'confidence'))
    """

    name: ClassVar[str] = "sal-gp"

    covariance: str = "sum"
    _: KW_ONLY
    rank: int | None = None
    n_latent: int = 2
    groups: Sequence[str] = ("layer",)
    objective: str = "auto"
    shared_offset: bool = True
    prior: str | None = None

    @classmethod
    def paper(cls, model: str = "ml", recipe: str = "converged", **changes: Any) -> SALGP:
        """SAL-GP with every setting of the paper: residuals, Matern 5/2 on features as they are,
        hyperparameters of the largest evidence, the shared offset kept, exact where it fits and
        512 inducing rows otherwise.

        Extract the features with ``pooling="channel-avg"`` or ``"channel-max"``, the paper's two.

        Args:
            model: one of `PAPER`: ``ml``, ``hl``, ``additive``, ``icm``, ``reduced-icm``, ``lcm``, or one of
                the four architectures, ``class-agnostic-global`` to ``class-specific-layer-wise``.
            recipe: ``converged`` (L-BFGS to the optimum), or the paper's ``adam-mstar`` (2,000 steps of 5e-3)
                and ``adam-plasticc`` (2,500 of 2e-3) from GPyTorch's starting points.
            changes: other arguments of `SALGP`.

        Example:
            >>> SALGP.paper("ml").objective, SALGP.paper("reduced-icm", n_inducing=800).rank
            ('evidence', 0)
        """
        if model not in PAPER:
            raise ValueError(f"the paper has no model {model!r}; choose from {', '.join(PAPER)}")
        return cls(**{"objective": "evidence", **PAPER[model], **paper_settings(recipe), **changes})

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        self.structure_ = structure(
            self.covariance,
            features.widths,
            features.n_classes,
            kernel=self.kernel,
            rank=self.rank,
            n_latent=self.n_latent,
            groups=tuple(self.groups),
            shared_offset=self.shared_offset,
        )
        self.fitted_ = fit_structure(self.structure_, features, labels, settings_of(self))

    @property
    def display_name(self) -> str:
        """``SAL-GP (paper, ml)`` where every setting is that of `paper`, ``layerwise GP (sum)`` otherwise."""
        family = "SAL-GP (paper, {})" if self._as_published() else "layerwise GP ({})"
        return family.format(self.covariance)

    def _as_published(self) -> bool:
        """Is it one of the paper's models, learned as there? How the search went is left open."""
        mine = {**self.get_params(), "groups": tuple(self.groups)}
        search = {field.name for field in fields(LayerwiseGP)} - {"kernel"}
        papers = (SALGP.paper(model).get_params() for model in PAPER)
        same = (all(mine[name] == paper[name] for name in paper.keys() - search) for paper in papers)
        return self.n_inducing >= PAPER_INDUCING and any(same)

    @one_at_a_time
    def update(self, features: Features, labels: Any) -> Self:
        """Add labelled samples without learning the hyperparameters again; the same as conditioning on all
        from scratch.
        """
        features = self.check_input(features, allow_empty=False).to(self.fitted_.posterior.alpha.device)
        y = labels_of(features, labels)
        with torch.no_grad():
            self.fitted_ = extend(self.fitted_, observe(self.structure_, features, y))
        return self

    def suggest(self, features: Features, k: int) -> Tensor:
        """Indices of the ``k`` unlabelled samples whose labels would teach most: uncertain, and unlike each
        other.
        """
        std = self.predict(features).std
        assert std is not None
        return spread_choice(features, std, k)


@dataclass(repr=False, eq=False)
class ResidualGP(LayerwiseGP):
    """Residual GP on one layer: feature-only, RIO (input + output kernel) or RED (ARD) form.

    Args:
        form: ``feature``, ``rio`` or ``red``.
        layer: name or position of the layer; the last one by default.
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
        >>> calibrator = ResidualGP("rio").fit(features, labels)
        >>> calibrator.predict(features).std.shape
        torch.Size([40])
    """

    name: ClassVar[str] = "residual-gp"

    form: str = "rio"
    layer: str | int = -1

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

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        self.layer_ = _layer_name(features, self.layer)
        one = features.select([self.layer_])
        self.structure_ = structure(FORMS[self.form], one.widths, one.n_classes, kernel=self.kernel)
        self.fitted_ = fit_structure(self.structure_, one, labels, settings_of(self))


def paper_settings(recipe: str) -> dict[str, Any]:
    """How the paper's models are fitted, by the name of the recipe."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    return {"n_inducing": PAPER_INDUCING, "exact_limit": 3000, **RECIPES[recipe]}


def fit_structure(structure: Structure, features: Features, labels: Tensor, settings: Settings) -> Fitted:
    """Fit a structure's GP to the residuals."""
    seen = observe(structure, features, labels)
    with threads_for(settings.largest_matrix(len(seen.rows))):
        return fit_gp(structure.covariance, seen, replace(settings, repeats=structure.repeats))


def settings_of(calibrator: Calibrator) -> Settings:
    """Fit settings of a calibrator's arguments."""
    names = {field.name for field in fields(Settings)}
    given = calibrator.get_params(deep=False)
    return Settings(**{name: value for name, value in given.items() if name in names})


def _layer_name(features: Features, layer: str | int) -> str:
    L = len(features.layer_names)
    if isinstance(layer, str):
        return layer
    if not -L <= layer < L:
        known = ", ".join(features.layer_names)
        raise ValueError(f"layer {layer} does not exist, the features have {L} layers: {known}")
    return features.layer_names[layer]
