"""The same classifier, with confidences that can be trusted: network, taps and calibrator in one module.

`calibrate` makes one in a single call; `CalibratedClassifier.save` and `load` keep it. The network itself is
not stored: a fingerprint of its modules, their settings and its weights tells another network from the one
the calibrator was made for. What a forward function does besides, it does not see.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from salgp.calibrators import Calibrator, get, load_calibrator
from salgp.calibrators.checks import CalibrationWarning
from salgp.calibrators.registry import DEFAULT, method_for
from salgp.calibrators.saving import save_folder, write_calibrator
from salgp.features import Features
from salgp.network.batches import Batch, LabelsAt
from salgp.network.extract import Copies, Perturb
from salgp.network.fingerprint import Fingerprint, check_network
from salgp.network.gathering import gather
from salgp.network.keeping import FORMAT, FORMAT_VERSION, LostFunctionError, module_header, reader_from
from salgp.network.layers import Layers, Poolings
from salgp.network.reader import Forward, Reader
from salgp.network.reading import ANYWHERE, Place, collect, read_batches
from salgp.network.rehearsal import Rehearsal
from salgp.network.scores import named_fields
from salgp.network.taps import unwrap
from salgp.prediction import Prediction
from salgp.storage import FormatError, read_header, reading, write_header

__all__ = ["CalibratedClassifier", "calibrate", "load", "suited"]


class CalibratedClassifier(nn.Module):
    """A network whose forward pass gives calibrated predictions.

    The wrapped network is never changed: a frozen view of it runs, in evaluation mode, on the same weights
    (`salgp.network.view`), so any number of threads may predict at once. ``train()`` and ``eval()`` have no
    effect on it, nor on the result; ``to(device)`` moves it. The calibrator works where it was fitted (or
    where ``calibrator.to(device)`` sent it), and its predictions come back to the network's device.

    Args:
        model: the classifier.
        calibrator: fitted on features of this network.
        taps: what to read from the network; by default the layers the calibrator was fitted on, pooled
            automatically. The first batch settles what is still open.
        rehearsal: which perturbed copies the calibrator was fitted on, where there were some.

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
        rehearsal: Rehearsal | None = None,
    ) -> None:
        super().__init__()
        calibrator._check_fitted()
        self.model = model
        self.calibrator = calibrator
        self.taps = taps if taps is not None else Reader(layers=tuple(calibrator.layer_widths_))
        self.rehearsal = rehearsal

    def extra_repr(self) -> str:
        """What print shows above the network."""
        layers = ", ".join(self.calibrator.layer_widths_) or "none"
        return f"calibrated by {self.calibrator.display_name}; layers read: {layers}"

    def _repr_html_(self) -> str:
        """What a notebook shows: method, network, layers, rehearsal and how the fit judged itself."""
        layers = [f"{name} ({width})" for name, width in self.calibrator.layer_widths_.items()]
        rehearsed = [] if self.rehearsal is None else list(self.rehearsal.families)
        rows = {
            "method": self.calibrator.display_name,
            "network": type(self.model).__name__,
            "layers read": ", ".join(layers) or "none",
            "rehearsed": ", ".join(rehearsed) or "nothing",
            "check": self.verdict_,
        }
        body = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        return f"<table><caption>Calibrated classifier</caption><tbody>{body}</tbody></table>"

    def forward(self, *inputs: Any, **keywords: Any) -> Prediction:
        """Calibrated prediction for one batch, given as the network takes it (or as one mapping)."""
        features = self.features(*inputs, **keywords)
        found = self._predicted(features)
        return found if found.label.device == features.logits.device else found.to(features.logits.device)

    def features(self, *inputs: Any, **keywords: Any) -> Features:
        """What the calibrator sees of one batch."""
        batch = self._given(inputs, keywords)
        if not torch.compiler.is_exporting() and batch.is_empty:
            raise ValueError("the batch is empty: there is nothing to predict")
        if self.taps.taps is None:
            self.taps = self.taps.settled(self.model, batch)
        return self.taps.read(self.model, batch)

    def batch_of(self, item: Any) -> Batch:
        """The inputs in a batch: an array, several in order or by name; or what a loader makes, whose labels
        go aside. Several arrays are a batch like those of calibration, with labels or without. Where these
        are not known, several arrays are inputs in order, unless the network takes fewer.
        """
        several = isinstance(item, tuple | list)
        batch = self._given(tuple(item) if several else (item,), {})
        by_loader = several and (self.taps.inputs is not None or not batch.fits(unwrap(self.model)))
        return self.taps.batch_of(item) if by_loader else batch

    def _given(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Batch:
        """The arguments of a call."""
        return Batch.given(inputs, keywords, unwrap(self.model), self.taps.labels_at, self.taps.inputs)

    def extract(
        self,
        loader: Iterable[Any],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        keep_on_device: bool = False,
        progress: bool | None = None,
    ) -> tuple[Features, Tensor | None]:
        """What the calibrator sees of everything a loader yields, and the labels where there are some.

        It is read exactly as it was for calibration: same layers, pooling, projection, output and forward
        function.

        Args:
            loader: see `salgp.extract`.
            device: see `salgp.extract`.
            dtype: see `salgp.extract`.
            keep_on_device: see `salgp.extract`.
            progress: see `salgp.extract`.
        """
        return self._read(loader, Place(device, dtype, keep_on_device), progress, with_labels=True)

    def _read(
        self, loader: Iterable[Any], place: Place, progress: bool | None, with_labels: bool
    ) -> tuple[Features, Tensor | None]:
        how: Any = {"progress": progress, "with_labels": with_labels}
        self.taps, features, labels = collect(read_batches(self.model, loader, self.taps, place, **how))
        return features, labels

    def predict(self, loader: Iterable[Any], context: Any = None, progress: bool | None = None) -> Prediction:
        """Calibrated predictions for everything a loader yields.

        Args:
            loader: see `salgp.extract`; labels are not looked at.
            context: what the samples have in common, for calibrators that take it.
            progress: see `salgp.extract`.
        """
        features = self._read(loader, ANYWHERE, progress, with_labels=False)[0]
        return self._predicted(features, context)

    def _predicted(self, features: Features, context: Any = None) -> Prediction:
        home = self._home()
        here = features if features.logits.device == home else features.to(home)
        return self.calibrator.predict(here, context)

    def _home(self) -> torch.device:
        """Where the calibrator works; kept beside what it learned, so that a new fit is looked at anew."""
        state = self.calibrator.__dict__
        if "_home" not in state:
            learned = {name: value for name, value in state.items() if name.endswith("_")}
            state["_home"] = next(_tensors(learned), torch.empty(0)).device
        home: torch.device = state["_home"]
        return home

    def report(self, loader: Iterable[Any], path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the HTML report of this classifier on labelled data.

        Args:
            loader: labelled data that neither training nor calibration has seen.
            path: target, e.g. ``report.html``.
            options: see `salgp.report.build`; e.g. ``class_names``, ``force``.

        Returns:
            The path written.
        """
        from salgp.report import build  # only whoever wants a report needs its libraries

        features, labels = self.extract(loader)
        if labels is None:
            raise ValueError("a report needs labels, but the loader yields inputs only; yield (x, y)")
        method = {"method": self.calibrator.display_name}
        return build(path, features, labels, self._predicted(features), **{**method, **options})

    @property
    def check_(self) -> dict[str, dict[str, dict[str, float]]]:
        """How the fit judged itself, where the calibrator does so: situation -> method -> score."""
        return getattr(self.calibrator, "check_", {})

    @property
    def verdict_(self) -> str:
        """The same in one sentence."""
        return getattr(self.calibrator, "verdict_", "This calibrator does not judge itself.")

    def train(self, mode: bool = True) -> Self:
        """Set the flag of this module only: the network's modes are the user's."""
        self.training = mode
        return self

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the calibrator, and ``module.json`` with the taps and the network's fingerprint; whole or not
        at all, see `salgp.calibrators.Calibrator.save`.
        """
        return save_folder(folder, self.write)

    def write(self, folder: Path) -> None:
        """Put its files into a folder that is being written."""
        header = module_header(self.model, self.taps)
        if self.rehearsal is not None:
            header["rehearsal"] = dataclasses.asdict(self.rehearsal)
        write_calibrator(self.calibrator, folder)
        write_header(folder / "module.json", FORMAT, FORMAT_VERSION, header)


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    method: Calibrator | str | None = None,
    reference: Iterable[Any] | None = None,
    layers: Layers = "auto",
    pooling: Poolings = "auto",
    output: str = "logits",
    device: torch.device | str | None = None,
    keep_on_device: bool = False,
    max_width: int | None = None,
    perturb: Perturb | Copies | bool | None = True,
    seed: int = 0,
    progress: bool | None = None,
    forward: Forward | None = None,
    labels_at: LabelsAt = None,
    tokenizer: Any = None,
) -> CalibratedClassifier:
    """Calibrate a trained classifier on labelled samples it was not trained on.

    Args:
        model: the classifier; it is not changed.
        loader: labelled calibration data, see `salgp.extract`.
        method: a calibrator (a fitted copy is made), its name, or None (also ``"auto"``) for layer evidence,
            the library's default, and for temperature scaling where no layer of the network can be read.
        reference: loader of the network's training data, for methods that compare against it.
        layers: see `salgp.extract`.
        pooling: see `salgp.extract`.
        output: see `salgp.extract`.
        device: see `salgp.extract`.
        keep_on_device: fit where the network is, instead of on the CPU.
        max_width: see `salgp.extract`.
        perturb: see `salgp.extract`; applied to the calibration data, not to the reference. True means
            ``"auto"`` for methods that learn from perturbed copies and nothing for the others; False or None
            nothing.
        seed: see `salgp.extract`.
        progress: see `salgp.extract`.
        forward: see `salgp.extract`.
        labels_at: see `salgp.extract`.
        tokenizer: see `salgp.extract`.

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
    taken = (layers, pooling) if calibrator.needs_layers else ((), "auto")
    reader = Reader(*taken, output, max_width, seed, forward, labels_at)
    copies = ("auto" if calibrator.uses_copies else None) if perturb is True else perturb or None
    data = gather(
        model,
        loader,
        reader,
        copies,
        Place(device, None, keep_on_device),
        reference=reference,
        seed=reader.seed,
        progress=progress,
        tokenizer=tokenizer,
        needs_layers=calibrator.needs_layers,
    )
    calibrator = suited(calibrator, data.features, method not in DEFAULT)
    calibrator.fit(data.features, data.labels, data.reference)
    return CalibratedClassifier(model, calibrator, data.reader, data.rehearsal)


def suited(calibrator: Calibrator, features: Features, asked_for: bool) -> Calibrator:
    """The calibrator; or, with a warning, temperature scaling, where it needs layers and there are none.

    Args:
        calibrator: not fitted.
        features: of the calibration samples.
        asked_for: was this method asked for? Then no other takes its place.

    Example:
        >>> suited(get("temperature"), Features(torch.zeros(2, 3)), False)
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
    calibrator = load_calibrator(folder)
    if model is None:
        return calibrator
    path = Path(folder) / "module.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder}: no module.json here, only a calibrator; use "
            f"CalibratedClassifier(model, load(folder), taps) and say which taps"
        )
    header = read_header(path, FORMAT, FORMAT_VERSION)
    with reading(path, "a whole module", LostFunctionError):
        stored = Fingerprint(**header["fingerprint"])
        rehearsal = Rehearsal.from_json(header["rehearsal"]) if "rehearsal" in header else None
        reader = reader_from(header, pooling, forward)
    check_network(stored, model, strict)
    known = dict(unwrap(model).named_modules())
    missing = [tap.module for tap in reader.taps or () if tap.module not in known]
    if missing:
        raise FormatError(f"{path}: the network has no module {missing[0][:80]!r}")
    return CalibratedClassifier(model, calibrator, reader, rehearsal)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _tensors(part)
    else:
        for _, part in named_fields(value) if not isinstance(value, tuple) else enumerate(value):
            yield from _tensors(part)
