"""A frozen view of a network: modules, modes and hooks of its own around the user's weights.

Prediction must not write to the user's network, not even for a moment: another thread may be using it. So the
network itself never runs. What runs is a structural copy of its module tree: the same classes and settings,
the same parameter tensors, every module in evaluation mode, private hooks, and private buffers that are
filled from the user's before each pass. Training the network shows at once, since the weights are shared.

Hooks of the user run in the view too, with the view's module as their argument: weight normalisation, pruning
and device placement are hooks, and a network without them would be another one.

Views are kept in a `Views` pool. A caller has a view for itself while it runs, so any number of threads may
predict at once. A view is thrown away when a module, parameter, buffer, hook or setting of the network was
replaced.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["View", "Views", "frozen"]

_MEMBERS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


def frozen(model: nn.Module) -> nn.Module:
    """A copy of the module tree in evaluation mode that shares the parameters and buffers of ``model``.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> view = frozen(model)
        >>> view[0].weight is model[0].weight, view[1].training, model[1].training
        (True, False, True)
    """
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("the network has lazy parameters without values yet; run it once, then calibrate it")
    copied: nn.Module = _copied(model, {}, {id(m) for m in model.modules()})
    return copied


class View:
    """One frozen copy of a network, for one caller at a time.

    Args:
        model: the user's network; it is only looked at.
        prepare: hangs hooks on the copy; what it returns is kept as ``probe``.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> view = View(model, lambda network: None)
        >>> view.is_current, view.network.running_mean is model.running_mean
        (True, False)
    """

    def __init__(self, model: nn.Module, prepare: Callable[[nn.Module], Any]) -> None:
        self.network = frozen(model)
        self._tables = [table for m in model.modules() for table in (vars(m), *_members(m))]
        self._sizes = list(map(len, self._tables))
        self._filled = [table for table in self._tables if table]
        self._kept = list(_values(self._filled))
        scripted = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
        self._copied_weights = list(model.parameters()) if scripted else []
        self._versions = [p._version for p in self._copied_weights]
        self._buffers = None if torch.compiler.is_exporting() else _Buffers(self.network)
        self._parameters: list[Tensor] = list(self.network.parameters())
        self._weights: list[Tensor] = [*self._parameters, *self.network.buffers()]
        self.probe = prepare(self.network)

    def placement(self, device: torch.device | str | None = None) -> tuple[torch.device, torch.dtype | None]:
        """Device given or else the network's, and the one floating-point type of its parameters (None where
        they differ).
        """
        home = self._weights[0].device if self._weights else torch.device("cpu")
        dtypes = {dtype for dtype in {p.dtype for p in self._parameters} if dtype.is_floating_point}
        return home if device is None else torch.device(device), dtypes.pop() if len(dtypes) == 1 else None

    @property
    def is_current(self) -> bool:
        """Is every module, parameter, buffer, hook and setting of the network still the same object?"""
        return (
            list(map(len, self._tables)) == self._sizes
            and all(map(is_, _values(self._filled), self._kept))
            and self._versions == [p._version for p in self._copied_weights]
        )

    def refresh(self) -> None:
        """Fill the private buffers from the network's."""
        if self._buffers is not None:
            self._buffers.refresh()


class Views:
    """Idle views of one network; empty in a copy of whoever holds it.

    Example:
        >>> views, model = Views(), nn.Linear(2, 3)
        >>> with views.lent(model, lambda network: None) as view:
        ...     view.network(torch.zeros(1, 2)).shape
        torch.Size([1, 3])
        >>> len(views)
        1
    """

    def __init__(self) -> None:
        self._idle: list[tuple[nn.Module, View]] = []

    def __len__(self) -> int:
        return len(self._idle)

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        return Views()

    @contextmanager
    def lent(self, model: nn.Module, prepare: Callable[[nn.Module], Any]) -> Iterator[View]:
        """A current view that nobody else uses meanwhile, without gradients."""
        view = self._take(model) or View(model, prepare)
        with torch.no_grad():
            view.refresh()
            yield view
        if not torch.compiler.is_exporting():  # a graph being traced has stand-ins for the weights
            self._idle.append((model, view))

    def _take(self, model: nn.Module) -> View | None:
        if torch.compiler.is_exporting():
            return None
        while self._idle:
            try:
                owner, view = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if owner is model and view.is_current:
                return view
        return None


def _copied(value: Any, copies: dict[int, Any], tree: set[int]) -> Any:
    """Modules, and the plain containers and bound methods that lead to them, anew; all else as it is."""
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    if isinstance(value, torch.jit.ScriptModule):
        copies[id(value)] = copy.deepcopy(value).eval()  # its state lies outside of Python
    elif isinstance(value, nn.Module):
        _copy_module(value, copies, tree)
    elif kind is list:
        copies[id(value)] = [_copied(v, copies, tree) for v in value]
    elif kind in (dict, OrderedDict):
        copies[id(value)] = kind((k, _copied(v, copies, tree)) for k, v in value.items())
    elif kind is tuple:
        return tuple(_copied(v, copies, tree) for v in value)
    elif kind is MethodType and id(value.__self__) in tree:
        return MethodType(value.__func__, _copied(value.__self__, copies, tree))
    elif kind is functools.partial:
        parts = _copied(value.args, copies, tree), _copied(value.keywords, copies, tree)
        return functools.partial(_copied(value.func, copies, tree), *parts[0], **parts[1])
    return copies.get(id(value), value)


def _copy_module(module: nn.Module, copies: dict[int, Any], tree: set[int]) -> None:
    new = object.__new__(type(module))
    copies[id(module)] = new  # before its children, which may lead back to it
    state = vars(new)
    for key, value in vars(module).items():
        plain = key in ("_parameters", "_buffers", "_non_persistent_buffers_set") or "hooks" in key
        state[key] = copy.copy(value) if plain else _copied(value, copies, tree)
    state["training"] = False
    state["_compiled_call_impl"] = None  # it would run the user's module


def _members(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module)[name] for name in _MEMBERS if isinstance(vars(module).get(name), dict)]


def _values(tables: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))


class _Buffers:
    """Buffers of a copied network that are its own, filled from the user's.

    Those of one type lie side by side, so that one operation fills them all: a network has dozens of tiny
    ones, and before a pass on one sample each operation counts.
    """

    def __init__(self, network: nn.Module) -> None:
        places = [(m._buffers, k, x) for m in network.modules() for k, x in _tensors_in(m)]
        shared = {id(x): x.detach() for _, _, x in places}
        own = {key: x.clone() for key, x in shared.items() if not _is_plain(x)}
        self._others = [(own[key], shared[key]) for key in own]
        self._flat: list[tuple[Tensor, list[Tensor]]] = []
        kinds = {(x.dtype, x.device) for x in shared.values() if _is_plain(x)}
        for kind in kinds:
            some = {k: x for k, x in shared.items() if _is_plain(x) and (x.dtype, x.device) == kind}
            sources = [x.view(-1) for x in some.values()]
            flat = torch.cat(sources)
            parts = flat.split([len(x) for x in sources])
            own |= {k: part.view(x.shape) for (k, x), part in zip(some.items(), parts, strict=True)}
            self._flat.append((flat, sources))
        self._places = [(table, name, own[id(x)]) for table, name, x in places]
        self._place()

    def refresh(self) -> None:
        """Fill them, and put those back that a pass replaced."""
        self._place()
        for flat, sources in self._flat:
            torch.cat(sources, out=flat)
        for own, shared in self._others:
            own.copy_(shared)

    def _place(self) -> None:
        for table, name, own in self._places:
            table[name] = own


def _tensors_in(module: nn.Module) -> list[tuple[str, Tensor]]:
    table = vars(module).get("_buffers")
    return [(k, x) for k, x in table.items() if isinstance(x, Tensor)] if isinstance(table, dict) else []


def _is_plain(x: Tensor) -> bool:
    """Can it be a part of a longer tensor?"""
    return type(x) is Tensor and x.layout == torch.strided and x.is_contiguous() and not x.is_quantized
