"""Which layers to tap: the automatic choice, names, positions and globs, settled on the trace of one forward
pass.

The automatic choice takes block boundaries:

1. the *stack*: the shallowest place where building blocks repeat (stages of a residual net, transformer
  blocks,
   members of a ``ModuleList``), one layer per block, plus every recurrent layer outside of it;
2. behind the stack, and everywhere in networks without one, *plain blocks*: a layer with weights together
  with the
   normalisation, activation and pooling that follow it;
3. never the classifier itself, the layer whose output is the logits, nor anything after it, nor a layer on
   which the logits do not depend.

A recurrent layer is read as the network uses it: the final hidden states of the lower depths, and of the last
depth the output sequence, or the final hidden state where only that is passed on.

More than `MAX_LAYERS` are thinned out evenly, keeping the first and the last.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import nn

from salgp.network.taps import Pooling, Tap
from salgp.network.trace import Call, Trace, ancestors, numbered

__all__ = ["MAX_LAYERS", "Layers", "Poolings", "thinned"]

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


def _always(tap: Tap) -> bool:
    return True


def auto_layers(found: Trace, leads: Leads = _always) -> tuple[str, ...]:
    """Names of the layers the automatic choice takes.

    Args:
        found: a forward pass of the network.
        leads: layers on which the logits do not depend are left out.

    Example:
        >>> import torch
        >>> from salgp.network.trace import trace
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
    found: Trace, layers: Layers = "auto", pooling: Poolings = "auto", leads: Leads = _always
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
        >>> import torch
        >>> from salgp.network.trace import trace
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
    if item in found.module_names:
        return (
            f"layer {item!r} exists but did not run in the forward pass (or it is of TorchScript, which "
            f"nobody can watch); layers that ran: {_listed(offered)}"
        )
    close = difflib.get_close_matches(item, offered, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"no layer matches {item!r}; {hint}known layers: {_listed(offered)}"


def _listed(names: Iterable[str], most: int = 60) -> str:
    known = list(names)
    more = f", ... ({len(known) - most} more)" if len(known) > most else ""
    return (", ".join(known[:most]) or "none") + more


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
    per_class = (
        last.layout.width == found.n_scores // max(found.n, 1) or prod(last.shape or ()) == found.n_scores
    )
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
