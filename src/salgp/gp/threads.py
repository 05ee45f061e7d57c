"""How many threads a computation gets: by its size, and the caller's setting comes back.

Threads that share small matrices spend their time waiting for each other; beside one other busy process a fit
of a few hundred samples takes several times as long on two threads as on one. A large factorisation gains
from every core. So a fit says how large its matrices are, and works under `threads_for`.

PyTorch has one setting for the whole process. Where several Python threads are inside at once, the first
changes it and the last puts it back.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["SMALL", "threads_for"]

SMALL = 4_000_000
"""Entries of a matrix up to which one thread is used."""


class _OneThread:
    """Who works on one thread at present, and what was set before they came."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = 1

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = torch.get_num_threads()
                if self.before > 1:
                    torch.set_num_threads(1)
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and self.before > 1 and torch.get_num_threads() == 1:
                torch.set_num_threads(self.before)


_ONE_THREAD = _OneThread()


class threads_for:  # noqa: N801  a context, named like a function as those of contextlib are
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

    def __init__(self, entries: int) -> None:
        self._small = entries <= SMALL

    def __enter__(self) -> None:
        if self._small:
            _ONE_THREAD.enter()

    def __exit__(self, *_: object) -> None:
        if self._small:
            _ONE_THREAD.leave()
