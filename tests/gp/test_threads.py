"""A fit chooses its threads by size and puts the setting back, also where it fails."""

from __future__ import annotations

import contextlib

import pytest
import torch

from salgp.gp.covariance import Rows, Stationary
from salgp.gp.fitting import Settings, fit_gaussian
from salgp.gp.threads import SMALL, threads_for


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield None
    torch.set_num_threads(before)


def test_small_matrices_get_one_thread_and_large_ones_keep_theirs(two_threads: object) -> None:
    with threads_for(SMALL):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with threads_for(SMALL + 1):
        assert torch.get_num_threads() == 2
    with contextlib.suppress(ZeroDivisionError), threads_for(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


def test_a_fit_runs_on_one_thread_and_puts_the_setting_back(
    two_threads: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    formula = Stationary.__call__

    def watched(self: Stationary, theta: object, gaps: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return formula(self, theta, gaps)  # type: ignore[arg-type]

    monkeypatch.setattr(Stationary, "__call__", watched)
    x = torch.linspace(0, 3, 30, dtype=torch.float64)[:, None]
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(0)).double()
    fit_gaussian(Stationary("x"), Rows({"x": x}), y, Settings())
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


def test_who_comes_second_and_leaves_last_puts_back_what_the_first_found(two_threads: object) -> None:
    first, second = contextlib.ExitStack(), contextlib.ExitStack()  # as two threads of Python would
    first.enter_context(threads_for(1))
    second.enter_context(threads_for(1))
    first.close()
    assert torch.get_num_threads() == 1  # somebody is still inside
    second.close()
    assert torch.get_num_threads() == 2
