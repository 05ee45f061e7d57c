"""Temperature scaling by a fixed number of gradient steps, whose result depends on the start.

Many published scripts fit the temperature so; the paper's rows "init 0.5" and "init 2" are such fits.
`salgp.calibrators` has the optimum itself.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from salgp.calibrators import register
from salgp.calibrators.base import Calibrator
from salgp.features import Features
from salgp.logits import BOUNDS, tempered_softmax
from salgp.prediction import Prediction

__all__ = ["GradientTemperature"]


@register
class GradientTemperature(Calibrator):
    """Temperature after ``steps`` of plain gradient descent on the mean negative log-likelihood.

    Args:
        init: temperature to start from.
        steps: number of steps.
        lr: length of a step.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0]]).repeat(4, 1))
        >>> round(GradientTemperature().fit(f, [0, 0, 0, 1]).temperature_, 2)  # the optimum is 1.82
        1.11
    """

    name: ClassVar[str] = "gradient-temperature"

    def __init__(self, init: float = 1.0, steps: int = 50, lr: float = 0.01) -> None:
        self.init = init
        self.steps = steps
        self.lr = lr

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        z, y = features.logits[labels >= 0].double(), labels[labels >= 0]
        low, high = BOUNDS
        t = torch.tensor(self.init, dtype=torch.float64, requires_grad=True)
        for _ in range(self.steps if len(y) else 0):
            with torch.enable_grad():
                loss = torch.nn.functional.cross_entropy(z / t, y)
            (slope,) = torch.autograd.grad(loss, t)
            t = (t.detach() - self.lr * slope).clamp(low, high).requires_grad_()
        self.temperature_ = float(t)

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, self.temperature_))
