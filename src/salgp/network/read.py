"""The only loop over a loader: batches of any form, random numbers of its own, progress, checks.

`extract`, `calibrate`, augmentation and feature stores all read networks through `read_batches`. The network
is never changed, and torch's random state is handed back as it was found after every batch: a loader that
shuffles gives the same order whether or not somebody reads features on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.labels import class_labels
from salgp.logits import check_undeclared
from salgp.network.batches import Batch, in_pieces
from salgp.network.frozen_copy import unwrap
from salgp.network.reader import Reader
from salgp.network.taps import Change
from salgp.progress import progress_bar, steps_in

__all__ = ["Prepare", "Reading", "collect", "read_batches"]

Prepare = Callable[[Batch, int], tuple[Batch, Change | None]]
"""``prepare(batch, index) -> (batch, change)``: what really runs in place of a batch of the loader."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What one batch gave.

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
    prepare: Prepare | None = None,
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
    random = _PrivateRandom(unwrap(model))
    first: Reading | None = None
    with progress_bar(title, steps_in(loader), progress) as advance:
        with random.use():
            items = iter(loader)
        for index in range(1 << 62):
            with random.use():
                item = next(items, _END)
                if item is _END:
                    break
                batch = reader.batch_of(item)
                if batch.is_empty:
                    continue
                changed, change = (batch, None) if prepare is None else prepare(batch, index)
                reader = reader.resolved(model, changed)
                features = reader.read(model, changed, change)
            labels = _labels(batch, features, reader) if with_labels else None
            place = features.logits.device if reader.keep_on_device else "cpu"
            reading = Reading(reader, batch, features.to(place, reader.dtype), labels)
            first = first or reading
            _check_alike(first, reading, index)
            yield reading
            advance(1)
    if first is None:
        raise ValueError("the loader gave no batch: there is nothing to extract")


def collect(readings: Iterable[Reading]) -> tuple[Reader, Features, Tensor | None]:
    """Join the readings of a loader: reader in use, features, and labels where there are some. Batches are
    let go as soon as they are read: inputs are often a thousand times as large as their features.
    """
    features: list[Features] = []
    labels: list[Tensor] = []
    readers: list[Reader] = []
    for reading in readings:
        readers = readers or [reading.reader]
        features.append(reading.features)
        labels += [] if reading.labels is None else [reading.labels]
    joined, known = Features.concatenate(features), torch.cat(labels) if labels else None
    reader = readers[0]
    if reader.output is None:
        check_undeclared(joined.logits, known)
        reader = replace(reader, output="logits")
    return reader, joined, known


_END = object()


def _check_loader(loader: Any) -> None:
    if isinstance(loader, Tensor | np.ndarray | str | nn.Module) or not isinstance(loader, Iterable):
        raise TypeError(
            f"loader must yield batches, got a {type(loader).__name__}; wrap it: "
            f"torch.utils.data.DataLoader(...) or [(x, y)]"
        )
    if isinstance(loader, tuple) and loader and all(isinstance(x, Tensor | np.ndarray) for x in loader):
        raise TypeError(
            f"loader must yield batches, got a tuple of {len(loader)} arrays, which is one batch; put it "
            f"into a list: [(x, y)]"
        )


def _check_alike(first: Reading, reading: Reading, index: int) -> None:
    if (first.labels is None) != (reading.labels is None):
        raise ValueError(
            f"batch {index + 1} differs from the first: only one of them has labels; give all or none"
        )
    if first.features.n_classes != reading.features.n_classes:
        raise ValueError(
            f"the network gave {first.features.n_classes} class scores for the first batch and "
            f"{reading.features.n_classes} for batch {index + 1}"
        )
    for name, width in first.features.widths.items():
        if reading.features.widths[name] != width:
            raise ValueError(
                f"layer {name!r} is {width} wide in the first batch and {reading.features.widths[name]} in "
                f"batch {index + 1}; inputs of varying size need a pooling over positions, such as "
                f"'spatial-avg' or 'time-max'"
            )


def _labels(batch: Batch, features: Features, reader: Reader) -> Tensor | None:
    if batch.labels is None:
        return None
    return class_labels(batch.labels, len(features), features.n_classes, reader.classes).cpu()


class _PrivateRandom:
    """A stream of torch random numbers of its own that starts where the global one stands."""

    def __init__(self, model: nn.Module) -> None:
        weight = next(model.parameters(), None)
        on_device = weight is not None and weight.device.type in ("cuda", "xpu")
        self._device = weight.device if weight is not None and on_device else None
        self._state = self._get()

    @contextmanager
    def use(self) -> Iterator[None]:
        outside = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = self._get()
            self._set(outside)

    def _get(self) -> tuple[Tensor, Tensor | None]:
        if self._device is None:
            return torch.get_rng_state(), None
        return torch.get_rng_state(), torch.get_device_module(self._device).get_rng_state(self._device)

    def _set(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(state[1], self._device)
