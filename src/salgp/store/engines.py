"""Run the same function on many pieces of work: on this machine's cores, or on Ray.

A piece of work reads files and writes files, each whole or not at all, and its result depends on nothing but
its arguments. So it may run anywhere, in any order, and again. Every piece computes on one thread: the number
of workers then never changes a bit of the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

__all__ = ["ENGINES", "run", "run_local"]

ENGINES = ("local", "ray")


def run(
    function: Callable[..., Any],
    pieces: Iterable[tuple[Any, ...]],
    *,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
) -> Iterator[Any]:
    """Yield ``function(*piece)`` of every piece, in the order in which they finish.

    Args:
        function: importable by name, so that a worker on another machine finds it.
        pieces: arguments of each call; plain values, since they may travel.
        engine: ``local`` (threads) or ``ray``.
        workers: how many at once; by default one per core (local, or a local Ray), all the cluster has (Ray).
        ray_address: of a running cluster, such as ``auto`` or ``ray://host:10001``; by default Ray is started
            here.

    Example:
        >>> sorted(run(pow, [(2, 3), (2, 5)]))
        [8, 32]
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if engine == "local":
        return run_local(function, pieces, workers)
    from salgp.store.ray_engine import run_ray

    return run_ray(function, pieces, workers, ray_address)


def run_local(
    function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]], workers: int | None = None
) -> Iterator[Any]:
    """Run pieces on threads of this process; the numerical work releases Python's lock."""
    count = workers or os.cpu_count() or 1
    before = torch.get_num_threads()
    todo = iter(pieces)
    pool = ThreadPoolExecutor(
        count, thread_name_prefix="salgp", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        running: set[Future[Any]] = set()
        while True:
            while len(running) < count and (piece := next(todo, None)) is not None:
                running.add(pool.submit(function, *piece))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)
