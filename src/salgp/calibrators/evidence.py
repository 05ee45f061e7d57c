"""Layer evidence: the log-odds of being correct from what every layer has to say, made to hold under shift.

Each layer answers two questions with the training set as reference (`salgp.evidence`): does it agree with the predicted
class, and how novel is the input to it? With both standardised on the calibration set (``A_l``, ``N_l``), and ``t`` the
log-odds of the temperature-scaled confidence, correctness is Bernoulli with log-odds

    f = a + b t + sum_l u_l g(N_l) A_l - sum_l v_l h(P_l),      b, u, v >= 0,

    P_l = min(N_l, ..., N_L),   h(P) = log(1 + softplus(P)),   g(N) = 1 / (1 + 0.3 softplus(N - 1)).

Monotone terms extrapolate sanely: more novelty never raises a confidence, more agreement never lowers it. What is new to
an early layer counts only as far as it persists through all later ones, ``P_l``: a network that has undone a change of
contrast or sharpness is not blamed for it. The agreement of a layer counts less where that layer has not seen such
input. The problem is convex in the weights.

Fitted on the calibration set together with perturbed copies of it (`Features.groups`), original samples carry most of
the weight, which keeps confidences right in domain, and errors among the copies count ``caution`` times: a shift met in
the field is rarely one of those rehearsed, and misses the network more often than they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.base import Calibrator
from salgp.calibrators.scaling import best_temperature
from salgp.evidence import NEAREST, WIDTH, Evidence, layer_evidence, make_reference
from salgp.features import Features
from salgp.gp.likelihood import sigmoid_moments
from salgp.prediction import LayerTerms, Prediction, confidence_points
from salgp.storage import storable

__all__ = ["LayerEvidence", "Scales", "explain_terms"]

LARGEST_LOG_ODDS = 4.0
"""The model's ``t`` is kept within this bound: beyond 98 %, more confidence of the network says little more."""


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Location and scale of the evidence on the original calibration samples, and the mean of each model column.

    Args:
        agreement: ``(L,)`` standard deviation of the agreement.
        novelty: ``(L,)`` median of the novelty.
        spread: ``(L,)`` median absolute deviation of the novelty, scaled to a standard deviation.
        typical: ``(2 + 2 L,)`` mean of the model's columns.
    """

    agreement: Tensor
    novelty: Tensor
    spread: Tensor
    typical: Tensor


class LayerEvidence(Calibrator):
    """Log-odds of being correct from agreement and novelty of every layer; our default under shift.

    Give it the training set as ``reference`` and perturbed copies in ``features`` (``extract(..., perturb="auto")``).
    Without a reference, the calibration set serves as one, each sample and its copies compared with the others; without
    copies, it is calibrated in domain and leans on monotonicity alone under shift.

    Args:
        k: nearest reference samples averaged over.
        width: principal directions kept per layer.
        prototypes: cluster centres per class to keep of the reference; None keeps every sample.
        clean: share of the weight given to original samples, where there are copies.
        caution: weight of an error among the copies, relative to a correct prediction.
        ridge: strength of the pull of ``u`` and ``v`` to 0 and of ``b`` to 1.
        looseness: factor on the standard deviation of the log-odds, for what the model does not know about itself.
        seed: of the prototypes.

    Attributes:
        weights_: ``(2 + 2 L,)`` weights ``a, b, u, v``.
        covariance_: ``(2 + 2 L, 2 + 2 L)`` their posterior covariance.
        relevance_: layer name -> standard deviation of its term over the calibration data, in log-odds.
        loo_confidence_: ``(n,)`` confidence of each original by the model without it and its copies (one Newton step).
        novelty_: ``(n, L)`` standardised novelty of the originals.
        temperature_: temperature of ``t``.
        reference_: the reference samples.
        scales_: standardisation of the evidence.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(300, 2, generator=g)
        >>> features = Features(3 * x, {"a": x})
        >>> labels = (x + 0.7 * torch.randn(300, 2, generator=g)).argmax(dim=1)
        >>> calibrator = LayerEvidence().fit(features[:150], labels[:150], reference=(features[150:], labels[150:]))
        >>> calibrator.predict(features[:2]).layers.names
        ('confidence', 'a')
    """

    name: ClassVar[str] = "layer-evidence"
    needs_layers: ClassVar[bool] = True
    uses_copies: ClassVar[bool] = True

    def __init__(
        self,
        k: int = NEAREST,
        width: int = WIDTH,
        prototypes: int | None = None,
        clean: float = 0.8,
        caution: float = 1.25,
        ridge: float = 0.2,
        looseness: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.k = k
        self.width = width
        self.prototypes = prototypes
        self.clean = clean
        self.caution = caution
        self.ridge = ridge
        self.looseness = looseness
        self.seed = seed

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if not 0 < self.clean <= 1 or self.caution <= 0 or self.ridge <= 0:
            raise ValueError(f"need 0 < clean <= 1, caution > 0, ridge > 0; got clean={self.clean}, caution={self.caution}, ridge={self.ridge}")
        first, original = originals(features)
        base, own = (features[first], labels[first]), None
        if reference is None:
            reference, own = base, original
        self.reference_ = make_reference(*reference, k=self.k, width=self.width, prototypes=self.prototypes, seed=self.seed)
        own = own if self.prototypes is None else None
        evidence = layer_evidence(self.reference_, features, own)
        self.temperature_ = best_temperature(base[0].logits, base[1], warn=False)[0]
        self.scales_, X = _scaled_design(features, evidence, self.temperature_, first)
        is_copy = torch.ones(len(features), dtype=torch.bool, device=X.device).index_fill(0, first, False)
        correct = features.correct(labels).double()
        weight = sample_weights(is_copy, correct, self.clean, self.caution)
        self.weights_, self.covariance_ = _fit_weights(X, correct, weight, self.ridge)
        self.loo_confidence_ = leave_group_out(X, correct, weight, self.weights_, self.covariance_, original)[first]
        self.novelty_ = standardised(evidence, self.scales_)[1][first]
        terms = self._terms(X, features)[0]
        self.relevance_ = dict(zip(features.layer_names, terms[:, 1:].std(dim=0, correction=0).tolist(), strict=True))

    def _predict(self, features: Features) -> Prediction:
        evidence = layer_evidence(self.reference_, features)
        X = design(features, evidence, self.temperature_, self.scales_)
        log_odds = X @ self.weights_.to(X)
        variance = self.looseness**2 * ((X @ self.covariance_.to(X)) * X).sum(dim=1)
        _, std = sigmoid_moments(log_odds, variance)
        half = 1.6448536269514722 * variance.sqrt()
        names = ("confidence", *features.layer_names)
        layers = LayerTerms(names, *self._terms(X, features), "log-odds", True)
        interval = (torch.sigmoid(log_odds - half), torch.sigmoid(log_odds + half))
        novelty = (-X[:, 2 + len(features.layers) :]).mean(dim=1)
        return Prediction.from_confidence(features, torch.sigmoid(log_odds), std, interval, layers=layers, novelty=novelty)

    def _chunk(self) -> int:
        return 8192

    def explain(self, features: Features, i: int) -> str:
        """Say in one line what each layer did to the confidence of sample ``i``.

        Example:
            >>> x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
            >>> f = Features(3 * x, {"a": x})
            >>> LayerEvidence().fit(f, f.label.where(torch.arange(80) % 9 > 0, 1 - f.label)).explain(f, 0)[:4]
            '0.52'
        """
        rows = [i % len(features)]
        return explain_terms(features[rows], self.predict(features[rows]))

    def standard_novelty(self, features: Features) -> Tensor:
        """Novelty of each layer, ``(n, L)``, in standard deviations of the calibration set."""
        return standardised(layer_evidence(self.reference_, self.check_input(features)), self.scales_)[1]

    def _terms(self, X: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """Log-odds added by the confidence and by each layer, and their standard deviations, ``(n, 1 + L)``."""
        L = len(features.layers)
        moved = X - self.scales_.typical.to(X)
        moved[:, :2] = X[:, :2]
        w, S = self.weights_.to(X), self.covariance_.to(X)
        picks = [[0, 1], *([2 + j, 2 + L + j] for j in range(L))]
        mean = torch.stack([moved[:, p] @ w[p] for p in picks], dim=1)
        constant = self.scales_.typical.to(X)[2:] @ w[2:]
        mean[:, 0] += constant - log_odds(features, 1.0, 20.0)
        std = torch.stack([((moved[:, p] @ S[p][:, p]) * moved[:, p]).sum(dim=1).clamp_min(0).sqrt() for p in picks], dim=1)
        return mean, std


def explain_terms(features: Features, prediction: Prediction) -> str:
    """One line for a single sample: confidence before and after, and each term in confidence points, largest first.

    Terms add up in log-odds; each is given in points by `salgp.prediction.confidence_points`.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0]]))
        >>> terms = LayerTerms(("confidence", "conv"), torch.tensor([[0.0, -1.0]]), None, "log-odds", True)
        >>> print(explain_terms(f, Prediction.from_confidence(f, torch.sigmoid(torch.tensor([1.0])), torch.tensor([0.05]), layers=terms)))
        0.88 -> 0.73 +- 0.05: conv -0.15, confidence +0.00
    """
    if prediction.layers is None or prediction.std is None:
        raise ValueError("this prediction has no layer terms to explain")
    before, after = float(features.confidence[0]), float(prediction.confidence[0])
    terms = prediction.layers.mean[0].cpu()
    points = confidence_points(float(torch.logit(prediction.confidence[0].double())) - float(terms.sum()), terms)
    order = points.abs().argsort(descending=True).tolist()
    parts = ", ".join(f"{prediction.layers.names[j]} {float(points[j]) + 0.0:+.2f}" for j in order)
    return f"{before:.2f} -> {after:.2f} +- {float(prediction.std[0]):.2f}: {parts}"


def originals(features: Features) -> tuple[Tensor, Tensor]:
    """Rows of the original samples, and for every row the position of its original among them.

    The first row of each group is the original, later ones are its copies.

    Example:
        >>> originals(Features(torch.zeros(4, 2), groups=torch.tensor([7, 8, 7, 8])))
        (tensor([0, 1]), tensor([0, 1, 0, 1]))
    """
    n, device = len(features), features.logits.device
    rows = torch.arange(n, device=device)
    if features.groups is None:
        return rows, rows
    _, group = features.groups.to(device).unique(return_inverse=True)
    first = torch.full((int(group.max()) + 1,), n, device=device).scatter_reduce(0, group, rows, "amin")
    rank = first.argsort().argsort()
    return first.sort().values, rank[group]


def sample_weights(is_copy: Tensor, correct: Tensor, clean: float, caution: float) -> Tensor:
    """Weight of each row: ``clean`` of the total for originals, the rest for copies, whose errors count ``caution`` times.

    The total is the number of originals: copies of a sample are no new information.

    Example:
        >>> sample_weights(torch.tensor([False, True, True]), torch.tensor([1.0, 1.0, 0.0]), 0.7, 2.0)
        tensor([0.7000, 0.1000, 0.2000])
    """
    n = float((~is_copy).sum())
    if not bool(is_copy.any()):
        return torch.ones_like(correct)
    copies = is_copy * torch.where(correct > 0, 1.0, caution)
    return torch.where(is_copy, n * (1 - clean) * copies / copies.sum(), clean).to(correct)


def log_odds(features: Features, temperature: float, largest: float) -> Tensor:
    """Log-odds ``log s / (1 - s)`` of the tempered confidence, without cancellation and within ``largest``, ``(n,)``."""
    z = features.logits.double() / temperature
    rest = z.scatter(1, features.label[:, None], -torch.inf).logsumexp(dim=1)
    return (z.amax(dim=1) - rest).clamp(-largest, largest)


def standardised(evidence: Evidence, scales: Scales) -> tuple[Tensor, Tensor]:
    """Agreement ``A`` and novelty ``N`` in units of the original calibration samples."""
    N = (evidence.novelty - scales.novelty.to(evidence.novelty)) / scales.spread.to(evidence.novelty)
    return evidence.agreement / scales.agreement.to(N), N


def design(features: Features, evidence: Evidence, temperature: float, scales: Scales) -> Tensor:
    """Columns of the model, ``(n, 2 + 2 L)``: one, ``t``, gated agreements, negative persistent novelties."""
    t = log_odds(features, temperature, LARGEST_LOG_ODDS)
    A, N = standardised(evidence, scales)
    gate = 1.0 / (1.0 + 0.3 * softplus(N - 1.0))
    persistent = N.flip(1).cummin(dim=1).values.flip(1)
    return torch.cat([torch.ones_like(t)[:, None], t[:, None], A * gate, -torch.log1p(softplus(persistent))], dim=1)


def leave_group_out(X: Tensor, correct: Tensor, weight: Tensor, w: Tensor, S: Tensor, group: Tensor) -> Tensor:
    """Confidence of every row by the model fitted without its whole group, ``(n,)``, by one Newton step from the optimum.

    With ``V = X_g S X_g'`` and ``W = weight p (1 - p)``, ``f_g - V (1 - W V)^-1 weight (correct - p)``.
    """
    f = X @ w
    p = torch.sigmoid(f)
    out = f.clone()
    order = group.argsort(stable=True)
    for rows in order.split(torch.bincount(group).tolist()):
        V = X[rows] @ S @ X[rows].T
        W = (weight * p * (1 - p))[rows]
        pull = torch.linalg.solve(torch.eye(len(rows)).to(V) - W[:, None] * V, (weight * (correct - p))[rows])
        out[rows] = f[rows] - V @ pull
    return torch.sigmoid(out)


def _scaled_design(features: Features, evidence: Evidence, temperature: float, first: Tensor) -> tuple[Scales, Tensor]:
    A, N = evidence.agreement[first], evidence.novelty[first]
    median = N.quantile(0.5, dim=0)
    spread = 1.4826 * (N - median).abs().quantile(0.5, dim=0)
    tiny = 1e-6
    scales = Scales(A.std(dim=0, correction=0).clamp_min(tiny), median, spread.clamp_min(tiny), torch.zeros(2 + 2 * A.shape[1]).to(A))
    X = design(features, evidence, temperature, scales)
    return Scales(scales.agreement, median, scales.spread, X[first].mean(dim=0)), X


def _fit_weights(X: Tensor, correct: Tensor, weight: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Weights of the largest posterior under ``b, u, v >= 0``, and the Laplace covariance around them."""
    from scipy.optimize import minimize

    prior = torch.full((X.shape[1],), 2.0 * ridge, dtype=X.dtype, device=X.device)
    prior[0], prior[1] = 1e-2, 0.2 * ridge
    centre = torch.zeros_like(prior)
    centre[1] = 1.0

    def loss(w: object) -> tuple[float, object]:
        w_ = torch.as_tensor(w).to(X)
        f, off = X @ w_, w_ - centre
        value = (weight * (softplus(f) - correct * f)).sum() + 0.5 * (prior * off.square()).sum()
        slope = X.T @ (weight * (torch.sigmoid(f) - correct)) + prior * off
        return float(value), slope.cpu().numpy()

    start = torch.full_like(prior, 0.1)
    start[0], start[1] = 0.0, 1.0
    bounds = [(None, None)] + [(0.0, None)] * (X.shape[1] - 1)
    found = minimize(loss, start.cpu().numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 1000})
    w = torch.as_tensor(found.x).to(X)
    p = torch.sigmoid(X @ w)
    H = X.T @ ((weight * p * (1 - p))[:, None] * X) + prior.diag()
    return w, torch.linalg.inv(H).contiguous()
