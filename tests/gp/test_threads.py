"""A fit chooses its threads by size and puts the setting back, also where it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pytest
import torch
from samples import sample

from salgp.calibrators.gp.salgp import fit_structure
from salgp.calibrators.gp.structures import structure
from salgp.gp.covariance import Stationary
from salgp.gp.fitting import Settings
from salgp.gp.linalg import SMALL, _scipy_blas, one_blas_thread, threads_for
from salgp.gp.optimise import Parameter, maximise


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


@pytest.mark.filterwarnings("ignore::salgp.gp.optimise.AtBoundWarning")
def test_a_fit_runs_on_one_thread_and_puts_the_setting_back(
    two_threads: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    formula = Stationary.__call__

    def watched(self: Stationary, theta: object, gaps: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return formula(self, theta, gaps)  # type: ignore[arg-type]

    monkeypatch.setattr(Stationary, "__call__", watched)
    features, labels = sample(30)
    made = structure("concat", features.widths, features.n_classes)
    fit_structure(made, features, labels, Settings())
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


needs_openblas = pytest.mark.skipif(not _scipy_blas().info(), reason="this SciPy has another BLAS")


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in _scipy_blas().info()}


@needs_openblas
def test_a_search_holds_the_threads_of_scipys_blas_and_puts_them_back() -> None:
    with _scipy_blas().limit(limits=2):
        before, seen = blas_threads(), []

        def parabola(theta: Mapping[str, torch.Tensor]) -> torch.Tensor:
            seen.append(blas_threads())
            return -(theta["x"] - 2.0).square()

        start = torch.zeros((), dtype=torch.float64)
        found = maximise(parabola, [Parameter("x", start, -5.0, 5.0)])
        assert float(found.theta["x"]) == pytest.approx(2.0, abs=1e-4)
        assert seen
        assert all(threads == {1} for threads in seen)
        assert blas_threads() == before


@needs_openblas
def test_blas_stays_held_until_the_last_search_ends() -> None:
    with _scipy_blas().limit(limits=2):
        before = blas_threads()
        with one_blas_thread():
            with one_blas_thread():
                assert blas_threads() == {1}
            assert blas_threads() == {1}
        assert blas_threads() == before
