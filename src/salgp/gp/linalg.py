"""Factorisations and the one jitter policy: every Cholesky of the library, and what is done with its factor.

A test of the architecture looks for the word elsewhere.

How many threads a computation gets: by its size, and the caller's setting comes back.

Threads that share small matrices spend their time waiting for each other; beside one other busy process a fit
of a few hundred samples takes several times as long on two threads as on one. A large factorisation gains
from every core. So a fit says how large its matrices are, and works under `threads_for`.

The search of SciPy (``L-BFGS-B``) solves systems of a few rows, for which SciPy's own BLAS wakes its threads;
they then wait for more work, and a fit takes twice the processor time. `one_blas_thread` holds them.

Both settings belong to the whole process. Where several Python threads are inside at once, the first changes
them and the last puts them back.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

__all__ = [
    "cholesky",
    "eye_like",
    "inverse_positive",
    "log_determinant",
    "lower_inverse",
    "one_blas_thread",
    "solve_positive",
    "threads_for",
]

JITTERS = (0.0, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
"""Fractions of the mean diagonal that are added in turn until the factorisation succeeds."""


class NotPositiveDefiniteError(ValueError):
    """A covariance matrix could not be factorised even with the largest jitter."""


def cholesky(K: Tensor, start: float = 0.0) -> Tensor:
    """Lower Cholesky factor of a covariance matrix, with the least jitter of `JITTERS` that works.

    Args:
        K: ``(n, n)`` symmetric matrix.
        start: smallest jitter to try; see `salgp.gp.regression.INDUCING_JITTER`.

    Returns:
        Lower-triangular ``L`` with ``L L' = K + jitter * mean(diag K) * I``.

    Example:
        >>> cholesky(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))
        tensor([[2., 0.],
                [0., 3.]])
    """
    scale = K.detach().diagonal().mean()
    if not torch.isfinite(scale):
        why = "the covariance matrix holds NaN or infinity; check the inputs and hyperparameters"
        raise NotPositiveDefiniteError(why)
    for jitter in (j for j in JITTERS if j >= start):
        jittered = K if jitter == 0.0 else K + (jitter * scale) * eye_like(K)
        L, info = torch.linalg.cholesky_ex(jittered)
        if int(info) == 0:
            return L
    raise NotPositiveDefiniteError(
        f"the {len(K)} x {len(K)} covariance matrix is not positive definite even with jitter "
        f"{JITTERS[-1]:g}; are there many duplicate rows and no noise?"
    )


def eye_like(A: Tensor) -> Tensor:
    """The identity with as many rows as ``A``."""
    return A.new_ones(len(A)).diag()


def solve_lower(L: Tensor, B: Tensor) -> Tensor:
    """``L^-1 B`` for lower-triangular ``L``; ``B`` may be a vector."""
    columns = B[:, None] if B.ndim == 1 else B
    return torch.linalg.solve_triangular(L, columns, upper=False).reshape(B.shape)


def lower_inverse(L: Tensor) -> Tensor:
    """``L^-1`` of a lower-triangular matrix."""
    return solve_lower(L, eye_like(L))


def solve_positive(A: Tensor, b: Tensor) -> Tensor:
    """``A^-1 b`` for a positive definite ``A`` and a vector ``b``, with the jitter policy.

    Example:
        >>> solve_positive(torch.tensor([[4.0, 0.0], [0.0, 2.0]]), torch.tensor([4.0, 4.0]))
        tensor([1., 2.])
    """
    return solve_factored(cholesky(A), b)


def solve_factored(L: Tensor, b: Tensor) -> Tensor:
    """``(L L')^-1 b`` for a vector ``b``."""
    return torch.cholesky_solve(b[:, None], L)[:, 0]


def inverse_positive(L: Tensor) -> Tensor:
    """``(L L')^-1`` from the Cholesky factor; LAPACK lays it out by columns, and it is its own transpose."""
    return torch.cholesky_inverse(L).mT


def log_determinant(L: Tensor) -> Tensor:
    """``log det (L L')`` from the Cholesky factor."""
    return 2.0 * L.diagonal().log().sum()


def spectral_root(A: Tensor) -> Tensor:
    """Symmetric-factor root ``R`` with ``R R' = I - (I + A)^-1`` for positive semi-definite ``A``.

    This is what an inducing posterior removes from the prior variance, in whitened coordinates.

    Example:
        >>> R = spectral_root(torch.eye(2, dtype=torch.float64))
        >>> (R @ R.T).diagonal()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(A)
    positive = values.clamp_min(0.0)
    return vectors * (positive / (1.0 + positive)).sqrt()


SMALL = 4_000_000
"""Entries of a matrix up to which one thread is used."""


Restore = Callable[[], None]
"""Takes a change back."""


class _Shared(AbstractContextManager[None]):
    """A change to the whole process: made by the first who enters, taken back by the last who leaves."""

    def __init__(self, change: Callable[[], Restore]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._take_back = self._change()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._take_back()


def _hold_torch() -> Restore:
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def take_back() -> None:
        if torch.get_num_threads() == 1:
            torch.set_num_threads(before)

    return take_back


@functools.cache
def _scipy_blas() -> "ThreadpoolController":
    """SciPy's BLAS; finding it reads the list of all loaded libraries, so it is done once."""
    import scipy.linalg  # noqa: F401  loads it
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")


_TORCH = _Shared(_hold_torch)
_BLAS = _Shared(lambda: _scipy_blas().limit(limits=1).restore_original_limits)


def threads_for(entries: int) -> AbstractContextManager[None]:
    """Work on one thread where the largest matrix has at most `SMALL` entries; put the setting back
    afterwards.

    Example:
        >>> before = torch.get_num_threads()
        >>> with threads_for(100 * 100):
        ...     torch.get_num_threads()
        1
        >>> torch.get_num_threads() == before
        True
    """
    return _TORCH if entries <= SMALL else nullcontext()


def one_blas_thread() -> AbstractContextManager[None]:
    """Let SciPy's BLAS work on one thread; put its setting back afterwards.

    Example:
        >>> with one_blas_thread():
        ...     float(torch.eye(2).sum())
        2.0
    """
    return _BLAS
