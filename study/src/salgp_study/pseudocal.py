"""PseudoCal: the temperature of a network on unlabelled inputs, from mixed pairs of them.

Two inputs of different predicted classes are mixed with a fixed share, ``x = l x_a + (1 - l) x_b``; the mixed
input has the prediction of ``x_a``, the larger part, as its label, and the temperature of the largest
likelihood on such pairs is the one for the inputs themselves. It needs the network's own answers to mixed
*inputs*, which features and logits do not tell, so it is a function of the network here and not one of
`salgp.calibrators`.

Reference: Hu, Liang, Wang and Foo, Pseudo-calibration: improving predictive uncertainty estimation in
unsupervised domain adaptation, ICML 2024.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from salgp.logits import best_temperature

__all__ = ["pseudo_temperature"]


def pseudo_temperature(
    network: Callable[[Tensor], Tensor], inputs: Tensor, share: float = 0.65, seed: int = 0
) -> float:
    """Temperature of ``network`` on unlabelled ``inputs``.

    Args:
        network: from inputs to logits ``(n, c)``, in evaluation mode.
        inputs: ``(n, ...)`` of the set to be calibrated.
        share: of the input that gives the label, in (0.5, 1); 0.65 by the authors.
        seed: of the pairs.

    Example:
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> pseudo_temperature(lambda x: 9 * x, x) > pseudo_temperature(lambda x: 3 * x, x)
        True
    """
    if not 0.5 < share < 1:
        raise ValueError(f"share must lie between 0.5 and 1, got {share}")
    other = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        label = network(inputs).argmax(dim=1)
        pairs = (label != label[other]).nonzero()[:, 0]  # of one class alone every label would be right
        if not len(pairs):
            return 1.0
        mixed = share * inputs[pairs] + (1 - share) * inputs[other[pairs]]
        return best_temperature(network(mixed), label[pairs])[0]
