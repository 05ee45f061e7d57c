"""A trace of one forward pass: which modules ran, in which order, and what their outputs look like.

Reading a pass instead of the module tree settles what no tree can tell: the order of execution, modules that
never run, modules that run twice, where the logits come from, and which axis of an output counts the samples.

`Flow` tells which layers lead to the logits, and at which positions of a sequence the network reads its
answer, by disturbing what a layer gives: where the logits stay as they are, they do not depend on it; where
they stay as all tokens but the last are disturbed, the network reads the last token, as causal language
models do.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from salgp.logits import raw_logits
from salgp.network.frozen_copy import FrozenCopy
from salgp.network.taps import Layout, Probe, Tap, activation

__all__ = ["Call", "numbered", "trace"]

ALIKE, SAME = 0.02, 1e-4
"""Scores of the same inputs may differ by this share of the largest, and by this where the inputs of the last
layers differ in nothing that counts: some devices add up in any order.
"""


class NetworkWarning(UserWarning):
    """The network can be read, but what it gives may not be what was meant."""


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


class Flow:
    """Do the logits depend on a tap, and where do they read it?

    Args:
        model: the network; a frozen copy of it runs.
        found: a forward pass of it.
        run: makes the same forward pass of the network it is given.
        mask: ``(n, T)`` true at real tokens, where there is one.

    Example:
        >>> run = lambda network: network(torch.ones(2, 4))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = trace(model, run)
        >>> Flow(model, found, run)(found.taps()["1"])
        True
    """

    def __init__(
        self, model: nn.Module, found: Trace, run: Callable[[nn.Module], Any], mask: Tensor | None = None
    ) -> None:
        self._taps = tuple(found.taps().values())
        self._run = run
        self._mask = mask
        self._frozen = FrozenCopy(model, lambda copied: Probe(copied, self._taps, pooled=False))
        self._shapes: dict[str, torch.Size] = {}
        self._known: dict[str, bool] = {}
        self._before = self._logits(self._keep_shape)
        _warn_of_chance(found.logits, self._before)

    def __call__(self, tap: Tap) -> bool:
        if tap.name not in self._known:
            self._known[tap.name] = not torch.equal(self._disturbed(tap.name), self._before)
        return self._known[tap.name]

    def with_pooling(self, tap: Tap) -> Tap:
        """The tap, with the last token instead of the mean over tokens where the network reads that."""
        sequence = tap.pooling == "auto" and not tap.layout.recurrent and self._is_sequence(tap)
        return replace(tap, pooling="time-last") if sequence and self._reads_last else tap

    @functools.cached_property
    def _reads_last(self) -> bool:
        """Does the deepest sequence count for nothing but its last real token?"""
        deepest = next((tap for tap in reversed(self._taps) if self._is_sequence(tap) and self(tap)), None)
        if deepest is None:
            return False
        n, width = self._shapes[deepest.name][:2]
        if self._mask is not None and self._mask.shape != (n, width):
            return False
        real = torch.ones(n, width) if self._mask is None else self._mask.cpu()
        last = width - 1 - real.flip(1).bool().int().argmax(dim=1)
        others = 1 - torch.nn.functional.one_hot(last, width)
        after = self._disturbed(deepest.name, others[:, :, None])
        return torch.allclose(after, self._before, rtol=SAME, atol=SAME)

    def _is_sequence(self, tap: Tap) -> bool:
        """Does it give a vector for each of several tokens, ``(n, T, d)``?"""
        shape = self._shapes.get(tap.name, ())
        return tap.layout.channels == "last" and len(shape) == 3 and shape[1] > 1

    def _keep_shape(self, name: str, x: Tensor) -> Tensor:
        self._shapes[name] = x.shape
        return x

    def _disturbed(self, disturbed: str, share: Tensor | float = 1.0) -> Tensor:
        """The logits with noise on what one tap gives, a share of it at each position."""

        def change(name: str, x: Tensor) -> Tensor:
            if name != disturbed:
                return x
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * share
            return x + (x.abs().mean() + 1) * noise.to(x)

        return self._logits(change)

    @torch.no_grad()
    def _logits(self, change: Callable[[str, Tensor], Tensor]) -> Tensor:
        self._frozen.follow()
        with self._frozen.probe.reading(None, lambda j, x: change(self._taps[j].name, x)):
            return raw_logits(self._run(self._frozen.network)).clone()


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
        x, mask, _ = activation(output)
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


def _warn_of_chance(first: Tensor, second: Tensor) -> None:
    """Two passes of the same samples have been made anyway: are their scores alike?"""
    if not first.is_floating_point() or first.numel() == 0 or first.shape != second.shape:
        return  # no class scores: `as_logits` says so
    if bool((first - second).abs().max() > ALIKE * first.abs().max()):
        warnings.warn(
            "the network gives other scores for the same inputs in every pass (dropout that stays on in "
            "evaluation mode?): a confidence is then that of one random pass; switch it off, or calibrate "
            "the mean of several passes",
            NetworkWarning,
            stacklevel=2,
        )
