"""Which layers to tap: the automatic choice, names, positions and globs, decided by a trace of one forward
pass: which modules ran, in which order, and what their outputs look like.

Reading a pass instead of the module tree gives what no tree can: the order of execution, modules that
never run, modules that run twice, where the logits come from, and which axis of an output counts the samples.
`Flow` tells which layers lead to the logits, and at which positions of a sequence the network reads its
answer, by disturbing what a layer gives: where the logits stay as they are, they do not depend on it; where
they stay as all tokens but the last are disturbed, the network reads the last token, as causal language
models do.

The automatic choice takes block boundaries:

1. the *stack*: the shallowest place where building blocks repeat (stages of a residual net, transformer
   blocks, members of a ``ModuleList``), one layer per block, plus every recurrent layer outside of it;
2. behind the stack, and everywhere in networks without one, *plain blocks*: a layer with weights together
   with the normalisation, activation and pooling that follow it;
3. never the classifier itself, the layer whose output is the logits, nor anything after it, nor a layer on
   which the logits do not depend.

A recurrent layer is read as the network uses it: the final hidden states of the lower depths, and of the last
depth the output sequence, or the final hidden state where only that is passed on.

More than `MAX_LAYERS` are thinned out evenly, keeping the first and the last.
"""

from __future__ import annotations

import difflib
import functools
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from salgp.network.frozen_copy import FrozenCopy
from salgp.network.taps import Layout, Pooling, Probe, Tap, activation, raw_logits

__all__ = [
    "MAX_LAYERS",
    "Flow",
    "Layers",
    "NetworkWarning",
    "Poolings",
    "Trace",
    "auto_layers",
    "make_taps",
    "pooling_for",
    "thinned",
    "trace",
]

MAX_LAYERS = 12
"""Most layers the automatic choice takes."""

Layers = str | int | Sequence[str | int]
"""``"auto"``, or names, globs and positions among the automatic layers, one or several."""

Poolings = Pooling | Mapping[str, Pooling]
"""One pooling for all layers, or a mapping from layer name or glob to pooling; the first match counts, others
are ``auto``.
"""


Leads = Callable[[Tap], bool]
"""Do the logits depend on what this tap reads?"""

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
        module_names: all modules of the network, run or not.
        logits: the class scores, ``(n, c)`` or ``(n,)``.
    """

    calls: tuple[Call, ...]
    module_names: tuple[str, ...]
    logits: Tensor

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.logits)

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
    seen: list[_Seen] = []
    network = FrozenCopy(model).network
    for name, module in network.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)  # takes no hooks
        if not scripted and "parametrizations" not in name.split("."):
            module.register_forward_hook(_recorder(name, seen))
    with torch.no_grad():
        logits = raw_logits(run(network))
    names = tuple(name for name, _ in model.named_modules() if name)
    return Trace(tuple(_calls(seen, logits)), names, logits.clone())


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
        after = self._disturbed(deepest.name, others)
        return torch.allclose(after, self._before, rtol=SAME, atol=SAME)

    def _is_sequence(self, tap: Tap) -> bool:
        """Does it give a vector for each of several tokens, ``(n, T, d)``?"""
        shape = self._shapes.get(tap.name, ())
        return tap.layout.channels == "last" and len(shape) == 3 and shape[1] > 1

    def _keep_shape(self, name: str, x: Tensor) -> Tensor:
        self._shapes[name] = x.shape
        return x

    def _disturbed(self, name: str, share: Tensor | None = None) -> Tensor:
        """The logits with noise on what one tap gives, or on a share ``(n, T)`` of its positions."""

        def change(at: str, x: Tensor) -> Tensor:
            if at != name:
                return x
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
            noise = noise if share is None else noise * share[:, :, None]
            return x + (x.abs().mean() + 1) * noise.to(x)

        return self._logits(change)

    @torch.no_grad()
    def _logits(self, change: Callable[[str, Tensor], Tensor]) -> Tensor:
        self._frozen.follow()
        with self._frozen.probe.reading(None, lambda j, x: change(self._taps[j].name, x)):
            return raw_logits(self._run(self._frozen.network)).clone()


_Seen = tuple[str, nn.Module, Tensor | None, bool, Layout]
"""Name, module and output of a call, was it padded (then it is batch first), and its layout."""


def _recorder(name: str, seen: list[_Seen]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, _: Any, output: Any) -> None:
        x, mask, _ = activation(output)
        layout = _own_layout(module) or (seen[-1][-1] if seen else Layout())
        if x is not None and x.numel() > x.shape[:2].numel():
            x = x.to("meta")  # only the logits are to be recognised by where they lie
        seen.append((name, module, x, mask is not None, layout))

    return hook


def _calls(seen: Iterable[_Seen], logits: Tensor) -> Iterator[Call]:
    counts: Counter[str] = Counter()
    for name, module, x, padded, layout in seen:
        counts[name] += 1
        shape = None if x is None else tuple(x.shape)
        axis = 0 if shape is None or padded else _batch_axis(shape, len(logits), module)
        yield Call(
            name, counts[name], module, shape, replace(layout, batch_axis=axis), _same_values(x, logits)
        )


def _same_values(x: Tensor | None, logits: Tensor) -> bool:
    """Are the logits this output, or a view of it?"""
    if x is None or x.is_meta or x.numel() != logits.numel():
        return False
    return x.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


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


def auto_layers(found: Trace, leads: Leads = lambda tap: True) -> tuple[str, ...]:
    """Names of the layers the automatic choice takes.

    Args:
        found: a forward pass of the network.
        leads: layers on which the logits do not depend are left out.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Conv2d(1, 4, 3),
        ...     nn.ReLU(),
        ...     nn.MaxPool2d(2),
        ...     nn.Flatten(),
        ...     nn.Linear(36, 16),
        ...     nn.ReLU(),
        ...     nn.Linear(16, 3),
        ... )
        >>> auto_layers(trace(model, lambda network: network(torch.zeros(2, 1, 8, 8))))
        ('2', '5')
    """
    head = _classifier(found)
    stop = len(found.calls) if head is None else found.calls.index(head)
    closed = {"", *(() if head is None else (head.name, *ancestors(head.name)))}
    before = [c for c in found.calls[:stop] if c.name not in closed]
    stack = [c for c in before if c.name in _stack(found, before, closed)]
    inside = {c.name for c in stack}
    plain = [
        end
        for start, end in _plain_blocks(found, before)
        if not inside.intersection((start.name, *ancestors(start.name)))
    ]
    if stack:
        last = before.index(stack[-1])
        plain = [c for c in plain if before.index(c) > last or isinstance(c.module, nn.RNNBase)]
    offered = found.taps()
    names = [name for c in before if c in stack or c in plain for name in _auto_names(c, offered, leads)]
    return thinned(names, MAX_LAYERS)


def make_taps(
    found: Trace, layers: Layers = "auto", pooling: Poolings = "auto", leads: Leads = lambda tap: True
) -> tuple[Tap, ...]:
    """Turn a choice of layers and poolings into taps, in the order of the forward pass.

    Args:
        found: a forward pass of the network.
        layers: ``"auto"``; or names, positions among the automatic layers (negative from the end) and globs,
            in which ``*`` stays within one level of the name and ``**`` does not. A name stands for all calls
            of the module.
        pooling: one pooling, or a mapping from name or glob to pooling.
        leads: whether the logits depend on a tap; the automatic choice leaves out others.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = trace(model, lambda network: network(torch.zeros(2, 4)))
        >>> [t.name for t in make_taps(found, ["0", -1])]
        ['0', '1']
    """
    offered = found.taps()
    wanted: set[str] = set()
    for item in [layers] if isinstance(layers, str | int) else layers:
        wanted.update(_resolve(item, found, offered, leads))
    chosen = [tap for name, tap in offered.items() if name in wanted]
    for rule in pooling if isinstance(pooling, Mapping) else ():
        if not any(_matches(tap.name, rule) for tap in chosen):
            raise KeyError(
                f"pooling given for {rule!r}, which is none of the tapped layers: "
                f"{', '.join(t.name for t in chosen) or 'none'}"
            )
    return tuple(replace(tap, pooling=pooling_for(tap.name, pooling), leads=leads(tap)) for tap in chosen)


def pooling_for(name: str, pooling: Poolings) -> Pooling:
    """The pooling of one layer: the first rule that matches its name, else ``"auto"``.

    Example:
        >>> pooling_for("layer1", {"layer*": "channel-max"}), pooling_for("fc", {"layer*": "channel-max"})
        ('channel-max', 'auto')
    """
    if not isinstance(pooling, Mapping):
        return pooling
    return next((how for rule, how in pooling.items() if _matches(name, rule)), "auto")


def thinned(names: Sequence[str], most: int) -> tuple[str, ...]:
    """At most so many of the names, evenly spread, with the first and the last.

    Example:
        >>> thinned("abcdefg", 3)
        ('a', 'd', 'g')
    """
    if len(names) <= most:
        return tuple(names)
    return tuple(names[round(i * (len(names) - 1) / (most - 1))] for i in range(most))


def _resolve(item: str | int, found: Trace, offered: Mapping[str, Tap], leads: Leads) -> Iterable[str]:
    if item == "auto":
        return auto_layers(found, leads)
    if isinstance(item, int):
        automatic = auto_layers(found, leads)
        if not -len(automatic) <= item < len(automatic):
            raise IndexError(
                f"layer {item} is out of range: there are {len(automatic)} automatic layers "
                f"({', '.join(automatic)})"
            )
        return [automatic[item]]
    matching = [name for name in offered if _matches(name, item)]
    if not matching:
        raise KeyError(_unknown(item, found, offered))
    return matching


def _unknown(item: str, found: Trace, offered: Mapping[str, Tap]) -> str:
    if item.partition("@")[0] in found.names:
        return (
            f"layer {item!r} ran, but has no floating-point output with one row for each of the "
            f"{found.n} samples, or ran less often"
        )
    close = difflib.get_close_matches(item, offered, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    if item in found.module_names:
        hint = "it exists but did not run (or it is of TorchScript, which nobody can watch); "
    return f"no layer matches {item!r}; {hint}known layers: {textwrap.shorten(', '.join(offered), 2000)}"


def _matches(label: str, pattern: str) -> bool:
    """Exact name, module name without call number, or glob."""
    if pattern in (label, label.partition("@")[0]):
        return True
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    regex = "".join({"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)) for part in parts)
    return len(parts) > 1 and re.fullmatch(regex, label.partition("@")[0]) is not None


def _auto_names(call: Call, offered: Mapping[str, Tap], leads: Leads) -> list[str]:
    if not isinstance(call.module, nn.RNNBase):
        return [call.label] if call.label in offered and leads(offered[call.label]) else []
    states = [numbered(f"{call.name}.{depth}", call.count) for depth in range(call.module.num_layers)]
    if call.label in offered and leads(offered[call.label]):
        return [*states[:-1], call.label]
    return states if any(leads(offered[name]) for name in states) else []


def _classifier(found: Trace) -> Call | None:
    """The call whose output is the logits; failing that, the last one with weights if it gives one channel
    per class.
    """
    weighty = [c for c in found.leaves() if _starts_block(c.module)]
    sure = [c for c in weighty if c.classifier]
    if sure or not weighty:
        return sure[0] if sure else None
    last = weighty[-1]
    n_scores = found.logits.numel()
    per_class = n_scores in (prod(last.shape or ()), found.n * (last.layout.width or -1))
    return last if per_class else None


def _stack(found: Trace, before: Sequence[Call], closed: set[str]) -> set[str]:
    """Names of the repeated blocks at the shallowest level that has some."""
    runs = Counter(c.name for c in before)
    modules = {c.name: c.module for c in found.calls}
    parents = {p for name in found.names for p in ancestors(name)}
    level = [""]
    while level:
        below: list[str] = []
        for name in level:
            children = list(_running_children(name, modules)) if name in modules else []
            blocks = [
                (k, listed)
                for k, listed in children
                if k in parents and k in runs and k not in closed and _starts_block(modules[k])
            ]
            kinds = Counter(type(modules[k]) for k, _ in blocks)
            repeated = [
                listed or runs[k] > 1 or kinds[type(modules[k])] >= _enough(modules[k])
                for k, listed in blocks
            ]
            if any(repeated):
                return {k for k, _ in blocks[repeated.index(True) :]}
            below += [k for k, _ in children if k in parents]
        level = below
    return set()


def _running_children(name: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, bool]]:
    """Children that run themselves, looking through containers that do not; with: did they stand in a
    ModuleList?
    """

    def walk(prefix: str, module: nn.Module, listed: bool) -> Iterator[tuple[str, bool]]:
        for key, child in module.named_children():
            full = f"{prefix}.{key}" if prefix else key
            if full in modules:
                yield full, listed
            else:
                yield from walk(full, child, isinstance(child, nn.ModuleList))

    return walk(name, modules[name], False)


def _enough(module: nn.Module) -> int:
    """How many siblings of a kind make a stack; sequences are too common to mean much in pairs."""
    return 3 if type(module) is nn.Sequential else 2


def _plain_blocks(found: Trace, before: Sequence[Call]) -> list[tuple[Call, Call]]:
    """First and last call of each block: a layer with weights and the normalisation, activation and pooling
    behind it.
    """
    usable = set(found.taps())
    starts: list[Call] = []
    ends: list[Call] = []
    still_open = False
    for call in [c for c in found.leaves() if c in before]:
        if _starts_block(call.module):
            starts.append(call)
            ends.append(call)
            still_open = True
        elif still_open and not isinstance(call.module, nn.Identity | nn.modules.dropout._DropoutNd):
            still_open = call.shape == ends[-1].shape or isinstance(call.module, _LOCAL_POOLINGS)
            ends[-1] = call if still_open else ends[-1]
    kept = [i for i, end in enumerate(ends) if end.label in usable or isinstance(end.module, nn.RNNBase)]
    return [(starts[i], _promoted(ends[i], ends, before)) for i in kept]


def _promoted(call: Call, blocks: Sequence[Call], before: Sequence[Call]) -> Call:
    """The outermost module that holds this block and no other, if it keeps the number of axes."""
    parents = {c.name: c for c in before if c.count == 1}
    for parent in reversed(ancestors(call.name)):
        alone = parent in parents and sum(parent in ancestors(b.name) for b in blocks) == 1
        if alone and call.count == 1 and len(parents[parent].shape or ()) == len(call.shape or ()):
            return parents[parent]
    return call


_LOCAL_POOLINGS = (nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._LPPoolNd)


def _starts_block(module: nn.Module) -> bool:
    """Has it weights, beyond scales and shifts?"""
    return any(p.ndim >= 2 for p in module.parameters())
