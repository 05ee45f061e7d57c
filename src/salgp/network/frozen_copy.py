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
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
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
    while True:
        if "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
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
        if not _is_scripted(module):  # its state lies outside of Python
            _share(vars(module).values(), memo)
    memo |= buffers or {}
    copied: nn.Module = copy.deepcopy(model, memo)
    for new in memo.values():  # also modules that no other module has registered
        if isinstance(new, torch.jit.ScriptModule):
            new.eval()
        elif isinstance(new, nn.Module):
            vars(new)["training"] = False
    return copied


def _share(values: Iterable[Any], memo: dict[int, Any]) -> None:
    """Let the copy keep every value that is no module, container or method: tensors, sessions, trainers."""
    for value in values:
        if isinstance(value, nn.Module | MethodType | functools.partial):
            continue
        if isinstance(value, dict):
            _share(value.values(), memo)
        elif isinstance(value, list | tuple | set):
            _share(value, memo)
        else:
            memo[id(value)] = value


Prepare = Callable[[nn.Module], Any]
"""Hangs hooks on a copy."""


class FrozenCopy:
    """One frozen copy of a network, for one caller at a time.

    Args:
        model: the user's network.
        prepare: hangs hooks on the copy; what it returns is kept as ``probe``.

    ``placement`` is the device of the network, and the floating-point type of its parameters, None where
    they differ.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> frozen = FrozenCopy(model)
        >>> frozen.follow(), frozen.network.running_mean is model.running_mean
        (True, False)
    """

    def __init__(self, model: nn.Module, prepare: Prepare = lambda network: None) -> None:
        self.model = model
        self._values = _tables(model)
        self._entries = [*chain.from_iterable(self._values)]
        self._parameters, buffers = [*model.parameters()], [*model.buffers()]
        self._tensors = [*self._parameters, *buffers]
        self._counted = [x for x in self._tensors if not x.is_inference()]
        self._versions: list[int] = []
        self.placement = _placement(self._tensors, self._parameters)
        self._hashed: tuple[Any, str] | None = None
        self._last: Callable[[], list[float]] | None = None
        self._scripted = any(map(_is_scripted, model.modules()))
        # while a graph is traced, its buffers are stand-ins that must stay the network's own
        self._shared = [] if torch.compiler.is_compiling() else [x.detach() for x in buffers]
        with torch.inference_mode(False):  # a copy made for inference could not follow outside of it
            self._own = [x.clone() for x in self._shared]
        self.network = frozen_copy(model, dict(zip(map(id, buffers), self._own, strict=False)))
        self._places = _buffer_places(self.network) if self._own else []
        self.probe = prepare(self.network)

    def follow(self) -> bool:
        """Take over the network's buffers, and put those back that a pass replaced. False where a module,
        parameter, buffer, hook or setting of the network is another one: then this copy is of no use.
        """
        now = [*chain.from_iterable(self._values)]
        try:
            if now != self._entries:  # an entry that is the same object is not looked at further
                return False
        except (RuntimeError, ValueError, TypeError):  # other tensors or arrays of several numbers
            return False
        versions = [x._version for x in self._counted] + [x.data_ptr() for x in self._tensors]
        if versions != self._versions:
            if self._scripted and self._versions:
                return False  # TorchScript copies its weights
            self._versions = versions
            self.placement = _placement(self._tensors, self._parameters)
        for table, name, own in self._places:
            table[name] = own
        if self._own:  # always: batch normalisation writes to its buffers without counting versions
            torch._foreach_copy_(self._own, self._shared)
        return True

    @property
    def weights(self) -> str | None:
        """Fingerprint of the weights, hashed anew only where a tensor has changed; None while a graph is
        traced.
        """
        if torch.compiler.is_compiling():
            return None
        now = self._versions, [] if self._last is None else self._last()
        if self._hashed is None or self._hashed[0] != now:
            self._last = _last_numbers(self._parameters)
            now = self._versions, self._last()
            self._hashed = now, fingerprint(self.model).weights
        return self._hashed[1]


class FrozenCopies:
    """Idle copies of one network, so that any number of threads may predict at once.

    Copied or pickled, they are none. A copy is thrown away when a module, parameter, buffer, hook or
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
        self._idle: list[FrozenCopy] = []
        self._structure: str | None = None

    def __len__(self) -> int:
        return len(self._idle)

    def __reduce__(self) -> tuple[type[FrozenCopies], tuple[()]]:
        return FrozenCopies, ()

    @contextmanager
    def lent(self, model: nn.Module, prepare: Prepare = lambda network: None) -> Iterator[FrozenCopy]:
        """A current copy that nobody else uses meanwhile, without gradients."""
        if torch.compiler.is_compiling():  # a graph being traced has stand-ins for the weights
            with torch.no_grad():
                yield FrozenCopy(model, prepare)
            return
        frozen = None
        with suppress(IndexError):  # there is none, or another thread was faster
            frozen = self._idle.pop()
        if frozen is None or frozen.model is not model or not frozen.follow():
            frozen = FrozenCopy(model, prepare)
            frozen.follow()
        with torch.no_grad():
            yield frozen
        self._idle.append(frozen)

    def check(self, model: nn.Module) -> None:
        """Refuse a network whose modules or settings are not those of the one that was first checked."""
        found = _structure(unwrap(model))
        self._structure = self._structure or found
        if found != self._structure:
            raise ValueError(
                "modules of the network, or their settings, were replaced since it was calibrated or first "
                "read: calibrate again"
            )


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


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _tables(model: nn.Module) -> list[ValuesView[Any]]:
    """Values that make the modules what they are, as these are at any time."""
    everything = [vars(module) for module in model.modules()]
    inside = [own.get(name) for own in everything for name in TABLES]
    tables = everything + [table for table in inside if isinstance(table, dict)]
    return [table.values() for table in tables]


def _buffer_places(network: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Where the buffers are kept: dictionary, name and buffer."""
    tables = [module._buffers for module in network.modules()]
    return [(table, name, x) for table in tables for name, x in table.items()]


def _placement(
    tensors: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[torch.device, torch.dtype | None]:
    """Device of a network, and the floating-point type of its parameters, None where they differ."""
    device = tensors[0].device if tensors else torch.device("cpu")
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    return device, dtypes.pop() if len(dtypes) == 1 else None


def _last_numbers(parameters: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Tells the last number of every parameter on one device, since fused optimizers count no versions."""
    compared = [p for p in parameters if p.numel() and p.is_floating_point() and p.itemsize > 1]
    last = [p.detach()[(-1,) * p.ndim] for p in compared]
    here = [x for x in last if x.device == last[0].device]
    return lambda: torch.stack(here).tolist() if here else []


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
    weights, network = hashlib.sha256(), unwrap(model)
    for name, value in _state(network):
        weights.update(f"{name}{value.dtype};".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        weights.update(flat.view(torch.uint8).numpy().data)
    return Fingerprint(_structure(network), weights.hexdigest())


def _structure(network: nn.Module) -> str:
    found = hashlib.sha256()
    for name, module in network.named_modules():
        # as printed, without addresses; not whether it works in place
        settings = re.sub(r"0x[0-9a-f]+|,? ?inplace(=True)?", "", module.extra_repr())
        found.update(f"{name}:{type(module).__name__}({settings});".encode())
    for name, value in _state(network):
        found.update(f"{name}{tuple(value.shape)};".encode())
    return found.hexdigest()


def _state(network: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, without batch counters."""
    named = network.state_dict().items()
    return [(k, x) for k, x in named if isinstance(x, Tensor) and not k.endswith("num_batches_tracked")]


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
