"""Maximisation with bounds: known optima, restarts, honest outcomes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from salgp.gp import optimise
from salgp.gp.linalg import NotPositiveDefiniteError
from salgp.gp.optimise import NotConvergedWarning, Parameter, maximise, restarted, warn_unless_converged

Theta = Mapping[str, Tensor]


def parameter(name: str, start: float | list[float], lower: float = -5.0, upper: float = 5.0) -> Parameter:
    return Parameter(name, torch.tensor(start, dtype=torch.float64), lower, upper)


def rosenbrock(theta: Theta) -> Tensor:
    return -((1 - theta["x"]) ** 2 + 100 * (theta["y"] - theta["x"] ** 2) ** 2)


def two_hills(theta: Theta) -> Tensor:
    """A low hill at -2, a high one at 2."""
    x = theta["x"]
    return torch.exp(-((x + 2) ** 2)) + 3.0 * torch.exp(-((x - 2) ** 2))


def test_lbfgs_finds_the_known_optimum() -> None:
    fit = maximise(rosenbrock, [parameter("x", -1.2), parameter("y", 1.0)], tolerance=1e-14)
    assert fit.converged
    assert fit.reason
    assert float(fit.theta["x"]) == pytest.approx(1.0, abs=1e-3)
    assert fit.value == pytest.approx(max(fit.history))


def test_arrays_keep_their_shape_and_bounds_hold() -> None:
    target = torch.tensor([[1.0, 9.0], [-9.0, 2.0]], dtype=torch.float64)
    fit = maximise(
        lambda theta: -(theta["W"] - target).square().sum(), [parameter("W", [[0.0, 0.0], [0.0, 0.0]])]
    )
    torch.testing.assert_close(fit.theta["W"], target.clamp(-5, 5), rtol=1e-4, atol=1e-4)
    assert fit.converged


def test_start_outside_its_bounds_is_moved_inside() -> None:
    fit = maximise(lambda theta: -(theta["x"] ** 2), [parameter("x", 50.0)])
    assert float(fit.theta["x"]) == pytest.approx(0.0, abs=1e-4)


def test_too_few_steps_are_reported() -> None:
    fit = maximise(rosenbrock, [parameter("x", -1.2), parameter("y", 1.0)], max_steps=3)
    assert not fit.converged
    assert "LIMIT" in fit.reason.upper()


def test_adam_reaches_the_optimum_and_says_what_it_did() -> None:
    fit = maximise(
        lambda theta: -((theta["x"] - 1.0) ** 2),
        [parameter("x", 0.0)],
        optimizer="adam",
        max_steps=300,
        learning_rate=0.05,
    )
    assert float(fit.theta["x"]) == pytest.approx(1.0, abs=1e-2)
    assert fit.converged
    assert fit.reason == "ran its 300 steps"
    short = maximise(
        lambda theta: -((theta["x"] - 4.0) ** 2), [parameter("x", 0.0)], optimizer="adam", max_steps=50
    )
    assert not short.converged
    assert short.reason == "ran its 50 steps and was still improving"
    assert len(short.history) == 50


def test_adam_is_torchs_own() -> None:
    x = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    step = torch.optim.Adam([x], lr=5e-3)
    for _ in range(9):
        step.zero_grad()
        ((x - 1.0) ** 2).backward()
        step.step()
    fit = maximise(
        lambda theta: -((theta["x"] - 1.0) ** 2), [parameter("x", 0.0)], optimizer="adam", max_steps=10
    )
    assert float(fit.theta["x"]) == pytest.approx(float(x.detach()), rel=1e-12)


def test_restarts_keep_the_best_objective() -> None:
    alone = maximise(two_hills, [parameter("x", -2.2)])
    assert float(alone.theta["x"]) == pytest.approx(-2.0, abs=0.01)
    best = maximise(two_hills, [parameter("x", -2.2)], restarts=12, seed=1)
    assert float(best.theta["x"]) == pytest.approx(2.0, abs=0.01)
    assert best.value > alone.value


def test_restarts_depend_on_the_seed_only() -> None:
    runs = [[p.start for (p,) in restarted([parameter("x", -2.2)], 3, seed)] for seed in (7, 7, 8)]
    assert runs[0][0] == -2.2
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_point_without_a_value_is_stepped_around() -> None:
    def objective(theta: Theta) -> Tensor:
        if float(theta["x"].detach()) > 3.0:
            raise NotPositiveDefiniteError("too far")
        return theta["x"]

    fit = maximise(objective, [parameter("x", 0.0)])
    assert np.isfinite(fit.value)
    assert 0.0 < float(fit.theta["x"]) <= 3.0


def test_no_value_anywhere_is_no_convergence() -> None:
    def objective(theta: Theta) -> Tensor:
        raise NotPositiveDefiniteError("nowhere")

    fit = maximise(objective, [parameter("x", 0.0)])
    assert not fit.converged
    assert "no starting point" in fit.reason


def test_gradients_that_are_not_needed_are_zero() -> None:
    fit = maximise(lambda theta: -(theta["x"] ** 2), [parameter("x", 1.0), parameter("unused", 0.5)])
    assert float(fit.theta["unused"]) == 0.5


def test_works_inside_no_grad() -> None:
    with torch.no_grad():
        assert float(
            maximise(lambda theta: -((theta["x"] - 2.0) ** 2), [parameter("x", 0.0)]).theta["x"]
        ) == pytest.approx(2.0, abs=1e-4)


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'; choose 'lbfgs' or 'adam'"):
        maximise(two_hills, [parameter("x", 0.0)], optimizer="sgd")


def test_a_search_that_did_not_settle_says_so() -> None:
    from scipy.optimize import minimize, rosen

    short = minimize(rosen, [-1.2, 1.0, 3.0], method="L-BFGS-B", options={"maxiter": 2})
    with pytest.warns(NotConvergedWarning, match="the valley did not converge"):
        warn_unless_converged(short, "the valley")
    warn_unless_converged(minimize(rosen, [-1.2, 1.0, 3.0], method="L-BFGS-B"), "the valley")


def test_parameters_on_their_bounds_are_named() -> None:
    fit = maximise(lambda t: t["up"] - t["inside"] ** 2, [parameter("up", 0.0), parameter("inside", 1.0)])
    assert fit.at_bounds == ("up",)


def test_adam_moves_positive_parameters_as_gpytorch_does() -> None:
    """Fifty steps on ``softplus`` from 0, against torch's own Adam on the raw number."""
    raw = torch.zeros((), dtype=torch.float64, requires_grad=True)
    step = torch.optim.Adam([raw], lr=0.05)
    for _ in range(50):
        step.zero_grad()
        (torch.nn.functional.softplus(raw) - 3.0).square().backward()
        step.step()
    start = Parameter("a.log_lengthscale", torch.tensor(2.0).double().log().log(), -9.0, 9.0)
    fit = maximise(
        lambda t: -((t["a.log_lengthscale"].exp() - 3.0) ** 2),
        [start],
        optimizer="adam",
        max_steps=51,
        learning_rate=0.05,
    )
    expected = torch.nn.functional.softplus(raw.detach()).log()
    torch.testing.assert_close(fit.theta["a.log_lengthscale"], expected)


def test_a_search_that_can_see_no_difference_any_more_has_settled() -> None:
    from scipy.optimize import OptimizeResult

    ended = {"success": False, "message": "ABNORMAL", "fun": -9.0}
    warn_unless_converged(OptimizeResult(**ended, jac=np.array([0.019, -0.002])), "flat")
    for steep in ({"jac": np.array([0.0, -0.021])}, {}):
        with pytest.warns(NotConvergedWarning, match="steep did not converge: ABNORMAL"):
            warn_unless_converged(OptimizeResult(**ended, **steep), "steep")


def test_the_reason_speaks_of_precision_only_where_that_ended_the_search() -> None:
    fit = maximise(two_hills, [parameter("x", 0.0)])
    assert fit.converged
    assert "precision" not in fit.reason


@pytest.mark.parametrize(
    ("gradient", "x", "flat"),
    [
        ([0.5], [2.0], True),  # uphill leads out of the bounds
        ([0.5], [1.0], False),
        ([-0.5], [-2.0], True),
        ([-0.5], [2.0], False),
        ([0.0039, 0.0], [0.0, 0.0], True),  # 0.2 % of 1 + |value| = 2
        ([0.0041, 0.0], [0.0, 0.0], False),
        ([], [], True),
    ],
)
def test_precision_is_reached_where_no_free_step_gains(
    gradient: list[float], x: list[float], flat: bool
) -> None:
    ends = np.full(len(x), -2.0), np.full(len(x), 2.0)
    assert optimise._at_precision(np.array(gradient), np.array(x), *ends, -1.0) is flat
    assert not optimise._at_precision(np.array(gradient), np.array(x), *ends, float("nan"))
