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

import difflib
import functools
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules import pooling as pool_modules

from salgp.network.frozen_copy import FrozenCopy
from salgp.network.taps import Change, Layout, Pooling, Probe, Tap, activation, raw_logits

__all__ = ["MAX_LAYERS", "NetworkWarning", "Poolings", "thinned"]

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

Run = Callable[[nn.Module], Any]
"""Makes one forward pass of the network it is given and returns its output."""

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

    @property
    def states(self) -> list[str]:
        """Feature names of a recurrent layer's final hidden states, by depth; none of others."""
        depths = self.module.num_layers if isinstance(self.module, nn.RNNBase) else 0
        return [numbered(f"{self.name}.{depth}", self.count) for depth in range(depths)]


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

    @property
    def parents(self) -> frozenset[str]:
        """Modules inside which another module ran."""
        return frozenset(parent for name in self.names for parent in ancestors(name))

    def leaves(self) -> list[Call]:
        """Calls of modules inside which no other module ran."""
        parents = self.parents
        return [c for c in self.calls if c.name not in parents]

    def taps(self) -> dict[str, Tap]:
        """Every tap the pass offers, by feature name, in order."""
        found = (tap for call in self.calls if call.name for tap in _taps_of(call, self.n))
        return {tap.name: tap for tap in found}


Calls = Sequence[Call]
Block = tuple[Call, Call]
"""First and last call of a block."""
Child = tuple[str, bool]
"""Name of a module, and whether it stands in a `nn.ModuleList`."""
Modules = Mapping[str, nn.Module]
Offered = Mapping[str, Tap]


def trace(model: nn.Module, run: Run) -> Trace:
    """Write down which modules a forward pass calls, in order.

    Args:
        model: the network; a frozen copy of it runs.
        run: makes one forward pass.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> [c.name for c in trace(model, lambda network: network(torch.zeros(2, 4))).calls]
        ['0', '1', '2', '']
    """
    seen: list[_Seen] = []
    network = FrozenCopy(model).network
    _record(network, seen)
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
    outer = name.rpartition(".")[0]
    return [outer, *ancestors(outer)] if name else []


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

    def __init__(self, model: nn.Module, found: Trace, run: Run, mask: Tensor | None = None) -> None:
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
        open_choice = tap.pooling == "auto" and not tap.layout.recurrent
        if open_choice and self._is_sequence(tap) and self._reads_last:
            return replace(tap, pooling="time-last")
        return tap

    @functools.cached_property
    def _reads_last(self) -> bool:
        """Does the deepest sequence count for nothing but its last real token?"""
        sequences = filter(self._is_sequence, reversed(self._taps))
        deepest = next(filter(self, sequences), None)
        if deepest is None:
            return False
        n, width = self._shapes[deepest.name][:2]
        real = torch.ones(n, width) if self._mask is None else self._mask.cpu()
        if real.shape != (n, width):
            return False
        after = self._disturbed(deepest.name, 1 - _last_real(real))
        return torch.allclose(after, self._before, rtol=SAME, atol=SAME)

    def _is_sequence(self, tap: Tap) -> bool:
        """Does it give a vector for each of several tokens, ``(n, T, d)``?"""
        shape = self._shapes.get(tap.name, ())
        return tap.layout.channels == "last" and len(shape) == 3 and shape[1] > 1

    def _keep_shape(self, j: int, x: Tensor) -> Tensor:
        self._shapes[self._taps[j].name] = x.shape
        return x

    def _disturbed(self, name: str, share: Tensor | int = 1) -> Tensor:
        """The logits with noise on what one tap gives, or on a share ``(n, T, 1)`` of its positions."""

        def change(j: int, x: Tensor) -> Tensor:
            return x + _noise_for(x, share) if self._taps[j].name == name else x

        return self._logits(change)

    @torch.no_grad()
    def _logits(self, change: Change) -> Tensor:
        self._frozen.follow()
        with self._frozen.probe.reading(None, change):
            return raw_logits(self._run(self._frozen.network)).clone()


_Seen = tuple[str, nn.Module, Tensor | None, bool, Layout]
"""Name, module and output of a call, was it padded (then it is batch first), and its layout."""


def _last_real(mask: Tensor) -> Tensor:
    """1 at the last real token of each row, ``(n, T, 1)``."""
    padding_behind = mask.bool().flip(1).int().argmax(dim=1)
    return nn.functional.one_hot(padding_behind, mask.shape[1]).flip(1)[:, :, None]


def _noise_for(x: Tensor, share: Tensor | int) -> Tensor:
    noise = share * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return (x.abs().mean() + 1) * noise.to(x)


def _record(network: nn.Module, seen: list[_Seen]) -> None:
    """Append every call of the network's modules to ``seen``."""
    for name, module in network.named_modules():
        scripted = isinstance(module, ScriptModule)  # takes no hooks
        if not scripted and "parametrizations" not in name.split("."):
            module.register_forward_hook(functools.partial(_record_call, seen, name))


def _record_call(seen: list[_Seen], name: str, module: nn.Module, _: Any, output: Any) -> None:
    x, mask, _ = activation(output)
    if x is not None and x.numel() > x.shape[:2].numel():
        x = x.to("meta")  # only the logits are to be recognised by where they lie
    layout = _own_layout(module) or (seen[-1][-1] if seen else Layout())
    seen.append((name, module, x, mask is not None, layout))


def _calls(seen: Iterable[_Seen], logits: Tensor) -> Iterator[Call]:
    counts: Counter[str] = Counter()
    for name, module, x, padded, layout in seen:
        counts[name] += 1
        shape, classifier = None, False
        if x is not None:
            shape, classifier = tuple(x.shape), _same_values(x, logits)
            axis = 0 if padded else _batch_axis(shape, len(logits), module)
            layout = replace(layout, batch_axis=axis)
        yield Call(name, counts[name], module, shape, layout, classifier)


def _same_values(x: Tensor, logits: Tensor) -> bool:
    """Are the logits this output, or a view of it?"""
    if x.is_meta or x.numel() != logits.numel():
        return False
    return x.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


def _batch_axis(shape: tuple[int, ...], n: int, module: nn.Module) -> int:
    if len(shape) < 3:
        return 0
    if shape[:2].count(n) == 1:
        return shape.index(n)
    kinds = nn.RNNBase | nn.MultiheadAttention
    stated = {m.batch_first for m in module.modules() if isinstance(m, kinds)}
    return int(stated == {False})


_WIDTHS = (
    (nn.modules.conv._ConvNd, "first", "out_channels"),
    (nn.modules.batchnorm._NormBase, "first", "num_features"),
    (nn.Linear, "last", "out_features"),
    (nn.Embedding, "last", "embedding_dim"),
    (nn.MultiheadAttention, "last", "embed_dim"),
)
"""Kinds of module, which axis holds their channels, and the attribute that counts these."""


def _own_layout(module: nn.Module) -> Layout | None:
    if isinstance(module, nn.RNNBase):
        size = module.proj_size or module.hidden_size
        return Layout("last", size * (1 + module.bidirectional), recurrent=True)
    if isinstance(module, nn.LayerNorm):
        return Layout("last", module.normalized_shape[-1])
    for kind, channels, width in _WIDTHS:
        if isinstance(module, kind):
            return Layout(channels, getattr(module, width))
    return None


def _taps_of(call: Call, n: int) -> Iterator[Tap]:
    for depth, state in enumerate(call.states):
        yield Tap(state, call.name, call.count, depth)
    if call.shape and call.shape[call.layout.batch_axis] == n:
        yield Tap(call.label, call.name, call.count, layout=call.layout)


def _warn_of_chance(first: Tensor, second: Tensor) -> None:
    """Two passes of the same samples have been made anyway: are their scores alike?"""
    scores = first.is_floating_point() and first.numel() > 0
    if not scores or first.shape != second.shape:
        return  # no class scores: `as_logits` says so
    difference = (first - second).abs().max()
    if difference > ALIKE * first.abs().max():
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
    before = _before_classifier(found)
    stack = _stack(found, before)
    chosen = _plain_outside(found, before, stack)
    chosen |= {c for c in before if c.name in stack}
    offered = found.taps()

    def used(name: str) -> bool:
        return name in offered and leads(offered[name])

    names = [_auto_names(call, used) for call in before if call in chosen]
    return thinned(list(chain(*names)), MAX_LAYERS)


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
    items = [layers] if isinstance(layers, str | int) else layers
    wanted = {name for item in items for name in _resolve(item, found, offered, leads)}
    chosen = [tap for name, tap in offered.items() if name in wanted]
    if isinstance(pooling, Mapping):
        _check_rules(pooling, [tap.name for tap in chosen])
    pooled = [replace(tap, pooling=pooling_for(tap.name, pooling)) for tap in chosen]
    return tuple(replace(tap, leads=leads(tap)) for tap in pooled)


def _check_rules(rules: Iterable[str], names: Sequence[str]) -> None:
    for rule in rules:
        if not any(_matches(name, rule) for name in names):
            raise KeyError(
                f"pooling given for {rule!r}, which is none of the tapped layers: "
                f"{', '.join(names) or 'none'}"
            )


def pooling_for(name: str, pooling: Poolings) -> Pooling:
    """The pooling of one layer: the first rule that matches its name, else ``"auto"``.

    Example:
        >>> pooling_for("layer1", {"layer*": "channel-max"}), pooling_for("fc", {"layer*": "channel-max"})
        ('channel-max', 'auto')
    """
    if not isinstance(pooling, Mapping):
        return pooling
    fitting = (how for rule, how in pooling.items() if _matches(name, rule))
    return next(fitting, "auto")


def thinned(names: Sequence[str], most: int) -> tuple[str, ...]:
    """At most so many of the names, evenly spread, with the first and the last.

    Example:
        >>> thinned("abcdefg", 3)
        ('a', 'd', 'g')
    """
    last = len(names) - 1
    if last < most:
        return tuple(names)
    return tuple(names[round(i * last / (most - 1))] for i in range(most))


def _resolve(item: str | int, found: Trace, offered: Offered, leads: Leads) -> Iterable[str]:
    if item == "auto":
        return auto_layers(found, leads)
    if isinstance(item, int):
        return [_at(item, auto_layers(found, leads))]
    matching = [name for name in offered if _matches(name, item)]
    if not matching:
        raise KeyError(_unknown(item, found, offered))
    return matching


def _at(position: int, automatic: Sequence[str]) -> str:
    try:
        return automatic[position]
    except IndexError:
        raise IndexError(
            f"layer {position} is out of range: there are {len(automatic)} automatic layers "
            f"({', '.join(automatic)})"
        ) from None


def _unknown(item: str, found: Trace, offered: Offered) -> str:
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
    regex = re.escape(pattern).replace(r"\*\*", ".*")
    regex = regex.replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
    name = label.partition("@")[0]
    return pattern == label or re.fullmatch(regex, name) is not None


def _auto_names(call: Call, used: Callable[[str], bool]) -> list[str]:
    if used(call.label):
        return [*call.states[:-1], call.label]
    return call.states if any(map(used, call.states)) else []


def _before_classifier(found: Trace) -> list[Call]:
    """Calls that finished before the classifier ran; none of modules that it stands in."""
    head = _classifier(found)
    name = head.name if head else ""
    closed = [name, *ancestors(name)]
    before = takewhile(lambda call: call is not head, found.calls)
    return [call for call in before if call.name not in closed]


def _plain_outside(found: Trace, before: Calls, stack: set[str]) -> set[Call]:
    """Ends of the plain blocks behind the stack, and of the recurrent ones outside of it."""
    in_stack = [i for i, c in enumerate(before) if c.name in stack]
    behind = before[in_stack[-1] + 1 :] if in_stack else before
    blocks = _plain_blocks(found, before)
    outside = [end for start, end in blocks if stack.isdisjoint([start.name, *ancestors(start.name)])]
    return {end for end in outside if end in behind or end.states}


def _classifier(found: Trace) -> Call | None:
    """The call whose output is the logits; failing that, the last one with weights if it gives one channel
    per class.
    """
    weighty = [c for c in found.leaves() if _starts_block(c.module)]
    sure = next((c for c in weighty if c.classifier), None)
    if sure or not weighty:
        return sure
    last = weighty[-1]
    width = last.layout.width or -1
    sizes = prod(last.shape or ()), found.n * width
    return last if found.logits.numel() in sizes else None


def _stack(found: Trace, before: Calls) -> set[str]:
    """Names of the repeated blocks at the shallowest level that has some."""
    modules = {c.name: c.module for c in found.calls}
    parents = found.parents
    runs = Counter(c.name for c in before if c.name in parents and _starts_block(c.module))
    level = [""] if "" in modules else []
    while level:
        below = [list(_running_children(name, modules[name], modules)) for name in level]
        for children in below:
            if stack := _repeated(children, modules, runs):
                return stack
        level = [name for name, _ in chain(*below) if name in parents]
    return set()


def _repeated(children: Sequence[Child], modules: Modules, runs: Counter[str]) -> set[str]:
    """The blocks from the first repeated one on: one of a list, of a kind, or of several runs."""
    blocks = [(name, listed) for name, listed in children if name in runs]
    kinds = Counter(type(modules[name]) for name, _ in blocks)
    for i, (name, listed) in enumerate(blocks):
        kind = type(modules[name])
        enough = 3 if kind is nn.Sequential else 2  # sequences are too common to mean much in pairs
        if listed or runs[name] > 1 or kinds[kind] >= enough:
            return {name for name, _ in blocks[i:]}
    return set()


def _running_children(
    prefix: str, module: nn.Module, running: Container[str], listed: bool = False
) -> Iterator[Child]:
    """Children that run themselves, looking through containers that do not; with: did they stand in a
    ModuleList?
    """
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if name in running:
            yield name, listed
        else:
            yield from _running_children(name, child, running, isinstance(child, nn.ModuleList))


def _plain_blocks(found: Trace, before: Calls) -> list[Block]:
    """First and last call of each block: a layer with weights and the normalisation, activation and pooling
    behind it.
    """
    blocks = _grouped(c for c in found.leaves() if c in before)
    ends = [end for _, end in blocks]
    usable = found.taps()
    kept = [(start, end) for start, end in blocks if end.states or end.label in usable]
    return [(start, _promoted(end, ends, before)) for start, end in kept]


def _grouped(leaves: Iterable[Call]) -> list[Block]:
    blocks: list[Block] = []
    still_open = False
    for call in leaves:
        if _starts_block(call.module):
            blocks.append((call, call))
            still_open = True
        elif still_open and not isinstance(call.module, _IDLE):
            start, end = blocks[-1]
            still_open = call.shape == end.shape or isinstance(call.module, _LOCAL_POOLINGS)
            blocks[-1] = start, call if still_open else end
    return blocks


def _promoted(call: Call, blocks: Calls, before: Calls) -> Call:
    """The outermost module that holds this block and no other, if it keeps the number of axes."""
    if call.count > 1:
        return call
    inside = Counter(parent for block in blocks for parent in ancestors(block.name))
    alone = {parent for parent in ancestors(call.name) if inside[parent] == 1}
    once = [c for c in before if c.name in alone and c.count == 1]
    axes = len(call.shape or ())
    fitting = [c for c in once if len(c.shape or ()) == axes]
    return min([*fitting, call], key=lambda c: len(c.name))


_IDLE = (nn.Identity, nn.modules.dropout._DropoutNd)
_LOCAL_POOLINGS = (pool_modules._MaxPoolNd, pool_modules._AvgPoolNd, pool_modules._LPPoolNd)


def _starts_block(module: nn.Module) -> bool:
    """Has it weights, beyond scales and shifts?"""
    return any(p.ndim >= 2 for p in module.parameters())
