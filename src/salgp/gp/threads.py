"""How many threads a computation gets: by its size, and the caller's setting comes back.

Threads that share small matrices spend their time waiting for each other; beside one other busy process a fit
of a few hundred samples takes several times as long on two threads as on one. A large factorisation gains
from every core. So a fit says how large its matrices are, and works under `threads_for`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SMALL", "threads_for"]

SMALL = 4_000_000
"""Entries of a matrix up to which one thread is used."""


@contextmanager
def threads_for(entries: int) -> Iterator[None]:
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
    before = torch.get_num_threads()
    if entries <= SMALL and before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
