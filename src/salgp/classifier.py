"""Calibrated classifier: network, taps and calibrator in one module; made by `calibrate`, read by `load`.

`calibrate` makes one in a single call; `CalibratedClassifier.save` and `load` keep it. The network itself is
not stored: a fingerprint of its modules, their settings and its weights tells another network from the one
the calibrator was made for. What a forward function does besides, it does not see.
"""

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from salgp.calibrators.base import FILE, Calibrator, save_calibrator
from salgp.calibrators.checks import CalibrationWarning
from salgp.calibrators.loading import load_parts
from salgp.calibrators.registry import DEFAULT, get, method_for
from salgp.features import Features
from salgp.io import FormatError, check_kind, plain_number, reading
from salgp.network.batches import Batch, are_texts
from salgp.network.extract import Augmentation, Families, read_calibration_data, reader_for
from salgp.network.frozen_copy import Fingerprint, check_network, unwrap
from salgp.network.layers import Poolings
from salgp.network.reader import (
    FORMAT,
    FORMAT_VERSION,
    Forward,
    LostFunctionError,
    Reader,
    collect,
    module_header,
    read_batches,
    reader_from,
)
from salgp.prediction import Prediction

__all__ = ["CalibratedClassifier", "calibrate", "load"]


class CalibratedClassifier(nn.Module):
    """A network whose forward pass gives calibrated predictions.

    The wrapped network is never changed: a frozen copy of it runs, in evaluation mode, on the same weights
    (`salgp.network.frozen_copy`), so any number of threads may predict at once. ``train()`` and ``eval()``
    have no effect on it, nor on the result; ``to(device)`` moves it. The calibrator works on the CPU, or
    where the network is if the reader keeps features there; predictions come back to the network's device.

    Args:
        model: the classifier.
        calibrator: fitted on features of this network.
        taps: what to read from the network; by default the layers the calibrator was fitted on, pooled
            automatically. The first batch resolves what is still open.
        augmentation: how the augmented samples of its fit were made, where there were some.

    Example:
        >>> model, g = nn.Sequential(nn.Flatten()), torch.Generator().manual_seed(0)
        >>> x = torch.randn(80, 3, generator=g)
        >>> y = (x + torch.randn(80, 3, generator=g)).argmax(dim=1)
        >>> classifier = calibrate(model, [(x, y)], method="temperature")
        >>> bool((classifier(x).label == model(x).argmax(dim=1)).all())
        True
    """

    def __init__(
        self,
        model: nn.Module,
        calibrator: Calibrator,
        taps: Reader | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        super().__init__()
        calibrator._check_fitted()
        self.model = model
        self.calibrator = calibrator
        layers = tuple(calibrator.layer_widths_)
        self.taps = taps or Reader(layers=layers, output="logits")
        self.augmentation = augmentation

    def extra_repr(self) -> str:
        """What print shows above the network."""
        layers = ", ".join(self.calibrator.layer_widths_) or "none"
        return f"calibrated by {self.calibrator.display_name}; layers read: {layers}"

    def _repr_html_(self) -> str:
        """What a notebook shows: method, network, layers, augmentation and the verdict of the fit."""
        layers = [f"{name} ({width})" for name, width in self.calibrator.layer_widths_.items()]
        families = [] if self.augmentation is None else list(self.augmentation.families)
        rows = {
            "method": self.calibrator.display_name,
            "network": type(self.model).__name__,
            "layers read": ", ".join(layers) or "none",
            "augmented by": ", ".join(families) or "nothing",
            "check": self.verdict_,
        }
        body = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        return f"<table><caption>Calibrated classifier</caption><tbody>{body}</tbody></table>"

    def forward(self, *inputs: Any, **keywords: Any) -> Prediction:
        """Calibrated prediction for one batch, given as the network takes it (or as one mapping)."""
        features = self.features(*inputs, **keywords)
        device = features.logits.device
        found = self._predicted(features)
        return found if found.label.device == device else found.to(device)

    def features(self, *inputs: Any, **keywords: Any) -> Features:
        """Logits and layer features of one batch, as the calibrator reads them."""
        taps = self.taps
        batch = Batch.given(inputs, keywords, unwrap(self.model), taps.labels_at, taps.inputs)
        if not torch.compiler.is_compiling() and batch.is_empty:
            raise ValueError("the batch is empty: there is nothing to predict")
        if self.taps.taps is None:
            self.taps = self.taps.resolved(self.model, batch)
        return self.taps.read(self.model, batch)

    def batch_of(self, item: Any) -> Batch:
        """The inputs in a batch: an array, several in order or by name; or what a loader makes, whose labels
        go aside. Several arrays are a batch like those of calibration, with labels or without. Where these
        are not known, several arrays are inputs in order, unless the network takes fewer.
        """
        several = isinstance(item, tuple | list) and not are_texts(item)
        inputs, network, taps = tuple(item) if several else (item,), unwrap(self.model), self.taps
        batch = Batch.given(inputs, {}, network, taps.labels_at, taps.inputs)
        if several and (taps.inputs is not None or not batch.fits(network)):
            return taps.batch_of(item)
        return batch

    def extract(
        self, loader: Iterable[Any], *, progress: bool | None = None
    ) -> tuple[Features, Tensor | None]:
        """Features of everything a loader yields, and the labels where there are some.

        It is read exactly as it was for calibration: same layers, pooling, output and forward function.

        Args:
            loader: yields batches as at calibration, with labels or without.
            progress: True shows a bar (needs ``rich``), False nothing; None a bar on a terminal, elsewhere a
                line now and then.
        """
        readings = read_batches(self.model, loader, self.taps, progress=progress)
        self.taps, features, labels = collect(readings)
        return features, labels

    def predict(self, loader: Iterable[Any], context: Any = None, progress: bool | None = None) -> Prediction:
        """Calibrated predictions for everything a loader yields.

        Args:
            loader: yields batches as at calibration; labels are not looked at.
            context: what the samples have in common, for calibrators that take it.
            progress: True shows a bar (needs ``rich``), False nothing; None a bar on a terminal, elsewhere a
                line now and then.
        """
        readings = read_batches(self.model, loader, self.taps, progress=progress, with_labels=False)
        self.taps, features, _ = collect(readings)
        return self._predicted(features, context)

    def _predicted(self, features: Features, context: Any = None) -> Prediction:
        if features.logits.device.type != "cpu" and not self.taps.keep_on_device:
            features = features.to("cpu")  # where calibrators are fitted
        return self.calibrator.predict(features, context)

    def report(self, loader: Iterable[Any], path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the HTML report of this classifier on labelled data.

        Args:
            loader: labelled data that neither training nor calibration has seen.
            path: target, e.g. ``report.html``.
            options: those of `salgp.report.build`, such as ``class_names`` and ``force``.

        Returns:
            The path written.
        """
        from salgp.report import build  # only whoever wants a report needs its libraries

        features, labels = self.extract(loader)
        if labels is None:
            raise ValueError("a report needs labels, but the loader yields inputs only; yield (x, y)")
        defaults: dict[str, Any] = {
            "method": self.calibrator.display_name,
            "class_names": self.taps.classes,
            "fit": getattr(self.calibrator, "verdict_", None),
        }
        prediction = self._predicted(features)
        return build(path, features, labels, prediction, **(defaults | options))

    @property
    def check_(self) -> dict[str, dict[str, dict[str, float]]]:
        """Scores of the fit on data left out of it, if any: situation -> method -> score."""
        return getattr(self.calibrator, "check_", {})

    @property
    def verdict_(self) -> str:
        """The same in a few sentences."""
        return getattr(self.calibrator, "verdict_", "This calibrator does not check its own fit.")

    def train(self, mode: bool = True) -> Self:
        """Set the flag of this module only: the network's modes are the user's."""
        self.training = mode
        return self

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the calibrator with the taps and the network's fingerprint into a folder, see
        `salgp.calibrators.Calibrator.save`.
        """
        return save_calibrator(folder, self.calibrator, network=self.network_header())

    def network_header(self) -> dict[str, Any]:
        """Which network it is and what is read from it, as `load` needs it; refused where the network was
        trained further since calibration.
        """
        self.taps.check(self.model)
        header = {"format": FORMAT, "format_version": FORMAT_VERSION, **module_header(self.model, self.taps)}
        if self.calibrator.network_ not in (None, header["fingerprint"]["weights"]):
            raise ValueError(
                "the network has other weights or precision than at calibration; calibrate again, or set "
                "classifier.calibrator.network_ = None to keep it all the same"
            )
        if self.augmentation is not None:
            header["augmentation"] = asdict(self.augmentation)
        text = json.dumps(header, default=plain_number)
        plain: dict[str, Any] = json.loads(text)
        return plain


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    method: Calibrator | str | None = None,
    reference: Iterable[Any] | None = None,
    output: str | None = None,
    classes: Sequence[str] | None = None,
    reader: Reader | None = None,
    perturb: Families | bool | None = True,
    budget: float | None = None,
    progress: bool | None = None,
) -> CalibratedClassifier:
    """Calibrate a trained classifier on labelled samples it was not trained on.

    Args:
        model: the classifier; it is not changed.
        loader: labelled calibration data: ``(x, y)``, ``(x1, x2, ..., y)``, or mappings with keyword
            arguments and ``labels`` (or ``label``, ``targets``, ``target``, ``y``). Labels are class
            numbers, one-hot rows, or names out of ``classes``.
        method: a calibrator (a fitted copy is made), its name, or None (also ``"auto"``) for layer evidence,
            the library's default, and for temperature scaling where no layer of the network can be read.
        reference: loader of the network's training data, for methods that compare against it.
        output: what the network returns: ``"logits"`` (the default), ``"probabilities"``,
            ``"log-probabilities"`` or ``"sigmoids"`` (one probability per class, against the rest).
        classes: names of the classes in the order of the network's outputs; labels may then be names, and
            reports name the classes.
        reader: how to read the network: layers, pooling, how it is called, where labels are, devices, the
            tokenizer of a network that reads text, the seed of augmented samples.
        perturb: families of perturbations that make augmented samples: ``"auto"``, by the kind of input; a
            kind (``"images"``, ``"sequences"``, ``"tabular"``, ``"tokens"``, ``"text"``); or a list of names
            (``"noise"``, ``"blur"``, ...) and of `salgp.network.augment.families.Family` of your own. True
            means ``"auto"`` for methods that learn from augmented samples and nothing for the others; False
            or None nothing.
        budget: seconds that reading and fitting may take, about. It is spent on augmented samples, up to
            three of each sample and family; where it is short, part of the batches is augmented and part of
            the reference read. ``.augmentation`` says what was done. By default, one of each and all of it.
        progress: True shows a bar (needs ``rich``), False nothing; None a bar on a terminal and in notebooks,
            and elsewhere a line now and then.

    Returns:
        The calibrated classifier; its fitted calibrator is ``.calibrator``.

    Example:
        >>> model, g = nn.Sequential(nn.Flatten()), torch.Generator().manual_seed(0)
        >>> x = torch.randn(80, 3, generator=g)
        >>> y = (x + torch.randn(80, 3, generator=g)).argmax(dim=1)
        >>> calibrate(model, [(x, y)], method="temperature")(x[:2]).probs.shape
        torch.Size([2, 3])
    """
    calibrator = method_for(method)
    reader = reader_for(reader, output)
    if classes is not None:
        reader = replace(reader, classes=tuple(classes))
    if not calibrator.needs_layers:
        reader = replace(reader, layers=(), pooling="auto")
    if perturb is True:
        perturb = "auto" if calibrator.uses_augmented else None
    data = read_calibration_data(
        model,
        loader,
        reader,
        perturb or None,
        reference=reference,
        needs_layers=calibrator.needs_layers,
        budget=budget,
        progress=progress,
    )
    calibrator = with_fallback(calibrator, data.features, method not in DEFAULT)
    calibrator.fit(data.features, data.labels, data.reference)
    taps = replace(data.reader, tokenizer=None)
    return CalibratedClassifier(model, calibrator, taps, data.augmentation)


def with_fallback(calibrator: Calibrator, features: Features, asked_for: bool) -> Calibrator:
    """The calibrator; or, with a warning, temperature scaling, where it needs layers and there are none.

    Args:
        calibrator: not fitted.
        features: of the calibration samples.
        asked_for: was this method asked for? Then no other takes its place.

    Example:
        >>> with_fallback(get("temperature"), Features(torch.zeros(2, 3)), False)
        TemperatureScaling()
    """
    if features.layers or not calibrator.needs_layers:
        return calibrator
    none = (
        "no hidden layer of the network can be read: it has none before its scores, or they are no "
        "modules that PyTorch can watch (plain tensors, TorchScript)"
    )
    if asked_for:
        raise ValueError(f'{none}; {calibrator.display_name} needs some: use method="temperature"')
    warnings.warn(f"{none}; temperature scaling is used instead", CalibrationWarning, stacklevel=3)
    return get("temperature")


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    strict: bool = True,
    pooling: Poolings | None = None,
    forward: Forward | None = None,
) -> Calibrator | CalibratedClassifier:
    """Read a calibrator or, together with its network, a calibrated classifier.

    Args:
        folder: written by `CalibratedClassifier.save` or `salgp.calibrators.Calibrator.save`.
        model: the network; None to read the calibrator alone.
        strict: refuse a network with other weights. One of another structure is always refused.
        pooling: the pooling function(s), where the classifier was made with some: code is never stored.
        forward: the forward function, likewise.

    Returns:
        The calibrator if ``model`` is None, else a `CalibratedClassifier`.

    Example:
        >>> import tempfile
        >>> model, x = nn.Linear(4, 3), torch.randn(60, 4)
        >>> classifier = calibrate(model, [(x, torch.arange(60) % 3)], method="uncalibrated")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load(classifier.save(folder), model)
        >>> bool((again(x).probs == classifier(x).probs).all())
        True
    """
    calibrator, parts = load_parts(folder)
    if model is None:
        return calibrator
    path = Path(folder) / FILE
    if "network" not in parts:
        raise FileNotFoundError(
            f"{path} says nothing of a network, it is a calibrator alone; use "
            f"CalibratedClassifier(model, load(folder), taps) and say which taps"
        )
    header = parts["network"]
    if not isinstance(header, dict):
        raise FormatError(f"{path}: expected a description of the network, got {type(header).__name__}")
    check_kind(path, header, FORMAT, FORMAT_VERSION)
    with reading(path, "a whole module", LostFunctionError):
        stored = Fingerprint(**header["fingerprint"])
        augmentation = Augmentation.from_json(header["augmentation"]) if "augmentation" in header else None
        reader = reader_from(header, pooling, forward)
    check_network(stored, model, strict)
    if not strict:
        calibrator.network_ = None
    known = dict(unwrap(model).named_modules())
    missing = [tap.module for tap in reader.taps or () if tap.module not in known]
    if missing:
        raise FormatError(f"{path}: the network has no module {missing[0][:80]!r}")
    return CalibratedClassifier(model, calibrator, reader, augmentation)
