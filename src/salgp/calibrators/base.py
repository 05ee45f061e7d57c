"""The one contract of all calibrators: ``fit(features, labels)``, ``predict(features) -> Prediction``,
``save``.

A calibrator is a scikit-learn style estimator: the constructor stores its arguments verbatim, learned state
ends in ``_``, `sklearn.base.clone` works. Input is checked here, once, so that every method below may assume
clean tensors. A leaf implements `_fit` and `_predict` and nothing else; a saved calibrator is its arguments
plus every attribute that ends in ``_``.

A fitted calibrator as one safetensors file: its arguments, what it learned, and what belongs to it.

One file is replaced at once, so a reader gets the old calibrator or the new one with everything that belongs
to it. `salgp.calibrators.loading` reads it back.

Rows that do not fit into memory, as `Calibrator.fit_stream` asks for them; feature stores answer it.

A method is fitted out of core by a sample of the rows in memory and by passes over all rows, each of which
adds up what the rows say.
"""

import copy
import functools
import hashlib
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Protocol, Self, TypeVar

import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from torch import Tensor

import salgp.calibrators.checks as checks
from salgp.calibrators.checks import CalibrationWarning, Labelled
from salgp.features import Features
from salgp.file_signatures import is_of_kind
from salgp.io import pack, refuse_foreign, unpack, value_bytes, value_from, write_value
from salgp.io.files import AnyPath, refuse_link
from salgp.labels import as_labels
from salgp.logits import ZERO, rest_temperature
from salgp.prediction import Prediction

__all__ = [
    "CalibrationWarning",
    "Calibrator",
    "FILE",
    "FORMAT_VERSION",
    "KIND",
    "Source",
    "Training",
    "calibrator_digest",
    "check_place",
    "chunks",
    "labels_of",
    "one_at_a_time",
    "save_calibrator",
]

P = ParamSpec("P")
R = TypeVar("R")
Training = Labelled | None
"""Samples of the network's training set and their classes, where a method is given them."""


class Calibrator(BaseEstimator, ABC):
    """Abstract base of all calibrators.

    Attributes:
        n_classes_: number of classes seen in `fit`; `predict` refuses others.
        layer_widths_: feature widths seen in `fit`; `predict` refuses others.
        zero_logits_: ``(c,)`` logits in place of a probability of exactly 0 (see
            `salgp.calibrators.checks`), None where no calibration sample had one.
        network_: fingerprint of the network whose features it was fitted on; None accepts those of any.
    """

    name: ClassVar[str]
    """Short name for look-up, e.g. ``"temperature"``."""
    needs_layers: ClassVar[bool] = False
    """Does the method read hidden layers, or the logits only?"""
    uses_reference: ClassVar[bool] = False
    """Does the method, as it is by default, compare samples with the network's training data?"""
    uses_augmented: ClassVar[bool] = False
    """Does the method learn from augmented calibration samples (`Features.groups`)?"""
    takes_context: ClassVar[bool] = False
    """Can `predict` use other unlabelled samples from the same place and time (``context=``)?"""
    gives_confidence_only: ClassVar[bool] = False
    """Does the method say how sure to be of the label, and nothing about the other classes? Then `fit` also
    learns ``rest_temperature_``, by which `Prediction.from_confidence` shares what is left among them.
    """

    floors_zeros: ClassVar[bool] = True
    """Is a probability of exactly 0 replaced by the smallest that the classifier can tell?"""
    suits_few_values: ClassVar[bool] = False
    """Does the method suit classifiers that tell few values apart, so that `fit` need not name another?"""
    zero_logits_: Tensor | None = None
    network_: str | None = None

    @property
    def display_name(self) -> str:
        """The method's name for readers, in tables and reports."""
        return self.name.replace("-", " ")

    def fit(self, features: Features, labels: Any, reference: tuple[Features, Any] | None = None) -> Self:
        """Learn from labelled calibration data.

        Args:
            features: of the calibration samples.
            labels: ``(n,)`` true classes; -1 for a class the network does not know.
            reference: features and labels of the network's training set, for methods that compare against it.

        Returns:
            The fitted calibrator itself.
        """
        checks.check_features(features, self.needs_layers)
        features = checks.bounded_logits(features)
        y = labels_of(features, labels)
        checks.refuse_signs(y, features.n_classes)
        rows, _ = features.originals
        if len(rows) < 2:
            raise ValueError("only one calibration sample: at least 2 are needed, a few hundred are sensible")
        plain = features if len(rows) == len(features) else Features(features.logits[rows])
        known = self._checked_reference(reference, features)
        zeros = self.floors_zeros and not self.suits_few_values
        checks.warn_of_data(plain, y[rows], known if self.needs_layers else None, zeros)
        fresh = type(self)(**self.get_params(deep=False))  # a fit that fails leaves the old one as it was
        fresh._learn_zero_logits(plain)
        known = known and (fresh.floor_zeros(known[0]), known[1])
        with torch.no_grad():
            if self.gives_confidence_only:
                fresh.rest_temperature_ = rest_temperature(fresh.floor_zeros(plain).logits, y[rows])
            fresh._fit(fresh.floor_zeros(features), y, known)
        fresh._remember(features)
        self.__dict__ = fresh.__dict__
        return self

    def _remember(self, features: Features) -> None:
        """Keep what later features are compared with."""
        if features.network is not None:
            self.network_ = features.network
        self.n_classes_ = features.n_classes
        self.layer_widths_ = features.widths if self.needs_layers else {}

    def _checked_reference(self, reference: tuple[Features, Any] | None, features: Features) -> Training:
        """The reference with the layers and on the device of the calibration samples."""
        if reference is None:
            return None
        known = checks.check_reference(reference[0], features, self.needs_layers)
        _check_network(known, features.network, "the reference was read from", "the calibration samples")
        return known, labels_of(known, reference[1]).to(features.logits.device)

    def predict(self, features: Features, context: Any = None) -> Prediction:
        """Calibrated confidences for new samples.

        Args:
            features: of the samples.
            context: what the samples have in common, for methods that make use of it (`takes_context`).
        """
        features = self.check_input(features)
        if context is not None:
            raise self._without_context()
        away = features.logits.device
        home = self.device or away
        if away != home:
            return self.predict(features.to(home)).to(away)
        with torch.no_grad():
            parts = list(map(self._predict, chunks(features, self._chunk())))
        return parts[0] if len(parts) == 1 else Prediction.concatenate(parts)

    @property
    def device(self) -> torch.device | None:
        """Where it works: where it was fitted, or where `to` sent it; None where it learned no arrays."""
        first = next(_tensors(_learned(self)), None)
        return None if first is None else first.device

    def explain(self, features: Features, i: int) -> str:
        """Say in one line what each term did to the confidence of sample ``i``, in confidence points that add
        up to the change, see `salgp.explanation`.

        Args:
            features: of ``n`` samples.
            i: one of them, from 0 to ``n - 1``; negative numbers count from the end.

        Example:
            >>> from salgp.calibrators import get
            >>> x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
            >>> f = Features(3 * x, {"a": x})
            >>> labels = f.label.where(torch.arange(80) % 9 > 0, 1 - f.label)
            >>> get("layer-evidence").fit(f, labels).explain(f, 0)[:7]
            '0.52 ->'
        """
        from salgp.explanation import explain_sample  # only whoever asks needs it

        one = features[[_place(i, len(features))]]
        prediction = self.predict(one)
        if prediction.layers is None:
            raise ValueError(f"{self.display_name} has no layer terms to explain")
        return str(explain_sample(one, prediction))

    def check_input(self, features: Features, allow_empty: bool = True) -> Features:
        """The features `predict` works on, with the fitted layers only; refuses what the calibrator was not
        fitted for.
        """
        largest = checks.check_features(features, self.needs_layers, allow_empty)
        if features.network != self.network_:
            _check_network(features, self.network_, "these features were read from", "this calibrator")
        self._check_fitted()
        if features.logits.shape[1] != self.n_classes_:
            raise ValueError(f"fitted on {self.n_classes_} classes, got class scores of {features.n_classes}")
        if largest >= -ZERO:
            features = self.floor_zeros(checks.bounded_logits(features))
        expected, found = self.layer_widths_, features.widths
        if not self.needs_layers or list(found.items()) == list(expected.items()):
            return features
        for name, width in expected.items():
            if name not in found:
                raise ValueError(f"layer {name!r} is missing; fitted on {list(expected)}, got {list(found)}")
            if found[name] != width:
                why = f"layer {name!r} has width {found[name]}, fitted on {width}: is it the same network?"
                raise ValueError(why)
        return features.select(tuple(expected))

    def _learn_zero_logits(self, features: Features) -> None:
        """Keep what takes the place of probabilities of 0, where there are any."""
        self.__dict__.pop("zero_logits_", None)
        zeros = checks.learn_zero_logits(features.logits) if self.floors_zeros else None
        if zeros is not None:
            self.zero_logits_ = zeros

    def floor_zeros(self, features: Features) -> Features:
        """The features with the learned logits in place of probabilities of 0, as `predict` sees them."""
        return checks.floor_zeros(features, self.zero_logits_) if self.floors_zeros else features

    @abstractmethod
    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        """Set the learned attributes; called under ``no_grad`` with checked input."""

    @abstractmethod
    def _predict(self, features: Features) -> Prediction:
        """Compute the prediction; called under ``no_grad`` with checked input."""

    def context(self, features: Features) -> Any:
        """Summary of unlabelled samples that were met together, for `predict`, where `takes_context`."""
        raise self._without_context()

    def predict_in_window(self, features: Features, window: Tensor) -> tuple[Prediction, Tensor]:
        """Prediction in a window of which only sums are known, for exported graphs.

        Args:
            features: of the samples, checked.
            window: ``(2 + C,)`` sums over its samples: of two numbers, and of how often each class was
                predicted.

        Returns:
            The prediction, and what every sample adds to the sums, ``(n, 2 + C)``.
        """
        raise self._without_context()

    def _without_context(self) -> ValueError:
        return ValueError(f"{self.display_name} predicts each sample by itself: it takes no context")

    def _chunk(self) -> int:
        """Samples predicted at once; bounds memory whatever the number of samples."""
        return 65_536

    def fit_stream(self, source: Any) -> Self | None:
        """Fit to more rows than memory holds, or None where the method has no such way (the default).

        Args:
            source: what a feature store offers (`salgp.calibrators.base.Source`).
        """
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with_state(copy.deepcopy(_learned(self), memo), memo)

    def _with_state(self, state: Any, memo: dict[int, Any] | None = None) -> Self:
        """A copy that has learned something else."""
        same = type(self)(**copy.deepcopy(self.get_params(deep=False), memo))
        same.__dict__.update(state)
        return same

    def to(self, device: torch.device | str) -> Self:
        """A copy whose learned arrays are on ``device``, where its predictions are then made."""
        self._check_fitted()
        tensors: dict[str, Tensor] = {}
        state = pack(_learned(self), tensors)
        moved = {name: x.to(device) for name, x in tensors.items()}
        return self._with_state(unpack(state, moved))

    def save(self, folder: AnyPath) -> Path:
        """Write ``calibrator.safetensors`` into a folder, whole or not at all; other files there stay.

        A calibrator that is there already is replaced at once, and no other file. Where a rule was saved
        beside it (`salgp.decide.Rule.save`), nothing is written: a rule promises nothing about other
        confidences.
        """
        self._check_fitted()
        return save_calibrator(folder, self)

    def _check_fitted(self) -> None:
        if "n_classes_" not in vars(self):
            what = type(self).__name__
            raise NotFittedError(f"this {what} is not fitted; call fit(features, labels) first")

    def __getstate__(self) -> dict[str, bytes]:
        """The bytes that `save` writes, so that pickles, joblib and process pools carry what a file does."""
        return {"safetensors": value_bytes(KIND, FORMAT_VERSION, calibrator_value(self))}

    def __setstate__(self, state: dict[str, bytes]) -> None:
        found = value_from(state["safetensors"], KIND, FORMAT_VERSION)
        type(self).__init__(self, **found["config"])
        self.__dict__.update(found["state"])


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator of methods that read what was learned and then replace it: threads take turns."""

    @functools.wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _CHANGING:
            return method(*args, **kwargs)

    return alone


_CHANGING = threading.RLock()


def chunks(features: Features, size: int) -> list[Features]:
    """The samples, at most ``size`` at a time; no samples are one chunk.

    Example:
        >>> [len(part) for part in chunks(Features(torch.zeros(5, 2)), 2)]
        [2, 2, 1]
    """
    n = len(features)
    return [features] if n <= size else [features[i : i + size] for i in range(0, n, size)]


def labels_of(features: Features, labels: Any) -> Tensor:
    """Checked labels of the samples, on their device."""
    return as_labels(labels, len(features), features.n_classes).to(features.logits.device)


def _place(i: Any, n: int) -> int:
    """The number of one of ``n`` samples, counted from 0."""
    try:
        number = operator.index(i)
    except TypeError:
        raise TypeError(
            f"expected the number of one sample, got a {type(i).__name__}; explain several one by one: "
            f"[calibrator.explain(features, i) for i in ...]"
        ) from None
    if not -n <= number < n:
        raise IndexError(f"there is no sample {number}: the features have {n:,}, counted from 0")
    return number % n


def _check_network(features: Features, expected: str | None, what: str, other: str) -> None:
    """Refuse features of another network, or of one that was trained further, where both are known."""
    if None not in (expected, features.network) and features.network != expected:
        raise ValueError(
            f"{what} a network with other weights or precision than {other}: was it trained further? "
            f"Calibrate again; to use it all the same, set calibrator.network_ = None"
        )


KIND = "salgp-calibrator"
FORMAT_VERSION = 5
FILE = "calibrator.safetensors"
"""Name of the file inside the folder that `Calibrator.save` is given."""


def save_calibrator(folder: AnyPath, calibrator: Calibrator, **parts: Any) -> Path:
    """Write a calibrator into a folder, over an older one where there is one.

    Args:
        folder: created where missing; other files in it are left alone.
        calibrator: fitted.
        parts: what belongs to it, such as the description of its network; nested values and tensors.

    Returns:
        The folder.
    """
    where = Path(folder)
    check_place(where)
    write_value(where / FILE, KIND, FORMAT_VERSION, calibrator_value(calibrator) | parts)
    return where


def check_place(folder: Path) -> None:
    """Refuse a place where `save_calibrator` would overwrite something else, or leave a rule beside a
    calibrator that it was not chosen for.
    """
    refuse_link(folder)
    refuse_foreign(folder / FILE, "calibrator")
    files = filter(Path.is_file, sorted(folder.glob("*.json")))
    rules = [path for path in files if is_of_kind(path, "rule")]
    if rules and (folder / FILE).is_file():
        raise FileExistsError(
            f"{rules[0]} was chosen for the calibrator that would be replaced; move it away, and choose the "
            f"rule again for the new one"
        )


def calibrator_value(calibrator: Calibrator) -> dict[str, Any]:
    """Name, arguments and learned attributes."""
    config = calibrator.get_params(deep=False)
    return {"calibrator": calibrator.name, "config": config, "state": _learned(calibrator)}


def _learned(calibrator: Any) -> dict[str, Any]:
    """Learned attributes."""
    return {name: value for name, value in vars(calibrator).items() if is_learned(name)}


def is_learned(name: str) -> bool:
    """Is it the name of a learned attribute?"""
    return name.endswith("_") and not name.startswith("_")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a learned value, one by one."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        yield from _tensors(vars(value))


def calibrator_digest(calibrator: Calibrator) -> str:
    """SHA-256 of its arguments and of what it learned; the same for the same calibrator loaded again."""
    written = value_bytes(KIND, FORMAT_VERSION, calibrator_value(calibrator))
    return hashlib.sha256(written).hexdigest()


class Source(Protocol):
    """Labelled rows of any number."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def has_reference(self) -> bool:
        """Is there a second set of rows, of the network's training set?"""

    def subset(self) -> tuple[Features, Tensor]:
        """A stratified sample in memory, with all augmented samples of every sample in it."""

    def over_rows(
        self, name: str, function: Callable[..., Any], state: Any, *, reference: bool = False
    ) -> Any:
        """The sum (by ``+``, in the order of the rows) of ``function(state, features, labels, number)`` over
        numbered parts of all rows.

        Args:
            name: of the pass, for its progress bar.
            function: of a module, found by name wherever it runs; its results and ``state`` are values that
                `salgp.io.pack` takes.
            state: given to each call.
            reference: go over the rows of the training set instead.
        """
