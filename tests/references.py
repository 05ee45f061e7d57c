"""Independent implementations of the GP core: plain Python loops on the formulas, and GPyTorch."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from salgp.calibrators.gp.structures import Structure
from salgp.features import Features

with warnings.catch_warnings():  # its import uses a deprecated part of torch
    warnings.simplefilter("ignore")
    import gpytorch
    from gpytorch.kernels import IndexKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel

__all__ = ["GPyTorchGP", "double_loop", "gpytorch_inputs", "gpytorch_kernel", "perturbed_start"]

Theta = Mapping[str, Tensor]
Row = tuple[list[list[float]], float, list[float], int, int]
"""A row of the loops: features of each layer, confidence, softmax, layer, predicted class."""


def perturbed_start(structure: Structure, scale: object, size: float = 0.4) -> dict[str, Tensor]:
    """Distinct fixed hyperparameters: the starting points, each moved by its own amount."""
    theta, count = {}, 0
    for p in structure.covariance.parameters(scale):  # type: ignore[arg-type]
        step = torch.arange(count, count + p.start.numel(), dtype=torch.float64).reshape(p.start.shape)
        theta[p.name] = p.start + size * torch.sin(2.3 * step + 0.7)
        count += p.start.numel()
    return theta


# --- plain loops
# -------------------------------------------------------------------------------------------------


def double_loop(
    name: str,
    theta: Theta,
    features: Features,
    kernel: str,
    rank: int = 0,
    groups: Sequence[str] = (),
    stacked: bool = False,
) -> Tensor:
    """The covariance matrix of a structure, entry by entry, with Python floats."""
    rows = _rows(features, stacked)
    value = _formula(name, theta, kernel, rank, tuple(groups), features.n_classes, stacked)
    return torch.tensor([[value(a, b) for b in rows] for a in rows], dtype=torch.float64)


def _rows(features: Features, stacked: bool) -> list[Row]:
    rows = []
    for i in range(len(features)):
        layers = [x[i].double().tolist() for x in features.layers.values()]
        softmax = features.probs[i].double().tolist()
        for layer in range(len(layers)) if stacked else [0]:
            rows.append((layers, max(softmax), softmax, layer, softmax.index(max(softmax))))
    return rows


def _base(kernel: str, r: float) -> float:
    if kernel == "rbf":
        return math.exp(-r * r / 2)
    if kernel == "matern12":
        return math.exp(-r)
    if kernel == "matern32":
        return (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r)
    return (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r)


def _distance(a: Sequence[float], b: Sequence[float], scales: Sequence[float] | None = None) -> float:
    width = max(len(a), len(b))
    a, b = [*a, *[0.0] * (width - len(a))], [*b, *[0.0] * (width - len(b))]
    return math.sqrt(
        sum(
            ((x - y) / (1.0 if scales is None else scales[k])) ** 2
            for k, (x, y) in enumerate(zip(a, b, strict=True))
        )
    )


def _formula(
    name: str, theta: Theta, kernel: str, rank: int, groups: tuple[str, ...], n_classes: int, stacked: bool
) -> Callable[[Row, Row], float]:
    def exp(key: str, at: int | None = None) -> float:
        return math.exp(float(theta[key] if at is None else theta[key][at]))

    def k(prefix: str, distance: float, unit: bool = False) -> float:
        return (1.0 if unit else exp(f"{prefix}.log_variance")) * _base(
            kernel, distance / exp(f"{prefix}.log_lengthscale")
        )

    def feature(a: Row, b: Row) -> float:
        return _distance(a[0][a[3]], b[0][b[3]])

    def joint(a: Row, b: Row) -> float:
        return math.hypot(feature(a, b), a[1] - b[1])

    def concat(a: Row, b: Row) -> float:
        return math.sqrt(
            sum(_distance(x, y) ** 2 for x, y in zip(a[0], b[0], strict=True)) + (a[1] - b[1]) ** 2
        )

    def index(prefix: str, a: int, b: int, r: int) -> float:
        own = exp(f"{prefix}.log_own", a) if a == b else 0.0
        if not r:
            return exp(f"{prefix}.log_shared") + own
        W = theta[f"{prefix}.W"]
        return sum(float(W[a, q]) * float(W[b, q]) for q in range(r)) + own

    def ard(prefix: str, a: Sequence[float], b: Sequence[float]) -> float:
        scales = [math.exp(float(x)) for x in theta[f"{prefix}.log_lengthscales"]]
        return exp(f"{prefix}.log_variance") * _base("rbf", _distance(a, b, scales))

    def group(g: str, a: Row) -> tuple[int, ...]:
        return {"layer": (a[3],), "class": (a[4],), "layer/class": (a[3], a[4])}[g]

    def nested(a: Row, b: Row) -> float:
        distance = joint(a, b) if stacked else concat(a, b)
        return k("global", distance) + sum(
            k(f"local-{g.replace('/', '-')}", distance) for g in groups if group(g, a) == group(g, b)
        )

    def additive(a: Row, b: Row) -> float:
        local = 0.0
        if a[3] == b[3]:
            local = exp("local.log_variance", a[3]) * _base(
                kernel, joint(a, b) / exp("local.log_lengthscale", a[3])
            )
        return k("global", joint(a, b)) + local

    def layer_sum(a: Row, b: Row) -> float:
        names = [
            key.removesuffix(".log_variance")
            for key in theta
            if key.endswith(".log_variance") and key != "confidence.log_variance"
        ]
        return sum(k(p, _distance(x, y)) for p, x, y in zip(names, a[0], b[0], strict=True)) + k(
            "confidence", abs(a[1] - b[1])
        )

    def coregionalised(a: Row, b: Row) -> float:
        n = sum(key.endswith(".log_own") for key in theta)
        return sum(
            k(f"latent{q}", joint(a, b), unit=True) * index(f"layer{q}", a[3], b[3], max(rank, 1))
            for q in range(n)
        )

    formulas: dict[str, Callable[[Row, Row], float]] = {
        "single": lambda a, b: k("features", feature(a, b)),
        "rio": lambda a, b: k("features", feature(a, b)) + k("confidence", abs(a[1] - b[1])),
        "red": lambda a, b: ard("features", a[0][0], b[0][0]) + ard("softmax", a[2], b[2]),
        "concat": lambda a, b: k("concat", concat(a, b)),
        "sum": layer_sum,
        "ml": lambda a, b: (
            k("features", feature(a, b))
            + k("confidence", abs(a[1] - b[1]))
            + index("layer", a[3], b[3], rank)
        ),
        "hl": lambda a, b: k("global", joint(a, b)) + (k("local", joint(a, b)) if a[3] == b[3] else 0.0),
        "additive": additive,
        "icm": coregionalised,
        "lcm": coregionalised,
        "nested": nested,
    }
    return formulas[name]


# --- GPyTorch
# ----------------------------------------------------------------------------------------------------


class GPyTorchGP:
    """An exact GPyTorch GP at fixed hyperparameters, every factorisation by Cholesky in double precision."""

    def __init__(self, kernel: Kernel, x: Tensor, y: Tensor, noise: float) -> None:
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        self.likelihood.noise = noise
        self.model = _Exact(x, y, self.likelihood, kernel).double()

    def log_evidence(self) -> float:
        """Log marginal likelihood of the training targets."""
        self.model.train()
        x, y = self.model.train_inputs[0], self.model.train_targets
        with _exactly():
            return float(
                gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self.model)(self.model(x), y)
                * len(y)
            )

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the latent function at ``x``."""
        self.model.eval()
        with _exactly():
            latent = self.model(x)
            return latent.mean, latent.covariance_matrix


class _Exact(gpytorch.models.ExactGP):
    def __init__(
        self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood, kernel: Kernel
    ) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@contextlib.contextmanager
def _exactly() -> Iterator[None]:
    settings = gpytorch.settings
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        settings.fast_computations(False, False, False),
        settings.max_cholesky_size(10_000),
        settings.debug(False),
    ):
        warnings.simplefilter("ignore")  # its sparse interpolation warns once per process
        yield


def gpytorch_inputs(features: Features, stacked: bool) -> Tensor:
    """Columns: features (padded; or all layers side by side), confidence, softmax, layer, class, layer and
    class.
    """
    n, L, c = len(features), len(features.layers), features.n_classes
    s, softmax, label = (
        features.confidence.double()[:, None],
        features.probs.double(),
        features.label.double()[:, None],
    )
    if not stacked:
        return torch.cat(
            [*(x.double() for x in features.layers.values()), s, softmax, torch.zeros(n, 1), label, label],
            dim=1,
        )
    width, parts = max(features.widths.values()), []
    for layer, x in enumerate(features.layers.values()):
        padded = torch.cat([x.double(), torch.zeros(n, width - x.shape[1], dtype=torch.float64)], dim=1)
        parts.append(
            torch.cat([padded, s, softmax, torch.full_like(s, layer), label, layer * c + label], dim=1)
        )
    return torch.stack(parts, dim=1).reshape(n * L, -1)


def gpytorch_kernel(
    name: str,
    theta: Theta,
    features: Features,
    kernel: str,
    groups: Sequence[str] = (),
    stacked: bool = False,
) -> Kernel:
    """The same covariance, assembled from GPyTorch's kernels."""
    L, c = len(features.layers), features.n_classes
    width = max(features.widths.values()) if stacked else sum(features.widths.values())
    block = {
        "features": list(range(width)),
        "confidence": [width],
        "joint": list(range(width + 1)),
        "softmax": list(range(width + 1, width + 1 + c)),
    }
    column = {"layer": width + c + 1, "class": width + c + 2, "layer/class": width + c + 3}

    def base(dims: list[int], prefix: str, at: int | None = None) -> Kernel:
        found = (
            RBFKernel(active_dims=dims)
            if kernel == "rbf"
            else MaternKernel(nu={"12": 0.5, "32": 1.5, "52": 2.5}[kernel[-2:]], active_dims=dims)
        )
        raw = theta[f"{prefix}.log_lengthscale"]
        found = found.double()
        found.lengthscale = (raw if at is None else raw[at]).exp()
        return found

    def scaled(dims: list[int], prefix: str, at: int | None = None) -> Kernel:
        found, raw = ScaleKernel(base(dims, prefix, at)).double(), theta[f"{prefix}.log_variance"]
        found.outputscale = (raw if at is None else raw[at]).exp()
        return found

    def ard(dims: list[int], prefix: str) -> Kernel:
        found = ScaleKernel(RBFKernel(ard_num_dims=len(dims), active_dims=dims)).double()
        found.base_kernel.lengthscale = theta[f"{prefix}.log_lengthscales"].exp()
        found.outputscale = theta[f"{prefix}.log_variance"].exp()
        return found

    def index(group: str, W: Tensor, own: Tensor) -> Kernel:
        found = IndexKernel(num_tasks=len(W), rank=W.shape[1], active_dims=[column[group]]).double()
        found.covar_factor.data = W.clone()
        found.var = own.clamp_min(1e-30)
        return found

    def same(group: str, weight: Tensor | None = None) -> Kernel:
        size = {"layer": L, "class": c, "layer/class": L * c}[group]
        return index(
            group,
            torch.zeros(size, 1, dtype=torch.float64),
            torch.ones(size, dtype=torch.float64) if weight is None else weight,
        )

    def coregionalisation(prefix: str) -> Kernel:
        own = theta[f"{prefix}.log_own"].exp()
        W = (
            theta[f"{prefix}.W"]
            if f"{prefix}.W" in theta
            else (0.5 * theta[f"{prefix}.log_shared"]).exp().expand(L, 1)
        )
        return index("layer", W, own)

    if name == "single":
        return scaled(block["features"], "features")
    if name == "rio":
        return scaled(block["features"], "features") + scaled(block["confidence"], "confidence")
    if name == "red":
        return ard(block["features"], "features") + ard(block["softmax"], "softmax")
    if name == "concat":
        return scaled(block["joint"], "concat")
    if name == "ml":
        return (
            scaled(block["features"], "features")
            + scaled(block["confidence"], "confidence")
            + coregionalisation("layer")
        )
    if name == "hl":
        return scaled(block["joint"], "global") + scaled(block["joint"], "local") * same("layer")
    if name == "nested":
        total = scaled(block["joint"], "global")
        for g in groups:
            total = total + scaled(block["joint"], f"local-{g.replace('/', '-')}") * same(g)
        return total
    if name == "additive":
        total = scaled(block["joint"], "global")
        for layer in range(L):
            total = total + scaled(block["joint"], "local", layer) * same(
                "layer", torch.eye(L, dtype=torch.float64)[layer]
            )
        return total
    if name in ("icm", "lcm"):
        terms = [
            base(block["joint"], f"latent{q}") * coregionalisation(f"layer{q}")
            for q in range(sum(k.endswith(".log_own") for k in theta))
        ]
        return terms[0] if len(terms) == 1 else sum(terms[1:], terms[0])
    if name == "sum":
        total, start = scaled(block["confidence"], "confidence"), 0
        prefixes = [
            k.removesuffix(".log_variance")
            for k in theta
            if k.endswith(".log_variance") and k != "confidence.log_variance"
        ]
        for prefix, width_l in zip(prefixes, features.widths.values(), strict=True):
            total = total + scaled(list(range(start, start + width_l)), prefix)
            start += width_l
        return total
    raise ValueError(name)
