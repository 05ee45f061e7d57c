"""From a network and a loader to `Features` and labels, batch by batch.

The network is never changed: every submodule keeps its own mode, hooks of others stay, no gradient, weight or
buffer is touched, and torch's random state is handed back as it was found. Batches are pooled while they pass
through, so memory holds pooled features only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from salgp.features import Features, as_labels
from salgp.network.batches import Batch
from salgp.network.layers import Layers, Poolings
from salgp.network.perturb import Family
from salgp.network.reader import Choice, Forward, Reader, placement
from salgp.network.rehearsal import rehearse
from salgp.network.taps import unwrap

if TYPE_CHECKING:
    from salgp.store.store import FeatureStore

__all__ = ["Copies", "Perturb", "collect", "extract", "extract_batches", "read_batches"]

Perturb = Callable[[Tensor, torch.Generator], Tensor]
"""``perturb(inputs, generator) -> inputs``, applied to the first floating-point input of each batch."""
Copies = str | Sequence[str | Family]
"""Which perturbed copies to add to the originals: see `salgp.network.perturb.families_for`."""


@overload
def extract(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Layers = ...,
    pooling: Poolings = ...,
    output: str = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    max_width: int | None = ...,
    perturb: Perturb | Copies | None = ...,
    seed: int = ...,
    progress: bool = ...,
    forward: Forward | None = ...,
    out: None = ...,
) -> tuple[Features, Tensor | None]: ...
@overload
def extract(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Layers = ...,
    pooling: Poolings = ...,
    output: str = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    max_width: int | None = ...,
    perturb: Perturb | Copies | None = ...,
    seed: int = ...,
    progress: bool = ...,
    forward: Forward | None = ...,
    out: str | os.PathLike[str],
) -> FeatureStore: ...
def extract(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Layers = "auto",
    pooling: Poolings = "auto",
    output: str = "logits",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    max_width: int | None = None,
    perturb: Perturb | Copies | None = None,
    seed: int = 0,
    progress: bool = False,
    forward: Forward | None = None,
    out: str | os.PathLike[str] | None = None,
) -> tuple[Features, Tensor | None] | FeatureStore:
    """Logits and pooled layer features of everything a loader yields.

    Args:
        model: any PyTorch classifier; it is the same afterwards.
        loader: yields ``(x, y)``, ``(x1, x2, ..., y)``, ``x`` alone, or mappings with keyword arguments (and
            ``labels``).
        layers: ``"auto"`` for block boundaries (at most 12), or names, globs (``"layer*"``) and positions
            among the automatic layers (``-1``), one or several; empty for the logits only.
        pooling: one of `salgp.network.pooling.POOLINGS`, a function, or a mapping from layer name or glob to
            those.
        output: what the network returns: ``"logits"``, ``"probabilities"`` or ``"log-probabilities"``. It is
            not guessed. A binary network with one output column ``z`` gets the logits ``[0, z]``.
        device: where batches are sent; by default to the network, which itself is never moved. Floating-point
            inputs are cast to the type of the network's parameters, so that half-precision networks take any
            loader.
        dtype: of the features; by default the network's own, and single precision for half precision.
        max_width: wider layers are projected to this width by a random Gaussian matrix fixed by ``seed`` and
            layer name.
        perturb: ``"auto"``, or families of perturbations (`salgp.network.perturb.families_for`): labelled
            originals are followed by perturbed copies that share their original's group. A function
            ``perturb(inputs, generator) -> inputs`` instead replaces the first floating-point input of each
            batch.
        seed: of ``perturb`` and the projections.
        progress: show a progress bar (needs ``rich``).
        forward: ``forward(model, *inputs, **keywords) -> output`` for networks that are not simply called.
        out: write to a feature store in this folder as batches pass, for more samples than memory holds; the
            same call continues after a kill (`salgp.store.extract_to_store`, which has further options).
            Families of ``perturb`` are read in memory first.

    Returns:
        Features on the CPU, and labels ``(n,)`` or None where the loader has none; with ``out``, the finished
        store.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [(torch.zeros(2, 4), torch.tensor([0, 1])), (torch.ones(1, 4), torch.tensor([2]))]
        >>> features, labels = extract(model, loader)
        >>> len(features), features.widths, labels
        (3, {'1': 8}, tensor([0, 1, 2]))
    """
    choice = Choice(layers, pooling, output, max_width, seed, forward)
    if perturb is not None and not callable(perturb):
        features, labels = rehearse(model, loader, choice, perturb, device=device, dtype=dtype, seed=seed)[1:]
        return (features, labels) if out is None else _stored(features, labels, out)
    if out is not None:
        from salgp.store.extraction import extract_to_store

        return extract_to_store(
            model,
            loader,
            out,
            layers=layers,
            pooling=pooling,
            output=output,
            device=device,
            max_width=max_width,
            perturb=perturb,
            seed=seed,
            progress=progress,
            forward=forward,
        )
    parts = read_batches(
        model, loader, choice, device=device, dtype=dtype, perturb=perturb, seed=seed, progress=progress
    )
    return collect(features_and_labels for _, *features_and_labels in parts)


def extract_batches(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Layers = "auto",
    pooling: Poolings = "auto",
    output: str = "logits",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    max_width: int | None = None,
    perturb: Perturb | None = None,
    seed: int = 0,
    progress: bool = False,
    forward: Forward | None = None,
) -> Iterator[tuple[Features, Tensor | None]]:
    """Like `extract`, one batch at a time: memory does not grow with the number of samples.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> [len(f) for f, _ in extract_batches(model, [torch.zeros(2, 4), torch.zeros(5, 4)])]
        [2, 5]
    """
    choice = Choice(layers, pooling, output, max_width, seed, forward)
    for _, features, labels in read_batches(
        model, loader, choice, device=device, dtype=dtype, perturb=perturb, seed=seed, progress=progress
    ):
        yield features, labels


def read_batches(
    model: nn.Module,
    loader: Iterable[Any],
    source: Choice | Reader,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    perturb: Perturb | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Iterator[tuple[Reader, Features, Tensor | None]]:
    """Yield the reader in use, and features on the CPU and labels of each batch."""
    if isinstance(loader, Tensor | str | nn.Module):
        raise TypeError(
            f"loader must yield batches, got a {type(loader).__name__}; wrap it: "
            f"torch.utils.data.DataLoader(...) or [(x, y)]"
        )
    reader = source if isinstance(source, Reader) else None
    random = _PrivateRandom(placement(unwrap(model))[0])
    generators: dict[torch.device, torch.Generator] = {}
    with random.use():
        items = iter(_shown(loader) if progress else loader)
    while True:
        with random.use():
            item = next(items, _END)
            if item is _END:
                return
            batch = Batch.of(item)
            batch = batch if perturb is None else _perturbed(batch, perturb, seed, generators)
            reader = (
                source.reader(model, batch, device)
                if reader is None and isinstance(source, Choice)
                else reader
            )
            assert reader is not None
            features = reader.read(model, batch, device).to("cpu", dtype)
        yield reader, features, None if batch.labels is None else as_labels(batch.labels, len(features)).cpu()


def collect(parts: Iterable[Any]) -> tuple[Features, Tensor | None]:
    """Join ``(features, labels)`` of several batches."""
    features: list[Features] = []
    labels: list[Tensor | None] = []
    for part, y in parts:
        features.append(part)
        labels.append(y)
        for name, width in features[0].widths.items():
            if part.widths[name] != width:
                raise ValueError(
                    f"layer {name!r} is {width} wide in the first batch and "
                    f"{part.widths[name]} in batch {len(features)}; "
                    "inputs of varying size need a pooling over positions, such as "
                    "'spatial-avg' or 'time-max'"
                )
    if not features:
        raise ValueError("the loader gave no batch: there is nothing to extract")
    known = [y for y in labels if y is not None]
    if known and len(known) < len(labels):
        raise ValueError(f"only {len(known)} of {len(labels)} batches have labels; give all or none")
    return Features.concatenate(features), torch.cat(known) if known else None


def _stored(features: Features, labels: Tensor, out: str | os.PathLike[str]) -> FeatureStore:
    from salgp.store.store import write_store

    return write_store([(features, labels)], out)


_END = object()


class _PrivateRandom:
    """A stream of torch random numbers of its own that starts where the global one stands."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type in ("cuda", "xpu") else None
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
        return torch.get_rng_state(), None if self._device is None else torch.get_device_module(
            self._device
        ).get_rng_state(self._device)

    def _set(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(state[1], self._device)


def _perturbed(
    batch: Batch, perturb: Perturb, seed: int, generators: dict[torch.device, torch.Generator]
) -> Batch:
    def apply(x: Tensor) -> Tensor:
        if x.device not in generators:
            generators[x.device] = torch.Generator(x.device).manual_seed(seed)
        return perturb(x, generators[x.device])

    for i, x in enumerate(batch.inputs):
        if isinstance(x, PackedSequence) and x.data.is_floating_point():
            return Batch(
                (*batch.inputs[:i], x._replace(data=apply(x.data)), *batch.inputs[i + 1 :]),
                batch.keywords,
                batch.labels,
            )
        if isinstance(x, Tensor) and x.is_floating_point():
            return Batch((*batch.inputs[:i], apply(x), *batch.inputs[i + 1 :]), batch.keywords, batch.labels)
    for key, x in batch.keywords.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            return Batch(batch.inputs, {**batch.keywords, key: apply(x)}, batch.labels)
    raise ValueError("perturb needs a floating-point input tensor, but the batch has none")


def _shown(loader: Iterable[Any]) -> Iterable[Any]:
    try:
        from rich.progress import track
    except ImportError:
        return loader
    return track(loader, description="extracting", total=len(loader) if isinstance(loader, Sized) else None)
