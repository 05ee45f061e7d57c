"""How many threads a computation gets: by its size, and the caller's setting comes back.

Threads that share small matrices spend their time waiting for each other; beside one other busy process a fit
of a few hundred samples takes several times as long on two threads as on one. A large factorisation gains
from every core. So a fit says how large its matrices are, and works under `threads_for`.

The search of SciPy (``L-BFGS-B``) solves systems of a few rows, for which SciPy's own BLAS wakes its threads;
they then wait for more work, and a fit takes twice the processor time. `one_blas_thread` holds them.

Both settings belong to the whole process. Where several Python threads are inside at once, the first changes
them and the last puts them back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

__all__ = ["SMALL", "one_blas_thread", "threads_for"]

SMALL = 4_000_000
"""Entries of a matrix up to which one thread is used."""


class _Shared(AbstractContextManager[None]):
    """A change to the whole process: made by the first who enters, taken back by the last who leaves.

    Args:
        change: makes it, and gives a function that takes it back.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
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


def _hold_torch() -> Callable[[], None]:
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)

    def take_back() -> None:
        if before > 1 and torch.get_num_threads() == 1:
            torch.set_num_threads(before)

    return take_back


def _hold_blas() -> Callable[[], None]:
    take_back: Callable[[], None] = _scipy_blas().limit(limits=1).restore_original_limits
    return take_back


@functools.cache
def _scipy_blas() -> ThreadpoolController:
    """SciPy's BLAS; finding it reads the list of all loaded libraries, so it is done once."""
    import scipy.linalg  # noqa: F401  loads it
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")


_TORCH, _BLAS = _Shared(_hold_torch), _Shared(_hold_blas)


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
