"""Which layers lead to the logits, and at which positions of a sequence the network reads its answer.

One pass forward and one backward answers both for all layers: a layer whose gradient is not zero leads to
the logits; where the deepest sequence has a gradient at its last token alone, the network reads the last
token, as causal language models do. Gradients stop at every ``no_grad`` inside a network, so a layer without
one is tested by disturbing what it gives.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from salgp.logits import raw_logits
from salgp.network.frozen_copy import FrozenCopy
from salgp.network.taps import Change, Probe, Tap
from salgp.network.trace import Trace

__all__ = ["Flow", "NetworkWarning"]

ALIKE = 0.02
"""Scores of the same inputs may differ by this share of the largest: some devices add up in any order."""


class NetworkWarning(UserWarning):
    """The network can be read, but what it gives may not be what was meant."""


class Flow:
    """Do the logits depend on a tap, and where do they read it?

    Args:
        model: the network; a frozen copy of it runs.
        found: a forward pass of it.
        run: makes the same forward pass of the network it is given.
        mask: ``(n, T)`` true at real tokens, where there is one.

    Example:
        >>> from salgp.network.trace import trace
        >>> run = lambda network: network(torch.ones(2, 4))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = trace(model, run)
        >>> Flow(model, found, run)(found.taps()["1"])
        True
    """

    def __init__(
        self, model: nn.Module, found: Trace, run: Callable[[nn.Module], Any], mask: Tensor | None = None
    ) -> None:
        self._taps = tuple(found.taps().values())
        self._names = {tap.name: j for j, tap in enumerate(self._taps)}
        self._run = run
        self._mask = mask
        self._seen = found.logits
        self._frozen = FrozenCopy(model, lambda copied: Probe(copied, self._taps, pooled=False))

    def __call__(self, tap: Tap) -> bool:
        if tap.name not in self._known:
            after = self._logits(self._names[tap.name])
            self._known[tap.name] = not torch.equal(after, self._before)
        return self._known[tap.name]

    def with_pooling(self, tap: Tap) -> Tap:
        """The tap, with the last token instead of the mean over tokens where the network reads that."""
        sequence = tap.pooling == "auto" and not tap.layout.recurrent and tap.name in self._sequences
        return replace(tap, pooling="time-last") if sequence and self._reads_last else tap

    @functools.cached_property
    def _known(self) -> dict[str, bool]:
        """Taps that are known to lead to the logits, or not to."""
        return {name: True for name, g in self._gradients.items() if bool((g != 0).any())}

    @functools.cached_property
    def _sequences(self) -> dict[str, Tensor]:
        """Gradients ``(n, T, d)`` at taps that give a vector for each of several tokens."""
        last = {tap.name for tap in self._taps if tap.layout.channels == "last"}
        found = {name: g for name, g in self._gradients.items() if name in last}
        return {name: g for name, g in found.items() if g.ndim == 3 and g.shape[1] > 1}

    @functools.cached_property
    def _reads_last(self) -> bool:
        leading = [name for name in self._sequences if self._known.get(name)]
        deepest = max(leading, key=self._names.__getitem__, default=None)
        return deepest is not None and _only_at_last(self._sequences[deepest], self._mask)

    @functools.cached_property
    def _before(self) -> Tensor:
        """The logits of a pass like the traced one."""
        logits = self._logits(None)
        _warn_of_chance(self._seen, logits)
        return logits

    @functools.cached_property
    def _gradients(self) -> dict[str, Tensor]:
        """Gradient of the logits at every tap by its name; nothing where the network has none."""
        passed: dict[str, Tensor] = {}

        def keep(j: int, x: Tensor) -> Tensor:
            name = self._taps[j].name
            passed[name] = x if x.requires_grad else x.detach().requires_grad_()
            return x if x.requires_grad else passed[name].clone()  # a leaf must not be overwritten in place

        try:
            with torch.enable_grad():
                logits = self._passed(keep)
                if logits.shape != self._before.shape:
                    return {}
                weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
                parts = torch.autograd.grad(
                    (logits * weights).sum(), list(passed.values()), allow_unused=True
                )
        except (RuntimeError, NotImplementedError):  # operations that cannot be differentiated
            return {}
        return {name: g for name, g in zip(passed, parts, strict=True) if g is not None}

    def _logits(self, disturbed: int | None) -> Tensor:
        def change(j: int, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
            return x + (x.abs().mean() + 1) * noise if j == disturbed else x

        with torch.no_grad():
            return self._passed(change).clone()

    def _passed(self, change: Change) -> Tensor:
        with self._frozen.probe.reading(None, change):
            self._frozen.refresh()
            return raw_logits(self._run(self._frozen.network))


def _only_at_last(gradient: Tensor, mask: Tensor | None) -> bool:
    """Is the gradient ``(n, T, d)`` zero everywhere but at the last real token of every sample?"""
    n, width = gradient.shape[:2]
    if mask is not None and mask.shape != (n, width):
        return False
    real = torch.ones(n, width, dtype=torch.bool) if mask is None else mask.bool().cpu()
    last = width - 1 - real.flip(1).int().argmax(dim=1)
    read = (gradient != 0).any(dim=2).cpu()
    return torch.equal(read, torch.nn.functional.one_hot(last, width).bool())


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
