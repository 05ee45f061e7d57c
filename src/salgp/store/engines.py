"""Run the same function on many pieces of work: on threads of this process, or by Ray Data on a cluster.

A piece depends on nothing but its arguments, so it may run anywhere, in any order, and again: Ray repeats the
pieces of a killed worker. Every piece computes on one thread, so that the number of workers changes no bit.
With an address the pieces go to that cluster, whose workers must see the same paths; without one a small Ray
is started on this machine and shut down again.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from salgp.extras import require

__all__ = ["run"]

OBJECT_STORE = 96 * 2**20
"""Bytes of shared memory of a Ray started here; the data stays in files."""
Pieces = Sequence[tuple[Any, ...]]


def run(
    function: Callable[..., Any],
    pieces: Pieces,
    *,
    engine: str = "local",
    workers: int | None = None,
    num_gpus: float = 0,
    keep: bool = False,
) -> Iterator[Any]:
    """Yield ``function(*piece)`` of every piece, in their order.

    Args:
        function: what is done.
        pieces: arguments of each call.
        engine: ``local`` (threads), ``ray`` (started here), or the address of a running Ray cluster, such as
            ``auto`` or ``ray://host:10001``.
        workers: how many at once; by default one per core (local, or a local Ray), all the cluster has (Ray).
        num_gpus: of each piece on Ray.
        keep: keep ``function``, with what it made for itself, in the process of each worker on Ray.

    Example:
        >>> list(run(pow, [(2, 3), (2, 5)]))
        [8, 32]
    """
    if engine == "local":
        return _run_local(function, pieces, workers or os.cpu_count() or 1)
    if engine not in ("ray", "auto") and ":" not in engine:
        raise ValueError(f"engine must be local, ray, or the address of a Ray cluster; got {engine!r}")
    require("ray")
    return _run_ray(function, pieces, workers, None if engine == "ray" else engine, num_gpus, keep)


def _run_local(function: Callable[..., Any], pieces: Pieces, count: int) -> Iterator[Any]:
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(lambda piece: function(*piece), pieces)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)


def _run_ray(
    function: Callable[..., Any],
    pieces: Pieces,
    workers: int | None,
    address: str | None,
    num_gpus: float,
    keep: bool,
) -> Iterator[Any]:
    if not pieces:
        return
    with _ray_session(workers, address) as ray:
        import ray.data as data

        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        has = ray.cluster_resources()
        slots = int(has.get("GPU", 0) / num_gpus if num_gpus else has.get("CPU", 1))
        most = max(1, min(workers or slots, len(pieces)))
        numbers = data.from_items([{"piece": i} for i in range(len(pieces))], override_num_blocks=len(pieces))
        actors = data.ActorPoolStrategy(min_size=1, max_size=most)
        how: dict[str, Any] = (
            {"fn": Worker, "fn_constructor_args": (function, pieces), "compute": actors}
            if keep
            else {"fn": Worker(function, pieces).__call__, "compute": data.TaskPoolStrategy(most)}
        )
        for row in numbers.map(**how, num_cpus=1, num_gpus=num_gpus).iter_rows():
            yield row["result"].value()


@dataclass(frozen=True)
class Result:
    """Result or error of a piece of work: Ray Data keeps only the text of errors, so they travel as values.

    Args:
        found: the result.
        error: or what was raised.
    """

    found: Any = None
    error: Exception | None = None

    def value(self) -> Any:
        """The result; its error is raised here."""
        if self.error is not None:
            raise self.error
        return self.found


@dataclass(frozen=True)
class Worker:
    """Does pieces of work one after the other in a process of its own.

    Args:
        function: what is done.
        pieces: arguments of each call, by number.
    """

    function: Callable[..., Any]
    pieces: Pieces

    def __call__(self, row: dict[str, Any]) -> dict[str, Result]:
        """Result of the piece whose number is in the row."""
        torch.set_num_threads(1)
        try:
            return {"result": Result(self.function(*self.pieces[row["piece"]]))}
        except Exception as error:
            return {"result": Result(error=error)}


@contextmanager
def _ray_session(workers: int | None, address: str | None) -> Iterator[Any]:
    """Ray: the session already open, the cluster at ``address``, or a new one; closes what it opened."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own deprecation and resource warnings are not the user's
        import ray

        if ray.is_initialized():
            yield ray
            return
        local = {
            "num_cpus": workers or os.cpu_count() or 1,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE,
        }
        try:
            quiet = {"log_to_driver": False, "logging_level": "error"}
            ray.init(address=address or "local", **quiet, **({} if address else local))
            yield ray
        finally:
            ray.shutdown()
