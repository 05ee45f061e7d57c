"""Base kernels and composition: against GPyTorch and scikit-learn, gradients, groups, distances."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from references import gpytorch

from salgp.gp.covariance import ARD, Covariance, Index, Linear, Product, Same, Stationary, Sum, Theta, gaps
from salgp.gp.fitting import Observations, Settings, fit_gp
from salgp.gp.kernels import KERNELS, Gaps, Rows, squared_distance, stationary
from salgp.gp.optimise import Scale, started

G = torch.Generator().manual_seed(0)
X = torch.randn(7, 3, generator=G, dtype=torch.float64)
Y = torch.randn(5, 3, generator=G, dtype=torch.float64)
LAYER = torch.tensor([0, 1, 2, 0, 1, 2, -1])


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def rows(x: torch.Tensor = X) -> Rows:
    return Rows({"x": x, "t": x[:, :1]}, {"layer": LAYER[: len(x)], "class": (LAYER[: len(x)] + 1) % 2})


def theirs(kernel: str, lengthscale: torch.Tensor) -> gpytorch.kernels.Kernel:
    made = (
        gpytorch.kernels.RBFKernel()
        if kernel == "rbf"
        else gpytorch.kernels.MaternKernel(nu={"12": 0.5, "32": 1.5, "52": 2.5}[kernel[-2:]])
    )
    made = made.double()
    made.lengthscale = lengthscale
    return made


@pytest.mark.parametrize("kernel", KERNELS)
def test_base_kernels_match_gpytorch(kernel: str) -> None:
    theta = {"x.log_lengthscale": scalar(0.3), "x.log_variance": scalar(-0.7)}
    k = Stationary("x", kernel)
    expected = scalar(-0.7).exp() * theirs(kernel, scalar(0.3).exp())(X, Y).to_dense().detach()
    torch.testing.assert_close(k(theta, gaps(rows(X), rows(Y), k)), expected, rtol=1e-9, atol=1e-12)


def test_ard_matches_gpytorch() -> None:
    lengthscales = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    expected = gpytorch.kernels.RBFKernel(ard_num_dims=3).double()
    expected.lengthscale = lengthscales
    k = ARD("x", 3)
    K = k(
        {"x.log_lengthscales": lengthscales.log(), "x.log_variance": scalar(0.4)}, gaps(rows(X), rows(Y), k)
    )
    torch.testing.assert_close(
        K, scalar(0.4).exp() * expected(X, Y).to_dense().detach(), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_by_one_lengthscale(kernel: str) -> None:
    squared = torch.cdist(X, Y).square()
    assert torch.autograd.gradcheck(
        lambda log_l: stationary(kernel, squared, log_l), scalar(0.2).requires_grad_(True)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_by_a_lengthscale_per_row(kernel: str) -> None:
    squared = torch.cdist(X, Y).square()
    log_l = torch.linspace(-0.5, 0.5, 7, dtype=torch.float64)[:, None].requires_grad_(True)
    assert torch.autograd.gradcheck(lambda log_l: stationary(kernel, squared, log_l), log_l)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_is_finite_at_zero_distance(kernel: str) -> None:
    log_l = scalar(0.0).requires_grad_(True)
    (gradient,) = torch.autograd.grad(
        stationary(kernel, torch.zeros(3, 3, dtype=torch.float64), log_l).sum(), log_l
    )
    assert float(gradient) == 0.0


COVARIANCES: list[Covariance] = [
    Stationary("x"),
    Stationary("x", per="layer", n_groups=3),
    Stationary("x") + Stationary("t", "rbf"),
    Stationary("x", unit=True) * Index("layer", 3, 2),
    Stationary("x") + Product((Same("layer"), Stationary("x", "matern32", "local"))),
    Index("layer", 3) + Stationary("t", "matern12"),
    ARD("x", 3) + Index("layer", 3, 1),
    Linear("x") + Linear("t") + Product((Same("layer"), Stationary("t", "rbf", "own"))),
]


@pytest.mark.parametrize("k", COVARIANCES, ids=lambda k: type(k).__name__)
def test_gradients_by_every_parameter(k: Covariance) -> None:
    parameters = k.parameters(Scale({"x": 2.0, "t": 1.0}, 0.5))
    compared = gaps(rows(), rows(), k)
    starts = tuple(
        (p.start + 0.1 * torch.arange(p.start.numel()).reshape(p.start.shape)).requires_grad_(True)
        for p in parameters
    )
    assert torch.autograd.gradcheck(
        lambda *values: k({p.name: v for p, v in zip(parameters, values, strict=True)}, compared), starts
    )


@pytest.mark.parametrize("k", COVARIANCES, ids=lambda k: type(k).__name__)
def test_starting_points_are_inside_their_bounds_and_sum_to_the_target_variance(k: Covariance) -> None:
    parameters = k.parameters(Scale({"x": 2.0, "t": 1.0}, 0.5))
    assert len({p.name for p in parameters}) == len(parameters)
    assert all(bool(((p.start > p.lower) & (p.start < p.upper)).all()) for p in parameters)
    prior = k({p.name: p.start for p in parameters}, gaps(rows()[:6], rows()[:6], k)).diagonal().mean()
    assert 0.1 < float(prior) < 2.5


@pytest.mark.parametrize("k", COVARIANCES, ids=lambda k: type(k).__name__)
def test_variances_are_the_diagonal(k: Covariance) -> None:
    theta = {p.name: p.start for p in k.parameters(Scale({"x": 2.0, "t": 1.0}, 0.5))}
    torch.testing.assert_close(k.variance(theta, rows()), k.between(theta, rows(), rows()).diagonal())


def test_sum_and_product_compose() -> None:
    a, b, c = Stationary("x"), Stationary("t"), Same("layer")
    assert (a + b + c) == Sum((a, b, c))
    theta = {p.name: p.start for p in (a + b).parameters(Scale({"x": 2.0, "t": 1.0}, 0.5))}
    compared = gaps(rows(), rows(), a + b)
    torch.testing.assert_close((a * b)(theta, compared), a(theta, compared) * b(theta, compared))
    torch.testing.assert_close(
        (a + b * c)(theta, compared), a(theta, compared) + b(theta, compared) * c(theta, compared)
    )


@dataclass(frozen=True)
class Watched(Same):
    """Ones; notes how many of the matrices given before are still there."""

    given: ClassVar[list[weakref.ref[torch.Tensor]]] = []
    alive: ClassVar[list[int]] = []

    def __call__(self, theta: Theta, gaps: Gaps) -> torch.Tensor:
        self.alive.append(sum(ref() is not None for ref in self.given))
        made = torch.ones(3, 3)
        self.given.append(weakref.ref(made))
        return made


def test_terms_and_factors_are_not_held_all_at_once() -> None:
    """Of thousands of rows each is hundreds of megabytes."""
    for whole in (Sum((Watched("layer"),) * 8), Product((Watched("layer"),) * 8)):
        Watched.given.clear()
        Watched.alive.clear()
        whole({}, gaps(rows(), rows(), Same("layer")))
        assert max(Watched.alive) <= 2


def test_rows_without_a_group_share_nothing_with_it() -> None:
    compared = gaps(rows(), rows(), Stationary("x"))
    same = Same("layer")({}, compared)
    assert bool((same[-1] == 0).all())
    assert bool((same[:, -1] == 0).all())
    theta = {"layer.log_shared": scalar(0.0), "layer.log_own": torch.zeros(3, dtype=torch.float64)}
    for keep in (True, False):  # what all layers share stays, unless it is asked to go
        index = Index("layer", 3, keep_shared=keep)
        B = index(theta, compared)
        assert bool((B[-1] == float(keep)).all())
        assert bool((B[:, -1] == float(keep)).all())
        assert B[0, :3].tolist() == [2.0, 1.0, 1.0]
        assert index.shares("layer") is keep
    assert not Index("layer", 3, rank=1).shares("layer")
    assert not (Stationary("x") * Same("layer")).shares("layer")
    assert (Stationary("x") + Same("layer")).shares("layer")
    per = Stationary("x", per="layer", n_groups=3)
    K = per(
        {
            "x.log_lengthscale": torch.zeros(3, dtype=torch.float64),
            "x.log_variance": torch.zeros(3, dtype=torch.float64),
        },
        compared,
    )
    assert bool((K[-1] == 0).all())


def test_ungrouped_reaches_groups_nested_in_it() -> None:
    some = Rows({"x": X}, {"layer": LAYER, "layer/class": LAYER, "class": LAYER})
    loose = some.ungrouped("layer")
    assert loose.groups["layer"].tolist() == loose.groups["layer/class"].tolist() == [-1] * 7
    assert loose.groups["class"].tolist() == LAYER.tolist()
    assert not Same("layer/class").shares("layer")
    assert Same("class").shares("layer")


def test_linear_kernel_is_the_inner_product() -> None:
    k = Linear("x")
    K = k({"x.log_variance": scalar(0.3)}, gaps(rows(X), rows(Y), k))
    torch.testing.assert_close(K, scalar(0.3).exp() * X @ Y.T)


def test_two_terms_with_the_same_parameters_are_refused() -> None:
    """They used to end in a broadcast error of SciPy."""
    y = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = Observations(rows(), y)
    with pytest.raises(ValueError, match=r"two terms of the covariance have a parameter called 'x.log_len"):
        fit_gp(Stationary("x") + Stationary("x", "rbf"), seen, Settings())
    k = Stationary("x") + Stationary("x", "rbf", "slow")
    assert len(started(k.parameters(Scale({"x": 1.0}, 1.0)))) == 4


def test_distances_survive_a_large_common_offset() -> None:
    k = Stationary("x")
    near = gaps(rows(X), rows(Y), k).squared["x"]
    far = gaps(rows(X + 1e6), rows(Y + 1e6), k).squared["x"]
    torch.testing.assert_close(near, torch.cdist(X, Y).square(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(far, near, rtol=1e-6, atol=1e-6)


def test_distances_of_half_precision_features_are_double() -> None:
    k = Stationary("x")
    half = rows(X.half())
    assert gaps(half, half, k).squared["x"].dtype == torch.float64
    assert bool((gaps(half, half, k).squared["x"].diagonal() == 0).all())


def test_rows_index_flatten_concatenate() -> None:
    stacked = Rows(
        {"x": torch.arange(12.0).reshape(2, 3, 2)}, {"layer": torch.tensor([[0, 1, 2], [0, 1, 2]])}
    )
    flat = stacked.flatten()
    assert len(flat) == 6
    assert flat[torch.tensor([4])].groups["layer"].tolist() == [1]
    whole = Rows.concatenate([flat[:2], flat[2:]])
    assert torch.equal(whole.blocks["x"], flat.blocks["x"])
    assert torch.equal(whole.groups["layer"], flat.groups["layer"])


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'cosine'; choose from rbf, matern12"):
        Stationary("x", "cosine")


@pytest.mark.parametrize("n", [1, 4])
def test_distances_whatever_the_layout_in_memory(n: int) -> None:
    """Rows that are columns of another matrix, and one row that stands for many."""
    g = torch.Generator().manual_seed(0)
    b = torch.randn(2, 5, 3, generator=g, dtype=torch.float64)
    turned = torch.randn(2, 3, n, generator=g, dtype=torch.float64).mT
    torch.testing.assert_close(squared_distance(turned, b), torch.cdist(turned, b).square())
    repeated = torch.randn(2, 1, 3, generator=g, dtype=torch.float64).expand(2, n, 3)
    found = squared_distance(repeated, b).expand(2, n, 5)
    torch.testing.assert_close(found, torch.cdist(repeated, b).square())


@pytest.mark.parametrize("name", list(KERNELS))
def test_gradients_by_the_inputs_flow_through_a_kernel(name: str) -> None:
    squared = torch.linspace(0.1, 3.0, 7, dtype=torch.float64).requires_grad_()
    scale = torch.tensor(0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: stationary(name, x, scale, scale), (squared,))
    expected = stationary(name, squared.detach().clone(), scale, scale)
    torch.testing.assert_close(stationary(name, squared, scale, scale).detach(), expected)
