"""The monotone regression: its optimum, its signs, its Laplace posterior and its leave-group-out."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from salgp.calibrators.evidence.mixture import Samples
from salgp.calibrators.evidence.monotone import RIDGE, MonotoneLogistic, fit_monotone, leave_group_out

WEIGHTS = torch.tensor([-1.0, 1.2, 0.7, 0.4], dtype=torch.float64)


def problem(n: int, seed: int = 0, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Columns whose free optimum has no negative weight, predicted classes, and answers."""
    g = torch.Generator().manual_seed(seed)
    X = torch.cat([torch.ones(n, 1), torch.randn(n, 3, generator=g)], dim=1).double()
    label = torch.randint(classes, (n,), generator=g)
    f = X @ WEIGHTS + torch.linspace(-0.7, 0.7, classes).double()[label]
    return X, label, torch.bernoulli(torch.sigmoid(f), generator=g)


def fit(X: Tensor, label: Tensor, correct: Tensor, offsets: bool = True) -> MonotoneLogistic:
    return fit_monotone(X, label, correct, torch.ones_like(correct), 3, offsets)


def dense(X: Tensor, label: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets as columns of ones and zeros; the prior's precisions and centre."""
    Z = np.hstack([X.numpy(), np.eye(3)[label.numpy()]])
    prior = np.array([RIDGE / 40, RIDGE / 40, *[RIDGE] * (X.shape[1] + 1)])
    return Z, prior, np.eye(len(prior))[1]


def test_design_by_hand() -> None:
    top, A = torch.tensor([[2.0, 0.0], [-1.0, 0.0]]), torch.tensor([[0.5, 0.1], [1.0, 2.0]])
    N = torch.tensor([[9.0, -1.0], [9.0, np.e - 1]])  # the last layer's counts
    none, label = torch.zeros(2, 0), torch.zeros(2).long()
    X = Samples(top, torch.zeros(2, 2), A, N, none, torch.ones(2), label).design
    torch.testing.assert_close(X, torch.tensor([[1.0, 2.0, 0.5, 0.1, 0.0], [1.0, -1.0, 1.0, 2.0, -1.0]]))


def test_the_optimum_is_that_of_scipy_without_constraints() -> None:
    X, label, correct = problem(300)
    Z, prior, centre = dense(X, label)

    def loss(v: np.ndarray) -> float:
        f = Z @ v
        return float(
            (np.logaddexp(0, f) - correct.numpy() * f).sum() + 0.5 * (prior * (v - centre) ** 2).sum()
        )

    free = minimize(loss, centre, method="BFGS", options={"gtol": 1e-6}).x
    assert (free[1:4] > 0).all()
    found = fit(X, label, correct)
    np.testing.assert_allclose(np.r_[found.weights.numpy(), found.offsets.numpy()], free, atol=2e-5)


def test_with_a_matching_penalty_it_is_sklearn_logistic_regression() -> None:
    """One penalty for all columns: scaled so that the constant and the slope have it too."""
    from sklearn.linear_model import LogisticRegression

    X, label, correct = problem(300)
    found = fit(X, label, correct, offsets=False)
    scale = np.sqrt(np.array([40.0, 40.0, 1.0, 1.0]))
    # around a slope of 1: the objective's centre moves into an offset, which sklearn lacks, so that rows are
    # compared by the gradient at its optimum with the centre at 0
    peer = LogisticRegression(C=1 / RIDGE, fit_intercept=False, tol=1e-10, max_iter=5000)
    w0 = peer.fit(X.numpy() * scale, correct.numpy()).coef_[0] * scale
    p = 1 / (1 + np.exp(-X.numpy() @ w0))
    prior = RIDGE / scale**2
    np.testing.assert_allclose(X.numpy().T @ (p - correct.numpy()) + prior * w0, 0, atol=1e-3)
    pull = prior * np.array([0.0, 1.0, 0.0, 0.0])  # of the centre, one Newton step away
    H = (X.numpy() * (p * (1 - p))[:, None]).T @ X.numpy() + np.diag(prior)
    np.testing.assert_allclose(found.weights.numpy(), w0 + np.linalg.solve(H, pull), atol=1e-4)


def test_no_weight_but_the_constant_is_negative() -> None:
    X, label, correct = problem(300)
    against = X * torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    found = fit(against, label, correct)
    assert found.weights[1] == 0
    assert found.weights[3] == 0
    assert found.weights[2] > 0.3
    assert found.weights[0] < 0


def test_without_rows_it_is_the_prior() -> None:
    X, label, correct = problem(5)
    found = fit_monotone(X, label, correct, torch.zeros(5).double(), 3)
    torch.testing.assert_close(found.weights, torch.tensor([0.0, 1.0, 0.0, 0.0]).double())
    torch.testing.assert_close(found.covariance.diagonal(), torch.tensor([100, 100, 2.5, 2.5]).double())
    torch.testing.assert_close(found.class_variance, torch.full((3,), 2.5).double())


def test_the_covariance_is_the_dense_inverse() -> None:
    X, label, correct = problem(120, 3)
    found = fit(X, label, correct)
    Z, prior, _ = dense(X, label)
    p = 1 / (1 + np.exp(-(Z @ np.r_[found.weights.numpy(), found.offsets.numpy()])))
    H = (Z * (p * (1 - p))[:, None]).T @ Z + np.diag(prior)
    expected = Z @ np.linalg.inv(H) @ Z.T
    np.testing.assert_allclose(found.joint(X, label).numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(found.variance(X, label).numpy(), np.diag(expected), atol=1e-9)


def test_without_offsets_classes_have_no_variance() -> None:
    X, label, correct = problem(120, 3)
    found = fit(X, label, correct, offsets=False)
    assert not found.offsets.any()
    assert not found.class_variance.any()
    p = torch.sigmoid(X @ found.weights)
    prior = torch.tensor([RIDGE / 40, RIDGE / 40, RIDGE, RIDGE]).double()
    H = X.T @ ((p * (1 - p))[:, None] * X) + prior.diag()
    torch.testing.assert_close(found.variance(X, label), ((X @ torch.linalg.inv(H)) * X).sum(dim=1))


def test_a_weight_of_two_is_a_row_twice() -> None:
    X, label, correct = problem(60, 4)
    weight = torch.where(torch.arange(60) < 20, 2.0, 1.0).double()
    a = fit_monotone(X, label, correct, weight, 3)
    twice = torch.cat([torch.arange(60), torch.arange(20)])
    b = fit(X[twice], label[twice], correct[twice])
    torch.testing.assert_close(a.weights, b.weights, atol=1e-6, rtol=0)
    torch.testing.assert_close(a.covariance, b.covariance, atol=1e-6, rtol=1e-6)


def test_leave_group_out_is_close_to_refitting() -> None:
    """Groups of unequal sizes."""
    X, label, correct = problem(90, 2)
    weight, group = torch.full((90,), 0.5, dtype=torch.float64), torch.arange(90) ** 2 % 23
    model = fit_monotone(X, label, correct, weight, 3, 0.7)
    found, spread = leave_group_out(X, label, correct, weight, model, group)
    for k in group.unique().tolist()[::3]:
        keep = group != k
        without = fit_monotone(X[keep], label[keep], correct[keep], weight[keep], 3, 0.7)
        mean, variance = without.log_odds(X[~keep], label[~keep]), without.variance(X[~keep], label[~keep])
        torch.testing.assert_close(torch.sigmoid(found[~keep]), torch.sigmoid(mean), atol=0.03, rtol=0)
        torch.testing.assert_close(spread[~keep], variance, atol=0.06, rtol=0.15)
    assert (torch.sigmoid(found) - torch.sigmoid(model.log_odds(X, label))).abs().max() > 0.01


def test_a_thousand_classes_are_no_matrix_of_a_million() -> None:
    X, _, correct = problem(400, 5)
    label = torch.arange(400) * 2
    found = fit_monotone(X, label, correct, torch.ones(400).double(), 1000)
    assert found.pull.shape == (1000, 4)
    assert found.covariance.shape == (4, 4)
    assert float(found.class_variance[1]) == 2.5  # never seen: the prior
    assert float(found.class_variance[0]) < 2.5
