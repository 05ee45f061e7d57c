"""The one jitter policy and the factorisations around it."""

from __future__ import annotations

import pytest
import torch

from salgp.gp.linalg import (
    JITTERS,
    NotPositiveDefiniteError,
    cholesky,
    log_determinant,
    lower_inverse,
    solve_lower,
    spectral_root,
)

G = torch.Generator().manual_seed(0)
ROOT = torch.randn(6, 6, generator=G, dtype=torch.float64)
K = ROOT @ ROOT.T + torch.eye(6, dtype=torch.float64)


def test_no_jitter_where_none_is_needed() -> None:
    L = cholesky(K)
    torch.testing.assert_close(L @ L.T, K, rtol=1e-14, atol=1e-14)


def test_singular_matrix_gets_the_least_jitter_that_works() -> None:
    ones = torch.ones(5, 5, dtype=torch.float64)
    L = cholesky(ones)
    assert float((L @ L.T - ones).abs().max()) <= 1e-8


def test_start_adds_that_much_at_once() -> None:
    L = cholesky(K, start=1e-6)
    torch.testing.assert_close(
        (L @ L.T - K).diagonal(), 1e-6 * K.diagonal().mean().expand(6), rtol=1e-6, atol=1e-12
    )


def test_jitter_is_relative_to_the_matrix() -> None:
    tiny = 1e-20 * torch.ones(4, 4, dtype=torch.float64)
    L = cholesky(tiny)
    torch.testing.assert_close(L @ L.T, tiny, rtol=1e-6, atol=0)


def test_indefinite_matrix_is_refused() -> None:
    with pytest.raises(
        NotPositiveDefiniteError, match=f"not positive definite even with jitter {JITTERS[-1]:g}"
    ):
        cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64))


def test_nan_is_refused_by_name() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        cholesky(K * float("nan"))


def test_nan_off_the_diagonal_is_refused() -> None:
    broken = K.clone()
    broken[2, 1] = broken[1, 2] = float("nan")
    with pytest.raises(NotPositiveDefiniteError):
        cholesky(broken)


def test_solves_inverse_and_determinant() -> None:
    L = cholesky(K)
    b = torch.arange(6, dtype=torch.float64)
    torch.testing.assert_close(L @ solve_lower(L, b), b)
    torch.testing.assert_close(L @ solve_lower(L, K), K)
    torch.testing.assert_close(L @ lower_inverse(L), torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(log_determinant(L), torch.linalg.slogdet(K)[1])


@pytest.mark.parametrize("rank", [0, 2, 6])
def test_spectral_root(rank: int) -> None:
    A = ROOT[:, :rank] @ ROOT[:, :rank].T
    R = spectral_root(A)
    eye = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(R @ R.T, eye - torch.linalg.inv(eye + A), rtol=1e-10, atol=1e-12)


def test_gradient_through_the_factorisation() -> None:
    def value(M: torch.Tensor) -> torch.Tensor:
        return log_determinant(cholesky(M @ M.T + torch.eye(4, dtype=torch.float64)))

    assert torch.autograd.gradcheck(value, ROOT[:4, :4].clone().requires_grad_(True))
