"""Recognising a network: one hash of its structure, one of its weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from salgp.network.taps import unwrap

__all__ = ["Fingerprint", "fingerprint"]


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of the names and shapes, and of the contents, of a network's parameters and buffers."""

    structure: str
    weights: str


def fingerprint(model: nn.Module) -> Fingerprint:
    """Fingerprint of a network, whatever its device, mode or wrapper.

    Batch counters are left out, since they have no part in prediction.

    Example:
        >>> a, b = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> (
        ...     fingerprint(a).structure == fingerprint(b).structure,
        ...     fingerprint(a).weights == fingerprint(b).weights,
        ... )
        (True, False)
    """
    structure, weights = hashlib.sha256(), hashlib.sha256()
    for name, value in unwrap(model).state_dict().items():
        if isinstance(value, Tensor) and not name.endswith("num_batches_tracked"):
            structure.update(f"{name}{tuple(value.shape)};".encode())
            weights.update(f"{name}{value.dtype};".encode())
            weights.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Fingerprint(structure.hexdigest(), weights.hexdigest())
