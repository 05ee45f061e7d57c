"""One pass over some shards: the pieces of work of an out-of-core fit.

Each piece reads a saved calibrator (hyperparameters, inducing rows, current posterior) and a range of shards,
and writes one file. The inducing posterior needs only sums over rows (`salgp.gp.regression.Statistics`), so
the pieces are independent and their results add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.base import load_calibrator
from salgp.calibrators.layerwise.salgp import log_odds_design
from salgp.calibrators.layerwise.structures import Structure, rows_of
from salgp.features import Features
from salgp.gp.covariance import Rows
from salgp.gp.fast import plan_of
from salgp.gp.fitting import Fitted
from salgp.gp.likelihood import Sites, bernoulli_sites, gaussian_sites
from salgp.gp.regression import Posterior, Statistics, statistics
from salgp.storage import pack, read_json, read_tensors, storable, unpack, write_json, write_tensors
from salgp.store.store import FeatureStore

__all__ = [
    "Candidates",
    "PassSums",
    "add_up",
    "flat_rows",
    "propose",
    "read_value",
    "sum_features",
    "sum_shards",
    "write_value",
]

GENERIC_BLOCK = 1_000_000
"""Covariance entries computed at once where there is no fast path."""


@storable
@dataclass(frozen=True, eq=False)
class PassSums:
    """Sums of one pass over some rows.

    Args:
        sums: statistics of the inducing posterior.
        constant: what the sites add to the log evidence.
    """

    sums: Statistics
    constant: Tensor

    def __add__(self, other: PassSums) -> PassSums:
        return PassSums(self.sums + other.sums, self.constant + other.constant)


@storable
@dataclass(frozen=True, eq=False)
class Candidates:
    """Rows proposed as inducing rows, with their conditional variance."""

    rows: Rows
    variance: Tensor

    def best(self, count: int) -> Candidates:
        """Those with the largest conditional variance."""
        index = self.variance.topk(min(count, len(self.variance))).indices
        return Candidates(self.rows[index], self.variance[index])


def sum_shards(state: str, store: str, first: int, last: int, out: str, verify: bool) -> str:
    """Add up the statistics of shards ``first`` to ``last - 1`` and write them to ``out``."""
    calibrator, source = load_calibrator(state), FeatureStore(store)
    parts = []
    for index in range(first, last):
        features, labels = source.shard(index, verify=verify)
        assert labels is not None
        parts.append(
            sum_features(calibrator.structure_, calibrator.fitted_, features, labels, weight_of(calibrator))
        )
    write_value(Path(out), add_up(parts))
    return out


def propose(state: str, store: str, first: int, last: int, out: str, verify: bool) -> str:
    """Write the rows of shards ``first`` to ``last - 1`` that the saved inducing rows explain least."""
    calibrator, source = load_calibrator(state), FeatureStore(store)
    posterior = calibrator.fitted_.posterior
    best: Candidates | None = None
    for index in range(first, last):
        rows = flat_rows(calibrator.structure_, source.shard(index, verify=verify)[0])
        left = torch.cat([posterior.moments(cross, prior)[1] for _, cross, prior in crosses(posterior, rows)])
        few = Candidates(rows, left).best(len(posterior.alpha))
        best = (
            few
            if best is None
            else Candidates(Rows.concatenate([best.rows, few.rows]), torch.cat([best.variance, few.variance]))
        )
        best = best.best(len(posterior.alpha))
    write_value(Path(out), best)
    return out


@torch.no_grad()
def sum_features(
    structure: Structure, fitted: Fitted, features: Features, labels: Tensor, weight: float = 1.0
) -> PassSums:
    """Statistics of the given samples on the inducing rows of ``fitted``; Bernoulli sites are taken around
    its posterior.

    Args:
        structure: covariance and row layout.
        fitted: hyperparameters, inducing rows and current posterior.
        features: of some samples.
        labels: true classes.
        weight: of each row in the likelihood.
    """
    posterior, rows = fitted.posterior, flat_rows(structure, features)
    repeats = len(rows) // max(len(features), 1)
    bernoulli = len(fitted.mean_weights) > 0
    y = (
        (features.correct(labels) if bernoulli else features.residual(labels))
        .double()
        .repeat_interleave(repeats)
    )
    offset = (
        (log_odds_design(features) @ fitted.mean_weights).repeat_interleave(repeats)
        if bernoulli
        else torch.zeros_like(y)
    )
    parts = []
    for part, cross, prior in crosses(posterior, rows):
        sites = _sites(fitted, y[part], offset[part], cross, prior, weight)
        parts.append(
            PassSums(statistics(cross.T, prior, sites.target - offset[part], sites.noise), sites.constant)
        )
    return add_up(parts)


def crosses(posterior: Posterior, rows: Rows) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Covariance with the inducing rows ``(b, m)`` and prior variance ``(b,)`` of each block of rows, in
    double precision.
    """
    plan = plan_of(posterior)
    if plan is not None:
        yield from (
            (part, cross, torch.full((len(cross),), plan.prior, dtype=cross.dtype, device=cross.device))
            for part, cross in plan.blocks(rows)
        )
        return
    size = max(1, GENERIC_BLOCK // len(posterior.alpha))
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        yield part, posterior.cross(rows[part]), posterior.prior_variance(rows[part])


def flat_rows(structure: Structure, features: Features) -> Rows:
    """Rows of the features along one axis, as in training."""
    rows = rows_of(structure, features)
    return rows.flatten() if structure.stacked else rows


def weight_of(calibrator: Any) -> float:
    """Weight of a row in the likelihood: 1, or ``1/L`` for tempered stacked rows."""
    tempered = calibrator.structure_.stacked and calibrator.get_params().get("tempering", False)
    return 1.0 / len(calibrator.structure_.layers) if tempered else 1.0


def add_up(parts: list[PassSums]) -> PassSums:
    """Sum in the given order, which fixes every bit of the result."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def write_value(path: Path, value: Any) -> None:
    """Write any storable value as ``path`` (JSON, last) and its tensors beside it."""
    tensors: dict[str, Tensor] = {}
    packed = pack(value, tensors)
    write_tensors(path.with_suffix(".safetensors"), tensors, {})
    write_json(path, packed)


def read_value(path: Path) -> Any:
    """Inverse of `write_value`."""
    return unpack(read_json(path), read_tensors(path.with_suffix(".safetensors"))[0])


def _sites(fitted: Fitted, y: Tensor, offset: Tensor, cross: Tensor, prior: Tensor, weight: float) -> Sites:
    if len(fitted.mean_weights) == 0:
        return gaussian_sites(y, torch.tensor(fitted.log_noise, dtype=y.dtype, device=y.device), weight)
    mean, variance = fitted.posterior.moments(cross, prior)
    return bernoulli_sites(y, mean + offset, variance, weight)
