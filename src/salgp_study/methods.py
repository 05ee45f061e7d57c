"""Every row of the paper's tables as a calibrator to fit and the predictions to read off it.

One fit gives one or several rows: SAL-GP with a stacked covariance gives the global prediction ``G`` and one
of each layer, ``L1``.. ``L5``, whose confidence is ``s`` plus that layer's own correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from salgp.features import Features
from salgp.prediction import Prediction

__all__ = ["GROUPS", "Method", "methods_of", "rows_of_prediction"]

GROUPS = (
    "conventional",
    "single",
    "ml",
    "hl",
    "subsets",
    "sum",
    "class",
    "deep",
    "evidence",
    "approximation",
)
"""Groups of methods a study can ask for."""

_STACKED = "SAL-GP (ML)", "SAL-GP (HL)"


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
    if group == "conventional":
        return _conventional()
    if group == "single":
        return [_single(k, gp) for k in range(1, n_layers + 1)]
    if group == "subsets":
        low, high = tuple(range(1, min(3, n_layers) + 1)), tuple(range(max(n_layers - 2, 1), n_layers + 1))
        return [
            _salgp(f"{name} G({ls[0]}-{ls[-1]})", gp, name[8:10].lower(), layers=ls)
            for name in _STACKED
            for ls in (low, high)
        ]
    if group == "class":
        return [
            _salgp("Class-specific global", gp, "nested", groups=("class",)),
            _salgp("Class-specific layer-wise", gp, "nested", groups=("layer", "layer/class")),
        ]
    if group == "approximation":
        return _approximation(gp)
    one = {
        "ml": _salgp("SAL-GP (ML)", gp, "ml", per_layer=True),
        "hl": _salgp("SAL-GP (HL)", gp, "hl", per_layer=True),
        "sum": _salgp("SAL-GP (sum)", gp, "sum"),
        "deep": Method("Deep GP", "deep-gp", dict(deep or {}), reads_layers=True),
        "evidence": Method(
            "SAL-GP (evidence)", "sal-gp", {"inputs": "evidence"}, reads_layers=True, reference=True
        ),
    }
    return [one[group]]


def rows_of_prediction(method: Method, prediction: Prediction, features: Features) -> dict[str, Prediction]:
    """Split a prediction into the rows of the table: the global one and, for a stacked model, one
    per layer.
    """
    names = method.rows(len(features.layers))
    terms = prediction.layers
    if len(names) == 1 or terms is None:
        return {names[0]: prediction}
    s = features.probs.to(terms.mean.dtype).amax(dim=1)
    layers = {
        name: Prediction.from_confidence(
            features, s + terms.mean[:, k], None if terms.std is None else terms.std[:, k]
        )
        for k, name in enumerate(names[1:])
    }
    return {names[0]: prediction, **layers}


def _conventional() -> list[Method]:
    return [
        Method("Uncalibrated (Baseline)", "uncalibrated"),
        Method("Temperature Scaled (Baseline)", "temperature"),
        Method("Temperature Scaled (init 0.5)", "temperature", {"init": 0.5, "optimizer": "gradient"}),
        Method("Temperature Scaled (init 2)", "temperature", {"init": 2.0, "optimizer": "gradient"}),
        Method("Isotonic", "isotonic"),
        Method("BBQ (alpha 1)", "bbq", {"alpha": 1.0, "beta": 1.0}),
        Method("BBQ (alpha 0.1)", "bbq", {"alpha": 0.1, "beta": 1.0}),
    ]


def _single(layer: int, gp: Mapping[str, Any]) -> Method:
    return Method(
        f"Single GP (Layer {layer})", "residual-gp", {"form": "rio", **gp}, (layer,), reads_layers=True
    )


def _salgp(
    name: str,
    gp: Mapping[str, Any],
    covariance: str,
    layers: tuple[int, ...] | None = None,
    per_layer: bool = False,
    **more: Any,
) -> Method:
    arguments = {"covariance": covariance, "likelihood": "gaussian", "objective": "evidence", **gp, **more}
    return Method(name, "sal-gp", arguments, layers, True, per_layer)


def _approximation(gp: Mapping[str, Any]) -> list[Method]:
    sizes: dict[str, dict[str, Any]] = {
        f"{m} inducing": {"inference": "inducing", "n_inducing": m} for m in (64, 256, 512)
    }
    ways = {"exact": {"inference": "exact"}, **sizes}
    return [
        _salgp(f"{name} {how}", {**gp, **way}, name[8:10].lower())
        for name in _STACKED
        for how, way in ways.items()
    ]
