"""What a Gaussian process sees, and how two sets of it are compared.

`Rows` are named blocks of numbers (features, confidence, ...) and named groups (layer, predicted class).
`gaps` compares two sets of rows once: squared distances per block, group pairs. Covariances are formulas on
those gaps, so that a whole hyperparameter search touches the inputs a single time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from salgp.gp.kernels import distances_to, squared_distance
from salgp.io import storable

__all__ = ["Gaps", "Rows", "gaps", "gaps_to", "is_within", "pairs_of", "self_gaps"]


class Reader(Protocol):
    """A covariance, as far as a comparison of rows knows it."""

    def reads(self) -> set[tuple[str, str]]:
        """Blocks it reads, each with how: ``squared`` distances, raw ``points`` or ``inner_products``."""


@storable
@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs of a GP: blocks ``(..., N, d)`` and integer groups ``(..., N)``; -1 is "no group"."""

    blocks: Mapping[str, Tensor]
    groups: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return next(iter(self.blocks.values())).shape[-2]

    def __getitem__(self, index: Any) -> Rows:
        return Rows(
            {k: x[..., index, :] for k, x in self.blocks.items()},
            {k: g[..., index] for k, g in self.groups.items()},
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """Apply ``function`` to every tensor."""
        return Rows(
            {k: function(x) for k, x in self.blocks.items()}, {k: function(g) for k, g in self.groups.items()}
        )

    def flatten(self) -> Rows:
        """Merge leading axes: ``(n, L, d)`` becomes ``(n * L, d)``."""
        return Rows(
            {k: x.reshape(-1, x.shape[-1]) for k, x in self.blocks.items()},
            {k: g.reshape(-1) for k, g in self.groups.items()},
        )

    def ungrouped(self, group: str) -> Rows:
        """The same rows, belonging to no ``group`` (nor to a group nested in it, ``group/...``)."""
        return Rows(
            self.blocks,
            {k: torch.full_like(g, -1) if is_within(k, group) else g for k, g in self.groups.items()},
        )

    @staticmethod
    def concatenate(parts: Iterable[Rows]) -> Rows:
        """Stack several sets of rows."""
        every = list(parts)
        blocks = {k: torch.cat([p.blocks[k] for p in every], dim=-2) for k in every[0].blocks}
        return Rows(blocks, {k: torch.cat([p.groups[k] for p in every], dim=-1) for k in every[0].groups})


@dataclass(frozen=True, eq=False)
class Gaps:
    """Comparison of two sets of rows: squared distances, raw points (for ARD), inner products (for linear
    kernels) and group pairs, all broadcastable.
    """

    squared: Mapping[str, Tensor]
    points: Mapping[str, tuple[Tensor, Tensor]]
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    inner_products: Mapping[str, Tensor] = field(default_factory=dict)

    def with_pairs(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Gaps:
        """The same distances under other group memberships."""
        return Gaps(self.squared, self.points, pairs, self.inner_products)


def gaps(a: Rows, b: Rows, covariance: Reader) -> Gaps:
    """Compare rows ``a`` (..., N) with rows ``b`` (..., M), for the blocks that ``covariance`` reads."""
    squared = {k: squared_distance(x, b.blocks[k]) for k, x in _read(a, covariance, "squared")}
    return Gaps(squared, *_other_gaps(a, b, covariance))


def gaps_to(b: Rows, covariance: Reader) -> Callable[[Rows], Gaps]:
    """`gaps` to the same rows many times: what depends on them alone is computed once."""
    to = {k: distances_to(x) for k, x in _read(b, covariance, "squared")}

    def compare(a: Rows) -> Gaps:
        squared = {k: distances(a.blocks[k]) for k, distances in to.items()}
        return Gaps(squared, *_other_gaps(a, b, covariance))

    return compare


def pairs_of(a: Rows, b: Rows) -> dict[str, tuple[Tensor, Tensor]]:
    """Group memberships of two sets of rows, shaped to broadcast to (..., N, M)."""
    return {k: (a.groups[k][..., :, None], b.groups[k][..., None, :]) for k in a.groups}


def self_gaps(a: Rows, covariance: Reader) -> Gaps:
    """Each row compared with itself: zero distances of shape (..., N), for prior variances."""
    some = next(iter(a.blocks.values()))
    zero = torch.zeros(some.shape[:-1], dtype=torch.float64, device=some.device)
    kinds = covariance.reads()
    inner_products = {
        k: a.blocks[k].double().square().sum(dim=-1) for k, kind in kinds if kind == "inner_products"
    }
    return Gaps({k: zero for k, _ in kinds}, {}, {k: (g, g) for k, g in a.groups.items()}, inner_products)


def is_within(name: str, group: str) -> bool:
    """Is group ``name`` the given one, or nested in it?"""
    return name.split("/")[0] == group


def _read(rows: Rows, covariance: Reader, kind: str) -> list[tuple[str, Tensor]]:
    """The blocks that a covariance reads in one way."""
    return [(block, rows.blocks[block]) for block, how in covariance.reads() if how == kind]


def _other_gaps(a: Rows, b: Rows, covariance: Reader) -> tuple[Any, Any, Any]:
    """Points, group pairs and inner products of two sets of rows."""
    points = {k: (x, b.blocks[k]) for k, x in _read(a, covariance, "points")}
    inner_products = {
        k: x.double() @ b.blocks[k].double().mT for k, x in _read(a, covariance, "inner_products")
    }
    return points, pairs_of(a, b), inner_products
