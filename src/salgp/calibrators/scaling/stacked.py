"""Stacked scaling: a mixture of simple calibration maps, weighted by cross-validation.

    p' = sum_k w_k softmax(W_k log p + b_k)

No one map is best for every classifier: a forest wants another than a network, ten classes another than two.
The components are the classifier's own probabilities (``W = 1``), equal ones (``W = 0``), temperature scaling
(``W = 1 / T``) and one matrix scaling for each prior width: Gaussian priors hold the entries of ``W`` near
temperature scaling and ``b`` near 0. The weights maximise the likelihood of samples that the components were
not fitted to, so a map that overfits gets none. With two classes a matrix is beta calibration.

References: Wolpert, Stacked generalization, 1992; Zhang et al., Mix-n-match, ICML 2020; Kull et al., Beyond
temperature scaling, NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.calibrators.scaling.multiclass import affine, fit_affine
from salgp.calibrators.scaling.temperature import mixture_weights
from salgp.calibrators.temperature import best_temperature, tempered_softmax
from salgp.features import Features
from salgp.logits import at_least_single
from salgp.prediction import Prediction

__all__ = ["StackedScaling"]

LARGEST = 2**17
"""Numbers of the calibration set that maps are fitted to; more change nothing that could be measured."""
ITERATIONS = 500
"""Of the optimiser, for each map."""
TEMPERATURE = 2
"""Place of temperature scaling among the components."""

Map = tuple[Tensor, Tensor]
"""Weight, ``(c, c)`` or ``(c,)`` for a diagonal matrix, and intercept ``(c,)``."""


class StackedScaling(Calibrator):
    """A mixture of the raw, equal, temperature-scaled and matrix-scaled probabilities, by cross-validation.

    Matrices need ``c^2`` samples, diagonal ones ``4 c``; with fewer the mixture is one of raw, equal and
    temperature-scaled probabilities, and with fewer than two per fold it is temperature scaling.

    Args:
        widths: prior standard deviations of what a map may add to a logit; one matrix scaling for each.
        folds: of the cross-validation.

    Attributes:
        weights_: ``(k,)`` of the components: raw, equal, temperature, and one for each width.
        maps_: ``W`` and ``b`` of each component.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> z = 3 * torch.randn(600, 3, generator=generator)
        >>> labels = torch.multinomial(torch.softmax(z / 2, 1), 1, generator=generator)[:, 0]
        >>> stacked = StackedScaling().fit(Features(z), labels)
        >>> bool((stacked.weights_ >= 0).all()), len(stacked.maps_)
        (True, 5)
    """

    name: ClassVar[str] = "stacked"
    display_name: ClassVar[str] = "stacked scaling"

    def __init__(self, widths: tuple[float, ...] = (0.3, 3.0), folds: int = 5) -> None:
        self.widths = widths
        self.folds = folds

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if self.folds < 2 or not all(width > 0 for width in self.widths):
            raise ValueError(f"expected positive widths and 2 folds or more, got {self.widths}, {self.folds}")
        x, y = _log_probs(features)[labels >= 0], labels[labels >= 0]
        order = _sorted(x, y)  # so that the result depends on no order of samples or classes
        x, y = x[order], y[order]
        identity = _identity(*x.shape)
        some = slice(None, None, 1 if identity is None else -(-x.numel() // LARGEST) or 1)
        temperature = best_temperature(x, y, warn=False)[0] if len(y) else 1.0
        maps = _maps(x[some], y[some], temperature, identity, self.widths)
        likelihood = self._left_out(x[some], y[some], identity, len(maps))
        equal = [1 / len(maps)] * len(maps)
        alone = [float(k == TEMPERATURE) for k in range(len(maps))]
        self.weights_ = mixture_weights(likelihood, equal if len(likelihood) else alone)
        self.maps_ = [[W.cpu(), b.cpu()] for W, b in maps]

    def _left_out(self, x: Tensor, y: Tensor, identity: Tensor | None, n_maps: int) -> Tensor:
        """``(n, k)`` probability of the true class under components that were fitted to other folds."""
        fold = torch.arange(len(y), device=x.device) % self.folds
        found = [x.new_zeros(0, n_maps).double()]
        for k in range(self.folds if len(y) >= 2 * self.folds else 0):
            rest, out = fold != k, fold == k
            temperature = best_temperature(x[rest], y[rest], warn=False)[0]
            maps = _maps(x[rest], y[rest], temperature, identity, self.widths)
            each = [p.gather(1, y[out, None])[:, 0] for p in _components(x[out], maps)]
            found.append(torch.stack(each, dim=1).double())
        return torch.cat(found)

    def _predict(self, features: Features) -> Prediction:
        x = _log_probs(features)
        mixed = torch.zeros_like(x)
        for w, p in zip(self.weights_.tolist(), _components(x, self.maps_), strict=True):
            mixed = mixed + w * p
        return Prediction.from_probs(features, mixed)


def _log_probs(features: Features) -> Tensor:
    return torch.log_softmax(at_least_single(features.logits), dim=1)


def _sorted(x: Tensor, y: Tensor) -> Tensor:
    """Rows by the likelihood of their true class and then by their largest numbers, whatever their order."""
    largest = x.sort(dim=1, descending=True).values[:, :8]
    own = x.gather(1, y[:, None])[:, 0]
    return torch.from_numpy(np.lexsort([*largest.T.cpu().numpy(), own.cpu().numpy()])).to(x.device)


def _identity(n: int, c: int) -> Tensor | None:
    """The identity as a matrix or as a diagonal, as many parameters as the samples can tell, or None."""
    n = min(n, LARGEST // c)
    if c * c <= n:
        return torch.eye(c, dtype=torch.float64)
    return torch.ones(c, dtype=torch.float64) if 4 * c <= n else None


def _maps(
    x: Tensor, y: Tensor, temperature: float, identity: Tensor | None, widths: tuple[float, ...]
) -> list[Map]:
    """Raw, equal and temperature-scaled probabilities, and an affine map for each prior width."""
    n, c = x.shape
    zero = torch.zeros(c, dtype=torch.float64)
    maps = [(torch.full_like(zero, scale), zero) for scale in (1.0, 0.0, 1 / temperature)]
    if identity is None or not n:
        return maps
    z = x.double() / temperature
    size = float((z - z.mean(dim=1, keepdim=True)).abs().mean())
    for width in widths:
        precision = 1 / (2 * n * width**2)  # of a Gaussian prior, in units of the mean likelihood
        penalty = torch.full_like(identity, precision * size**2)
        W, b = fit_affine(z, y, identity, penalty, c * precision, ITERATIONS, 1e-9)
        maps.append((W / temperature, b))
    return maps


def _components(x: Tensor, maps: Iterable[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Probabilities ``(n, c)`` by each map."""
    return (tempered_softmax(affine(x, W.to(x), b.to(x)), 1.0) for W, b in maps)
