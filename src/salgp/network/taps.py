"""Taps on a network: forward hooks that pool a layer's output on the spot, and are gone afterwards.

`inference` puts a network to rest for a forward pass and gives every submodule its own mode back. `tapped`
hangs the hooks; they keep the pooled features only, so no activation outlives its layer. A module that runs
several times in one pass gives ``name``, ``name@2``, ... . A recurrent module ``gru`` gives its output
sequence as ``gru`` and the final hidden state of each depth (both directions side by side) as ``gru.0``,
``gru.1``, ... .
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from salgp.network.batches import named_fields
from salgp.network.pooling import Layout, Pooling, pool

__all__ = ["Tap", "activation", "hidden_state", "inference", "tapped", "unwrap"]


@dataclass(frozen=True)
class Tap:
    """One place in a network where features are taken.

    Args:
        name: of the features.
        module: name of the module, as in ``named_modules``.
        call: which of the module's calls within one forward pass, from 1.
        depth: of a recurrent module: the layer whose final hidden state is taken; None for its output
            sequence.
        pooling: how the output becomes a vector.
        layout: how its axes are read.
    """

    name: str
    module: str
    call: int = 1
    depth: int | None = None
    pooling: Pooling = "auto"
    layout: Layout = field(default_factory=Layout)

    def read(self, output: Any, module: nn.Module, mask: Tensor | None = None) -> Tensor:
        """Pooled features ``(N, d)`` out of what the module returned."""
        if self.depth is not None:
            return hidden_state(output, module, self.depth).clone()
        x, own_mask = activation(output)
        if x is None:
            raise ValueError(
                f"layer {self.name!r} returned {type(output).__name__} without any "
                f"floating-point tensor; leave it out"
            )
        x = x.transpose(0, 1) if self.layout.batch_axis == 1 and own_mask is None and x.ndim > 2 else x
        try:
            pooled = pool(x, self.pooling, self.layout, mask if own_mask is None else own_mask)
        except ValueError as error:
            raise ValueError(f"layer {self.name!r}: {error}") from error
        shared = (
            torch.compiler.is_exporting()
            or x.untyped_storage().data_ptr() == pooled.untyped_storage().data_ptr()
        )
        return pooled.clone() if shared else pooled  # the network may yet overwrite its output in place


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule has the mode it had before.

    Flags are set one by one and not through ``eval()``, which a network may have overridden to do more. A
    network that several threads use at once should be in evaluation mode already: then nothing is set at all.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with inference(model):
        ...     [m.training for m in model]
        [False, False]
        >>> [m.training for m in model]
        [True, False]
    """
    training = [m for m in model.modules() if m.training]
    try:
        for m in training:
            m.training = False
        with torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True


@contextmanager
def tapped(
    model: nn.Module, taps: Sequence[Tap], mask: Tensor | None = None
) -> Iterator[Mapping[str, Tensor]]:
    """While open, forward passes of this thread fill the yielded mapping from tap name to pooled features.

    Args:
        model: the network; its hooks are as before on leaving, also after an error.
        taps: where to take features.
        mask: ``(N, T)`` true at real positions, for the poolings over tokens.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        >>> with inference(model), tapped(model, [Tap("relu", "1", layout=Layout("first"))]) as found:
        ...     _ = model(torch.zeros(2, 1, 8, 8))
        >>> found["relu"].shape, len(model[1]._forward_hooks)
        (torch.Size([2, 4]), 0)
    """
    found: dict[str, Tensor] = {}
    by_module: dict[str, list[Tap]] = {}
    for tap in taps:
        by_module.setdefault(tap.module, []).append(tap)
    handles = []
    try:
        for name, wanted in by_module.items():
            handles.append(model.get_submodule(name).register_forward_hook(_collector(wanted, found, mask)))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def activation(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The tensor a module returned and, where it carries lengths, its mask ``(N, T)``.

    Of a tuple, the first floating-point tensor; of a mapping or dataclass, ``last_hidden_state`` or else the
    first; packed and nested sequences are padded.

    Example:
        >>> activation((torch.zeros(2, 3), None))[0].shape
        torch.Size([2, 3])
    """
    if isinstance(output, PackedSequence):
        padded, lengths = pad_packed_sequence(output, batch_first=True)
        return padded, _mask(lengths.to(padded.device), padded.shape[1])
    if isinstance(output, Tensor):
        return _dense(output)
    fields = dict(named_fields(output))
    parts = list(fields.values()) if fields else list(output) if isinstance(output, tuple | list) else []
    for part in [fields.get("last_hidden_state"), *parts]:
        if isinstance(part, Tensor | PackedSequence | tuple | list | Mapping):
            x, mask = activation(part)
            if x is not None:
                return x, mask
    return None, None


def hidden_state(output: Any, module: nn.Module, depth: int) -> Tensor:
    """Final hidden state of one depth of a recurrent module, ``(N, directions * hidden)``.

    Example:
        >>> gru = nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        >>> hidden_state(gru(torch.zeros(5, 7, 3)), gru, 1).shape
        torch.Size([5, 8])
    """
    if not isinstance(module, nn.RNNBase):
        raise TypeError(f"only recurrent layers have hidden states per depth, got {type(module).__name__}")
    state = output[1][0] if isinstance(output[1], tuple) else output[1]  # (depth * directions, N, hidden)
    directions = 2 if module.bidirectional else 1
    own = state[depth * directions : (depth + 1) * directions]
    pooled: Tensor = own.transpose(0, 1).flatten(1)
    return pool(pooled)


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile`` wrappers.

    Example:
        >>> type(unwrap(nn.DataParallel(nn.Linear(2, 2)))).__name__
        'Linear'
    """
    while (
        isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        or "_orig_mod" in model._modules
    ):
        model = model.get_submodule("_orig_mod" if "_orig_mod" in model._modules else "module")
    return model


def _collector(
    taps: Sequence[Tap], found: dict[str, Tensor], mask: Tensor | None
) -> Callable[[nn.Module, Any, Any], None]:
    owner = threading.get_ident()
    by_call: dict[int, list[Tap]] = {}
    for tap in taps:
        by_call.setdefault(tap.call, []).append(tap)
    calls = 0

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        nonlocal calls
        if threading.get_ident() != owner:
            return
        calls += 1
        for tap in by_call.get(calls, []):
            found[tap.name] = tap.read(output, module, mask)

    return hook


def _dense(x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if not x.is_floating_point():
        return None, None
    if not x.is_nested:
        return x, None
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    padded = x.to_padded_tensor(0.0)
    return padded, _mask(lengths, padded.shape[1])


def _mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]
