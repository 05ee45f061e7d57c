"""A private copy of the user's network that shares its weights, and the network's fingerprint.

Prediction must not write to the user's network, not even for a moment: another thread may be using it. So the
network itself never runs. What runs is a deep copy of its modules in evaluation mode: with hooks and buffers
of its own, around the same parameter tensors. Training the network shows at once, since weights are shared.

Hooks of the user are copied with their modules: weight normalisation, pruning and device placement are hooks,
and a network without them would be another one.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["Fingerprint", "check_network", "fingerprint", "frozen_copy", "unwrap"]

TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""Dictionaries of a module whose entries make it what it is, beside its attributes."""


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile`` wrappers.

    Example:
        >>> type(unwrap(nn.DataParallel(nn.Linear(2, 2)))).__name__
        'Linear'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a network (torch.nn.Module), got a {type(model).__name__}; a classifier of "
            f"scikit-learn goes to salgp.sklearn.CalibratedEstimator, arrays to salgp.calibrate_outputs"
        )
    while "_orig_mod" in model._modules or isinstance(
        model, nn.DataParallel | nn.parallel.DistributedDataParallel
    ):
        model = model.get_submodule("_orig_mod" if "_orig_mod" in model._modules else "module")
    return model


def frozen_copy(model: nn.Module, buffers: dict[int, Tensor] | None = None) -> nn.Module:
    """A copy of the module tree in evaluation mode that shares the weights of ``model``.

    Args:
        model: the network; it is only read.
        buffers: private ones by the ``id`` of the network's; None shares these too.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> copied = frozen_copy(model)
        >>> copied[0].weight is model[0].weight, copied[1].training, model[1].training
        (True, False, True)
    """
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("the network has lazy parameters without values yet; run it once, then calibrate it")
    memo: dict[int, Any] = {}
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # its state lies outside of Python
            _share(list(vars(module).values()), memo)
    memo |= buffers or {}
    copied: nn.Module = copy.deepcopy(model, memo)
    for new in memo.values():  # also modules that no other module has registered
        if isinstance(new, torch.jit.ScriptModule):
            new.eval()
        elif isinstance(new, nn.Module):
            vars(new)["training"] = False
    return copied


def _share(values: list[Any], memo: dict[int, Any]) -> None:
    """Let the copy keep every value that is no module, container or method: tensors, sessions, trainers."""
    for value in values:
        if isinstance(value, nn.Module | MethodType | functools.partial):
            continue
        if isinstance(value, dict | list | tuple | set):
            _share(list(value.values() if isinstance(value, dict) else value), memo)
        else:
            memo[id(value)] = value


class FrozenCopy:
    """One frozen copy of a network, for one caller at a time.

    Args:
        model: the user's network.
        prepare: hangs hooks on the copy; what it returns is kept as ``probe``.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> frozen = FrozenCopy(model)
        >>> frozen.is_current, frozen.network.running_mean is model.running_mean
        (True, False)
    """

    def __init__(self, model: nn.Module, prepare: Callable[[nn.Module], Any] = lambda network: None) -> None:
        self._model = model
        self._tables = [table for module in model.modules() for table in _tables(module)]
        self._entries = [list(table.values()) for table in self._tables]
        scripted = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
        self._versioned = [*model.parameters()] if scripted else []  # TorchScript copies its weights
        self._versions = [p._version for p in self._versioned]
        # while a graph is traced, its buffers are stand-ins that must stay the network's own
        shared = [] if torch.compiler.is_exporting() else [*model.buffers()]
        own = {id(x): x.detach().clone() for x in shared}
        self._buffers = [(own[id(x)], x.detach()) for x in shared]
        self._parameters = [*model.parameters()]
        self._tensors = [*self._parameters, *model.buffers()]
        self._hashed: tuple[list[Any], str] | None = None
        self.network = frozen_copy(model, own)
        named = [(m._buffers, name, x) for m in self.network.modules() for name, x in m._buffers.items()]
        self._places = named if shared else []
        self.probe = prepare(self.network)

    def placement(self, device: torch.device | str | None = None) -> tuple[torch.device, torch.dtype | None]:
        """Device given or else the network's, and the one floating-point type of its parameters (None where
        they differ).
        """
        home = self._tensors[0].device if self._tensors else torch.device("cpu")
        dtypes = {p.dtype for p in self._parameters if p.dtype.is_floating_point}
        return home if device is None else torch.device(device), dtypes.pop() if len(dtypes) == 1 else None

    @property
    def is_current(self) -> bool:
        """Is every module, parameter, buffer, hook and setting of the network still the same object?"""
        return self._versions == [p._version for p in self._versioned] and all(
            len(table) == len(entries) and all(map(is_, table.values(), entries))
            for table, entries in zip(self._tables, self._entries, strict=True)
        )

    @property
    def weights(self) -> str | None:
        """Fingerprint of the weights, hashed anew only where a tensor has changed; None while a graph is
        traced.
        """
        if torch.compiler.is_exporting():
            return None
        now = [(0 if x.is_inference() else x._version, x.data_ptr()) for x in self._tensors]
        if self._hashed is None or self._hashed[0] != now:
            self._hashed = now, fingerprint(self._model).weights
        return self._hashed[1]

    def refresh(self) -> None:
        """Fill the private buffers from the network's, and put those back that a pass replaced."""
        for table, name, own in self._places:
            table[name] = own
        for own, shared in self._buffers:
            own.copy_(shared)


class FrozenCopies:
    """Idle copies of one network, so that any number of threads may predict at once.

    A copy of whoever holds them has none. A copy is thrown away when a module, parameter, buffer, hook or
    setting of the network was replaced.

    Example:
        >>> copies, model = FrozenCopies(), nn.Linear(2, 3)
        >>> with copies.lent(model) as frozen:
        ...     frozen.network(torch.zeros(1, 2)).shape
        torch.Size([1, 3])
        >>> len(copies)
        1
    """

    def __init__(self) -> None:
        self._idle: list[tuple[nn.Module, FrozenCopy]] = []

    def __len__(self) -> int:
        return len(self._idle)

    def __reduce__(self) -> tuple[type[FrozenCopies], tuple[()]]:
        return FrozenCopies, ()

    @contextmanager
    def lent(
        self, model: nn.Module, prepare: Callable[[nn.Module], Any] = lambda network: None
    ) -> Iterator[FrozenCopy]:
        """A current copy that nobody else uses meanwhile, without gradients."""
        exporting = torch.compiler.is_exporting()  # a graph being traced has stand-ins for the weights
        frozen = None
        while frozen is None and self._idle and not exporting:
            try:
                owner, idle = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            frozen = idle if owner is model and idle.is_current else None
        frozen = frozen or FrozenCopy(model, prepare)
        with torch.no_grad():
            frozen.refresh()
            yield frozen
        if not exporting:
            self._idle.append((model, frozen))


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    own = vars(module)
    return [own, *(own[name] for name in TABLES if isinstance(own.get(name), dict))]


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of what a network is made of, and of the contents of its parameters and buffers.

    Args:
        structure: of names, types and settings of the modules, and of names and shapes of the parameters and
            buffers.
        weights: of their contents.
    """

    structure: str
    weights: str


def fingerprint(model: nn.Module) -> Fingerprint:
    """Fingerprint of a network, whatever its device, mode or wrapper.

    A network with another activation, stride or normalisation is another one. Settings are those that a
    module shows when printed, so a module of one's own shows its settings by ``extra_repr``. What a forward
    function does besides is not seen. Batch counters are left out, since they have no part in prediction.

    Example:
        >>> a, b = fingerprint(nn.Linear(2, 3)), fingerprint(nn.Linear(2, 3))
        >>> a.structure == b.structure, a.weights == b.weights
        (True, False)
        >>> fingerprint(nn.ReLU()) == fingerprint(nn.Tanh())
        False
    """
    structure, weights = hashlib.sha256(), hashlib.sha256()
    network = unwrap(model)
    for name, module in network.named_modules():
        structure.update(f"{name}:{type(module).__name__}({_settings(module)});".encode())
    for name, value in network.state_dict().items():
        if isinstance(value, Tensor) and not name.endswith("num_batches_tracked"):
            structure.update(f"{name}{tuple(value.shape)};".encode())
            weights.update(f"{name}{value.dtype};".encode())
            weights.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Fingerprint(structure.hexdigest(), weights.hexdigest())


def check_network(stored: Fingerprint, model: nn.Module, strict: bool) -> None:
    """Refuse a network of another structure and, where ``strict``, one with other weights.

    Example:
        >>> check_network(fingerprint(nn.Linear(2, 3)), nn.Linear(2, 3), strict=False)
    """
    found = fingerprint(model)
    if found.structure != stored.structure:
        raise ValueError(
            f"another network: the modules, their settings or the parameter shapes of this "
            f"{type(model).__name__} are not those the calibrator was made for"
        )
    if strict and found.weights != stored.weights:
        raise ValueError(
            "the network has other weights (or precision) than the calibrator was made for; "
            "recalibrate, or pass strict=False to use it anyway"
        )


def _settings(module: nn.Module) -> str:
    """What the module says of itself when printed, without addresses; not whether it works in place."""
    return re.sub(r"0x[0-9a-f]+|,? ?inplace(=True)?", "", module.extra_repr())
