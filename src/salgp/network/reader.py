"""Reading features off a network: one specification of what is read, settled on a first batch.

A `Reader` holds what was asked for. `Reader.settled` traces the network on a handful of samples and returns
the same specification with its taps filled in: which layers there are, how their outputs are laid out, and
whether the logits depend on them. From then on it does nothing but run a frozen view of the network
(`salgp.network.view`) and pool what passes its taps.
"""

from __future__ import annotations

import hashlib
import operator
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import OUTPUTS, as_logits
from salgp.network.batches import Batch, KnownInputs, LabelsAt
from salgp.network.layers import Layers, Poolings, make_taps
from salgp.network.scores import FORWARD, raw_logits
from salgp.network.taps import Change, Probe, Tap, TapError, unwrap
from salgp.network.trace import Trace, trace
from salgp.network.view import View, Views

__all__ = ["Forward", "NetworkWarning", "Reader", "projection"]

Forward = Callable[[nn.Module, Any], Any]
"""``forward(model, batch) -> output``, for networks that are not simply called with the inputs."""

HANDFUL = 5
"""Samples on which the taps are settled."""

ALIKE = 0.02
"""Scores of the same inputs may differ by this share of the largest: some devices add up in any order."""


class NetworkWarning(UserWarning):
    """The network can be read, but what it gives may not be what was meant."""


@dataclass(frozen=True)
class Reader:
    """What to read from a network.

    Args:
        layers: see `salgp.extract`.
        pooling: see `salgp.extract`.
        output: what the network returns: ``"logits"``, ``"probabilities"`` or ``"log-probabilities"``.
        max_width: wider layers are projected to this width.
        seed: of the projections.
        forward: how the network is called; it gets the batch as the loader made it.
        labels_at: where a batch has its labels.
        taps: what ``layers`` and ``pooling`` mean for one network; None until settled.
        form: in which form batches came when it was settled (`salgp.network.batches.Batch`).
        inputs: which inputs they had beside their labels, where they had some.
        columns: how many scores the network gave for each sample; 1 for a binary network of one output.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 4)
        >>> reader = Reader().settled(model, Batch((x,)))
        >>> reader.read(model, Batch((x,))).widths
        {'1': 8}
    """

    layers: Layers = "auto"
    pooling: Poolings = "auto"
    output: str = "logits"
    max_width: int | None = None
    seed: int = 0
    forward: Forward | None = None
    labels_at: LabelsAt = None
    taps: tuple[Tap, ...] | None = None
    form: str | None = None
    inputs: KnownInputs | None = None
    columns: int | None = None
    _views: Views = field(default_factory=Views, init=False, repr=False, compare=False)
    _projections: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_width", "seed", "labels_at"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, str):  # a whole number of NumPy is one too
                object.__setattr__(self, name, operator.index(given))
        if self.output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {self.output!r}")
        if self.max_width is not None and self.max_width < 1:
            raise ValueError(f"max_width must be at least 1, got {self.max_width}")

    def settled(self, model: nn.Module, batch: Batch, device: torch.device | str | None = None) -> Reader:
        """The same with its taps, found on a few samples of a batch; itself where it has them already."""
        if self.taps is not None:
            return self
        network = unwrap(model)
        seen: Any = {"form": batch.form, "inputs": KnownInputs.of(batch, network, self.forward is not None)}
        if not isinstance(self.layers, str | int) and len(self.layers) == 0:
            return replace(self, taps=(), **seen)
        few = batch.head(HANDFUL).to(*View(network, _untouched).placement(device))
        found = trace(network, lambda view: _run(view, few, self))
        leads = _Flow(network, found, lambda view: _run(view, few, self))
        layers = _own_layers(network) if self.layers == "auto" else self.layers
        return replace(self, taps=make_taps(found, layers, self.pooling, leads), **seen)

    def batch_of(self, item: Any) -> Batch:
        """Inputs and labels of what a loader yields."""
        return item if isinstance(item, Batch) else Batch.of(item, self.labels_at, self.inputs)

    def read(
        self,
        model: nn.Module,
        batch: Batch,
        device: torch.device | str | None = None,
        change: Change | None = None,
    ) -> Features:
        """Run the network on one batch, sent to ``device`` or else to the network; the features stay there.

        Args:
            model: the network; a frozen view of it runs.
            batch: inputs.
            device: where the inputs are sent.
            change: disturbs what passes the taps.
        """
        return self.features(*self.run(model, batch, device, change))

    def run(
        self,
        model: nn.Module,
        batch: Batch,
        device: torch.device | str | None = None,
        change: Change | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The class scores of one batch as the network gives them, and what passed the taps; see `read`."""
        if self.taps is None:
            raise ValueError(
                "the reader does not know its taps yet; use reader.settled(model, batch).read(...)"
            )
        taps = self.taps
        with self._views.lent(unwrap(model), lambda network: Probe(network, taps)) as view:
            batch = batch.to(*view.placement(device))
            with view.probe.reading(batch.mask, change) as found:
                output = _run(view.network, batch, self)
        return raw_logits(output), found

    def knowing(self, scores: Tensor) -> Reader:
        """The same with the number of scores for each sample, where it was not known."""
        if self.columns is not None or scores.ndim not in (1, 2):
            return self
        return replace(self, columns=1 if scores.ndim == 1 else scores.shape[1])

    def features(self, scores: Tensor, found: Mapping[str, Tensor]) -> Features:
        """Features of what `run` gave."""
        if scores.ndim == 1 and self.columns is not None and self.columns > 1:
            raise ValueError(
                f"the network gave scores of shape {tuple(scores.shape)}, and of shape (n, {self.columns}) "
                f"when it was calibrated; a sample alone needs a batch axis: x[None]"
            )
        logits, taps = as_logits(scores, self.output, FORWARD), self.taps or ()
        missing = [tap.name for tap in taps if tap.name not in found]
        if missing:
            raise ValueError(
                f"layer {missing[0]!r} did not run in this forward pass; it ran in the "
                f"first one: take only layers that always run"
            )
        return Features(logits, {tap.name: self._projected(tap.name, found[tap.name]) for tap in taps})

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


class _Flow:
    """Do the logits depend on a tap? Found by disturbing what it reads, one tap after the other.

    Gradients would need one pass for all, but stop at every ``no_grad`` inside a network.
    """

    def __init__(self, model: nn.Module, found: Trace, run: Callable[[nn.Module], Any]) -> None:
        self._names = {name: j for j, name in enumerate(found.taps())}
        taps = tuple(found.taps().values())
        self._view = View(model, lambda copied: Probe(copied, taps, pooled=False))
        self._run = run
        self._seen = found.logits
        self._known: dict[str, bool] = {}
        self._before: Tensor | None = None

    def __call__(self, tap: Tap) -> bool:
        if tap.name not in self._known:
            if self._before is None:
                self._before = self._logits(None)
                _warn_of_chance(self._seen, self._before)
            after = self._logits(self._names[tap.name])
            self._known[tap.name] = not torch.equal(after, self._before)
        return self._known[tap.name]

    def _logits(self, disturbed: int | None) -> Tensor:
        def change(j: int, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
            return x + (x.abs().mean() + 1) * noise if j == disturbed else x

        with torch.no_grad(), self._view.probe.reading(None, change):
            self._view.refresh()
            return raw_logits(self._run(self._view.network)).clone()


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


def _untouched(network: nn.Module) -> None:
    pass


def _run(network: nn.Module, batch: Batch, reader: Reader) -> Any:
    if reader.forward is None:
        return _called(network, batch)
    labels_left_out = (batch.form, reader.form) in (("single", "tuple"), ("mapping", "pair"))
    return reader.forward(network, (batch.as_made,) if labels_left_out else batch.as_made)


def _called(network: nn.Module, batch: Batch) -> Any:
    """What the network returns; where it fails, what it was given stands before its own words."""
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
