"""Calibrate a classifier of any framework from its outputs: logits or probabilities, as arrays.

XGBoost, Keras, scikit-learn, an API: whoever has class scores and labels of held-out samples needs no
network. Embeddings of the same samples become layers, so that layer evidence works there, too.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salgp.calibrators import Calibrator
from salgp.calibrators.registry import method_for
from salgp.features import Features
from salgp.prediction import Prediction

__all__ = ["CalibratedOutputs", "calibrate_outputs"]


Columns = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class CalibratedOutputs:
    """A fitted calibrator that is used on arrays.

    Args:
        calibrator: fitted.
        output: what it was fitted on, and what it predicts on: ``"logits"`` or ``"probabilities"``.
        columns: names of the columns of the tables it was fitted on; arrays have none.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> logits = 4 * rng.normal(size=(200, 3))
        >>> labels = (logits + 6 * rng.normal(size=(200, 3))).argmax(1)
        >>> calibrated = calibrate_outputs(logits, labels)
        >>> bool(calibrated.predict(logits).confidence.mean() < 0.8)  # it was overconfident
        True
    """

    calibrator: Calibrator
    output: str
    columns: Columns = field(default_factory=dict)

    def predict(
        self, logits: Any = None, *, probs: Any = None, layers: Mapping[str, Any] | None = None
    ) -> Prediction:
        """Calibrated predictions of new samples, given as in `calibrate_outputs`."""
        if isinstance(logits, Features):
            why = "predict takes arrays; salgp.Features go to the calibrator: .calibrator.predict(...)"
            raise TypeError(why)
        features, found, columns = _read(logits, probs, layers)
        if found != self.output:
            raise ValueError(f"fitted on {self.output}, got {found}; pass {_ARGUMENT[self.output]}=...")
        missing = [name for name in self.calibrator.layer_widths_ if name not in features.layers]
        if missing:
            raise ValueError(
                f"fitted with the embeddings {', '.join(map(repr, missing))}, which are missing here; pass "
                f"layers={{{missing[0]!r}: array}}"
            )
        self._check_columns(columns)
        return self.calibrator.predict(features)

    def _check_columns(self, found: Columns) -> None:
        """Tables with other columns, or in another order, than those of the fit would mix up classes."""
        for name, expected in self.columns.items():
            if found.get(name, expected) != expected:
                raise ValueError(
                    f"{name}: the columns ({', '.join(found[name][:3])}, ...) are not those of the fit "
                    f"({', '.join(expected[:3])}, ...) in the same order; bring them in its order"
                )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the calibrator; ``salgp.load(folder)`` reads it and predicts on `salgp.Features`."""
        return self.calibrator.save(folder)


def calibrate_outputs(
    logits: Any = None,
    labels: Any = None,
    *,
    probs: Any = None,
    layers: Mapping[str, Any] | None = None,
    reference: tuple[Mapping[str, Any] | Features, Any] | None = None,
    method: Calibrator | str | None = None,
) -> CalibratedOutputs:
    """Calibrate from class scores and labels of samples the classifier was not trained on.

    Args:
        logits: ``(n, c)`` class scores before any softmax; ``(n,)`` are a binary classifier's log-odds.
        labels: ``(n,)`` class indices; -1 for a class the classifier does not know.
        probs: class probabilities, in place of logits. Which of the two it is, is never guessed.
        layers: embeddings of the samples by name, ``(n, d)`` each, for methods that read layers.
        reference: embeddings (by the same names, or as `salgp.Features`) and labels of the training data, for
            methods that compare against it.
        method: a calibrator, its name, or None (also ``"auto"``): layer evidence where there are layers, else
            stacked scaling, a cross-validated mixture of temperature and matrix scaling. Labels stay those of
            the classifier; where another class has become more probable, `Prediction.flips` says so.

    Returns:
        The fitted calibrator, ready to predict on arrays.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> probs = rng.dirichlet(np.full(3, 0.3), size=200)
        >>> labels = (probs.cumsum(1) < rng.random((200, 1))).sum(1)
        >>> calibrate_outputs(labels=labels, probs=probs, method="platt").predict(probs=probs).probs.shape
        torch.Size([200, 3])
    """
    features, output, columns = _read(logits, probs, layers)
    if labels is None:
        raise ValueError("labels are missing; pass the true classes of the samples: labels=...")
    known = None if reference is None else _reference(reference, features)
    calibrator = method_for(method, bool(features.layers))
    return CalibratedOutputs(calibrator.fit(features, labels, known), output, columns)


_ARGUMENT = {"logits": "logits", "probabilities": "probs"}


def _read(logits: Any, probs: Any, layers: Mapping[str, Any] | None) -> tuple[Features, str, Columns]:
    """The features, what the class scores are, and the columns of those that are tables."""
    if (logits is None) == (probs is None):
        raise ValueError("pass either logits or probs=..., exactly one of them")
    if probs is None:
        features, output = Features.from_logits(logits, layers), "logits"
    else:
        features, output = Features.from_probs(probs, layers), "probabilities"
    given = {"class scores": logits if probs is None else probs}
    given |= {f"layer {name!r}": x for name, x in (layers or {}).items()}
    named = {name: getattr(x, "columns", None) for name, x in given.items()}
    columns = {name: tuple(map(str, found)) for name, found in named.items() if found is not None}
    return features, output, columns


def _reference(
    reference: tuple[Mapping[str, Any] | Features, Any], features: Features
) -> tuple[Features, Any]:
    """The training data as features with the layers of the calibration data."""
    given, labels = reference
    if isinstance(given, Features):
        return given.select(features.layer_names), labels
    if not isinstance(given, Mapping):
        got = type(given).__name__
        raise TypeError(f"reference must be ({{name: embeddings}}, labels), got a {got} in first place")
    no_logits = features.logits.new_zeros(len(labels), features.n_classes)
    return Features.from_logits(no_logits, given).select(features.layer_names), labels
