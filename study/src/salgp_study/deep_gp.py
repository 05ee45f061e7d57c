"""A doubly stochastic deep Gaussian process on the softmax residual: the comparator the layered models argue
against.

All layers' features and the confidence, standardised, are one long input. A first sparse variational layer
maps it to a few hidden functions (with a principal-component mean), a second maps those to the residual ``r =
correct - s``. Both are GPyTorch's; the hidden layer is sampled with the same few normal draws for every row,
so predictions do not depend on the order or number of rows. Reference: Salimbeni and Deisenroth, Doubly
stochastic variational inference for deep Gaussian processes, NeurIPS 2017. Needs GPyTorch.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

from salgp.calibrators import register
from salgp.calibrators.base import Calibrator
from salgp.extras import require
from salgp.features import Features
from salgp.prediction import Prediction

__all__ = ["DeepGPCalibrator"]

PREDICT_DRAWS = 32
"""Hidden samples averaged by `predict`."""


@register
class DeepGPCalibrator(Calibrator):
    """Two-layer deep Gaussian process regression of the softmax residual on all layers at once.

    The confidence is ``s + mean``; its standard deviation is that of the latent residual (hidden and output
    variance, without observation noise).

    Args:
        n_hidden: number of hidden functions.
        n_inducing: inducing points per layer.
        steps: Adam steps.
        lr: Adam step size.
        batch_size: rows per step; all of them where there are fewer.
        draws: hidden samples per step.
        seed: of the draws and batches.

    Attributes:
        state_: tensors of both layers and the noise; the layers are rebuilt from it.
        history_: evidence bound per sample at every step.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> f = Features(
        ...     torch.randn(40, 3, generator=generator), {"a": torch.randn(40, 2, generator=generator)}
        ... )
        >>> p = DeepGPCalibrator(steps=5).fit(f, torch.arange(40) % 3).predict(f)
        >>> p.std.shape
        torch.Size([40])
    """

    name: ClassVar[str] = "deep-gp"
    gives_confidence_only: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = True

    def __init__(
        self,
        n_hidden: int = 2,
        n_inducing: int = 32,
        steps: int = 300,
        lr: float = 0.02,
        batch_size: int = 1024,
        draws: int = 4,
        seed: int = 0,
    ) -> None:
        self.n_hidden = n_hidden
        self.n_inducing = n_inducing
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.draws = draws
        self.seed = seed

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        _require_gpytorch()
        X = _inputs(features)
        self.shift_, self.scale_ = X.mean(dim=0).cpu(), _spread(X).cpu()
        X = self._standardised(features)
        inducing = _inducing_rows(X, features.confidence, self.n_inducing)
        projection = _principal_directions(X, min(self.n_hidden, X.shape[1]))
        model = _build(inducing, projection)
        with torch.enable_grad():
            self.history_ = self._train(model, X, features.residual(labels).double())
        self.state_ = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}

    def _train(self, model: Any, X: Tensor, residual: Tensor) -> list[float]:
        """Adam on the evidence bound; returns its value per sample at every step."""
        generator = torch.Generator().manual_seed(self.seed)
        optimiser = torch.optim.Adam(model.parameters(), lr=self.lr)
        history = []
        for _ in range(self.steps):
            rows: Any = slice(None)
            if len(X) > self.batch_size:
                rows = torch.randperm(len(X), generator=generator)[: self.batch_size].to(X.device)
            noise = torch.randn(self.draws, model.n_hidden, generator=generator, dtype=X.dtype).to(X.device)
            optimiser.zero_grad()
            bound = _evidence_bound(model, X[rows], residual[rows], noise, len(X))
            (-bound).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            history.append(float(bound.detach()))
        return history

    def _predict(self, features: Features) -> Prediction:
        _require_gpytorch()
        X = self._standardised(features)
        model = _build(
            self.state_["hidden.variational_strategy.inducing_points"][0].to(X),
            self.state_["hidden.mean_module.projection"].to(X),
        )
        model.load_state_dict({name: x.to(X.device) for name, x in self.state_.items()})
        noise = torch.randn(
            PREDICT_DRAWS, model.n_hidden, generator=torch.Generator().manual_seed(self.seed), dtype=X.dtype
        ).to(X.device)
        parts = [_moments(model.eval(), x, noise) for x in torch.split(X, self.batch_size) if len(x)]
        mean, std = (torch.cat([p[i] for p in parts]) if parts else X.new_zeros(0) for i in range(2))
        dtype = torch.promote_types(features.logits.dtype, torch.float32)
        confidence = (features.confidence + mean).to(dtype)
        return Prediction.from_confidence(
            features, confidence, std.to(dtype), temperature=self.rest_temperature_
        )

    def _standardised(self, features: Features) -> Tensor:
        X = _inputs(features)
        return (X - self.shift_.to(X)) / self.scale_.to(X)


def _require_gpytorch() -> None:
    require("gpytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own, on import
        import gpytorch  # noqa: F401


def _inputs(features: Features) -> Tensor:
    """All layers and the confidence side by side, ``(n, sum d_l + 1)``."""
    return torch.cat(
        [*(x.double() for x in features.layers.values()), features.confidence.double()[:, None]], dim=1
    )


def _spread(X: Tensor) -> Tensor:
    """Standard deviation of each column, 1 where it is constant."""
    std = X.std(dim=0, correction=0)
    return torch.where(std > 1e-12 * X.abs().amax(dim=0), std, torch.ones_like(std)).clamp_min(1e-12)


def _inducing_rows(X: Tensor, confidence: Tensor, m: int) -> Tensor:
    """Distinct rows, evenly spread over the order of the confidence."""
    rows = torch.unique(torch.cat([confidence.to(X)[:, None], X], dim=1), dim=0)[:, 1:]
    return rows[
        torch.linspace(0, len(rows) - 1, min(m, len(rows)), device=X.device).round().long()
    ].contiguous()


def _principal_directions(X: Tensor, k: int) -> Tensor:
    """``(d, k)`` leading directions, each with its largest entry positive, scaled to unit output variance."""
    _, S, Vh = torch.linalg.svd(X, full_matrices=False)
    k = min(k, len(S))
    V = Vh[:k].T
    sign = torch.sign(V.gather(0, V.abs().argmax(dim=0, keepdim=True)))
    return V * torch.where(sign == 0, 1.0, sign) / (S[:k] / math.sqrt(len(X))).clamp_min(1e-6)


def _build(inducing: Tensor, projection: Tensor) -> Any:
    """Both layers and the noise as one module, in double precision and without a single random number."""
    from gpytorch.distributions import MultivariateNormal
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.means import ConstantMean, Mean
    from gpytorch.models import ApproximateGP
    from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

    class Projection(Mean):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("projection", projection)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("kid,dk->ki", x, self.projection)  # one direction per hidden function

    class Layer(ApproximateGP):  # type: ignore[misc]
        def __init__(
            self, points: Tensor, mean: Any, batch: torch.Size, lengthscale: float, scale: float
        ) -> None:
            q = CholeskyVariationalDistribution(points.shape[-2], batch_shape=batch)
            super().__init__(
                VariationalStrategy(self, points, q, learn_inducing_locations=True, jitter_val=1e-5)
            )
            self.mean_module = mean
            self.covar_module = ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch)
            self.covar_module.base_kernel.lengthscale = lengthscale
            self.variational_strategy.variational_params_initialized.fill_(1)
            q.chol_variational_covar.data.mul_(scale)

        def forward(self, x: Tensor) -> MultivariateNormal:
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class DeepGP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            k = projection.shape[1]
            self.n_hidden = k
            self.hidden = Layer(
                inducing.expand(k, -1, -1).clone(),
                Projection(),
                torch.Size([k]),
                math.sqrt(inducing.shape[1]),
                1e-2,
            )
            self.output = Layer(inducing @ projection, ConstantMean(), torch.Size(), 1.0, 1.0)
            self.log_noise = torch.nn.Parameter(torch.tensor(-2.0))

    return DeepGP().to(inducing)


def _output(model: Any, X: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the output for each hidden draw, ``(draws, n)``."""
    hidden = model.hidden(X)  # (k, n)
    h = hidden.mean + hidden.variance.sqrt() * noise[:, :, None]  # (draws, k, n)
    out = model.output(h.transpose(-1, -2))
    return out.mean, out.variance


def _evidence_bound(model: Any, X: Tensor, residual: Tensor, noise: Tensor, n: int) -> Tensor:
    """Evidence lower bound per sample, with the expected Gaussian log-likelihood in closed form."""
    mean, variance = _output(model, X, noise)
    precision = torch.exp(-model.log_noise)
    fit = -0.5 * (model.log_noise + math.log(2 * math.pi) + precision * ((residual - mean) ** 2 + variance))
    kl = (
        model.hidden.variational_strategy.kl_divergence().sum()
        + model.output.variational_strategy.kl_divergence().sum()
    )
    bound: Tensor = fit.mean() - kl / n
    return bound


def _moments(model: Any, X: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the residual over the hidden draws."""
    mean, variance = _output(model, X, noise)
    return mean.mean(dim=0), (variance.mean(dim=0) + mean.var(dim=0, correction=0)).sqrt()
