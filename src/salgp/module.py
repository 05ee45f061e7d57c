"""The same classifier, with confidences that can be trusted: network, taps and calibrator in one module.

`calibrate` makes one in a single call; `CalibratedClassifier.save` and `load` keep it. The network itself is
not stored: a fingerprint makes sure that a calibrator is only ever used with the network it was made for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from salgp.calibrators import Calibrator, get, load_calibrator
from salgp.calibrators.saving import KIND, write_calibrator
from salgp.features import Features
from salgp.network.batches import Batch, named_fields
from salgp.network.extract import Copies, Perturb, collect, read_batches
from salgp.network.fingerprint import Fingerprint, fingerprint
from salgp.network.layers import Layers, Poolings, pooling_for
from salgp.network.pooling import Layout
from salgp.network.reader import Choice, Forward, Reader
from salgp.network.rehearsal import rehearse
from salgp.network.taps import Tap
from salgp.prediction import Prediction
from salgp.storage import FormatError, read_header, write_folder, write_header

__all__ = ["CalibratedClassifier", "calibrate", "load", "module_header"]

FORMAT = "salgp-module"
FORMAT_VERSION = 1


class CalibratedClassifier(nn.Module):
    """A network whose forward pass gives calibrated predictions.

    The wrapped network is used as it is and never changed: it runs in evaluation mode without gradients and
    gets its own modes back. ``train()`` and ``eval()`` have no effect on it, nor on the result;
    ``to(device)`` moves it. The calibrator works where it was fitted, and its predictions come back to the
    network's device.

    Args:
        model: the classifier.
        calibrator: fitted on features of this network.
        taps: what to read from the network; by default the layers the calibrator was fitted on, pooled
            automatically.

    Example:
        >>> model, g = nn.Sequential(nn.Flatten()), torch.Generator().manual_seed(0)
        >>> x = torch.randn(80, 3, generator=g)
        >>> y = (x + torch.randn(80, 3, generator=g)).argmax(dim=1)
        >>> classifier = calibrate(model, [(x, y)], method="temperature")
        >>> bool((classifier(x).label == model(x).argmax(dim=1)).all())
        True
    """

    def __init__(self, model: nn.Module, calibrator: Calibrator, taps: Choice | Reader | None = None) -> None:
        super().__init__()
        calibrator._check_fitted()
        self.model = model
        self.calibrator = calibrator
        self.taps = taps if taps is not None else Choice(layers=tuple(calibrator.layer_widths_))
        self._home = next(_tensors(vars(calibrator)), torch.empty(0)).device

    def forward(self, *inputs: Any, **keywords: Any) -> Prediction:
        """Calibrated prediction for one batch, given as the network takes it (or as one mapping)."""
        features = self.features(*inputs, **keywords)
        return self.calibrator.predict(features.to(self._home)).to(features.logits.device)

    def features(self, *inputs: Any, **keywords: Any) -> Features:
        """What the calibrator sees of one batch."""
        whole = len(inputs) == 1 and isinstance(inputs[0], Mapping)
        named = Batch.of({**inputs[0], **keywords} if whole else keywords)
        batch = named if whole else Batch(inputs, named.keywords)
        if isinstance(self.taps, Choice):
            self.taps = self.taps.reader(self.model, batch)
        return self.taps.read(self.model, batch)

    def train(self, mode: bool = True) -> Self:
        """Set the flag of this module only: the network's modes are the user's."""
        self.training = mode
        return self

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the calibrator, and ``module.json`` with the taps and the network's fingerprint; whole or not
        at all, see `salgp.calibrators.Calibrator.save`.
        """
        header = module_header(self.model, self.taps)

        def write(part: Path) -> None:
            write_calibrator(self.calibrator, part)
            write_header(part / "module.json", FORMAT, FORMAT_VERSION, header)

        return write_folder(folder, write, KIND)


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
    max_width: int | None = None,
    perturb: Perturb | Copies | None = "default",
    seed: int = 0,
    progress: bool = False,
    forward: Forward | None = None,
    layer_cost: float | None = None,
) -> CalibratedClassifier:
    """Calibrate a trained classifier on labelled samples it was not trained on.

    Args:
        model: the classifier; it is not changed.
        loader: labelled calibration data, see `salgp.extract`.
        method: a calibrator (a fitted copy is made), its name, or None for layer evidence, the library's
            default.
        reference: loader of the network's training data, for methods that compare against it.
        layers: see `salgp.extract`.
        pooling: see `salgp.extract`.
        output: see `salgp.extract`.
        device: see `salgp.extract`.
        max_width: see `salgp.extract`.
        perturb: see `salgp.extract`; applied to the calibration data, not to the reference. By default
            ``"auto"`` for methods that learn from perturbed copies, and None for the others.
        seed: see `salgp.extract`.
        progress: show progress bars.
        forward: see `salgp.extract`.
        layer_cost: with layer evidence, read only the layers that are worth this much, see
            `salgp.calibrators.evidence.choice.select_layers`; None reads all.

    Returns:
        The calibrated classifier; its fitted calibrator is ``.calibrator``.

    Example:
        >>> model, g = nn.Sequential(nn.Flatten()), torch.Generator().manual_seed(0)
        >>> x = torch.randn(80, 3, generator=g)
        >>> y = (x + torch.randn(80, 3, generator=g)).argmax(dim=1)
        >>> calibrate(model, [(x, y)], method="temperature")(x[:2]).probs.shape
        torch.Size([2, 3])
    """
    calibrator = _unfitted(method)
    choice = Choice(
        layers if calibrator.needs_layers else (),
        pooling if calibrator.needs_layers else "auto",
        output,
        max_width,
        seed,
        forward,
    )
    if perturb == "default":
        perturb = "auto" if calibrator.uses_copies else None
    if perturb is None or callable(perturb):
        features, labels, reader = _read(
            model, loader, choice, device=device, perturb=perturb, seed=seed, progress=progress
        )
    else:
        reader, features, labels = rehearse(model, loader, choice, perturb, device=device, seed=seed)
    known = None
    if reference is not None:
        known = _read(model, reference, reader, device=device, seed=seed, progress=progress)[:2]
    if layer_cost is not None:
        names = _worth(calibrator, features, labels, known, layer_cost)
        reader = dataclasses.replace(reader, taps=tuple(tap for tap in reader.taps if tap.name in names))
        features, known = (
            features.select(names),
            None if known is None else (known[0].select(names), known[1]),
        )
    calibrator.fit(features, labels, known)
    return CalibratedClassifier(model, calibrator, reader)


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
    try:
        _check_network(Fingerprint(**header["fingerprint"]), model, strict)
        return CalibratedClassifier(model, calibrator, _source(header, pooling, forward))
    except (LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: incomplete or damaged ({type(error).__name__}: {error})") from error


def module_header(model: nn.Module, taps: Choice | Reader) -> dict[str, Any]:
    """What ``module.json`` says: which network it is, and what is read from it.

    Example:
        >>> module_header(nn.Linear(4, 3), Choice(layers=()))["layers"]
        []
    """
    header: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprint": dataclasses.asdict(fingerprint(model)),
        "output": taps.output,
        "max_width": taps.max_width,
        "seed": taps.seed,
        "needs_forward": taps.forward is not None,
    }
    if isinstance(taps, Reader):
        return header | {
            "taps": [{**dataclasses.asdict(tap), "pooling": _named(tap.pooling)} for tap in taps.taps]
        }
    pooling = (
        {k: _named(v) for k, v in taps.pooling.items()}
        if isinstance(taps.pooling, Mapping)
        else _named(taps.pooling)
    )
    return header | {
        "layers": taps.layers if isinstance(taps.layers, str | int) else list(taps.layers),
        "pooling": pooling,
    }


def _unfitted(method: Calibrator | str | None) -> Calibrator:
    from sklearn.base import clone

    if isinstance(method, Calibrator):
        copy: Calibrator = clone(method)
        return copy
    if method is None or isinstance(method, str):
        return get(method or "layer-evidence")
    raise TypeError(f"method must be a Calibrator, its name, or None, got {type(method).__name__}")


def _worth(
    calibrator: Calibrator,
    features: Features,
    labels: Tensor,
    known: tuple[Features, Tensor] | None,
    cost: float,
) -> tuple[str, ...]:
    from salgp.calibrators.evidence.calibrator import LayerEvidence
    from salgp.calibrators.evidence.choice import select_layers

    if not isinstance(calibrator, LayerEvidence):
        raise ValueError(
            f"layer_cost needs layer evidence, the default method; {calibrator.name!r} takes "
            f"the layers given by layers=..."
        )
    return select_layers(features, labels, known, cost, calibrator).names


def _read(
    model: nn.Module, loader: Iterable[Any], source: Choice | Reader, **options: Any
) -> tuple[Features, Tensor, Reader]:
    readers: list[Reader] = []

    def parts() -> Iterable[tuple[Features, Tensor | None]]:
        for reader, features, labels in read_batches(model, loader, source, **options):
            readers.append(reader)
            yield features, labels

    features, labels = collect(parts())
    if labels is None:
        raise ValueError(
            "calibration needs labels, but the loader yields inputs only; yield (x, y) or a "
            "mapping with 'labels'"
        )
    return features, labels, readers[0]


def _check_network(stored: Fingerprint, model: nn.Module, strict: bool) -> None:
    found = fingerprint(model)
    if found.structure != stored.structure:
        raise ValueError(
            f"another network: the parameter names or shapes of this {type(model).__name__} "
            f"are not those the calibrator was made for"
        )
    if strict and found.weights != stored.weights:
        raise ValueError(
            "the network has other weights (or precision) than the calibrator was made for; "
            "recalibrate, or pass strict=False to use it anyway"
        )


def _source(header: Mapping[str, Any], pooling: Poolings | None, forward: Forward | None) -> Choice | Reader:
    if header["needs_forward"] and forward is None:
        raise ValueError(
            "this classifier was made with a forward function; pass it again: load(folder, "
            "model, forward=...)"
        )
    rest = (header["output"], header["max_width"], header["seed"], forward)
    if "taps" in header:
        return Reader(tuple(_tap(stored, pooling) for stored in header["taps"]), *rest)
    stored = header["pooling"]
    if pooling is None and (stored is None or (isinstance(stored, dict) and None in stored.values())):
        raise ValueError(_LOST_POOLING)
    return Choice(header["layers"], stored if pooling is None else pooling, *rest)


def _tap(stored: Mapping[str, Any], pooling: Poolings | None) -> Tap:
    how = stored["pooling"] if pooling is None else pooling_for(stored["name"], pooling)
    if how is None:
        raise ValueError(_LOST_POOLING)
    return Tap(**{**stored, "pooling": how, "layout": Layout(**stored["layout"])})


_LOST_POOLING = (
    "this classifier was made with a pooling function, and code is never stored; pass it again: "
    "load(folder, model, pooling=...)"
)


def _named(pooling: Any) -> str | None:
    return pooling if isinstance(pooling, str) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _tensors(part)
    else:
        for _, part in named_fields(value) if not isinstance(value, tuple) else enumerate(value):
            yield from _tensors(part)
