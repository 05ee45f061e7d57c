"""Base kernels on fixed squared distances, with closed-form gradients in their lengthscale and variance.

A kernel is a function of ``r^2``, ``r`` = distance / lengthscale. It returns its value at unit variance, and
a function that returns the derivative of the value by the log-lengthscale, ``-r dk/dr``:

| name | formula |
|---|---|
| rbf | ``exp(-r^2 / 2)`` |
| matern12 | ``exp(-r)`` |
| matern32 | ``(1 + t) exp(-t)``, ``t = sqrt(3) r`` |
| matern52 | ``(1 + t + t^2/3) exp(-t)``, ``t = sqrt(5) r`` |

Another kernel is one more such function, put into `KERNELS` under its name: fitting, prediction, scoring and
export read it there and nowhere else.

What a Gaussian process sees, and how two sets of it are compared.

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

from salgp.io import storable

__all__ = ["Gaps", "KERNELS", "Rows", "gaps", "pairs_of", "self_gaps", "stationary"]

Kernel = Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]
"""``r^2`` -> value, and a function of no arguments that gives the derivative by the log-lengthscale."""


def rbf(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``exp(-r^2 / 2)``."""
    value = torch.exp(-0.5 * square)
    return value, lambda: square * value


def matern12(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``exp(-r)``."""
    r = torch.sqrt(square)
    value = torch.exp(-r)
    return value, lambda: r * value


def matern32(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``(1 + t) exp(-t)``, ``t = sqrt(3) r``."""
    t = torch.sqrt(3.0 * square)
    decay = torch.exp(-t)
    return (1.0 + t) * decay, lambda: t * t * decay


def matern52(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``(1 + t + t^2/3) exp(-t)``, ``t = sqrt(5) r``."""
    t = torch.sqrt(5.0 * square)
    decay = torch.exp(-t)
    third = t * t / 3.0
    return (1.0 + t + third) * decay, lambda: third * (1.0 + t) * decay


KERNELS: dict[str, Kernel] = {
    "rbf": rbf,
    "matern12": matern12,
    "matern32": matern32,
    "matern52": matern52,
}
"""Base kernels by name; the one place where a kernel is looked up."""


def stationary(
    kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None = None
) -> Tensor:
    """``variance * kernel`` on fixed squared distances; differentiable in the logarithms of lengthscale and
    variance only.

    Example:
        >>> zero = torch.zeros(())
        >>> stationary("matern12", torch.tensor([0.0, 4.0]), zero, zero)
        tensor([1.0000, 0.1353])
    """
    if torch.is_grad_enabled() and (
        log_lengthscale.requires_grad or (log_variance is not None and log_variance.requires_grad)
    ):
        value: Tensor = _OnFixedDistances.apply(kernel, squared, log_lengthscale, log_variance)  # type: ignore[no-untyped-call]
        return value
    value, _ = KERNELS[kernel](squared * (-2.0 * log_lengthscale).exp())
    return value if log_variance is None else value * log_variance.exp()


class _OnFixedDistances(torch.autograd.Function):
    """Closed-form gradients: two saved matrices instead of autograd's seven."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None
    ) -> Tensor:
        value, slope = KERNELS[kernel](squared * (-2.0 * log_lengthscale).exp())
        scale = 1.0 if log_variance is None else log_variance.exp()
        value, by_lengthscale = value * scale, slope() * scale
        ctx.save_for_backward(value, by_lengthscale)
        ctx.shapes = log_lengthscale.shape, None if log_variance is None else log_variance.shape
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor | None]:  # type: ignore[override]
        value, slope = ctx.saved_tensors
        by_lengthscale, by_variance = ctx.shapes
        return (
            None,
            None,
            _total(grad, slope, by_lengthscale),
            None if by_variance is None else _total(grad, value, by_variance),
        )


def _total(grad: Tensor, slope: Tensor, shape: torch.Size) -> Tensor:
    """``grad * slope`` summed to ``shape``."""
    return (grad * slope).sum_to_size(shape) if shape else torch.dot(grad.reshape(-1), slope.reshape(-1))


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Squared Euclidean distances (..., N, M) in double precision, clipped at zero."""
    if a is not b:
        return distances_to(b)(a)
    y, _ = _centred(b)
    G = y @ y.mT  # with the norms from the same product, the diagonal is exactly zero
    norms = G.diagonal(dim1=-2, dim2=-1)
    return (norms[..., :, None] + norms[..., None, :]).sub_(G, alpha=2.0).clamp_min_(0.0)


def distances_to(b: Tensor) -> Callable[[Tensor], Tensor]:
    """`squared_distance` to the same points many times: what depends on them alone is computed once.

    The common mean is removed first, which keeps the usual expansion ``|a|^2 + |b|^2 - 2ab`` accurate. The
    norms travel as two further columns, so that one matrix product does it all.

    Example:
        >>> distances_to(torch.tensor([[0.0], [3.0]]))(torch.tensor([[1.0]]))
        tensor([[1., 4.]], dtype=torch.float64)
    """
    y, centre = _centred(b)
    norms = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square()
    right = torch.cat([-2.0 * y, torch.ones_like(norms), norms], dim=-1).mT

    def distances(a: Tensor) -> Tensor:
        x = _distinct(a) - centre
        own = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
        left = torch.cat([x, own, torch.ones_like(own)], dim=-1)
        return (left @ right).clamp_min_(0.0)

    return distances


def _centred(b: Tensor) -> tuple[Tensor, Tensor]:
    """Points in double precision about their mean, and the mean."""
    y = b.double()
    centre = y.mean(dim=-2, keepdim=True) if b.shape[-2] else y.new_zeros(())
    return y - centre, centre


def _distinct(a: Tensor) -> Tensor:
    """One row where all ``N`` are the same memory (a sample's confidence, repeated for its layers); the
    result broadcasts.
    """
    return a[..., :1, :] if a.ndim > 2 and a.stride(-2) == 0 else a


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
