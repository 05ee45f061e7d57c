"""A trace of one forward pass: which modules ran, in which order, and what their outputs look like.

Reading a pass instead of the module tree settles what no tree can tell: the order of execution, modules that
never run, modules that run twice, where the logits come from, and which axis of an output counts the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from salgp.logits import raw_logits
from salgp.network.frozen_copy import FrozenCopy
from salgp.network.pooling import Layout
from salgp.network.taps import Tap, activation

__all__ = ["Call", "Trace", "ancestors", "numbered", "trace"]


@dataclass(frozen=True, eq=False)
class Call:
    """One run of a module within a forward pass.

    Args:
        name: of the module.
        count: 1 for the first run of this module, 2 for the second, ...
        module: the module itself.
        shape: of its (first floating-point) output; None where it has none.
        layout: how that output's axes are read.
        classifier: is its output the logits?
    """

    name: str
    count: int
    module: nn.Module
    shape: tuple[int, ...] | None
    layout: Layout
    classifier: bool = False

    @property
    def label(self) -> str:
        """Feature name: ``name``, ``name@2``, ..."""
        return numbered(self.name, self.count)


@dataclass(frozen=True, eq=False)
class Trace:
    """The calls of one forward pass, in the order in which they finished.

    Args:
        calls: what ran.
        n: number of samples.
        n_scores: number of class scores the network gave for them, ``n * c``.
        module_names: all modules of the network, run or not.
        logits: the scores themselves, ``(n, c)`` or ``(n,)``.
    """

    calls: tuple[Call, ...]
    n: int
    n_scores: int
    module_names: tuple[str, ...]
    logits: Tensor

    @property
    def names(self) -> frozenset[str]:
        """Modules that ran."""
        return frozenset(c.name for c in self.calls)

    def leaves(self) -> list[Call]:
        """Calls of modules inside which no other module ran."""
        parents = {p for name in self.names for p in ancestors(name)}
        return [c for c in self.calls if c.name not in parents]

    def taps(self) -> dict[str, Tap]:
        """Every tap the pass offers, by feature name, in order."""
        return {tap.name: tap for call in self.calls if call.name for tap in _taps_of(call, self.n)}


def trace(model: nn.Module, run: Callable[[nn.Module], Any]) -> Trace:
    """Write down which modules a forward pass calls, in order.

    Args:
        model: the network; a frozen copy of it runs.
        run: makes one forward pass of the network it is given and returns its output.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> [c.name for c in trace(model, lambda network: network(torch.zeros(2, 4))).calls]
        ['0', '1', '2', '']
    """
    seen: list[_Run] = []
    frozen = FrozenCopy(model, lambda network: _record(network, seen))
    with torch.no_grad():
        logits = raw_logits(run(frozen.network))
    names = tuple(name for name, _ in model.named_modules() if name)
    return Trace(tuple(_calls(seen, logits)), len(logits), logits.numel(), names, logits.clone())


def ancestors(name: str) -> list[str]:
    """All enclosing modules, innermost first; the network itself (the empty name) last.

    Example:
        >>> ancestors("layer1.0.conv")
        ['layer1.0', 'layer1', '']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) - 1, -1, -1)]


def numbered(name: str, count: int) -> str:
    """Feature name of the ``count``-th call.

    Example:
        >>> numbered("block", 1), numbered("block", 2)
        ('block', 'block@2')
    """
    return name if count == 1 else f"{name}@{count}"


@dataclass(frozen=True, eq=False)
class _Run:
    name: str
    module: nn.Module
    shape: tuple[int, ...] | None
    layout: Layout
    padded: bool  # packed and nested sequences arrive batch first
    small: Tensor | None  # kept to recognise the logits


def _record(network: nn.Module, seen: list[_Run]) -> None:
    """Watch every module; those of TorchScript take no hooks, and nobody can look into them."""
    for name, module in network.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        if not scripted and "parametrizations" not in name.split("."):
            module.register_forward_hook(_recorder(name, seen))


def _recorder(name: str, seen: list[_Run]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, _: Any, output: Any) -> None:
        x, mask = activation(output)
        layout = _own_layout(module) or (seen[-1].layout if seen else Layout())
        small = x if x is not None and x.numel() == x.shape[:2].numel() else None
        seen.append(
            _Run(name, module, None if x is None else tuple(x.shape), layout, mask is not None, small)
        )

    return hook


def _calls(seen: Iterable[_Run], logits: Tensor) -> Iterator[Call]:
    counts: Counter[str] = Counter()
    where = logits.untyped_storage().data_ptr()
    for s in seen:
        counts[s.name] += 1
        is_logits = (
            s.small is not None
            and s.small.untyped_storage().data_ptr() == where
            and s.small.numel() == logits.numel()
        )
        axis = 0 if s.shape is None or s.padded else _batch_axis(s.shape, len(logits), s.module)
        yield Call(s.name, counts[s.name], s.module, s.shape, replace(s.layout, batch_axis=axis), is_logits)


def _batch_axis(shape: tuple[int, ...], n: int, module: nn.Module) -> int:
    if len(shape) < 3 or (shape[0] == n != shape[1]):
        return 0
    if shape[1] == n != shape[0]:
        return 1
    stated = [m.batch_first for m in module.modules() if isinstance(m, nn.RNNBase | nn.MultiheadAttention)]
    return int(bool(stated) and not any(stated))


def _own_layout(module: nn.Module) -> Layout | None:
    if isinstance(module, nn.modules.conv._ConvNd):
        return Layout("first", module.out_channels)
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return Layout("first", module.num_features)
    if isinstance(module, nn.RNNBase):
        size = module.proj_size or module.hidden_size
        return Layout("last", size * (2 if module.bidirectional else 1), recurrent=True)
    if isinstance(module, nn.Linear):
        return Layout("last", module.out_features)
    if isinstance(module, nn.LayerNorm):
        return Layout("last", module.normalized_shape[-1])
    if isinstance(module, nn.Embedding | nn.MultiheadAttention):
        return Layout("last", module.embedding_dim if isinstance(module, nn.Embedding) else module.embed_dim)
    return None


def _taps_of(call: Call, n: int) -> Iterator[Tap]:
    if isinstance(call.module, nn.RNNBase):
        for depth in range(call.module.num_layers):
            yield Tap(numbered(f"{call.name}.{depth}", call.count), call.name, call.count, depth)
    if call.shape and call.shape[call.layout.batch_axis] == n:
        yield Tap(call.label, call.name, call.count, None, "auto", call.layout)
