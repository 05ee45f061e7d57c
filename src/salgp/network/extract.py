"""From a network and a loader to `Features` and labels.

The network is never changed (`salgp.network.view`), and batches are pooled while they pass through, so memory
holds pooled features only. For more samples than memory holds there is `salgp.store.extract_to_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from salgp.features import Features
from salgp.network.batches import Batch, LabelsAt
from salgp.network.inputs import first_input
from salgp.network.layers import Layers, Poolings
from salgp.network.perturb import Family
from salgp.network.reader import Forward, Reader
from salgp.network.reading import Place, Prepare, collect, read_batches
from salgp.network.rehearsal import rehearse

__all__ = ["Copies", "Perturb", "extract", "perturbed"]

Perturb = Callable[[Tensor, torch.Generator], Tensor]
"""``perturb(inputs, generator) -> inputs``, applied to the first floating-point input of each batch."""
Copies = str | Sequence[str | Family]
"""Which perturbed copies to add to the originals: see `salgp.network.perturb.families_for`."""


def extract(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Layers = "auto",
    pooling: Poolings = "auto",
    output: str = "logits",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    keep_on_device: bool = False,
    max_width: int | None = None,
    perturb: Perturb | Copies | None = None,
    seed: int = 0,
    progress: bool | None = None,
    forward: Forward | None = None,
    labels_at: LabelsAt = None,
    tokenizer: Any = None,
) -> tuple[Features, Tensor | None]:
    """Logits and pooled layer features of everything a loader yields.

    Args:
        model: any PyTorch classifier; it is the same afterwards.
        loader: yields ``(x, y)``, ``(x1, x2, ..., y)``, ``x`` alone, or mappings with keyword arguments (and
            ``labels``, ``label``, ``targets``, ``target`` or ``y``). Labels are class numbers or one-hot
            rows.
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
        keep_on_device: leave the features where the network is, instead of bringing them to the CPU.
        max_width: wider layers are projected to this width by a random Gaussian matrix fixed by ``seed`` and
            layer name.
        perturb: ``"auto"``, or families of perturbations (`salgp.network.perturb.families_for`): labelled
            originals are followed by perturbed copies that share their original's group. A function
            ``perturb(inputs, generator) -> inputs`` instead replaces the first floating-point input of each
            batch.
        seed: of ``perturb`` and the projections.
        progress: show a progress bar (needs ``rich``); None for "on a terminal and in notebooks".
        forward: ``forward(model, batch) -> output`` for networks that are not simply called with the inputs,
            or that return several tensors; it gets the batch as the loader made it, on the network's device.
        labels_at: where a batch has its labels, if not at its end: a position, such as 1 for ``(x, y, id)``,
            or a key.
        tokenizer: of a network that reads text, a Hugging Face one or a `salgp.network.text.Coder`; copies of
            texts then have typing errors, lost, swapped and unknown words.

    Returns:
        Features, and labels ``(n,)`` or None where the loader has none.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [(torch.zeros(2, 4), torch.tensor([0, 1])), (torch.ones(1, 4), torch.tensor([2]))]
        >>> features, labels = extract(model, loader)
        >>> len(features), features.widths, labels
        (3, {'1': 8}, tensor([0, 1, 2]))
    """
    reader = Reader(layers, pooling, output, max_width, seed, forward, labels_at)
    place = Place(device, dtype, keep_on_device)
    if perturb is not None and not callable(perturb):
        options: Any = {"seed": seed, "progress": progress, "tokenizer": tokenizer}
        found = rehearse(model, loader, reader, perturb, place, **options)
        return found.features, found.labels
    prepare = perturbed(perturb, seed)
    return collect(read_batches(model, loader, reader, place, prepare=prepare, progress=progress))[1:]


def perturbed(perturb: Perturb | None, seed: int) -> Prepare | None:
    """A function on inputs as `read_batches` takes it, with a stream of random numbers on each device."""
    if perturb is None:
        return None
    generators: dict[torch.device, torch.Generator] = {}

    def apply(x: Tensor) -> Tensor:
        if x.device not in generators:
            generators[x.device] = torch.Generator(x.device).manual_seed(seed)
        return perturb(x, generators[x.device])

    def prepare(batch: Batch, index: int) -> tuple[Batch, None]:
        where, x = first_input(batch)
        if where is None:
            raise ValueError("perturb needs a floating-point input tensor, but the batch has none")
        new = x._replace(data=apply(x.data)) if isinstance(x, PackedSequence) else apply(x)
        return batch.with_input(where, new), None

    return prepare
