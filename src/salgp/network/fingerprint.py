"""Recognising a network: one hash of its structure, one of its weights."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from salgp.network.taps import unwrap

__all__ = ["Fingerprint", "check_network", "fingerprint"]


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
        >>> a, b = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> (
        ...     fingerprint(a).structure == fingerprint(b).structure,
        ...     fingerprint(a).weights == fingerprint(b).weights,
        ... )
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
