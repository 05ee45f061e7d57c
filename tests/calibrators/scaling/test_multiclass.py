"""Vector scaling, matrix scaling and Dirichlet calibration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from salgp import Features
from salgp.calibrators.base import CalibrationWarning
from salgp.calibrators.scaling import multiclass
from salgp.calibrators.scaling.multiclass import (
    DirichletCalibration,
    MatrixScaling,
    VectorScaling,
    _nll_gradient,
    fit_affine,
)
from salgp.metrics import nll


def drawn(n: int = 400, c: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels from a known affine map of the logits."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    true = z * torch.linspace(0.5, 1.5, c) + torch.linspace(-1, 1, c)
    return z, torch.multinomial(torch.softmax(true, 1), 1, generator=generator)[:, 0]


def test_vector_scaling_recovers_the_map() -> None:
    z, labels = drawn(20_000)
    fitted = VectorScaling(intercept_penalty=0.0).fit(Features(z), labels)
    torch.testing.assert_close(fitted.weight_, torch.linspace(0.5, 1.5, 3).double(), atol=0.1, rtol=0)
    b = fitted.bias_ - fitted.bias_.mean()
    torch.testing.assert_close(b, torch.linspace(-1, 1, 3).double(), atol=0.1, rtol=0)


@pytest.mark.parametrize("shape", [(3,), (3, 3)])
def test_gradient_of_the_loss(shape: tuple[int, ...]) -> None:
    z, labels = drawn(30)
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    scores = z * W + b if W.ndim == 1 else z @ W.T + b
    loss = torch.nn.functional.cross_entropy(scores, labels)
    expected = torch.autograd.grad(loss, [W, b])
    with torch.no_grad():
        value, grad_W, grad_b = _nll_gradient(z, labels, W, b)
    assert value == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(grad_W, expected[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(grad_b, expected[1], atol=1e-10, rtol=0)


def test_a_fitted_matrix_is_a_stationary_point_of_the_penalised_loss() -> None:
    z, labels = drawn(200)
    fitted = MatrixScaling(off_diagonal_penalty=0.7, intercept_penalty=0.3).fit(Features(z), labels)
    W, b = (x.clone().requires_grad_() for x in (fitted.weight_, fitted.bias_))
    off = (W - W.diag().diag()).pow(2).sum() / 6
    loss = torch.nn.functional.cross_entropy(z @ W.T + b, labels) + 0.7 * off + 0.3 * b.pow(2).mean()
    for slope in torch.autograd.grad(loss, [W, b]):
        assert float(slope.abs().max()) < 1e-5  # the pull of the diagonal is 1e-6


def test_matrix_without_penalty_is_logistic_regression() -> None:
    z, labels = drawn(500)
    ours = (
        MatrixScaling(off_diagonal_penalty=0.0, intercept_penalty=0.0, max_iterations=2000)
        .fit(Features(z), labels)
        .predict(Features(z))
        .probs
    )
    reference = (
        LogisticRegression(C=1e8, tol=1e-8, max_iter=5000)
        .fit(z.numpy(), labels.numpy())
        .predict_proba(z.numpy())
    )
    np.testing.assert_allclose(ours.numpy(), reference, atol=2e-3)


def test_a_strong_penalty_leaves_a_diagonal() -> None:
    z, labels = drawn()
    W = MatrixScaling(off_diagonal_penalty=1e4, intercept_penalty=1e4).fit(Features(z), labels).weight_
    assert float((W - torch.diag(torch.diagonal(W))).abs().max()) < 1e-3


def test_dirichlet_does_not_see_offsets_of_a_sample() -> None:
    z, labels = drawn()
    shift = torch.randn(len(z), 1, generator=torch.Generator().manual_seed(2), dtype=z.dtype)
    a, b = (
        DirichletCalibration().fit(Features(x), labels).predict(Features(x)).probs for x in (z, z + 5 * shift)
    )
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", [VectorScaling(), MatrixScaling(), DirichletCalibration()])
def test_fit_is_no_worse_than_nothing_and_tells_of_flips(method: VectorScaling) -> None:
    z, labels = drawn()
    f = Features(z)
    p = method.fit(f, labels).predict(f)
    assert nll(p.probs, labels) < nll(f.probs, labels)
    assert torch.equal(p.flips, p.probs.argmax(1) != p.label)
    assert bool(p.flips.any())
    assert torch.equal(p.label, f.label)


def test_running_out_of_iterations_is_said() -> None:
    z, labels = drawn()
    with pytest.warns(CalibrationWarning, match="no convergence in 1 iterations"):
        VectorScaling(max_iterations=1).fit(Features(z), labels)


def test_size_of_the_logits_does_not_slow_convergence() -> None:
    z, labels = drawn()
    start = torch.ones(3, dtype=torch.float64)
    plain, _ = fit_affine(z, labels, start, 0 * start, 0.0, 200)
    large, _ = fit_affine(z * 1e3, labels, start, 0 * start, 0.0, 200)
    torch.testing.assert_close(large * 1e3, plain, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("method", [VectorScaling, MatrixScaling, DirichletCalibration])
def test_the_way_to_the_optimum_does_not_show(method: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last digits of a sum differ between processors; what comes out must not differ by more."""
    z, labels = drawn(120, 4)
    one = method().fit(Features(z), labels).predict(Features(z)).probs
    scale = multiclass._root_mean_square
    monkeypatch.setattr(multiclass, "_root_mean_square", lambda x: 1.3 * scale(x))
    other = method().fit(Features(z), labels).predict(Features(z)).probs
    torch.testing.assert_close(one, other, rtol=0, atol=2e-7)
