"""Base kernels (RBF, Matérn) on fixed squared distances, and the rows whose distances they read.

A kernel is a function of ``r^2``, ``r`` = distance / lengthscale. It returns its value at unit variance, and
a function that returns the derivative of the value by the log-lengthscale, ``-r dk/dr``:

| name | formula |
|---|---|
| rbf | ``exp(-r^2 / 2)`` |
| matern12 | ``exp(-r)`` |
| matern32 | ``(1 + t) exp(-t)``, ``t = sqrt(3) r`` |
| matern52 | ``(1 + t + t^2/3) exp(-t)``, ``t = sqrt(5) r`` |

Another kernel is one more such function, put into `KERNELS` under its name: fitting, prediction, scoring and
export read it there and nowhere else. Gradients in lengthscale and variance have a closed form. How layers
share a kernel (ML, HL, ICM) is in `salgp.calibrators.gp.structures`.

`Rows` are named blocks of numbers (features, confidence, ...) and named groups (layer, predicted class).
`Gaps` compares two sets of rows once: squared distances per block, group pairs. Covariances are formulas on
those gaps, so that a whole hyperparameter search touches the inputs a single time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from salgp.io import storable

__all__ = ["KERNELS", "Rows", "pairs_of"]

Value = tuple[Tensor, Callable[[], Tensor]]
"""Value of a kernel, and a function of no arguments that gives the derivative by the log-lengthscale."""
Kernel = Callable[[Tensor], Value]
"""``r^2`` -> value and derivative."""
Change = Callable[[Tensor], Tensor]
Pairs = Mapping[str, tuple[Tensor, Tensor]]


def rbf(square: Tensor) -> Value:
    """``exp(-r^2 / 2)``."""
    value = torch.exp(-0.5 * square)
    return value, lambda: square * value


def matern12(square: Tensor) -> Value:
    """``exp(-r)``."""
    r = torch.sqrt(square)
    value = torch.exp(-r)
    return value, lambda: r * value


def matern32(square: Tensor) -> Value:
    """``(1 + t) exp(-t)``, ``t = sqrt(3) r``."""
    t = torch.sqrt(3.0 * square)
    decay = torch.exp(-t)
    return (1.0 + t) * decay, lambda: t * t * decay


def matern52(square: Tensor) -> Value:
    """``(1 + t + t^2/3) exp(-t)``, ``t = sqrt(5) r``."""
    t = torch.sqrt(5.0 * square)
    decay = torch.exp(-t)
    third = t * t / 3.0
    value = (1.0 + t + third) * decay
    return value, lambda: third * (1.0 + t) * decay


_BASE = (rbf, matern12, matern32, matern52)
KERNELS: dict[str, Kernel] = {kernel.__name__: kernel for kernel in _BASE}
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
    if log_lengthscale.requires_grad:
        return _OnFixedDistances.apply(kernel, squared, log_lengthscale, log_variance)  # type: ignore[no-untyped-call]
    square = squared * (-2.0 * log_lengthscale).exp()
    value, _ = KERNELS[kernel](square)
    return value if log_variance is None else value * log_variance.exp()


class _OnFixedDistances(torch.autograd.Function):
    """Closed-form gradients: two saved matrices instead of autograd's seven."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None
    ) -> Tensor:
        square = squared * (-2.0 * log_lengthscale).exp()
        value, slope = KERNELS[kernel](square)
        scale = 1.0 if log_variance is None else log_variance.exp()
        value, by_lengthscale = value * scale, slope() * scale
        ctx.save_for_backward(value, by_lengthscale)
        ctx.shapes = log_lengthscale.shape, None if log_variance is None else log_variance.shape
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor | None]:  # type: ignore[override]
        value, slope = ctx.saved_tensors
        of_lengthscale, of_variance = ctx.shapes
        by_variance = None if of_variance is None else _total(grad, value, of_variance)
        return None, None, _total(grad, slope, of_lengthscale), by_variance


def _total(grad: Tensor, slope: Tensor, shape: torch.Size) -> Tensor:
    """``grad * slope`` summed to ``shape``."""
    if shape:
        return (grad * slope).sum_to_size(shape)
    return grad.flatten() @ slope.flatten()


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Squared Euclidean distances ``(..., N, M)`` in double precision, clipped at zero.

    The mean of ``b`` is removed first, which keeps the usual expansion ``|a|^2 + |b|^2 - 2ab`` accurate. The
    norms travel as two further columns, so that one matrix product does it all.

    Example:
        >>> squared_distance(torch.tensor([[1.0]]), torch.tensor([[0.0], [3.0]]))
        tensor([[1., 4.]], dtype=torch.float64)
    """
    if a is b and a.shape[-2] == 1:  # each row with itself
        return torch.zeros_like(a[..., :1], dtype=torch.float64)
    y = b.double()
    centre = y.mean(dim=-2, keepdim=True)
    y = y - centre
    if a is b:
        return _squared_among(y)
    x = a.double() - centre
    x_norms, y_norms = _norms(x), _norms(y)
    left = x, x_norms, torch.ones_like(x_norms)
    right = -2.0 * y, torch.ones_like(y_norms), y_norms
    product = torch.cat(left, dim=-1) @ torch.cat(right, dim=-1).mT
    return product.clamp_min_(0.0)


def _squared_among(y: Tensor) -> Tensor:
    """With the norms from the product itself, the diagonal is exactly zero."""
    G = y @ y.mT
    norms = G.diagonal(dim1=-2, dim2=-1)
    sums = norms[..., :, None] + norms[..., None, :]
    return sums.sub_(G, alpha=2.0).clamp_min_(0.0)


def _norms(x: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norms.square()


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@storable
@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs of a GP: blocks ``(..., N, d)`` and integer groups ``(..., N)``; -1 is "no group".

    Leading axes broadcast: ``(n, 1, 1)`` is one number that the ``L`` rows of a sample share.
    """

    blocks: Mapping[str, Tensor]
    groups: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return next(iter(self.blocks.values())).shape[-2]

    def __getitem__(self, index: Any) -> Rows:
        return self.map(lambda x: x[..., index, :], lambda g: g[..., index])

    def map(self, of_blocks: Change, of_groups: Change) -> Rows:
        """Apply a function to every block, and one to every group."""
        blocks = {name: of_blocks(x) for name, x in self.blocks.items()}
        groups = {name: of_groups(g) for name, g in self.groups.items()}
        return Rows(blocks, groups)

    def flatten(self) -> Rows:
        """Merge leading axes: ``(n, L, d)`` becomes ``(n * L, d)``; the result shares no memory."""
        shapes = [x.shape[:-1] for x in self.blocks.values()]
        shapes += [g.shape for g in self.groups.values()]
        lead = torch.broadcast_shapes(*shapes)
        return self.map(
            lambda x: _copied(x.expand(*lead, -1).flatten(0, -2)), lambda g: _copied(g.expand(lead).flatten())
        )

    def single(self) -> Rows:
        """Each row as a set of its own, ``(..., N, 1, d)``."""
        return self.map(lambda x: x[..., None, :], lambda g: g[..., None])

    def ungrouped(self, group: str) -> Rows:
        """The same rows, belonging to no ``group`` (nor to a group nested in it, ``group/...``)."""
        groups = dict(self.groups)
        for name, g in self.groups.items():
            if is_within(name, group):
                groups[name] = torch.full_like(g, -1)
        return Rows(self.blocks, groups)

    @staticmethod
    def concatenate(parts: Iterable[Rows]) -> Rows:
        """Stack several sets of rows."""
        every = list(parts)
        blocks = {k: torch.cat([p.blocks[k] for p in every], dim=-2) for k in every[0].blocks}
        return Rows(blocks, {k: torch.cat([p.groups[k] for p in every], dim=-1) for k in every[0].groups})


@dataclass(frozen=True, eq=False)
class Gaps:
    """Comparison of two sets of rows: squared distances and points of blocks, and memberships of groups, all
    of which broadcast to ``(..., N, M)``.
    """

    squared: Mapping[str, Tensor]
    points: Pairs
    pairs: Pairs


def pairs_of(a: Rows, b: Rows) -> Pairs:
    """Group memberships of two sets of rows, shaped to broadcast to ``(..., N, M)``."""
    return {k: (a.groups[k][..., :, None], b.groups[k][..., None, :]) for k in a.groups}


def is_within(name: str, group: str) -> bool:
    """Is group ``name`` the given one, or nested in it?"""
    return name.split("/")[0] == group
