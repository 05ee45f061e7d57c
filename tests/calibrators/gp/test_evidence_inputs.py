"""GPs on the evidence of the layers: no sample is its own neighbour, and the linear one is layer evidence."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from salgp.calibrators.evidence.layer_spaces import layer_evidence
from salgp.calibrators.evidence.monotone import RIDGE, fit_monotone
from salgp.calibrators.gp.inputs import learn_evidence
from salgp.calibrators.gp.salgp import SALGP
from salgp.calibrators.gp.structures import Structure, rows_of, structure
from salgp.features import Features
from salgp.gp.covariance import Covariance, Index, Theta
from salgp.gp.kernels import Rows
from salgp.gp.optimise import NotConvergedWarning
from salgp.gp.regression import Posterior, condition_exact

CLASS_SD = 1.0
PRIOR = {
    "layer:constant.log_variance": np.log(40 / RIDGE),
    "layer:log-odds.log_variance": np.log(40 / RIDGE),
    "layer:one.log_variance": np.log(1 / RIDGE),
    "layer:two.log_variance": np.log(1 / RIDGE),
    "class.log_own": np.full(3, np.log(CLASS_SD**2)),
    "class.W": np.zeros((3, 1)),
}
"""Prior variances of the weights of layer evidence."""


def world(n: int, seed: int, copied: bool = False) -> tuple[Features, Tensor]:
    """Three classes as clusters; the second layer is the noisier one."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, 3, (n,), generator=g)
    x = 2.0 * torch.nn.functional.one_hot(truth, 3).double() + torch.randn(n, 3, generator=g).double()
    y = x + 0.5 * torch.randn(n, 3, generator=g).double()
    features = Features(2.0 * y, {"one": torch.cat([x, x[:, :1] * x[:, 1:2]], dim=1), "two": y})
    if not copied:
        return features, truth
    moved = {k: v + 0.3 * torch.randn(v.shape, generator=g).double() for k, v in features.layers.items()}
    both = Features.concatenate([features, Features(features.logits, moved)])
    groups, families = torch.arange(n).repeat(2), torch.arange(2).repeat_interleave(n)
    return Features(both.logits, both.layers, groups, families), truth.repeat(2)


def fit(calibrator: SALGP, features: Features, labels: Tensor) -> SALGP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return calibrator.fit(features, labels)


@pytest.mark.parametrize("copied", [False, True])
def test_without_a_reference_no_sample_is_its_own_neighbour(copied: bool) -> None:
    """The evidence at the fit is of the kind that new samples will have."""
    features, labels = world(150, 0, copied)
    inputs, X = learn_evidence(features, labels, None, True, 0)
    fresh = inputs.view(world(400, 1)[0])[0]
    seen = inputs.view_of(features, X)[0]
    for name in ("one", "two"):
        at_fit, later = seen.layers[name][:150, 0], fresh.layers[name][:, 0]
        assert abs(float(at_fit.mean() - later.mean())) < 0.35 * float(later.std())
    itself = layer_evidence(inputs.reference, features[:150]).agreement.mean()
    assert float(itself) > 1.5 * float(layer_evidence(inputs.reference, world(400, 1)[0]).agreement.mean())


def test_confidence_without_a_reference_holds_on_new_data() -> None:
    calibrator = fit(SALGP(inputs="evidence", likelihood="bernoulli", max_steps=30), *world(200, 2))
    fresh, labels = world(800, 3)
    gap = calibrator.predict(fresh).confidence.mean() - fresh.correct(labels).double().mean()
    assert abs(float(gap)) < 0.05


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


def rows_by_class(made: Structure, seen: Features) -> Rows:
    return Rows(rows_of(made, seen).blocks, {"class": seen.label})


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
    features, labels = world(160, 4)
    inputs, X = learn_evidence(features, labels, None, True, 0)
    correct = features.correct(labels).double()
    seen, columns = inputs.view_of(features, X)
    made = structure("sum", seen.widths, 3, kernel="linear", confidence=False)
    assert made.terms == ("constant", "log-odds", "one", "two")
    k = made.covariance + Index("class", 3, rank=1)
    theta = {name: torch.as_tensor(value) for name, value in PRIOR.items()}
    posterior = laplace(k, theta, rows_by_class(made, seen), correct, columns[:, 1])
    w, S = newton(X, features.label, correct)
    new, columns = inputs.view(world(60, 5)[0])
    mean, variance = posterior(rows_by_class(made, new))
    Z = np.hstack([*(x.numpy() for x in new.layers.values()), np.eye(3)[new.label.numpy()]])
    np.testing.assert_allclose(columns[:, 1] + mean, Z @ w, rtol=0, atol=1e-6)
    np.testing.assert_allclose(variance, np.einsum("ij,jk,ik->i", Z, S, Z), rtol=0, atol=1e-6)


def test_the_constrained_model_is_the_same_where_no_constraint_binds() -> None:
    """`fit_monotone`, which the default is made of, on data whose free optimum has no negative weight."""
    features, labels = world(400, 6)
    _, X = learn_evidence(features, labels, None, True, 0)
    correct = features.correct(labels).double()
    w, _ = newton(X, features.label, correct)
    free = X.clone()
    for j in range(2, 5):  # turn a column whose weight would be negative
        free[:, j] = X[:, j] * (1.0 if w[j] >= 0 else -1.0)
    w, _ = newton(free, features.label, correct)
    assert (w[1:5] > 1e-3).all()
    ours = fit_monotone(free, features.label, correct, torch.ones_like(correct), 3, CLASS_SD)
    np.testing.assert_allclose(ours.weights.numpy(), w[:5], rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.offsets.numpy(), w[5:], rtol=0, atol=1e-6)


def test_hyperparameters_of_the_linear_gp_can_be_learned() -> None:
    features, labels = world(160, 7)
    linear = SALGP(inputs="evidence", kernel="linear", likelihood="bernoulli", inference="exact")
    calibrator = fit(linear, features, labels)
    fresh, truth = world(500, 8)
    gap = calibrator.predict(fresh).confidence.mean() - fresh.correct(truth).double().mean()
    assert abs(float(gap)) < 0.06


def test_a_linear_kernel_on_evidence_also_regresses_residuals() -> None:
    features, labels = world(160, 9)
    calibrator = fit(SALGP(inputs="evidence", kernel="linear"), features, labels)
    p = calibrator.predict(features)
    assert p.layers is not None
    torch.testing.assert_close(
        (features.confidence + p.layers.mean.sum(dim=1)).clamp(1e-6, 1 - 1e-6), p.confidence
    )
