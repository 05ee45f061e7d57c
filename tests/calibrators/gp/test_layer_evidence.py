"""One expert of layer evidence without its constraints is a Gaussian process: linear kernels on the columns,
an index kernel over the predicted class, a Bernoulli likelihood by Laplace's approximation.
"""

from __future__ import annotations

import functools
import operator

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.mixture import Samples
from salgp.calibrators.evidence.monotone import RIDGE, fit_monotone
from salgp.features import Features
from salgp.gp.covariance import Covariance, Index, Linear, Theta
from salgp.gp.kernels import Rows
from salgp.gp.regression import Posterior, condition_exact

CLASS_SD = RIDGE**-0.5
VARIANCES = [40 / RIDGE, 40 / RIDGE, 1 / RIDGE, 1 / RIDGE, 1 / RIDGE]
"""Prior variances of the weights: constant, tempered log-odds, two layers, novelty."""


def world(n: int, seed: int) -> tuple[Features, Tensor]:
    """Three classes as clusters; the second layer is the noisier one."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, 3, (n,), generator=g)
    x = 2.0 * torch.nn.functional.one_hot(truth, 3).double() + torch.randn(n, 3, generator=g).double()
    y = x + 0.5 * torch.randn(n, 3, generator=g).double()
    return Features(2.0 * y, {"one": torch.cat([x, x[:, :1] * x[:, 1:2]], dim=1), "two": y}), truth


def learned(n: int, seed: int) -> tuple[LayerEvidence, Samples, Tensor]:
    """A fit, and the columns and correctness of its calibration samples."""
    calibrator = LayerEvidence().fit(*world(n, seed))
    rows = calibrator.training_rows_
    return calibrator, rows.samples, rows.correct


def laplace(k: Covariance, theta: Theta, rows: Rows, correct: Tensor, mean: Tensor) -> Posterior:
    """Laplace's approximation: Newton's steps, each a regression on the expansion around the last mode."""
    f = mean
    for _ in range(100):
        p = torch.sigmoid(f)
        curvature = p * (1 - p)
        target = f + (correct - p) / curvature - mean
        posterior = condition_exact(k, theta, rows, target, 1 / curvature)
        f = mean + posterior(rows)[0]
    return posterior


def process(X: Tensor) -> tuple[Covariance, dict[str, Tensor]]:
    """A linear kernel per column, and one offset per class."""
    columns = [Linear(f"column{j}") for j in range(X.shape[1])]
    theta = {f"column{j}.log_variance": torch.tensor(v).double().log() for j, v in enumerate(VARIANCES)}
    theta["class.log_own"] = torch.full((3,), 2 * np.log(CLASS_SD)).double()
    theta["class.W"] = torch.zeros(3, 1).double()
    return functools.reduce(operator.add, columns) + Index("class", 3, rank=1), theta


def rows_of(X: Tensor, label: Tensor) -> Rows:
    return Rows({f"column{j}": X[:, j : j + 1] for j in range(X.shape[1])}, {"class": label})


def newton(X: Tensor, label: Tensor, correct: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mode and covariance of logistic weights under the prior of layer evidence, by plain Newton steps."""
    Z = np.hstack([X.numpy(), np.eye(3)[label.numpy()]])
    prior = np.array([RIDGE / 40, RIDGE / 40, *[RIDGE] * 3, *[CLASS_SD**-2] * 3])
    centre = np.eye(len(prior))[1]
    w = centre.copy()
    for _ in range(100):
        p = 1 / (1 + np.exp(-Z @ w))
        H = (Z * (p * (1 - p))[:, None]).T @ Z + np.diag(prior)
        w = w + np.linalg.solve(H, Z.T @ (correct.numpy() - p) - prior * (w - centre))
    return w, np.linalg.inv(H)


def test_linear_gp_on_evidence_is_the_model_of_layer_evidence() -> None:
    """Function space and weight space: means and variances of the log-odds agree to 1e-6."""
    calibrator, seen, correct = learned(160, 4)
    X, label = seen.design, seen.label
    k, theta = process(X)
    posterior = laplace(k, theta, rows_of(X, label), correct, X[:, 1])
    w, S = newton(X, label, correct)
    new = calibrator._samples(world(60, 5)[0])
    mean, variance = posterior(rows_of(new.design, new.label))
    Z = np.hstack([new.design.numpy(), np.eye(3)[new.label.numpy()]])
    np.testing.assert_allclose(new.design[:, 1] + mean, Z @ w, rtol=0, atol=1e-6)
    np.testing.assert_allclose(variance, np.einsum("ij,jk,ik->i", Z, S, Z), rtol=0, atol=1e-6)


def test_the_constrained_model_is_the_same_where_no_constraint_binds() -> None:
    """`fit_monotone`, which the default is made of, on data whose free optimum has no negative weight."""
    _, seen, correct = learned(400, 6)
    X, label = seen.design, seen.label
    w, _ = newton(X, label, correct)
    free = X.clone()
    for j in range(2, 5):  # turn a column whose weight would be negative
        free[:, j] = X[:, j] * (1.0 if w[j] >= 0 else -1.0)
    w, _ = newton(free, label, correct)
    assert (w[1:5] > 1e-3).all()
    ours = fit_monotone(free, label, correct, torch.ones_like(correct), 3, CLASS_SD)
    np.testing.assert_allclose(ours.weights.numpy(), w[:5], rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.offsets.numpy(), w[5:], rtol=0, atol=1e-6)
