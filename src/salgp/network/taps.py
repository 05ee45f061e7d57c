"""Taps on a network: hooks that pool a layer's output on the spot.

A `Tap` says where features are taken and how. A `Probe` hangs the hooks of several taps on a frozen copy of
the network (`salgp.network.frozen_copy`); each pass then fills a mapping with pooled features only, so no
activation outlives its layer. A module that runs several times in one pass gives ``name``, ``name@2``, ... .
A recurrent module ``gru`` gives its output sequence as ``gru`` and the final hidden state of each depth (both
directions side by side) as ``gru.0``, ``gru.1``, ... .

Augmentation perturbs a layer where it is read: `Tap.replaced` changes in an output exactly what `Tap.read`
reads from it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from salgp.logits import named_fields
from salgp.network.pooling import Layout, Pooling, pool

__all__ = ["Change", "Probe", "Tap", "TapError", "activation", "hidden_state"]

Change = Callable[[int, Tensor], Tensor]
"""``change(j, x) -> x``: the batch-first output ``x`` of tap number ``j``, perturbed."""


class TapError(ValueError):
    """What a layer returned cannot be read as features; the network itself is not to blame."""


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
        leads: do the logits depend on it? Augmentation perturbs only layers that lead to the logits.
    """

    name: str
    module: str
    call: int = 1
    depth: int | None = None
    pooling: Pooling = "auto"
    layout: Layout = field(default_factory=Layout)
    leads: bool = True

    def read(self, output: Any, module: nn.Module, mask: Tensor | None = None) -> Tensor:
        """Pooled features ``(N, d)`` out of what the module returned."""
        if self.depth is not None:
            return hidden_state(output, module, self.depth).clone()
        x, own_mask = activation(output)
        if x is None:
            raise TapError(
                f"layer {self.name!r} returned {type(output).__name__} without any "
                f"floating-point tensor; leave it out"
            )
        x = x.transpose(0, 1) if self.layout.batch_axis == 1 and own_mask is None and x.ndim > 2 else x
        try:
            pooled = pool(x, self.pooling, self.layout, mask if own_mask is None else own_mask)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, IndexError, RuntimeError) as error:  # also of the user's own pooling
            raise TapError(f"layer {self.name!r}: {error}") from error
        if torch.compiler.is_exporting() or _share_memory(x, pooled):
            return pooled.clone()  # the network may yet overwrite its output in place
        return pooled

    def replaced(self, output: Any, module: nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
        """What the module returned, with that part changed which `read` reads; ``change`` is batch first."""
        if self.depth is not None:
            return _with_state(output, module, self.depth, change)
        axis = self.layout.batch_axis
        return _with_activation(
            output, lambda x: change(x.transpose(0, axis)).transpose(0, axis) if x.ndim > axis else x, change
        )


class Probe:
    """The hooks of some taps on one network, for one caller at a time.

    Args:
        network: a private copy of the user's network; the hooks stay on it.
        taps: where to take features.
        pooled: take features, or only pass outputs through the change of `reading`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        >>> probe = Probe(model, [Tap("relu", "1", layout=Layout("first"))])
        >>> with torch.no_grad(), probe.reading() as found:
        ...     _ = model(torch.zeros(2, 1, 8, 8))
        >>> found["relu"].shape
        torch.Size([2, 4])
    """

    def __init__(self, network: nn.Module, taps: Sequence[Tap], pooled: bool = True) -> None:
        self._taps = tuple(taps)
        self._pooled = pooled
        self._found: dict[str, Tensor] | None = None
        self._calls: dict[str, int] = {}
        self._mask: Tensor | None = None
        self._change: Change | None = None
        for name in dict.fromkeys(tap.module for tap in taps):
            network.get_submodule(name).register_forward_hook(self._hook(name))

    @contextmanager
    def reading(
        self, mask: Tensor | None = None, change: Change | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """While open, a forward pass fills the yielded mapping from tap name to pooled features.

        Args:
            mask: ``(N, T)`` true at real positions, for the poolings over tokens.
            change: perturbs tapped outputs before they are read and passed on.
        """
        self._found, self._mask, self._change = {}, mask, change
        self._calls.clear()
        try:
            yield self._found
        finally:
            self._found = self._mask = self._change = None

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        """Reads what a module returned, and gives it back, perhaps changed."""
        by_call: dict[int, list[tuple[int, Tap]]] = {}
        for j, tap in enumerate(self._taps):
            if tap.module == name:
                by_call.setdefault(tap.call, []).append((j, tap))

        def hook(module: nn.Module, _: Any, output: Any) -> Any:
            if self._found is None:
                return output
            call = self._calls[name] = self._calls.get(name, 0) + 1
            now = by_call.get(call, ())
            if self._change is not None:
                for j, tap in now:
                    output = tap.replaced(output, module, functools.partial(self._change, j))
            for _, tap in now if self._pooled else ():
                self._found[tap.name] = tap.read(output, module, self._mask)
            return output

        return hook


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
        if output.is_nested:
            return _padded(output)
        return (output if output.is_floating_point() else None), None
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


def _with_activation(
    output: Any, change: Callable[[Tensor], Tensor], padded: Callable[[Tensor], Tensor]
) -> Any:
    """Counterpart of `activation`: the output with the tensor found there changed.

    Args:
        output: what a module returned.
        change: of a plain tensor, whichever axis counts its samples.
        padded: of a packed or nested sequence that was padded, samples first.
    """
    if isinstance(output, PackedSequence):
        x, lengths = pad_packed_sequence(output, batch_first=True)
        return pack_padded_sequence(padded(x), lengths, batch_first=True, enforce_sorted=False)
    if isinstance(output, Tensor):
        return _changed_tensor(output, change, padded)
    fields = dict(named_fields(output))
    parts: dict[Any, Any] = dict(fields)
    if not parts and isinstance(output, tuple | list):
        parts = dict(enumerate(output))
    order = sorted(parts, key=lambda key: key != "last_hidden_state")
    where = next((key for key in order if activation(parts[key])[0] is not None), None)
    if where is None:
        return output
    return _with_part(output, where, _with_activation(parts[where], change, padded))


def _changed_tensor(
    x: Tensor, change: Callable[[Tensor], Tensor], padded: Callable[[Tensor], Tensor]
) -> Tensor:
    if not x.is_floating_point():
        return x
    if not x.is_nested:
        return change(x)
    new = padded(x.to_padded_tensor(0.0))
    rows = [row[: len(old)] for row, old in zip(new, x.unbind(), strict=True)]
    return torch.nested.as_nested_tensor(rows)


def _with_part(output: Any, where: Any, new: Any) -> Any:
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed[where] = new
        return changed
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return dataclasses.replace(output, **{where: new})
    if isinstance(where, str):  # a named tuple
        return output._replace(**{where: new})
    return type(output)(new if i == where else part for i, part in enumerate(output))


def _with_state(output: Any, module: nn.Module, depth: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Counterpart of `hidden_state`: the final hidden state of one depth changed."""
    lstm = isinstance(output[1], tuple)
    state = output[1][0] if lstm else output[1]  # (depth * directions, N, hidden)
    directions = 2 if isinstance(module, nn.RNNBase) and module.bidirectional else 1
    own = slice(depth * directions, (depth + 1) * directions)
    pooled = state[own].transpose(0, 1)  # (N, directions, hidden)
    new = state.clone()
    new[own] = change(pooled.flatten(1)).reshape(pooled.shape).transpose(0, 1)
    return output[0], (new, *output[1][1:]) if lstm else new


def _padded(x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A nested tensor of sequences as one, with its mask."""
    if not x.is_floating_point():
        return None, None
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    padded = x.to_padded_tensor(0.0)
    return padded, _mask(lengths, padded.shape[1])


def _mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
