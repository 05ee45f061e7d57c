"""Covariances as formulas on distances and groups; composition by ``+`` and ``*``.

A covariance is a formula on the `salgp.gp.kernels.Gaps` between two sets of rows and on its parameters
``theta``. Which rows share a layer is data: group ``-1`` belongs to no group, so a row with layer ``-1``
keeps only the terms that are shared by all layers. That is the paper's global prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.gp.kernels import KERNELS, Gaps, is_within, squared_distance, stationary
from salgp.gp.optimise import Parameter, Scale
from salgp.io import storable

__all__ = [
    "ARD",
    "Constant",
    "Covariance",
    "Index",
    "Linear",
    "Product",
    "Same",
    "Stationary",
    "Sum",
    "kernel_on",
]

Theta = Mapping[str, Tensor]


class Covariance(ABC):
    """A positive semi-definite formula on `Gaps`."""

    @abstractmethod
    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        """Covariance matrix for the given gaps."""

    @abstractmethod
    def parameters(self, scale: Scale) -> list[Parameter]:
        """Learnable parameters with data-driven starting points."""

    @abstractmethod
    def reads(self) -> set[tuple[str, str]]:
        """Blocks it reads, each with how: ``squared`` distances, raw ``points`` or ``inner_products``."""

    def uses_group(self, group: str) -> bool:
        """Does the value depend on membership of ``group``?"""
        return False

    def shares(self, group: str) -> bool:
        """Does a row that belongs to no ``group`` still covary with the others?"""
        return not self.uses_group(group)

    def __add__(self, other: Covariance) -> Sum:
        return Sum((self, other))

    def __mul__(self, other: Covariance) -> Product:
        return Product((self, other))


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
        log_lengthscale, log_variance, mask = (
            theta[f"{self._name}.log_lengthscale"],
            theta.get(f"{self._name}.log_variance"),
            None,
        )
        if self.per:
            left, right = gaps.pairs[self.per]
            mask, own = (left == right) & (left >= 0), left.clamp_min(0)
            log_lengthscale = log_lengthscale[own]
            log_variance = None if log_variance is None else log_variance[own]
        K = stationary(self.kernel, gaps.squared[self.block], log_lengthscale, log_variance)
        return K if mask is None else K * mask

    def parameters(self, scale: Scale) -> list[Parameter]:
        typical = 0.5 * _log(scale.squared[self.block] or 1.0)
        shape = (self.n_groups,) if self.per else ()
        lengthscale = Parameter(
            f"{self._name}.log_lengthscale", _full(shape, typical), typical - 5.0, typical + 3.0
        )
        return (
            [lengthscale]
            if self.unit
            else [lengthscale, _variance(f"{self._name}.log_variance", shape, scale)]
        )

    def reads(self) -> set[tuple[str, str]]:
        return {(self.block, "squared")}

    def uses_group(self, group: str) -> bool:
        return is_within(self.per, group)

    @property
    def _name(self) -> str:
        return self.name or self.block


@storable
@dataclass(frozen=True)
class Linear(Covariance):
    """``v x . x'`` on one block: a function that is linear in it, with weights of prior variance ``v``."""

    block: str
    name: str = ""

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        return gaps.inner_products[self.block] * theta[f"{self.name or self.block}.log_variance"].exp()

    def parameters(self, scale: Scale) -> list[Parameter]:
        typical = _log(scale.variance) - _log(scale.squared[self.block] or 1.0)
        name = f"{self.name or self.block}.log_variance"
        return [Parameter(name, _full((), typical), typical - 12.0, typical + 8.0)]

    def reads(self) -> set[tuple[str, str]]:
        return {(self.block, "inner_products")}


@storable
@dataclass(frozen=True)
class Constant(Covariance):
    """``v`` between all rows: one unknown number that they share; in a product, a variance."""

    name: str

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        return theta[f"{self.name}.log_variance"].exp()

    def parameters(self, scale: Scale) -> list[Parameter]:
        return [_variance(f"{self.name}.log_variance", (), scale)]

    def reads(self) -> set[tuple[str, str]]:
        return set()


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
    name: str = ""

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        name = self.name or self.block
        if self.block in gaps.points:
            left, right = gaps.points[self.block]
            inverse = (-theta[f"{name}.log_lengthscales"]).exp()
            squared = squared_distance(left * inverse, right * inverse)
        else:
            squared = gaps.squared[self.block]
        return (-0.5 * squared).exp() * theta[f"{name}.log_variance"].exp()

    def parameters(self, scale: Scale) -> list[Parameter]:
        name, typical = self.name or self.block, 0.5 * _log(scale.squared[self.block] or 1.0)
        return [
            Parameter(
                f"{name}.log_lengthscales", _full((self.width,), typical), typical - 5.0, typical + 7.0
            ),
            _variance(f"{name}.log_variance", (), scale),
        ]

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
        if self.rank or not self.keep_shared:
            return self._between(left, right, self.matrix(theta))
        own = theta[f"{self._name}.log_own"].exp().diag()
        return self._between(left, right, own) + theta[f"{self._name}.log_shared"].exp()

    def _between(self, left: Tensor, right: Tensor, B: Tensor) -> Tensor:
        """``B[g, g']``, zero where either row has no group."""
        if left.shape == right.shape:
            return (self._members(left) @ B * self._members(right)).sum(-1)
        return self._members(left.squeeze(-1)) @ B @ self._members(right.squeeze(-2)).mT

    def _members(self, group: Tensor) -> Tensor:
        """``(..., n_groups)`` indicator of each row's group, zero for rows without one: ``B[g, g']`` as a
        product.
        """
        return (group[..., None] == torch.arange(self.n_groups, device=group.device)).double()

    def matrix(self, theta: Theta) -> Tensor:
        """The learned ``B``, ``(n_groups, n_groups)``."""
        own = theta[f"{self._name}.log_own"].exp().diag()
        if self.rank:
            W = theta[f"{self._name}.W"]
            return W @ W.T + own
        return theta[f"{self._name}.log_shared"].exp() + own

    def parameters(self, scale: Scale) -> list[Parameter]:
        own = _variance(f"{self._name}.log_own", (self.n_groups,), scale)
        if not self.rank:
            return [_variance(f"{self._name}.log_shared", (), scale), own]
        size = scale.variance**0.5
        pattern = torch.cos(
            torch.arange(self.n_groups * self.rank, dtype=torch.float64).reshape(self.n_groups, self.rank)
            * 0.7
        )
        return [Parameter(f"{self._name}.W", size * (0.6 + 0.3 * pattern), -30.0 * size, 30.0 * size), own]

    def reads(self) -> set[tuple[str, str]]:
        return set()

    def uses_group(self, group: str) -> bool:
        return is_within(self.group, group)

    def shares(self, group: str) -> bool:
        return not self.uses_group(group) or (self.rank == 0 and self.keep_shared)

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

    def reads(self) -> set[tuple[str, str]]:
        return set()

    def uses_group(self, group: str) -> bool:
        return is_within(self.group, group)


@storable
@dataclass(frozen=True)
class Sum(Covariance):
    """Sum of covariances; independent processes added up."""

    terms: tuple[Covariance, ...]

    def __call__(self, theta: Theta, gaps: Gaps) -> Tensor:
        total = self.terms[0](theta, gaps)
        for term in self.terms[1:]:
            total = total + term(theta, gaps)
        return total

    def parameters(self, scale: Scale) -> list[Parameter]:
        share = Scale(scale.squared, scale.variance / len(self.terms))
        return [p for term in self.terms for p in term.parameters(share)]

    def reads(self) -> set[tuple[str, str]]:
        return set().union(*(term.reads() for term in self.terms))

    def uses_group(self, group: str) -> bool:
        return any(term.uses_group(group) for term in self.terms)

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
        total = self.factors[0](theta, gaps)
        for factor in self.factors[1:]:
            total = total * factor(theta, gaps)
        return total

    def parameters(self, scale: Scale) -> list[Parameter]:
        return [p for factor in self.factors for p in factor.parameters(scale)]

    def reads(self) -> set[tuple[str, str]]:
        return set().union(*(factor.reads() for factor in self.factors))

    def uses_group(self, group: str) -> bool:
        return any(factor.uses_group(group) for factor in self.factors)

    def shares(self, group: str) -> bool:
        return all(factor.shares(group) for factor in self.factors)


def _variance(name: str, shape: tuple[int, ...], scale: Scale) -> Parameter:
    typical = _log(scale.variance)
    return Parameter(name, _full(shape, typical), typical - 12.0, typical + 4.0)


def _full(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())
