"""Ray as the engine: one task per piece of work, retried on another worker when its own is killed.

Scheduling, retries, autoscaling and placement are Ray's; nothing of that kind is here. With an address the
tasks go to that cluster and every worker must see the same paths; without one, a small Ray is started on this
machine and shut down again.

Work that needs something costly to make, such as a network on a GPU, runs on Ray Data: a pool of actors makes
it once each, and Ray Data holds pieces back while all of them are busy (backpressure). Pieces are numbers and
results a few words, since the data itself goes from file to file, so that the object store stays empty. An
actor that dies with its node is made again on another, and its pieces with it.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from salgp.extras import require

__all__ = ["ray_session", "run_on_actors", "run_ray"]

MAX_RETRIES = 20
"""How often a piece is tried again after its worker died; errors of the work itself are not retried."""

OBJECT_STORE = 96 * 2**20
"""Bytes of shared memory of a Ray started here; results are a few numbers, the data stays in files."""


def run_ray(
    function: Callable[..., Any],
    pieces: Iterable[tuple[Any, ...]],
    workers: int | None = None,
    address: str | None = None,
    resources: dict[str, float] | None = None,
) -> Iterator[Any]:
    """Run pieces as Ray tasks; yields results in the order in which they finish.

    Args:
        function: importable by name on the workers.
        pieces: arguments of each call.
        workers: tasks in flight at once; by default all the cluster has cores for, and more, so that it can
            scale up.
        address: of a running cluster.
        resources: of each task, such as ``{"num_gpus": 1}``; one core by default.
    """
    with ray_session(workers, address) as ray:
        remote = ray.remote(_one_thread).options(num_cpus=1, max_retries=MAX_RETRIES, **(resources or {}))
        window = workers or 4 * int(ray.cluster_resources().get("CPU", 1))
        todo = iter(pieces)
        running: list[Any] = []
        while True:
            while len(running) < window and (piece := next(todo, None)) is not None:
                running.append(remote.remote(function, *piece))
            if not running:
                return
            done, running = ray.wait(running, num_returns=1)
            yield ray.get(done[0])


def run_on_actors(
    function: Callable[[int], Any],
    pieces: Sequence[int],
    workers: int | None = None,
    address: str | None = None,
    num_gpus: float | None = None,
) -> Iterator[Any]:
    """Run numbered pieces on Ray Data by a pool of actors; yields results in the order in which they finish.

    Args:
        function: of the number of a piece; gives a value that JSON can hold. What it keeps in its process is
            made once per actor.
        pieces: their numbers.
        workers: actors at most; by default as many as the cluster has room for.
        address: of a running cluster.
        num_gpus: of each actor; by default one where the cluster has some, else none.
    """
    if not pieces:
        return
    with ray_session(workers, address) as ray, _quiet():
        import ray.data as data

        logging.getLogger("ray.data").setLevel(logging.ERROR)
        data.DataContext.get_current().enable_progress_bars = False
        gpus, room = _room(ray.cluster_resources(), num_gpus)
        rows = data.from_items([{"piece": piece} for piece in pieces], override_num_blocks=len(pieces))
        done = rows.map_batches(
            Actor,
            fn_constructor_args=(function,),
            batch_size=1,
            compute=data.ActorPoolStrategy(min_size=1, max_size=max(1, min(workers or room, len(pieces)))),
            num_cpus=1,
            num_gpus=gpus,
        )
        for row in done.iter_rows():
            yield json.loads(row["found"])


class Actor:
    """Does pieces of work one after the other, on one thread, in a process of its own."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self.function = function

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Results of the pieces of a batch, as JSON."""
        return {"found": [json.dumps(self.function(int(piece))) for piece in batch["piece"]]}


@contextmanager
def ray_session(workers: int | None = None, address: str | None = None) -> Iterator[Any]:
    """Connect to Ray: the session already open, the cluster at ``address``, or a new local one; closes what
    it opened.
    """
    require("ray")
    with _quiet():
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
        with _quiet():
            # without an address a Ray of our own, whatever others run on this machine
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level="error",
                **({} if address else local),
            )
        yield ray
    finally:
        with _quiet():
            ray.shutdown()


def _room(has: Mapping[str, float], num_gpus: float | None) -> tuple[float, int]:
    """GPUs of each actor, and how many actors a cluster that ``has`` this has room for."""
    gpus = float(has.get("GPU", 0) > 0) if num_gpus is None else num_gpus
    return gpus, int(has.get("GPU", 0) / gpus) if gpus else int(has.get("CPU", 1))


def _one_thread(function: Callable[..., Any], *piece: Any) -> Any:
    import torch

    torch.set_num_threads(1)
    return function(*piece)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's own deprecation and resource warnings are not the user's concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
