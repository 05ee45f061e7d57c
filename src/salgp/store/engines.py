"""Run the same function on many pieces of work: on threads of this process, or as tasks of Ray.

A piece depends on nothing but its arguments, so it may run anywhere, in any order, and again: Ray repeats the
pieces of a killed worker. Every piece computes on one thread, so that the number of workers changes no bit.
With an address the pieces go to that cluster, whose workers must see the same paths; without one a small Ray
is started on this machine and shut down again.
"""

import collections
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from salgp.extras import require

__all__ = ["run"]

OBJECT_STORE = 96 * 2**20
"""Bytes of shared memory of a Ray started here; the data stays in files."""
Work = Callable[..., Any]
Pieces = Sequence[tuple[Any, ...]]


def run(
    function: Work, pieces: Pieces, *, engine: str = "local", workers: int | None = None, num_gpus: float = 0
) -> Iterator[Any]:
    """Yield ``function(*piece)`` of every piece, in their order.

    Args:
        function: what is done.
        pieces: arguments of each call.
        engine: ``local`` (threads), ``ray`` (started here), or the address of a running Ray cluster, such as
            ``auto`` or ``ray://host:10001``.
        workers: how many at once; by default one per core (local, or a local Ray), all the cluster has (Ray).
        num_gpus: of each piece on Ray.

    Example:
        >>> list(run(pow, [(2, 3), (2, 5)]))
        [8, 32]
    """
    if engine == "local":
        return _run_local(function, pieces, workers or os.cpu_count() or 1)
    if engine not in ("ray", "auto") and ":" not in engine:
        raise ValueError(f"engine must be local, ray, or the address of a Ray cluster; got {engine!r}")
    require("ray")
    return _run_ray(function, pieces, workers, None if engine == "ray" else engine, num_gpus)


def _run_local(function: Work, pieces: Pieces, count: int) -> Iterator[Any]:
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(lambda piece: function(*piece), pieces)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)


def _run_ray(
    function: Work, pieces: Pieces, workers: int | None, address: str | None, num_gpus: float
) -> Iterator[Any]:
    if not pieces:
        return
    with _ray_session(workers, address) as ray:
        job = ray.put((function, pieces))
        task = ray.remote(num_gpus=num_gpus, max_retries=-1)(_piece)
        asked: collections.deque[Any] = collections.deque()
        try:
            for index in range(len(pieces)):
                asked.append(task.remote(job, index))
                if len(asked) == workers:
                    yield ray.get(asked.popleft())
            while asked:
                yield ray.get(asked.popleft())
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


def _piece(job: tuple[Work, Pieces], index: int) -> Any:
    """Result of one piece, in the process of a worker."""
    torch.set_num_threads(1)
    function, pieces = job
    return function(*pieces[index])


@contextmanager
def _ray_session(workers: int | None, address: str | None) -> Iterator[Any]:
    """Ray: the session already open, the cluster at ``address``, or a new one; closes what it opened."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own deprecation and resource warnings are not the user's
        import ray

        if ray.is_initialized():
            yield ray
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address is None:
            options["num_cpus"] = workers or os.cpu_count() or 1
            options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        try:
            ray.init(address=address or "local", **options)
            yield ray
        finally:
            ray.shutdown()
