"""How to read a network: one value that says what is read, resolved on a first batch.

A `Reader` holds what was asked for. `Reader.resolved` traces the network on a handful of samples and returns
the same value with its taps filled in: which layers there are, how their outputs are laid out, and whether
the logits depend on them. From then on `Reader.read` runs a frozen copy of the network
(`salgp.network.frozen_copy`) and pools what passes its taps.
"""

from __future__ import annotations

import hashlib
import operator
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import FORWARD, OUTPUTS, as_logits, raw_logits
from salgp.network.batches import Batch, KnownInputs, LabelsAt
from salgp.network.frozen_copy import FrozenCopies, FrozenCopy, unwrap
from salgp.network.layers import Layers, Poolings, make_taps
from salgp.network.taps import Change, Probe, Tap, TapError
from salgp.network.trace import Flow, trace

__all__ = ["Forward", "Reader", "projection"]

Forward = Callable[[nn.Module, Any], Any]
"""``forward(model, batch) -> output``, for networks that are not simply called with the inputs."""

HANDFUL = 5
"""Samples on which the taps are resolved."""


@dataclass(frozen=True)
class Reader:
    """How to read a network.

    Args:
        layers: ``"auto"`` for block boundaries (at most 12), or names, globs (``"layer*"``) and positions
            among the automatic layers (``-1``), one or several; empty for the logits only.
        pooling: one of `salgp.network.taps.POOLINGS`, a function, or a mapping from layer name or glob to
            those.
        output: what the network returns: ``"logits"``, ``"probabilities"`` or ``"log-probabilities"``. None
            means logits, and numbers that look like something else are refused. A binary network with one
            output column ``z`` gets the logits ``[0, z]``.
        max_width: wider layers are projected to this width by a random Gaussian matrix fixed by ``seed`` and
            layer name.
        seed: of the projections.
        forward: ``forward(model, batch) -> output`` for networks that are not simply called with the inputs,
            or that return several tensors; it gets the batch as the loader made it, on the network's device.
        labels_at: where a batch has its labels, if not at its end: a position, such as 1 for ``(x, y, id)``,
            or a key.
        device: where batches are sent; by default to the network, which itself is never moved. Floating-point
            inputs are cast to the type of the network's parameters, so that half-precision networks take any
            loader.
        dtype: of the features; by default the network's own, and single precision for half precision.
        keep_on_device: leave the features where the network is, instead of bringing them to the CPU.
        taps: what ``layers`` and ``pooling`` mean for one network; None until resolved, as are the next.
        form: in which form batches came (`salgp.network.batches.Batch`).
        inputs: which inputs they had beside their labels, where they had some.
        columns: how many scores the network gave for each sample; 1 for a binary network of one output.
        classes: names of the classes in the order of the scores, for labels that are names.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 4)
        >>> reader = Reader().resolved(model, Batch((x,)))
        >>> reader.read(model, Batch((x,))).widths
        {'1': 8}
    """

    layers: Layers = "auto"
    pooling: Poolings = "auto"
    output: str | None = None
    max_width: int | None = None
    seed: int = 0
    forward: Forward | None = None
    labels_at: LabelsAt = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    keep_on_device: bool = False
    taps: tuple[Tap, ...] | None = None
    form: str | None = None
    inputs: KnownInputs | None = None
    columns: int | None = None
    classes: tuple[str, ...] | None = None
    _copies: FrozenCopies = field(default_factory=FrozenCopies, repr=False, compare=False)
    _projections: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_width", "seed", "labels_at"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, str):  # a whole number of NumPy is one too
                object.__setattr__(self, name, operator.index(given))
        if self.output is not None and self.output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {self.output!r}")
        if self.max_width is not None and self.max_width < 1:
            raise ValueError(f"max_width must be at least 1, got {self.max_width}")

    def resolved(self, model: nn.Module, batch: Batch) -> Reader:
        """The same with its taps, found on a few samples of a batch; itself where it has them already."""
        if self.taps is not None:
            return self
        network = unwrap(model)
        few = batch.take(slice(HANDFUL)).to(*FrozenCopy(network).placement(self.device))
        found = trace(network, lambda frozen: _run(frozen, few, self))
        taps: tuple[Tap, ...] = ()
        if isinstance(self.layers, str | int) or len(self.layers):
            flow = Flow(network, found, lambda frozen: _run(frozen, few, self), self._mask(few, network))
            layers = _own_layers(network) if self.layers == "auto" else self.layers
            taps = tuple(map(flow.with_pooling, make_taps(found, layers, self.pooling, flow)))
        scores = found.logits
        return replace(
            self,
            taps=taps,
            form=batch.form,
            inputs=KnownInputs.of(batch, network, self.forward is not None),
            columns=None if scores.ndim not in (1, 2) else 1 if scores.ndim == 1 else scores.shape[1],
            classes=self.classes or getattr(network, "salgp_classes", None),
            _copies=FrozenCopies(),
        )

    def batch_of(self, item: Any) -> Batch:
        """Inputs and labels of what a loader yields."""
        return item if isinstance(item, Batch) else Batch.of(item, self.labels_at, self.inputs)

    def read(self, model: nn.Module, batch: Batch, change: Change | None = None) -> Features:
        """Run the network on one batch; the features stay where it runs.

        Args:
            model: the network; a frozen copy of it runs.
            batch: inputs.
            change: perturbs what passes the taps.
        """
        taps = self.taps
        if taps is None:
            raise ValueError(
                "the reader does not know its taps yet; use reader.resolved(model, batch).read(...)"
            )
        with self._copies.lent(unwrap(model), lambda network: Probe(network, taps)) as frozen:
            batch = batch.to(*frozen.placement(self.device))
            with frozen.probe.reading(self._mask(batch, frozen.network), change) as found:
                scores = raw_logits(_run(frozen.network, batch, self))
            network = frozen.weights
        if scores.ndim == 1 and self.columns is not None and self.columns > 1:
            raise ValueError(
                f"the network gave scores of shape {tuple(scores.shape)}, and of shape (n, {self.columns}) "
                f"when it was calibrated; a sample alone needs a batch axis: x[None]"
            )
        missing = [tap.name for tap in taps if tap.name not in found]
        if missing:
            raise ValueError(
                f"layer {missing[0]!r} did not run in this forward pass; it ran in the "
                f"first one: take only layers that always run"
            )
        layers = {tap.name: found[tap.name] for tap in taps}
        if self.max_width is not None:
            layers = {name: self._projected(name, x) for name, x in layers.items()}
        return Features(as_logits(scores, self.output or "logits", FORWARD), layers, network=network)

    def placed(self, features: Features) -> Features:
        """Features where and as they are wanted."""
        return features.to(features.logits.device if self.keep_on_device else "cpu", self.dtype)

    def _mask(self, batch: Batch, network: nn.Module) -> Tensor | None:
        return batch.mask(network if self.forward is None else None)  # a function may call it otherwise

    def _projected(self, name: str, x: Tensor) -> Tensor:
        width = x.shape[1]
        if self.max_width is None or width <= self.max_width:
            return x
        key = (name, width, x.device, x.dtype)
        if key not in self._projections:
            self._projections[key] = projection(name, width, self.max_width, self.seed).to(x)
        return x @ self._projections[key]


def _own_layers(network: nn.Module) -> Layers:
    """Layers that a network itself says are worth reading, as `salgp.onnx.OnnxNetwork` does; else those found
    on its trace.
    """
    own: Layers = getattr(network, "salgp_layers", "auto")
    return own


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


def _run(network: nn.Module, batch: Batch, reader: Reader) -> Any:
    """What the network returns; where it fails, what it was given stands before its own words."""
    if reader.forward is not None:
        labels_left_out = (batch.form, reader.form) in (("single", "tuple"), ("mapping", "pair"))
        return reader.forward(network, (batch.as_made,) if labels_left_out else batch.as_made)
    inputs, keywords = batch.arguments(network)
    try:
        return network(*inputs, **keywords)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, TapError | torch.OutOfMemoryError) or torch.compiler.is_exporting():
            raise
        own = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        raise RuntimeError(
            f"the network does not accept inputs of shape {batch.shapes}{batch.hint_for(network)}; its own "
            f"error: {own}"
        ) from error
