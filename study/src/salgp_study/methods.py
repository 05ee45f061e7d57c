"""Every row of the paper's tables as a calibrator to fit and the predictions to read off it.

One fit gives one or several rows: SAL-GP with a stacked covariance gives the global prediction ``G`` and one
of each layer, ``L1``.. ``L5``, whose confidence is ``s`` plus that layer's own correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from salgp.calibrators.gp.salgp import SALGP, ResidualGP
from salgp.features import Features
from salgp.prediction import Prediction
from salgp_study.deep_gp import DeepGPCalibrator
from salgp_study.evidence_gp import EvidenceGP
from salgp_study.gradient_temperature import GradientTemperature
from salgp_study.refined import RefinedSALGP
from salgp_study.selected_bbq import SelectedBBQ

__all__ = ["APPROXIMATE", "GROUPS", "INDUCING", "ONE_START", "Method", "methods_of", "rows_of_prediction"]

GROUPS = (
    "conventional",
    "single",
    "feature",
    "red",
    "ml",
    "hl",
    "dropped",
    "subsets",
    "coregionalised",
    "architectures",
    "concat",
    "sum",
    "class",
    "deep",
    "evidence",
    "adam",
    "inducing",
    "additive",
    "prior",
    "one-start",
)
"""Groups of methods a study can ask for."""

INDUCING = 512
"""Inducing rows of the approximate rows that stand beside exact ones."""
APPROXIMATE = f", {INDUCING} inducing rows"
"""What the name of such a row ends with."""
ONE_START = ", one start"
"""What the name of a row ends with that is searched from one starting point where others are from three."""
RESTARTS = 2
"""Further starting points of ML and HL: from one alone, ML ended far below the largest evidence."""
_STACKED = {"SAL-GP (ML)": "ml", "SAL-GP (HL)": "hl"}


@dataclass(frozen=True)
class Method:
    """A calibrator to fit.

    Args:
        name: of the row, or the stem of its rows.
        calibrator: name in `salgp.calibrators`.
        arguments: of that calibrator.
        layers: 1-based tapped layers it may see; None for all.
        reads_layers: does it read hidden layers, so that the pooling matters?
        per_layer: are there rows ``L1``.. besides the global ``G``?
        reference: does it compare with the training set?
    """

    name: str
    calibrator: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    reads_layers: bool = False
    per_layer: bool = False
    reference: bool = False

    def rows(self, n_layers: int) -> tuple[str, ...]:
        """Names of the rows this fit gives."""
        if not self.per_layer:
            return (self.name,)
        return (f"{self.name} G", *(f"{self.name} L{k}" for k in range(1, n_layers + 1)))

    def select(self, features: Features) -> Features:
        """The features it may see."""
        if self.layers is None:
            return features
        return features.select([features.layer_names[k - 1] for k in self.layers])


def methods_of(
    group: str, n_layers: int, gp: Mapping[str, Any], deep: Mapping[str, Any] | None = None
) -> list[Method]:
    """The methods of a group.

    Args:
        group: one of `GROUPS`.
        n_layers: tapped layers of the backbone.
        gp: arguments of every GP, such as its optimiser.
        deep: arguments of the deep GP.

    Example:
        >>> [m.name for m in methods_of("single", 2, {})]
        ['Single GP (Layer 1)', 'Single GP (Layer 2)']
    """
    if group not in GROUPS:
        raise KeyError(f"no group of methods called {group!r}; known: {', '.join(GROUPS)}")
    layers = range(1, n_layers + 1)
    by_group: dict[str, Callable[[], list[Method]]] = {
        "conventional": _conventional,
        "single": lambda: [_single("Single GP", "rio", k, gp) for k in layers],
        "feature": lambda: [_single("Single GP, feature only", "feature", k, gp) for k in layers],
        "red": lambda: [_single("RED", "red", n_layers, gp)],
        "ml": lambda: [_paper("SAL-GP (ML)", gp, "ml", per_layer=True)],
        "hl": lambda: [_paper("SAL-GP (HL)", gp, "hl", per_layer=True)],
        "dropped": lambda: [_paper("SAL-GP (ML), offset dropped", gp, "ml", shared_offset=False)],
        "subsets": lambda: _subsets(n_layers, gp),
        "coregionalised": lambda: [
            _paper("ICM", gp, "icm"),
            _paper("Reduced ICM", gp, "reduced-icm"),
            _paper("LCM", gp, "lcm"),
        ],
        "architectures": lambda: [
            _paper("Class-agnostic global (layer 1)", gp, "class-agnostic-global"),
            _paper("Class-specific global (layer 1)", gp, "class-specific-global"),
        ],
        "concat": lambda: [_ours("Concatenation", gp, "concat")],
        "sum": lambda: [_ours("SAL-GP (sum)", gp, "sum")],
        "class": lambda: [
            _ours("Class-specific global", gp, "nested", groups=("class",)),
            _paper("Class-specific layer-wise", gp, "class-specific-layer-wise"),
        ],
        "deep": lambda: [Method("Deep GP", DeepGPCalibrator.name, dict(deep or {}), reads_layers=True)],
        "evidence": lambda: [
            Method("SAL-GP on evidence", EvidenceGP.name, reads_layers=True, reference=True),
            Method("Layer evidence", "layer-evidence", reads_layers=True, reference=True),
        ],
        "adam": lambda: _adam(n_layers, gp),
        "inducing": lambda: _inducing(gp),
        "additive": lambda: [_paper("Additive", gp, "additive")],
        "prior": lambda: _prior(gp),
        "one-start": lambda: _one_start(gp),
    }
    return by_group[group]()


def rows_of_prediction(
    method: Method, prediction: Prediction, features: Features, temperature: float = 1.0
) -> dict[str, Prediction]:
    """Split a prediction into the rows of the table: the global one and, for a stacked model, one
    per layer.

    In all of them the other classes share what the predicted one leaves by the softmax at the same
    ``temperature``, that of the calibrator.
    """
    names = method.rows(len(features.layers))
    terms = prediction.layers
    if len(names) == 1 or terms is None:
        return {names[0]: prediction}
    s = features.probs.to(terms.mean.dtype).amax(dim=1)
    layers = {
        name: Prediction.from_confidence(
            features,
            s + terms.mean[:, k],
            None if terms.std is None else terms.std[:, k],
            temperature=temperature,
        )
        for k, name in enumerate(names[1:])
    }
    return {names[0]: prediction, **layers}


def _conventional() -> list[Method]:
    return [
        Method("Uncalibrated (Baseline)", "uncalibrated"),
        Method("Temperature Scaled (Baseline)", "temperature"),
        Method("Temperature Scaled (init 0.5)", GradientTemperature.name, {"init": 0.5}),
        Method("Temperature Scaled (init 2)", GradientTemperature.name, {"init": 2.0}),
        Method("Isotonic", "isotonic"),
        Method("BBQ (alpha 1)", "bbq", {"alpha": 1.0, "beta": 1.0}),
        Method("BBQ (alpha 0.1)", "bbq", {"alpha": 0.1, "beta": 1.0}),
        Method("BBQ (cross-validation)", SelectedBBQ.name, {"criterion": "ece"}),
        Method("BBQ (empirical Bayes)", SelectedBBQ.name, {"select": "empirical-bayes"}),
    ]


def _single(name: str, form: str, layer: int, gp: Mapping[str, Any]) -> Method:
    own = {name: value for name, value in gp.items() if name != "refine_steps"}
    arguments = ResidualGP.paper(form, **own).get_params()
    label = f"{name} (Layer {layer})"
    return Method(label, "residual-gp", arguments, (layer,), reads_layers=True)


def _paper(
    name: str,
    gp: Mapping[str, Any],
    model: str,
    layers: tuple[int, ...] | None = None,
    per_layer: bool = False,
    **more: Any,
) -> Method:
    """A model of the paper: every argument comes from `salgp.SALGP.paper`. ML and HL, and models of ours in
    their place, are searched from three starting points, save by the paper's own recipe, which has one.
    With ``refine_steps`` the search is on a part of the samples.
    """
    searched = {"restarts": RESTARTS} if model in _STACKED.values() and "recipe" not in gp else {}
    form = RefinedSALGP if "refine_steps" in gp else SALGP
    arguments = form.paper(model, **{**searched, **gp, **more}).get_params()
    return Method(name, form.name, arguments, layers, True, per_layer)


def _ours(name: str, gp: Mapping[str, Any], covariance: str, **more: Any) -> Method:
    """A model of ours under the same settings."""
    return _paper(name, gp, "ml", covariance=covariance, **more)


def _subsets(n_layers: int, gp: Mapping[str, Any]) -> list[Method]:
    low, high = tuple(range(1, min(3, n_layers) + 1)), tuple(range(max(n_layers - 2, 1), n_layers + 1))
    return [
        _paper(f"{name} G({some[0]}-{some[-1]})", gp, model, layers=some)
        for name, model in _STACKED.items()
        for some in (low, high)
    ]


def _adam(n_layers: int, gp: Mapping[str, Any]) -> list[Method]:
    """ML, HL and the single GPs by the paper's own recipe."""
    own = {**gp, "recipe": "adam-mstar"}
    stacked = [_paper(f"{name} by Adam", own, model) for name, model in _STACKED.items()]
    singles = [_single("Single GP by Adam", "rio", k, own) for k in range(1, n_layers + 1)]
    return [*stacked, *singles]


def _inducing(gp: Mapping[str, Any]) -> list[Method]:
    """The stacked models by 512 inducing rows, to stand beside the exact ones."""
    few = {**gp, "inference": "inducing", "n_inducing": INDUCING}
    models = {f"{name} G": model for name, model in _STACKED.items()}
    models |= {"Additive": "additive", "ICM": "icm", "LCM": "lcm", "Reduced ICM": "reduced-icm"}
    return [_paper(name + APPROXIMATE, few, model) for name, model in models.items()]


def _prior(gp: Mapping[str, Any]) -> list[Method]:
    """ML, HL and sum with lengthscales under the dimension-scaled prior."""
    scaled = {**gp, "prior": "dimension-scaled"}
    stacked = [_paper(f"{name}, scaled prior", scaled, model) for name, model in _STACKED.items()]
    return [*stacked, _ours("SAL-GP (sum), scaled prior", scaled, "sum")]


def _one_start(gp: Mapping[str, Any]) -> list[Method]:
    """ML, HL and sum searched from one starting point, as the other models are."""
    once = {**gp, "restarts": 0}
    stacked = [_paper(f"{name} G{ONE_START}", once, model) for name, model in _STACKED.items()]
    return [*stacked, _ours(f"SAL-GP (sum){ONE_START}", once, "sum")]
