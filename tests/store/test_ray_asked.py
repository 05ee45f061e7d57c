"""What Ray is asked for, with a stand-in that does everything at once; the real one is in `test_ray`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from salgp.store import engines, ray_engine

ray = pytest.importorskip("ray")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class AtOnce:
    """Does a task when it is handed in, notes how many are in flight, gives the newest result first."""

    def __init__(self, cores: float | None) -> None:
        self.cores, self.options_, self.flying, self.most = cores, {}, 0, 0

    def remote(self, function: Any) -> Any:
        outer = self

        class Task:
            def options(self, **given: Any) -> Any:
                outer.options_ = given
                return self

            def remote(self, *piece: Any) -> Any:
                outer.flying += 1
                outer.most = max(outer.most, outer.flying)
                return function(*piece)

        return Task()

    def cluster_resources(self) -> dict[str, float]:
        return {} if self.cores is None else {"CPU": self.cores}

    def wait(self, running: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        self.flying -= 1
        return running[-1:], running[:-1]

    def get(self, done: Any) -> Any:
        return done


def asked(monkeypatch: pytest.MonkeyPatch, cores: float | None) -> tuple[AtOnce, list[tuple[Any, Any]]]:
    """A stand-in, and the sessions that were opened."""
    here, sessions = AtOnce(cores), []

    @contextmanager
    def session(workers: Any, address: Any) -> Iterator[AtOnce]:
        sessions.append((workers, address))
        yield here

    monkeypatch.setattr(ray_engine, "ray_session", session)
    return here, sessions


@pytest.mark.parametrize(
    ("cores", "workers", "pieces", "most"),
    [(2.0, None, 30, 8), (2.0, 3, 30, 3), (None, None, 30, 4), (2.0, 5, 2, 2)],
)
def test_tasks_in_flight(
    monkeypatch: pytest.MonkeyPatch,
    threads: None,
    cores: float | None,
    workers: int | None,
    pieces: int,
    most: int,
) -> None:
    """As many as workers, or four for each core of the cluster, so that it can grow."""
    here, sessions = asked(monkeypatch, cores)
    found = list(
        engines.run(pow, [(i, 2) for i in range(pieces)], engine="ray", workers=workers, ray_address="a:1")
    )
    assert sorted(found) == [i * i for i in range(pieces)]
    assert (here.most, here.flying) == (most, 0)
    assert here.options_ == {"num_cpus": 1, "max_retries": 20}
    assert sessions == [(workers, "a:1")]
    assert torch.get_num_threads() == 1  # each task computes on one thread


def test_resources_of_a_task(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    here, _ = asked(monkeypatch, 1.0)
    assert list(ray_engine.run_ray(abs, [(-3,)], resources={"num_gpus": 0.5})) == [3]
    assert here.options_ == {"num_cpus": 1, "max_retries": 20, "num_gpus": 0.5}


@pytest.mark.parametrize(
    ("has", "wanted", "found"),
    [
        ({"CPU": 8.0}, None, (0.0, 8)),
        ({"CPU": 8.0, "GPU": 2.0}, None, (1.0, 2)),
        ({"CPU": 8.0, "GPU": 2.0}, 0.5, (0.5, 4)),
        ({"CPU": 8.0, "GPU": 2.0}, 0, (0, 8)),
        ({"CPU": 8.0}, 1.0, (1.0, 0)),
        ({}, None, (0.0, 1)),
    ],
)
def test_room_for_actors(has: dict[str, float], wanted: float | None, found: tuple[float, int]) -> None:
    assert ray_engine._room(has, wanted) == found


def test_an_actor_computes_on_one_thread_and_answers_in_json(threads: None) -> None:
    actor = ray_engine.Actor(lambda piece: [piece, "a"])
    assert torch.get_num_threads() == 1
    assert actor({"piece": [3, 4.0]}) == {"found": ['[3, "a"]', '[4, "a"]']}
    assert list(ray_engine.run_on_actors(abs, [])) == []  # no Ray for no work


@pytest.mark.parametrize(
    ("workers", "address", "local"),
    [
        (3, None, {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 100_663_296}),
        (None, None, {"num_cpus": 7, "include_dashboard": False, "object_store_memory": 100_663_296}),
        (3, "auto", {}),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_session_of_our_own_is_closed_and_needs_no_dashboard(
    monkeypatch: pytest.MonkeyPatch,
    workers: int | None,
    address: str | None,
    local: dict[str, Any],
    fails: bool,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **how: calls.append(how))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    with suppress(ZeroDivisionError), ray_engine.ray_session(workers, address) as session:
        assert session is ray
        assert len(calls) == 1
        _ = 1 / (not fails)
    asked_for = {"address": address or "local", "log_to_driver": False, "logging_level": "error", **local}
    assert calls == [asked_for, "shutdown"]


def test_a_session_that_is_open_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "init", lambda **how: pytest.fail("opened a second one"))
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("closed somebody's session"))
    with ray_engine.ray_session() as session:
        assert session is ray
