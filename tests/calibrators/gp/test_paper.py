"""`SALGP.paper` against an independent dense NumPy computation of the paper's formulas, and its readings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample

from salgp.calibrators.gp.salgp import PAPER, RECIPES, SALGP, ResidualGP
from salgp.features import Features
from salgp.gp.optimise import AtBoundWarning, NotConvergedWarning

FEATURES, LABELS = sample(30)
NEW, _ = sample(9, seed=1)
L = 3
Array = np.ndarray


def fit(model: str, **changes: Any) -> SALGP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return SALGP.paper(model, max_steps=6, **changes).fit(FEATURES, LABELS)


def matern(a: Array, b: Array, log_lengthscale: float, log_variance: float = 0.0) -> Array:
    r = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1)) / np.exp(log_lengthscale)
    t = np.sqrt(5.0) * r
    return np.exp(log_variance) * (1 + t + t**2 / 3) * np.exp(-t)


def stacked(features: Features) -> tuple[Array, Array, Array]:
    """Padded features, confidence and layer index of every row, sample by sample."""
    width = max(features.widths.values())
    f, s, layer = [], [], []
    for i in range(len(features)):
        for index, x in enumerate(features.layers.values()):
            f.append(np.pad(x[i].double().numpy(), (0, width - x.shape[1])))
            s.append([float(features.probs[i].max())])
            layer.append(index)
    return np.array(f), np.array(s), np.array(layer)


def theta_of(calibrator: SALGP) -> dict[str, Array]:
    return {k: v.numpy() for k, v in calibrator.fitted_.posterior.theta.items()}


Formula = Callable[[dict[str, Array], tuple[Array, Array, Array], tuple[Array, Array, Array]], Array]


def ml(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """``k(f, f') + k(s, s') + a + [l = l'] b_l``; layer -1 has no ``b``."""
    K = matern(a[0], b[0], th["features.log_lengthscale"], th["features.log_variance"])
    K = K + matern(a[1], b[1], th["confidence.log_lengthscale"], th["confidence.log_variance"])
    own = np.append(np.exp(th["layer.log_own"]), 0.0)
    return K + np.exp(th["layer.log_shared"]) + (a[2][:, None] == b[2]) * own[a[2]][:, None]


def hl(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    x, y = np.hstack(a[:2]), np.hstack(b[:2])
    same = (a[2][:, None] == b[2]) & (a[2] >= 0)[:, None]
    local = matern(x, y, th["local.log_lengthscale"], th["local.log_variance"])
    return matern(x, y, th["global.log_lengthscale"], th["global.log_variance"]) + same * local


def reduced_icm(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """``alpha k + [l = l'] beta_l k``."""
    k = matern(np.hstack(a[:2]), np.hstack(b[:2]), th["latent0.log_lengthscale"])
    beta = np.append(np.exp(th["layer0.log_own"]), 0.0)
    return np.exp(th["layer0.log_shared"]) * k + (a[2][:, None] == b[2]) * beta[a[2]][:, None] * k


def additive(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """``k([f,s]) + [l = l'] k_l([f,s])``, a lengthscale and a variance for each layer."""
    x, y = np.hstack(a[:2]), np.hstack(b[:2])
    K = matern(x, y, th["global.log_lengthscale"], th["global.log_variance"])
    for layer in range(L):
        both = (a[2] == layer)[:, None] & (b[2] == layer)
        own = th["local.log_lengthscale"][layer], th["local.log_variance"][layer]
        K = K + both * matern(x, y, *own)
    return K


def lcm(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """``sum_q k_q([f,s]) B_q[l, l']``, ``B_q = W W' + diag(v)``; one term is the ICM."""
    x, y = np.hstack(a[:2]), np.hstack(b[:2])
    K = np.zeros((len(x), len(y)))
    for q in range(sum(name.startswith("latent") for name in th)):
        W = th[f"layer{q}.W"]
        B = W @ W.T + np.diag(np.exp(th[f"layer{q}.log_own"]))
        K += matern(x, y, th[f"latent{q}.log_lengthscale"]) * B[a[2][:, None], b[2]]
    return K


def feature(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """``k(f, f')`` of one layer."""
    return matern(a[0], b[0], th["features.log_lengthscale"], th["features.log_variance"])


def rio(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """``k(f, f') + k(s, s')`` of one layer."""
    s = a[1].max(1, keepdims=True), b[1].max(1, keepdims=True)
    return feature(th, a, b) + matern(*s, th["confidence.log_lengthscale"], th["confidence.log_variance"])


def red(th: dict[str, Array], a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """Squared exponentials with a lengthscale per dimension, on the features and on the whole softmax."""
    K = np.zeros((len(a[0]), len(b[0])))
    for name, x, y in (("features", a[0], b[0]), ("softmax", a[1], b[1])):
        away = (x[:, None] - y[None]) / np.exp(th[f"{name}.log_lengthscales"])
        K += np.exp(th[f"{name}.log_variance"]) * np.exp(-0.5 * (away**2).sum(-1))
    return K


SINGLE: dict[str, Formula] = {"feature": feature, "rio": rio, "red": red}

FORMULAS: dict[str, Formula] = {
    "ml": ml,
    "hl": hl,
    "additive": additive,
    "reduced-icm": reduced_icm,
    "icm": lcm,
    "lcm": lcm,
}
SHARES_NOTHING = ("icm", "lcm")
"""Models of which a row without a layer keeps nothing: their global prediction averages the layers'."""


def dense(model: str, calibrator: SALGP) -> tuple[Array, Array, Array, Array]:
    """Global mean and variance, layer means and variances of the paper's formulas, by plain algebra."""
    formula = FORMULAS[model]
    th, train = theta_of(calibrator), stacked(FEATURES)
    y = np.repeat(FEATURES.residual(LABELS).double().numpy(), L)
    C = formula(th, train, train) + np.exp(calibrator.fitted_.log_noise) * np.eye(len(y))
    inverse = np.linalg.inv(C)
    f, s, layer = stacked(NEW)
    local = (f, s, layer)
    loose = local if model in SHARES_NOTHING else (f, s, np.full_like(layer, -1))

    def posterior(rows: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        k = formula(th, rows, train)
        return k @ inverse @ y, formula(th, rows, rows) - k @ inverse @ k.T

    mean, cov = posterior(loose)
    blocks = cov.reshape(len(NEW), L, len(NEW), L)
    variance = np.array([blocks[i, :, i, :].mean() for i in range(len(NEW))])
    layer_mean, layer_cov = posterior(local)
    return (
        mean.reshape(-1, L).mean(1),
        variance,
        layer_mean.reshape(-1, L),
        layer_cov.diagonal().reshape(-1, L),
    )


@pytest.mark.parametrize("model", FORMULAS)
def test_paper_is_the_dense_computation(model: str) -> None:
    calibrator = fit(model)
    assert calibrator.fitted_.inference == "exact"
    mean, variance, layer_mean, layer_variance = dense(model, calibrator)
    p = calibrator.predict(NEW)
    assert p.std is not None
    assert p.layers is not None
    assert p.layers.std is not None
    s = NEW.confidence.double().numpy()
    np.testing.assert_allclose(p.confidence.numpy(), np.clip(s + mean, 1e-6, 1 - 1e-6), rtol=0, atol=1e-9)
    np.testing.assert_allclose(p.std.numpy() ** 2, variance, rtol=0, atol=1e-9)
    np.testing.assert_allclose(p.layers.mean.numpy(), layer_mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(p.layers.std.numpy() ** 2, layer_variance, rtol=0, atol=1e-9)


@pytest.mark.parametrize("model", FORMULAS)
def test_inducing_rows_at_every_row_are_the_dense_computation(model: str) -> None:
    calibrator = fit(model, inference="inducing", n_inducing=L * len(FEATURES))
    assert calibrator.fitted_.inference == "inducing"
    mean, variance, layer_mean, _ = dense(model, calibrator)
    p = calibrator.predict(NEW)
    assert p.std is not None
    assert p.layers is not None
    s = NEW.confidence.double().numpy()
    np.testing.assert_allclose(p.confidence.numpy(), np.clip(s + mean, 1e-6, 1 - 1e-6), rtol=0, atol=1e-5)
    np.testing.assert_allclose(p.std.numpy() ** 2, variance, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(p.layers.mean.numpy(), layer_mean, rtol=0, atol=1e-5)


def one_layer(features: Features) -> tuple[Array, Array]:
    """Features of the middle layer, and softmax, of every sample."""
    return features.layers["layer1"].double().numpy(), features.probs.double().numpy()


@pytest.mark.parametrize("form", SINGLE)
@pytest.mark.parametrize(("inference", "atol"), [("exact", 1e-9), ("inducing", 1e-5)])
def test_single_layer_is_the_dense_computation(form: str, inference: str, atol: float) -> None:
    """Exactly, and with every row an inducing row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        made = ResidualGP.paper(form, 1, max_steps=6, inference=inference, n_inducing=len(FEATURES))
        calibrator = made.fit(FEATURES, LABELS)
    th = {k: v.numpy() for k, v in calibrator.fitted_.posterior.theta.items()}
    y = FEATURES.residual(LABELS).double().numpy()
    train, new = one_layer(FEATURES), one_layer(NEW)
    C = SINGLE[form](th, train, train) + np.exp(calibrator.fitted_.log_noise) * np.eye(len(y))
    k = SINGLE[form](th, new, train)
    mean = k @ np.linalg.solve(C, y)
    variance = (SINGLE[form](th, new, new) - k @ np.linalg.solve(C, k.T)).diagonal()
    p = calibrator.predict(NEW)
    assert p.std is not None
    s = NEW.confidence.double().numpy()
    assert calibrator.fitted_.inference == inference
    np.testing.assert_allclose(p.confidence.numpy(), np.clip(s + mean, 1e-6, 1 - 1e-6), rtol=0, atol=atol)
    np.testing.assert_allclose(p.std.numpy() ** 2, variance, rtol=0, atol=atol)
    density = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + len(y) * np.log(2 * np.pi))
    assert calibrator.fitted_.log_evidence == pytest.approx(density, rel=1e-4 if atol > 1e-6 else 1e-9)


def test_evidence_of_the_paper_is_the_log_marginal_likelihood() -> None:
    calibrator = fit("ml")
    train = stacked(FEATURES)
    y = np.repeat(FEATURES.residual(LABELS).double().numpy(), L)
    C = ml(theta_of(calibrator), train, train) + np.exp(calibrator.fitted_.log_noise) * np.eye(len(y))
    expected = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + len(y) * np.log(2 * np.pi))
    assert calibrator.fitted_.log_evidence == pytest.approx(expected, rel=1e-8)


def test_dropped_offset_is_an_option_and_another_prediction() -> None:
    kept, dropped = fit("ml"), fit("ml", shared_offset=False)
    torch.testing.assert_close(
        kept.fitted_.log_evidence, dropped.fitted_.log_evidence
    )  # the same model of the data
    th, train = theta_of(dropped), stacked(FEATURES)
    y = np.repeat(FEATURES.residual(LABELS).double().numpy(), L)
    C = ml(th, train, train) + np.exp(dropped.fitted_.log_noise) * np.eye(len(y))
    f, s, layer = stacked(NEW)
    k = ml(th, (f, s, np.full_like(layer, -1)), train) - np.exp(th["layer.log_shared"])
    mean = (k @ np.linalg.solve(C, y)).reshape(-1, L).mean(1)
    expected = np.clip(NEW.confidence.double().numpy() + mean, 1e-6, 1 - 1e-6)
    np.testing.assert_allclose(dropped.predict(NEW).confidence.numpy(), expected, rtol=0, atol=1e-7)
    assert not torch.allclose(kept.predict(NEW).confidence, dropped.predict(NEW).confidence, atol=1e-4)


@pytest.mark.parametrize("model", PAPER)
def test_every_model_of_the_paper_fits_and_predicts(model: str) -> None:
    p = fit(model).predict(NEW)
    assert bool(torch.isfinite(p.confidence).all())
    assert p.std is not None


def test_global_models_read_the_first_layer_only() -> None:
    moved = {k: x + 5.0 * (k != "layer0") for k, x in NEW.layers.items()}
    for model in ("class-agnostic-global", "class-specific-global"):
        calibrator = fit(model)
        other = calibrator.predict(Features(NEW.logits, moved)).confidence
        assert torch.equal(calibrator.predict(NEW).confidence, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_the_papers_numbers(recipe: str) -> None:
    for made in (SALGP.paper("hl", recipe), ResidualGP.paper(recipe=recipe)):
        expected = {"adam-mstar": (2000, 5e-3), "adam-plasticc": (2500, 2e-3)}.get(recipe)
        if expected:
            assert (made.max_steps, made.learning_rate) == expected
            assert made.optimizer == "adam"
        assert made.kernel == "matern52"
        assert made.n_inducing == 512


def test_paper_recipe_starts_and_steps_as_gpytorch() -> None:
    """Ten Adam steps on an exact GP: hyperparameters and evidence of GPyTorch's own training loop."""
    from references import gpytorch

    one = FEATURES.select(["layer0"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        ours = ResidualGP.paper("feature", 0, "adam-mstar", max_steps=11).fit(one, LABELS)
    x, y = one.layers["layer0"].double(), one.residual(LABELS).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()

    class Exact(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.k = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.k(x))

    model = Exact().double()
    model.train()
    step = torch.optim.Adam(model.parameters(), lr=5e-3)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for _ in range(10):
        step.zero_grad()
        (-len(y) * objective(model(x), y)).backward()
        step.step()
    theta = ours.fitted_.posterior.theta
    assert float(theta["features.log_lengthscale"].exp()) == pytest.approx(
        model.k.base_kernel.lengthscale.item(), abs=1e-4
    )
    assert float(theta["features.log_variance"].exp()) == pytest.approx(model.k.outputscale.item(), abs=1e-4)
    assert np.exp(ours.fitted_.log_noise) == pytest.approx(likelihood.noise.item(), abs=2e-4)


def test_a_noise_that_vanishes_says_so() -> None:
    """Every correct sample has the residual 1 - s exactly: without errors there is nothing but structure."""
    with pytest.warns(AtBoundWarning, match="log_noise = .*residual 1 - s exactly"):
        calibrator = SALGP.paper("class-agnostic-global").fit(FEATURES, FEATURES.label)
    assert "log_noise" in calibrator.fitted_.at_bounds


@pytest.mark.parametrize("model", PAPER)
def test_only_the_papers_settings_carry_its_name(model: str) -> None:
    own = SALGP.paper(model, recipe="adam-mstar", groups=list(SALGP.paper(model).groups))
    assert own.display_name.startswith("SAL-GP (paper")
    changes = ({"n_inducing": 256}, {"kernel": "rbf"}, {"objective": "auto"}, {"covariance": "sum"})
    assert not [c for c in changes if SALGP.paper(model, **c).display_name.startswith("SAL-GP (paper")]


@dataclass(repr=False, eq=False)
class WithMore(SALGP):
    """Somebody's own, with a setting that the paper's models do not have."""

    more: int = 3


def test_a_class_derived_with_settings_of_its_own_has_a_name() -> None:
    assert WithMore.paper("ml").display_name == "SAL-GP (paper, ml)"
    assert WithMore("hl").display_name == "layerwise GP (hl)"


def test_ml_without_the_shared_offset_is_not_the_papers() -> None:
    assert SALGP.paper("ml", shared_offset=False).display_name == "layerwise GP (ml)"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="the paper has no model 'sum'; choose from ml, hl"):
        SALGP.paper("sum")
    with pytest.raises(ValueError, match="recipe must be one of converged, adam-mstar"):
        SALGP.paper("ml", "sgd")
