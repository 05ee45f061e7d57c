"""Covariances as formulas on distances and groups; composition by ``+`` and ``*``.

A covariance is a formula on the `salgp.gp.kernels.Gaps` between two sets of rows and on its parameters
``theta``. Which rows share a layer is data: group ``-1`` belongs to no group, so a row with layer ``-1``
keeps only the terms that are shared by all layers. That is the paper's global prediction.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.gp.kernels import KERNELS, Gaps, Rows, is_within, pairs_of, squared_distance, stationary
from salgp.gp.optimise import Parameter, Scale
from salgp.io import storable

__all__ = ["ARD", "Covariance", "Index", "Same", "Stationary", "Sum", "gaps", "kernel_on"]

Theta = Mapping[str, Tensor]


class Covariance(ABC):
    """A positive semi-definite formula on `Gaps`."""

    @abstractmethod
    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        """Covariance matrix for the given gaps."""

    @abstractmethod
    def parameters(self, scale: Scale) -> list[Parameter]:
        """Learnable parameters with data-driven starting points."""

    def reads(self) -> set[tuple[str, str]]:
        """Blocks it reads, each with how: ``squared`` distances, or the ``points`` themselves."""
        return set()

    def shares(self, group: str) -> bool:
        """Does a row that belongs to no ``group`` still covary with the others?"""
        return True

    def between(self, theta: Theta, a: Rows, b: Rows) -> Tensor:
        """``k(a, b)``, ``(..., N, M)``."""
        return self(theta, gaps(a, b, self))

    def variance(self, theta: Theta, rows: Rows) -> Tensor:
        """``k(x, x)`` of each row, ``(..., N)``."""
        single = rows.single()
        return self.between(theta, single, single)[..., 0, 0]

    def __add__(self, other: Covariance) -> Sum:
        return Sum((self, other))

    def __mul__(self, other: Covariance) -> Product:
        return Product((self, other))


def gaps(a: Rows, b: Rows, covariance: Covariance) -> Gaps:
    """Compare rows ``a`` (..., N) with rows ``b`` (..., M), for the blocks that ``covariance`` reads."""
    squared, points = {}, {}
    for name, how in covariance.reads():
        pair = a.blocks[name], b.blocks[name]
        if how == "squared":
            squared[name] = squared_distance(*pair)
        else:
            points[name] = pair
    return Gaps(squared, points, pairs_of(a, b))


@storable
@dataclass(frozen=True)
class Stationary(Covariance):
    """``v * kernel(distance / lengthscale)`` on one block.

    Args:
        block: which numbers of a row are compared.
        kernel: one of `KERNELS`.
        name: prefix of the parameter names; the block's name where empty.
        unit: fix the variance at 1 (inside a product that has its own scale).
        per: a group name; then every group has its own variance and lengthscale, and rows of different groups
            do not covary (the additive model's ``[l = l'] k_l``).
        n_groups: number of groups of ``per``.
    """

    block: str
    kernel: str = "matern52"
    name: str = ""
    unit: bool = False
    per: str = ""
    n_groups: int = 1

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {self.kernel!r}; choose from {', '.join(KERNELS)}")

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        name = self.name or self.block
        scales = [theta[f"{name}.log_lengthscale"]]
        if not self.unit:
            scales.append(theta[f"{name}.log_variance"])
        if self.per:
            left, _ = gaps.pairs[self.per]
            scales = [scale[left.clamp_min(0)] for scale in scales]
        k = stationary(self.kernel, gaps.squared[self.block], *scales)
        return k * Same(self.per)(theta, gaps) if self.per else k

    def parameters(self, scale: Scale) -> list[Parameter]:
        name = self.name or self.block
        shape = (self.n_groups,) if self.per else ()
        typical = 0.5 * math.log(scale.squared[self.block] or 1.0)
        lengthscale = _around(f"{name}.log_lengthscale", shape, typical, 5.0, 3.0)
        if self.unit:
            return [lengthscale]
        return [lengthscale, _variance(name, shape, scale.variance)]

    def reads(self) -> set[tuple[str, str]]:
        return {(self.block, "squared")}

    def shares(self, group: str) -> bool:
        return not is_within(self.per, group)


@storable
@dataclass(frozen=True)
class Linear(Covariance):
    """``v x . x'`` on one block: a function that is linear in it, with weights of prior variance ``v``."""

    block: str
    name: str = ""

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        left, right = gaps.points[self.block]
        variance = theta[f"{self.name or self.block}.log_variance"].exp()
        return left.double() @ right.double().mT * variance

    def parameters(self, scale: Scale) -> list[Parameter]:
        typical = math.log(scale.variance) - math.log(scale.squared[self.block] or 1.0)
        return [_around(f"{self.name or self.block}.log_variance", (), typical, 12.0, 8.0)]

    def reads(self) -> set[tuple[str, str]]:
        return {(self.block, "points")}


def kernel_on(block: str, kernel: str, name: str = "") -> Covariance:
    """The base kernel called ``kernel`` on a block: ``linear``, or one of `salgp.gp.kernels.KERNELS`.

    Example:
        >>> kernel_on("x", "linear"), kernel_on("x", "rbf").kernel
        (Linear(block='x', name=''), 'rbf')
    """
    return Linear(block, name) if kernel == "linear" else Stationary(block, kernel, name)


@storable
@dataclass(frozen=True)
class ARD(Covariance):
    """RBF kernel with one lengthscale per dimension of the block (RED's kernels)."""

    block: str
    width: int

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        left, right = gaps.points[self.block]
        inverse = (-theta[f"{self.block}.log_lengthscales"]).exp()
        squared = squared_distance(left * inverse, right * inverse)
        return (-0.5 * squared).exp() * theta[f"{self.block}.log_variance"].exp()

    def parameters(self, scale: Scale) -> list[Parameter]:
        typical = 0.5 * math.log(scale.squared[self.block] or 1.0)
        lengthscales = _around(f"{self.block}.log_lengthscales", (self.width,), typical, 5.0, 7.0)
        return [lengthscales, _variance(self.block, (), scale.variance)]

    def reads(self) -> set[tuple[str, str]]:
        return {(self.block, "points")}


@storable
@dataclass(frozen=True)
class Index(Covariance):
    """Coregionalisation matrix ``B[g, g']`` between groups.

    ``rank=0`` is the paper's reduced form ``B = a 11' + diag(b)``, ``rank>0`` is ``B = W W' + diag(v)``. A
    row of no group has no entry of ``B``; of the reduced form it keeps the ``a`` that all groups share,
    unless ``keep_shared`` is False.
    """

    group: str
    n_groups: int
    rank: int = 0
    name: str = ""
    keep_shared: bool = True

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        left, right = gaps.pairs[self.group]
        left, right = self._members(left.squeeze(-1)), self._members(right.squeeze(-2))
        if self.rank or not self.keep_shared:
            return left @ self.matrix(theta) @ right.mT
        own, shared = self._own(theta), theta[f"{self._name}.log_shared"]
        return left @ own @ right.mT + shared.exp()

    def _members(self, group: Tensor) -> Tensor:
        """``(..., N, n_groups)`` indicator of each row's group, zero for rows without one."""
        every = torch.arange(self.n_groups, device=group.device)
        return (group[..., None] == every).double()

    def matrix(self, theta: Theta) -> Tensor:
        """The learned ``B``, ``(n_groups, n_groups)``."""
        own = self._own(theta)
        if self.rank:
            W = theta[f"{self._name}.W"]
            return W @ W.T + own
        return theta[f"{self._name}.log_shared"].exp() + own

    def _own(self, theta: Theta) -> Tensor:
        return theta[f"{self._name}.log_own"].exp().diag()

    def parameters(self, scale: Scale) -> list[Parameter]:
        own = _variance(self._name, (self.n_groups,), scale.variance, "log_own")
        if not self.rank:
            return [_variance(self._name, (), scale.variance, "log_shared"), own]
        size = scale.variance**0.5
        angle = 0.7 * torch.arange(self.n_groups * self.rank, dtype=torch.float64)
        start = size * (0.6 + 0.3 * angle.cos()).reshape(self.n_groups, self.rank)
        return [Parameter(f"{self._name}.W", start, -30.0 * size, 30.0 * size), own]

    def shares(self, group: str) -> bool:
        return not is_within(self.group, group) or (self.rank == 0 and self.keep_shared)

    @property
    def _name(self) -> str:
        return self.name or self.group


@storable
@dataclass(frozen=True)
class Same(Covariance):
    """``[g = g']``: 1 where both rows are in the same group, 0 elsewhere; no parameters."""

    group: str

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        left, right = gaps.pairs[self.group]
        return ((left == right) & (left >= 0)).double()

    def parameters(self, scale: Scale) -> list[Parameter]:
        return []

    def shares(self, group: str) -> bool:
        return not is_within(self.group, group)


@storable
@dataclass(frozen=True)
class Sum(Covariance):
    """Sum of covariances; independent processes added up."""

    terms: tuple[Covariance, ...]

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        return functools.reduce(torch.add, (term(theta, gaps) for term in self.terms))

    def parameters(self, scale: Scale) -> list[Parameter]:
        share = Scale(scale.squared, scale.variance / len(self.terms))
        return [p for term in self.terms for p in term.parameters(share)]

    def reads(self) -> set[tuple[str, str]]:
        return {read for term in self.terms for read in term.reads()}

    def shares(self, group: str) -> bool:
        return any(term.shares(group) for term in self.terms)

    def __add__(self, other: Covariance) -> Sum:
        return Sum((*self.terms, other))


@storable
@dataclass(frozen=True)
class Product(Covariance):
    """Product of covariances."""

    factors: tuple[Covariance, ...]

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        return functools.reduce(torch.mul, (factor(theta, gaps) for factor in self.factors))

    def parameters(self, scale: Scale) -> list[Parameter]:
        return [p for factor in self.factors for p in factor.parameters(scale)]

    def reads(self) -> set[tuple[str, str]]:
        return {read for factor in self.factors for read in factor.reads()}

    def shares(self, group: str) -> bool:
        return all(factor.shares(group) for factor in self.factors)


def _variance(name: str, shape: tuple[int, ...], typical: float, what: str = "log_variance") -> Parameter:
    return _around(f"{name}.{what}", shape, math.log(typical), 12.0, 4.0)


def _around(name: str, shape: tuple[int, ...], typical: float, below: float, above: float) -> Parameter:
    """A parameter that starts at a typical value, and how far below and above it may end."""
    start = torch.full(shape, typical, dtype=torch.float64)
    return Parameter(name, start, typical - below, typical + above)
