"""Calibrators by name: ours, those that other packages register, and those their entry points name.

Nothing heavy is imported with this module: the command line checks and completes names before PyTorch is
loaded.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from salgp.calibrators.base import Calibrator

__all__ = [
    "CLASSES",
    "DEFAULT",
    "check_names",
    "entry_points",
    "get",
    "known_names",
    "method_for",
    "names",
    "register",
]

GROUP = "salgp.calibrators"
"""Entry points of this group name calibrators of other packages."""

CLASSES = {
    "uncalibrated": "scaling.temperature.Uncalibrated",
    "temperature": "scaling.temperature.TemperatureScaling",
    "perturbed-temperature": "scaling.temperature.PerturbedTemperatureScaling",
    "ensemble-temperature": "scaling.temperature.EnsembleTemperatureScaling",
    "stacked": "scaling.multiclass.StackedScaling",
    "adaptive-ensemble": "scaling.temperature.AdaptiveCalibratorEnsemble",
    "vector": "scaling.multiclass.VectorScaling",
    "matrix": "scaling.multiclass.MatrixScaling",
    "dirichlet": "scaling.multiclass.DirichletCalibration",
    "platt": "scaling.toplabel.PlattScaling",
    "beta": "scaling.toplabel.BetaCalibration",
    "isotonic": "scaling.toplabel.IsotonicRegression",
    "histogram": "scaling.toplabel.HistogramBinning",
    "bbq": "scaling.bbq.BBQ",
    "latent-gp": "gp.latent_gp.GPCalibration",
    "density-aware": "density.DensityAwareCalibration",
    "trust-score": "density.TrustScore",
    "deep-knn": "density.DeepKNN",
    "residual-gp": "gp.salgp.ResidualGP",
    "layer-evidence": "evidence.calibrator.LayerEvidence",
    "sal-gp": "gp.salgp.SALGP",
}
"""Short name -> module.Class inside `salgp.calibrators`; modules are imported on first use."""

DEFAULT = (None, "auto")
"""Values of ``method`` that mean the default."""
_REGISTERED: dict[str, type[Calibrator]] = {}
"""Calibrators of other packages, by name."""

C = TypeVar("C", bound="type[Calibrator]")


def get(name: str, **arguments: Any) -> Calibrator:
    """Build the calibrator called ``name``.

    Example:
        >>> get("temperature")
        TemperatureScaling()
        >>> get("temprature")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        KeyError: "no calibrator called 'temprature'; did you mean 'temperature'? known: ...
    """
    return _class(name)(**arguments)


def method_for(method: Calibrator | str | None, has_layers: bool = True) -> Calibrator:
    """An unfitted calibrator: the given one copied, one by name, or the default for the data.

    Example:
        >>> method_for("auto", has_layers=False)
        StackedScaling()
    """
    from sklearn.base import clone

    from salgp.calibrators.base import Calibrator

    if isinstance(method, Calibrator):
        return clone(method)
    if method in DEFAULT:
        return get("layer-evidence" if has_layers else "stacked")
    if isinstance(method, str):
        return get(method)
    raise TypeError(f"method must be a Calibrator, its name, or None, got {type(method).__name__}")


def names() -> dict[str, str]:
    """Every calibrator's name and the first sentence of its description.

    Example:
        >>> "temperature" in names()
        True
    """
    return {name: _first_sentence(_class(name).__doc__ or "") for name in known_names()}


def register(cls: C) -> C:
    """Make a calibrator of another package one of ours: `get` builds it, and a saved one can be loaded.

    Use it as a decorator, or name the class as an entry point in the group ``salgp.calibrators`` of your
    package, so that it is found without being imported first.

    Args:
        cls: a `Calibrator` with a ``name`` that no other has.

    Returns:
        The class itself.

    Example:
        >>> from salgp import Prediction
        >>> from salgp.calibrators import Calibrator
        >>> class Half(Calibrator):
        ...     "Half of the network's confidence."
        ...
        ...     name = "half"
        ...
        ...     def _fit(self, features, labels, reference):
        ...         pass
        ...
        ...     def _predict(self, features):
        ...         return Prediction.from_confidence(features, features.confidence / 2)
        >>> get(register(Half).name)
        Half()
    """
    from salgp.calibrators.base import Calibrator

    if not (isinstance(cls, type) and issubclass(cls, Calibrator)):
        raise TypeError(f"expected a class derived from salgp.calibrators.Calibrator, got {cls!r}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{cls.__name__} needs a class attribute `name`, a short name to look it up by")
    other = _REGISTERED.get(name, cls)
    same = (other.__module__, other.__qualname__) == (cls.__module__, cls.__qualname__)
    if name in CLASSES or not same:
        raise ValueError(f"there is a calibrator called {name!r} already; choose another name")
    _REGISTERED[name] = cls
    return cls


def entry_points() -> dict[str, EntryPoint]:
    """Calibrators that other installed packages announce, by name.

    Example:
        >>> "temperature" in entry_points()  # one of our own
        False
    """
    from importlib import metadata  # takes longer than the rest of a help text

    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def known_names() -> list[str]:
    """Names of all calibrators; none of their modules is loaded."""
    return list({**CLASSES, **_REGISTERED, **entry_points()})


def check_names(*names: Any) -> None:
    """Refuse names that no calibrator has, and suggest the nearest; nothing is loaded.

    Example:
        >>> check_names("temperature", "platt")
    """
    known = known_names()
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise KeyError(f"no calibrator called {name!r}; {hint}known: {', '.join(sorted(known))}")


def _class(name: str) -> type[Calibrator]:
    if name in CLASSES:
        module, _, cls = CLASSES[name].rpartition(".")
        return getattr(importlib.import_module(f"salgp.calibrators.{module}"), cls)
    check_names(name)
    if name not in _REGISTERED:
        found = register(entry_points()[name].load())
        if found.name != name:
            raise ValueError(f"the entry point {name!r} leads to a calibrator called {found.name!r}")
    return _REGISTERED[name]


def _first_sentence(text: str) -> str:
    """The first paragraph up to its first full stop, as plain text."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split()).replace("`", "")
    return paragraph.split(". ")[0].rstrip(".") + "."
