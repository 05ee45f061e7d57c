"""Cross-covariances at the speed of the cache: the same numbers as `salgp.gp.covariance`, one matrix product
per term.

Carrying the norms as two more columns, ``[x, |x|^2, 1] s [-2u, 1, |u|^2]' = c r^2`` with ``s`` the square of
``sqrt(c) / lengthscale``, makes the scaled squared distance a single matrix product. The
kernel is then applied in place to a block of rows that stays in the cache, and added to the running sum of
the terms. Blocks and buffers are the same size whatever the number of samples. It works in single or double
precision; `salgp.store.scoring` measures on the data which one is accurate enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from salgp.gp.covariance import Covariance, Rows, Stationary, Sum
from salgp.gp.kernels import KERNELS
from salgp.gp.regression import Posterior

__all__ = ["CrossPlan", "plan_of"]

BLOCK_BYTES = 1024 * 1024
"""Size of one block of covariances: so large that starting an operation costs little beside it, and a few of
them fit into the cache."""
STRIPS = 4
"""Parts of a triangular product of which only what is not zero is computed."""

Moments = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class _Term:
    """One stationary term, with its inducing side ready for the product."""

    block: str
    kernel: str
    variance: float
    centre: Tensor  # (1, d)
    right: Tensor  # (m, d + 2): so laid out, products in double precision take a tenth less

    def left(self, x: Tensor) -> Tensor:
        """``[x, |x|^2, 1]`` of the centred rows, ``(n, d + 2)``."""
        n, d = x.shape
        left = torch.empty(n, d + 2, dtype=self.right.dtype, device=x.device)
        inner = left[:, :d]
        torch.sub(x.to(left.dtype), self.centre, out=inner)
        left[:, d] = torch.linalg.vector_norm(inner, dim=1).square_()
        left[:, d + 1] = 1.0
        return left

    def to(self, device: torch.device | str) -> _Term:
        return replace(self, centre=self.centre.to(device), right=self.right.to(device))


@dataclass(frozen=True, eq=False)
class CrossPlan:
    """Prepared prediction of a posterior whose covariance is a sum of stationary terms; made by `plan_of`.

    Args:
        terms: of the covariance.
        alpha: ``(m,)`` weights of the mean.
        root: ``(r, m)`` upper triangle ``R'``: a covariance ``k`` takes ``|k R|^2`` off the prior variance.
    """

    terms: tuple[_Term, ...]
    alpha: Tensor
    root: Tensor

    def to(self, device: torch.device | str) -> CrossPlan:
        """The same plan on another device."""
        terms = tuple(term.to(device) for term in self.terms)
        return CrossPlan(terms, self.alpha.to(device), self.root.to(device))

    def blocks(self, rows: Rows) -> Iterator[tuple[slice, Tensor]]:
        """The covariance of each block of rows with the inducing rows, ``(b, m)``; valid until the next
        block.
        """
        size = self._size()
        total, distance, spare = (self._buffer(size) for _ in range(3))
        for start in range(0, len(rows), size):
            part = slice(start, min(start + size, len(rows)))
            n = part.stop - part.start
            total[:n].zero_()
            for term in self.terms:
                torch.mm(term.left(rows.blocks[term.block][part]), term.right.mT, out=distance[:n])
                square = distance[:n].relu_()
                KERNELS[term.kernel].add_into(total[:n], square, spare[:n], term.variance)
            yield part, total[:n]

    def moments(self, rows: Rows, layers: bool = False) -> Moments:
        """Posterior mean and variance ``(n,)`` and, if asked for, those of each term ``(n, T)``, in double
        precision.
        """
        if layers:
            return self._term_moments(rows)
        mean, variance = (
            torch.empty(len(rows), dtype=torch.float64, device=self.alpha.device) for _ in range(2)
        )
        reduced = self._buffer(self._size(), len(self.root))
        for part, Kfu in self.blocks(rows):
            mean[part] = (Kfu @ self.alpha).double()
            variance[part] = self.prior - _squares(self._reduced(Kfu, reduced[: len(Kfu)]))
        return mean, variance.clamp_min_(0.0), None, None

    @property
    def prior(self) -> float:
        """Prior variance, the same for every row."""
        return math.fsum(term.variance for term in self.terms)

    def _term_moments(self, rows: Rows) -> Moments:
        n, T = len(rows), len(self.terms)
        means, variances = (
            torch.empty(n, T, dtype=torch.float64, device=self.alpha.device) for _ in range(2)
        )
        variance = torch.empty(n, dtype=torch.float64, device=self.alpha.device)
        plans = [CrossPlan((term,), self.alpha, self.root) for term in self.terms]
        reduced, whole = (self._buffer(self._size(), len(self.root)) for _ in range(2))
        for start in range(0, n, self._size()):
            part = slice(start, min(start + self._size(), n))
            few = rows[part]
            own, all_terms = reduced[: len(few)], whole[: len(few)].zero_()
            for i, plan in enumerate(plans):
                ((_, Kfu),) = plan.blocks(few)
                means[part, i] = (Kfu @ self.alpha).double()
                all_terms.add_(self._reduced(Kfu, own))
                variances[part, i] = plan.prior - _squares(own)
            variance[part] = self.prior - _squares(all_terms)
        return means.sum(dim=1), variance.clamp_min_(0.0), means, variances.clamp_min_(0.0)

    def _reduced(self, Kfu: Tensor, out: Tensor) -> Tensor:
        """``Kfu R``, strip by strip of the triangle."""
        step = -(-len(self.root) // STRIPS)
        for i in range(0, len(self.root), step):
            strip = slice(i, i + step)
            torch.mm(Kfu[:, i:], self.root[strip, i:].mT, out=out[:, strip])
        return out

    def _size(self) -> int:
        return max(16, BLOCK_BYTES // (len(self.alpha) * self.alpha.element_size()))

    def _buffer(self, rows: int, columns: int | None = None) -> Tensor:
        return self.alpha.new_empty(rows, len(self.alpha) if columns is None else columns)


def plan_of(posterior: Posterior, dtype: torch.dtype = torch.float64) -> CrossPlan | None:
    """Prepare a posterior for fast prediction; None where its covariance is not a sum of plain stationary
    terms.

    Example:
        >>> rows = Rows(
        ...     {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
        ... )
        >>> theta = {f"x.log_{k}": torch.zeros((), dtype=torch.float64) for k in ("lengthscale", "variance")}
        >>> posterior = Posterior(
        ...     Stationary("x"), theta, rows, torch.ones(4).double(), torch.eye(4).double() / 2
        ... )
        >>> mean, variance, _, _ = plan_of(posterior).moments(rows)
        >>> bool(torch.allclose(mean, posterior(rows)[0]) and torch.allclose(variance, posterior(rows)[1]))
        True
    """
    covariance = posterior.covariance
    terms = covariance.terms if isinstance(covariance, Sum) else (covariance,)
    plain = [t for t in terms if isinstance(t, Stationary) and not t.per and not t.unit]
    if len(plain) < len(terms):
        return None
    return CrossPlan(
        tuple(_prepare(t, posterior, dtype) for t in plain),
        posterior.alpha.to(dtype),
        _triangle(posterior.root.double()).to(dtype),
    )


def _prepare(term: Covariance, posterior: Posterior, dtype: torch.dtype) -> _Term:
    assert isinstance(term, Stationary)
    name, theta = term.name or term.block, posterior.theta
    points = posterior.rows.blocks[term.block].double()
    centre = points.mean(dim=0, keepdim=True)
    scale = math.sqrt(KERNELS[term.kernel].c) * math.exp(-float(theta[f"{name}.log_lengthscale"]))
    u = points - centre
    right = torch.cat([-2.0 * u, torch.ones_like(u[:, :1]), u.square().sum(dim=1, keepdim=True)], dim=1)
    return _Term(
        term.block,
        term.kernel,
        math.exp(float(theta[f"{name}.log_variance"])),
        centre.to(dtype),
        (scale**2 * right).to(dtype).contiguous(),
    )


def _triangle(root: Tensor) -> Tensor:
    """Upper triangle ``R'`` with ``R R' = root root'``."""
    return torch.linalg.qr(root.mT, mode="r").R.contiguous()


def _squares(x: Tensor) -> Tensor:
    """Squared norm of each row, in double precision."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=1)
    return norms.double().square_()
