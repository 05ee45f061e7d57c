"""Reading features off a network: what was asked for (`Choice`), and what that means for this network
(`Reader`).

A first batch settles which layers there are and how their outputs are laid out; from then on a `Reader` does
nothing but run the network and pool what passes its taps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import OUTPUTS, as_logits
from salgp.network.batches import Batch, raw_logits
from salgp.network.layers import Layers, Poolings, make_taps
from salgp.network.taps import Tap, inference, tapped, unwrap
from salgp.network.trace import trace

__all__ = ["Choice", "Forward", "Reader", "placement", "projection"]

Forward = Callable[..., Any]
"""``forward(model, *inputs, **keywords) -> output``, for networks that are not simply called."""


@dataclass(frozen=True)
class Reader:
    """Reads the features of one kind of network; made by `Choice.reader`, reusable for every batch.

    Args:
        taps: where features are taken.
        output: what the network's output means, one of ``"logits"``, ``"probabilities"``,
            ``"log-probabilities"``.
        max_width: wider layers are projected to this width.
        seed: of the projections.
        forward: how the network is called.
    """

    taps: tuple[Tap, ...]
    output: str = "logits"
    max_width: int | None = None
    seed: int = 0
    forward: Forward | None = None
    _projections: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def read(self, model: nn.Module, batch: Batch, device: torch.device | str | None = None) -> Features:
        """Run the network on one batch, sent to ``device`` or else to the network; the features
        stay there.
        """
        model = unwrap(model)
        batch = _placed(batch, model, device)
        with inference(model), tapped(model, self.taps, batch.mask) as found:
            output = _run(model, batch, self.forward)
            logits = as_logits(raw_logits(output), self.output)
            missing = [tap.name for tap in self.taps if tap.name not in found]
            if missing:
                raise ValueError(
                    f"layer {missing[0]!r} did not run in this forward pass; it ran in the "
                    f"first one: take only layers that always run"
                )
            return Features(
                logits, {tap.name: self._projected(tap.name, found[tap.name]) for tap in self.taps}
            )

    def _projected(self, name: str, x: Tensor) -> Tensor:
        if self.max_width is None or x.shape[1] <= self.max_width:
            return x
        matrix = self._projections.get(name)
        if matrix is None or len(matrix) != x.shape[1] or matrix.device != x.device:
            matrix = self._projections[name] = projection(name, x.shape[1], self.max_width, self.seed).to(x)
        return x @ matrix


@dataclass(frozen=True)
class Choice:
    """What to take from a network, before a first batch has settled what that means.

    Args:
        layers: see `extract`.
        pooling: see `extract`.
        output: see `extract`.
        max_width: see `extract`.
        seed: see `extract`.
        forward: see `extract`.
    """

    layers: Layers = "auto"
    pooling: Poolings = "auto"
    output: str = "logits"
    max_width: int | None = None
    seed: int = 0
    forward: Forward | None = None

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {self.output!r}")
        if self.max_width is not None and self.max_width < 1:
            raise ValueError(f"max_width must be at least 1, got {self.max_width}")

    def reader(self, model: nn.Module, batch: Batch, device: torch.device | str | None = None) -> Reader:
        """Trace the network on one batch and settle the taps."""
        model = unwrap(model)
        batch = _placed(batch, model, device)
        none = not isinstance(self.layers, str | int) and len(self.layers) == 0
        taps = (
            ()
            if none
            else make_taps(trace(model, lambda: _run(model, batch, self.forward)), self.layers, self.pooling)
        )
        return Reader(taps, self.output, self.max_width, self.seed, self.forward)


def projection(name: str, width: int, target: int, seed: int = 0) -> Tensor:
    """Random matrix ``(width, target)`` with entries N(0, 1/target), which keeps squared distances in
    expectation.

    It depends on nothing but its arguments, so that it need not be stored.

    Example:
        >>> bool((projection("conv1", 500, 8) == projection("conv1", 500, 8)).all())
        True
    """
    digest = hashlib.sha256(f"{seed}|{name}|{width}|{target}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(width, target, generator=generator) / target**0.5


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Device of a network, and the one floating-point type of its parameters (None where they differ)."""
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return tensors[0].device if tensors else torch.device("cpu"), dtypes.pop() if len(dtypes) == 1 else None


def _placed(batch: Batch, model: nn.Module, device: torch.device | str | None) -> Batch:
    home, dtype = placement(model)
    return batch.to(home if device is None else torch.device(device), dtype)


def _run(model: nn.Module, batch: Batch, forward: Forward | None) -> Any:
    return (
        model(*batch.inputs, **batch.keywords)
        if forward is None
        else forward(model, *batch.inputs, **batch.keywords)
    )
