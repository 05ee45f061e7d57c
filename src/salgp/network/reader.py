"""How to read a network: one value that says what is read, resolved on a first batch.

A `Reader` holds what was asked for. `Reader.resolved` traces the network on a handful of samples and returns
the same value with its taps filled in: which layers there are, how their outputs are laid out, and whether
the logits depend on them. From then on `Reader.read` runs a frozen copy of the network
(`salgp.network.frozen_copy`) and pools what passes its taps. `reader_header` and `reader_from` write it as
JSON and read it back; functions are never stored.

`read_batches` is the only loop over a loader: `extract`, `calibrate`, augmentation and feature stores all
read networks through it. Torch's random state is handed back as it was found after every batch: a loader
that shuffles gives the same order whether or not somebody reads features on the way.
"""

from __future__ import annotations

import functools
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import islice
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.labels import class_labels
from salgp.logits import OUTPUTS, as_logits, check_undeclared
from salgp.network.batches import Batch, KnownInputs, LabelsAt, are_texts, in_pieces
from salgp.network.frozen_copy import FrozenCopies, FrozenCopy, fingerprint, unwrap
from salgp.network.layers import Flow, Layers, Poolings, Trace, make_taps, pooling_for, trace
from salgp.network.taps import FORWARD, Change, Probe, Tap, TapError, raw_logits
from salgp.progress import progress_bar, steps_in

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "Forward",
    "LostFunctionError",
    "Prepare",
    "Reader",
    "Reading",
    "collect",
    "module_header",
    "read_batches",
    "reader_from",
    "reader_header",
]

FORMAT = "salgp-module"
FORMAT_VERSION = 2

Forward = Callable[[nn.Module, Any], Any]
"""``forward(model, batch) -> output``, for networks that are not simply called with the inputs."""

PLAIN = ("output", "seed", "labels_at", "form", "columns")
"""Fields of a reader that JSON holds as they are."""

T = TypeVar("T")

CALL = "for batches ((a, b), y): reader=salgp.Reader(forward=lambda model, batch: model(*batch[0]))"
"""How to call a network whose inputs stand in a tuple of their own."""

HANDFUL = 5
"""Samples on which the taps are resolved."""


@dataclass(frozen=True)
class Reader:
    """How to read a network.

    Args:
        layers: ``"auto"`` for block boundaries (at most 12), or names, globs (``"layer*"``) and positions
            among the automatic layers (``-1``), one or several; empty for the logits only.
        pooling: how a layer's output becomes one vector per sample. ``"auto"`` is the maximum over time for
            recurrent layers, the last token for causal language models, the mean over positions for others.
            ``"spatial-avg"`` and ``"spatial-max"`` are over positions, ``"channel-avg"`` and
            ``"channel-max"`` over channels; ``"tokens-avg"``, ``"first-token"``, ``"time-max"`` and
            ``"time-last"`` are for sequences; ``"flatten"`` keeps all numbers, ``"none"`` an output ``(N,
            d)`` as it is. Or a function from the output to ``(N, d)``; or a mapping from layer name or glob
            to any of these.
        output: what the network returns: ``"logits"``, ``"probabilities"``, ``"log-probabilities"`` or
            ``"sigmoids"`` (one probability per class, against the rest). None means logits, and numbers that
            look like something else are refused. A binary network with one output column ``z`` gets the
            logits ``[0, z]``.
        seed: of augmented samples.
        forward: ``forward(model, batch) -> output`` for networks that are not simply called with the inputs,
            or that return several tensors; it gets the batch as the loader made it, on the network's device.
        labels_at: where a batch has its labels, if not at its end: a position, such as 1 for ``(x, y, id)``,
            or a key.
        device: where batches are sent; by default to the network, which itself is never moved. Floating-point
            inputs are cast to the type of the network's parameters, so that half-precision networks take any
            loader.
        dtype: of the features; by default the network's own, and single precision for half precision.
        keep_on_device: leave the features where the network is, instead of bringing them to the CPU.
        taps: what ``layers`` and ``pooling`` mean for one network; None until resolved, as are the next.
        form: in which form batches came (`salgp.network.batches.Batch`).
        inputs: which inputs they had beside their labels, where they had some.
        columns: how many scores the network gave for each sample; 1 for a binary network of one output.
        classes: names of the classes in the order of the scores, for labels that are names.
        tokenizer: of a network that reads text, a Hugging Face one (or an object with its ``encode``,
            ``decode`` and ``all_special_ids``): augmented texts then have typing errors, lost, swapped and
            unknown words. A calibrated classifier does not keep it.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 4)
        >>> reader = Reader().resolved(model, Batch((x,)))
        >>> reader.read(model, Batch((x,))).widths
        {'1': 8}
    """

    layers: Layers = "auto"
    pooling: Poolings = "auto"
    output: str | None = None
    seed: int = 0
    forward: Forward | None = None
    labels_at: LabelsAt = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    keep_on_device: bool = False
    taps: tuple[Tap, ...] | None = None
    form: str | None = None
    inputs: KnownInputs | None = None
    columns: int | None = None
    classes: tuple[str, ...] | None = None
    tokenizer: Any = None
    _copies: FrozenCopies = field(default_factory=FrozenCopies, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("seed", "labels_at"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, str):  # a whole number of NumPy is one too
                object.__setattr__(self, name, operator.index(given))
        if self.output is not None and self.output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {self.output!r}")
        if self.tokenizer is not None:
            _check_tokenizer(self.tokenizer)

    def resolved(self, model: nn.Module, batch: Batch) -> Reader:
        """The same with its taps, found on a few samples of a batch; itself where it has them already."""
        if self.taps is not None:
            return self
        network = unwrap(model)
        device, dtype = FrozenCopy(network).placement
        few = batch.take(slice(HANDFUL)).to(self.device or device, dtype)
        found = trace(network, functools.partial(self._run, batch=few))
        scores = found.logits.shape
        return replace(
            self,
            taps=self._chosen_taps(network, found, few),
            form=batch.form,
            inputs=KnownInputs.of(batch, network, self.forward is not None),
            columns=scores[1:].numel() if len(scores) in (1, 2) else None,
            classes=self.classes or getattr(network, "salgp_classes", None),
            _copies=FrozenCopies(),
        )

    def _chosen_taps(self, network: nn.Module, found: Trace, few: Batch) -> tuple[Tap, ...]:
        layers = self.layers
        if not isinstance(layers, str | int) and not len(layers):
            return ()
        if layers == "auto":  # a network may say itself which layers are worth reading
            layers = getattr(network, "salgp_layers", "auto")
        run = functools.partial(self._run, batch=few)
        flow = Flow(network, found, run, few.mask(network if self.forward is None else None))
        taps = make_taps(found, layers, self.pooling, flow)
        return tuple(map(flow.with_pooling, taps))

    def batch_of(self, item: Any) -> Batch:
        """Inputs and labels of what a loader yields."""
        if isinstance(item, Batch):
            return item
        return Batch.of(item, self.labels_at, self.inputs)

    def check(self, model: nn.Module) -> None:
        """Refuse a network whose modules or settings are not those of the network that was read."""
        self._copies.check(model)

    def read(self, model: nn.Module, batch: Batch, change: Change | None = None) -> Features:
        """Run the network on one batch; the features stay where it runs.

        Args:
            model: the network; a frozen copy of it runs.
            batch: inputs.
            change: perturbs what passes the taps.
        """
        taps = self.taps
        if taps is None:
            raise ValueError(
                "the reader does not know its taps yet; use reader.resolved(model, batch).read(...)"
            )

        def prepare(network: nn.Module) -> Probe:
            self.check(model)
            return Probe(network, taps)

        with self._copies.lent(unwrap(model), prepare) as frozen:
            device, dtype = frozen.placement
            batch = batch.to(self.device or device, dtype)
            mask = batch.mask(frozen.network if self.forward is None else None)
            with frozen.probe.reading(mask, change) as found:
                scores = raw_logits(self._run(frozen.network, batch))
            network = frozen.weights
        if scores.ndim == 1:
            self._check_columns(scores)
        for tap in taps:
            if tap.name not in found:
                raise ValueError(
                    f"layer {tap.name!r} did not run in this forward pass; it ran in the "
                    f"first one: take only layers that always run"
                )
        layers = {tap.name: found[tap.name] for tap in taps}
        logits = as_logits(scores, self.output or "logits", FORWARD)
        return Features(logits, layers, network=network)

    def _check_columns(self, scores: Tensor) -> None:
        if self.columns is not None and self.columns > 1:
            raise ValueError(
                f"the network gave scores of shape {tuple(scores.shape)}, and of shape (n, {self.columns}) "
                f"when it was calibrated; a sample alone needs a batch axis: x[None]"
            )

    def _run(self, network: nn.Module, batch: Batch) -> Any:
        """What the network returns; where it fails, what it was given stands before its own words."""
        if self.forward is not None:
            made = batch.as_made
            labels_left_out = (batch.form, self.form) in _WITHOUT_LABELS
            return self.forward(network, (made,) if labels_left_out else made)
        inputs, keywords = batch.arguments(network)
        try:
            return network(*inputs, **keywords)
        except (TapError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if torch.compiler.is_compiling():
                raise
            raise RuntimeError(_refusal(batch, error)) from error


_WITHOUT_LABELS = (("single", "tuple"), ("mapping", "pair"))


def _check_tokenizer(tokenizer: Any) -> None:
    for name in ("encode", "decode", "all_special_ids"):
        if not hasattr(tokenizer, name):
            raise TypeError(
                f"tokenizer must be a Hugging Face tokenizer, or have encode, decode and all_special_ids as "
                f"one has; {type(tokenizer).__name__} has no {name}"
            )


def _refusal(batch: Batch, error: Exception) -> str:
    inputs = (*batch.inputs, *batch.keywords.values())
    hint = "" if all(isinstance(x, Tensor) for x in inputs) else f"; {CALL}"
    own = textwrap.shorten(str(error), 300, placeholder=" ...")
    own = own or type(error).__name__
    return f"the network does not accept inputs of shape {batch.shapes}; its own error: {own}{hint}"


Prepare = Callable[[Batch, int], tuple[Batch, Change | None]]
"""``prepare(batch, index) -> (batch, change)``: what really runs in place of a batch of the loader."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Features and labels of one batch.

    Args:
        reader: in use, resolved.
        batch: as the loader gave it.
        features: of its samples.
        labels: ``(n,)`` class numbers on the CPU, or None where the batch has none.
    """

    reader: Reader
    batch: Batch
    features: Features
    labels: Tensor | None


def read_batches(
    model: nn.Module,
    loader: Iterable[Any],
    reader: Reader,
    *,
    prepare: Prepare = lambda batch, index: (batch, None),
    progress: bool | None = None,
    title: str = "reading the network",
    with_labels: bool = True,
) -> Iterator[Reading]:
    """Read every batch of a loader.

    Args:
        model: the network.
        loader: yields batches, see `salgp.extract`.
        reader: what to read; where it is not resolved yet, the first batch does so.
        prepare: changes a batch before it runs.
        progress: show a progress bar; None for "on a terminal and in notebooks".
        title: of the progress bar.
        with_labels: are the labels of interest? Else they may be anything, such as names of files.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 4)
        >>> [len(reading.features) for reading in read_batches(model, [x, x], Reader())]
        [2, 2]
    """
    _check_loader(loader)
    loader = in_pieces(loader)
    readings = _readings(model, loader, reader, prepare, with_labels)
    first: Reading | None = None
    with progress_bar(title, steps_in(loader), progress) as advance:
        for index, reading in _with_own_random(readings, unwrap(model)):
            first = first or reading
            _check_alike(first, reading, index)
            yield reading
            advance(1)
    if first is None:
        raise ValueError("the loader gave no batch: there is nothing to extract")


def _readings(
    model: nn.Module, loader: Iterable[Any], reader: Reader, prepare: Prepare, with_labels: bool
) -> Iterator[tuple[int, Reading]]:
    """Number and reading of each batch that is not empty."""
    for index, item in enumerate(loader):
        batch = reader.batch_of(item)
        if batch.is_empty:
            continue
        changed, change = prepare(batch, index)
        reader = reader.resolved(model, changed)
        features = reader.read(model, changed, change)
        labels = _labels(batch, features, reader) if with_labels else None
        place = features.logits.device if reader.keep_on_device else "cpu"
        features = features.to(place, reader.dtype)
        yield index, Reading(reader, batch, features, labels)


def collect(readings: Iterable[Reading]) -> tuple[Reader, Features, Tensor | None]:
    """Join the readings of a loader: reader in use, features, and labels where there are some. Batches are
    let go as soon as they are read: inputs are often a thousand times as large as their features.
    """
    parts = map(operator.attrgetter("reader", "features", "labels"), readings)
    readers, features, labels = zip(*parts, strict=True)
    reader, joined = readers[0], Features.concatenate(features)
    known = None if labels[0] is None else torch.cat(labels)  # `read_batches`: all or none
    if reader.output is None:
        check_undeclared(joined.logits, known)
        reader = replace(reader, output="logits")
    return reader, joined, known


def _check_loader(loader: Any) -> None:
    array = Tensor | np.ndarray
    one_batch = isinstance(loader, array | str | nn.Module) or not isinstance(loader, Iterable)
    if isinstance(loader, tuple) and loader:  # arrays, or texts and their labels
        texts = len(loader) == 2 and are_texts(loader[0])
        one_batch = texts or all(isinstance(x, array) for x in loader)
    if one_batch:
        raise TypeError(
            f"loader must yield batches, got a {type(loader).__name__}; put one batch into a list, "
            f"[(x, y)], and data into torch.utils.data.DataLoader(...)"
        )


def _check_alike(first: Reading, reading: Reading, index: int) -> None:
    if (first.labels is None) != (reading.labels is None):
        raise ValueError(
            f"batch {index + 1} differs from the first: only one of them has labels; give all or none"
        )
    own = _widths(reading.features)
    for name, width in _widths(first.features).items():
        if own[name] != width:
            raise ValueError(
                f"{name} is {width} wide in the first batch and {own[name]} in batch {index + 1}; inputs of "
                f"varying size need a pooling over positions, such as 'spatial-avg' or 'time-max'"
            )


def _widths(features: Features) -> dict[str, int]:
    layers = {f"layer {name!r}": width for name, width in features.widths.items()}
    return {"the vector of class scores": features.n_classes, **layers}


def _labels(batch: Batch, features: Features, reader: Reader) -> Tensor | None:
    if batch.labels is None:
        return None
    n, classes = features.logits.shape
    return class_labels(batch.labels, n, classes, reader.classes).cpu()


def _with_own_random(items: Iterator[T], model: nn.Module) -> Iterator[T]:
    """The items, made with random numbers of their own that start where torch's global ones stand."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    kind = device.type if device.type in ("cuda", "xpu") else "cpu"
    state = torch.get_rng_state()
    while True:
        with torch.random.fork_rng([] if kind == "cpu" else [device], device_type=kind):
            torch.set_rng_state(state)
            some = list(islice(items, 1))
            state = torch.get_rng_state()
        if not some:
            return
        yield some[0]


class LostFunctionError(ValueError):
    """A function is part of the reader, and code is never stored: it must be given again."""


def module_header(model: nn.Module, reader: Reader) -> dict[str, Any]:
    """The part ``network`` of a saved calibrator: which network it is, and what is read from it.

    Example:
        >>> module_header(nn.Linear(4, 3), Reader(layers=()))["layers"]
        ()
    """
    return {"fingerprint": asdict(fingerprint(model)), **reader_header(reader)}


def reader_header(reader: Reader) -> dict[str, Any]:
    """A reader as JSON; pooling functions become None, and whether there was a forward function is kept."""
    taps, inputs = reader.taps, reader.inputs
    return {
        **{name: getattr(reader, name) for name in PLAIN},
        "needs_forward": reader.forward is not None,
        "layers": reader.layers,
        "pooling": _name(reader.pooling),
        "taps": taps and [asdict(tap) | {"pooling": _name(tap.pooling)} for tap in taps],
        "inputs": None if inputs is None else asdict(inputs),
        "classes": reader.classes,
    }


def reader_from(header: Mapping[str, Any], pooling: Poolings | None, forward: Forward | None) -> Reader:
    """The reader that `reader_header` described, with the functions it was made with.

    Example:
        >>> reader_from(reader_header(Reader(output="probabilities")), None, None).output
        'probabilities'
    """
    if _typed(bool, header["needs_forward"], "needs_forward") and forward is None:
        raise LostFunctionError(
            "this classifier was made with a forward function; pass it again: load(folder, "
            "model, forward=...)"
        )
    layers, taps, kinds = header["layers"], header["taps"], get_type_hints(Reader)
    if taps is None:
        asked = _stored_pooling(header["pooling"], pooling)
    else:
        asked = header["pooling"] or "auto" if pooling is None else pooling
        taps = tuple(_stored_tap(tap, pooling) for tap in taps)
    return Reader(
        layers if isinstance(layers, str | int) else tuple(layers),
        asked,
        forward=forward,
        taps=taps,
        inputs=_typed_or_none(KnownInputs, header["inputs"]),
        classes=_typed_or_none(tuple[str, ...], header["classes"], "classes"),
        **{name: _typed(kinds[name], header[name], name) for name in PLAIN},
    )


def _typed_or_none(kind: Any, value: Any, name: str = "") -> Any:
    return None if value is None else _typed(kind, value, name)


def _typed(kind: Any, value: Any, name: str = "") -> Any:
    """A value of this type, out of JSON; refused where that holds something else."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = {key: _typed(hints[key], part, key) for key, part in value.items()}
        return kind(**parts)  # type: ignore[operator]
    kinds = get_args(kind) or (kind,)
    if get_origin(kind) is tuple and type(value) in (list, tuple):
        return tuple(_typed(kinds[0], part, name) for part in value)
    if type(value) not in kinds:
        expected = " or ".join(getattr(one, "__name__", str(one)) for one in kinds)
        raise TypeError(f"{name!r} is {str(value)[:80]!r}, expected {expected}")
    return value


def _stored_tap(stored: Mapping[str, Any], pooling: Poolings | None) -> Tap:
    tap = _typed(Tap, {**stored, "pooling": "auto"})
    given = None if pooling is None else pooling_for(tap.name, pooling)
    return replace(tap, pooling=_stored_pooling(stored["pooling"], given))


def _stored_pooling(stored: Any, given: Poolings | None) -> Any:
    """What is given, or else what is stored; refused where that was a function."""
    if given is not None:
        return given
    for how in stored.values() if isinstance(stored, dict) else [stored]:
        if how is None:
            raise LostFunctionError(
                "this classifier was made with a pooling function, and code is never stored; pass it again: "
                "load(folder, model, pooling=...)"
            )
        if not isinstance(how, str):
            raise TypeError(f"expected the name of a pooling, got {how!r}")
    return stored


def _name(pooling: Any) -> Any:
    if isinstance(pooling, Mapping):
        return {rule: _name(how) for rule, how in pooling.items()}
    return pooling if isinstance(pooling, str) else None
