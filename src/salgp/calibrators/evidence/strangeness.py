"""One number for how strange a sample is: of an unknown class, or seen under unknown circumstances.

Three things make a sample strange: the network's logits are all low (a high *energy*), the layers do not vote
for the predicted class, and some layer finds it far from everything it knows. With ``e`` and ``a`` the energy
and the mean agreement in robust standard deviations of the calibration originals, and ``N_l`` the novelty of
the layers,

    novelty = h(e) + h(-a) + max_l h(N_l) / 3,      h(z) = log(1 + softplus(z)).

``h`` counts what is stranger than usual and not what is more usual than usual. Distance alone finds shifts
and misses unknown classes, whose samples are taken in the same way as the others; energy alone misses shifts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.evidence.model import height, robust_scale
from salgp.calibrators.evidence.rows import View
from salgp.storage import storable

__all__ = ["DISTANCE", "Strangeness", "energy", "fit_strangeness"]

DISTANCE = 1 / 3
"""Weight of the largest distance."""


@storable
@dataclass(frozen=True, eq=False)
class Strangeness:
    """What is usual.

    Args:
        centre: ``(2,)`` median of the energy and of the mean agreement over the originals.
        scale: ``(2,)`` their robust standard deviations.
    """

    centre: Tensor
    scale: Tensor

    def __call__(self, view: View, energy: Tensor) -> Tensor:
        """Novelty ``(n,)`` of samples of this energy ``(n,)``."""
        z = (_usual_things(view, energy) - self.centre.to(energy)) / self.scale.to(energy)
        return height(z[:, 0]) + height(-z[:, 1]) + DISTANCE * view.height.amax(dim=1)


def fit_strangeness(view: View, energy: Tensor) -> Strangeness:
    """Measure originals."""
    return Strangeness(*robust_scale(_usual_things(view, energy)))


def energy(logits: Tensor, temperature: float) -> Tensor:
    """Energy ``(n,)`` of samples: low where some class is likely, high where the network knows none.

    Example:
        >>> energy(torch.tensor([[9.0, 0.0], [0.0, 0.0]]), 1.0)
        tensor([-9.0001, -0.6931], dtype=torch.float64)
    """
    return -(logits.double() / temperature).logsumexp(dim=1)


def _usual_things(view: View, energy: Tensor) -> Tensor:
    return torch.stack([energy, view.agreement.mean(dim=1)], dim=1)
