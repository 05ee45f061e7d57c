"""Has an unlabelled batch moved away from the calibration data, and in which layers?

Layer evidence keeps how novel each calibration sample is to every layer. Were a batch of the same kind, its
samples could be swapped with those without notice; the share of random swaps with as large a difference is
the p-value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features

__all__ = ["shift_report"]


@dataclass(frozen=True)
class ShiftReport:
    """How far a batch has moved.

    Args:
        rise: layer name -> rise of its mean novelty over the calibration set, in standard deviations there.
        p_value: chance of so large a rise (mean over the layers) without any shift, by permutation.
        confidence: mean calibrated confidence of the batch, with the batch as its own context; the accuracy
            to expect of it.
        n: samples in the batch.
    """

    rise: dict[str, float]
    p_value: float
    confidence: float
    n: int

    def __str__(self) -> str:
        order = sorted(self.rise.items(), key=lambda item: -item[1])
        layers = ", ".join(f"{name} {value:+.1f}" for name, value in order)
        return (
            f"{self.n} samples: moved by {layers} sd (p = {self.p_value:.3g}); expected accuracy "
            f"{self.confidence:.2f}"
        )


def shift_report(
    calibrator: LayerEvidence, features: Features, draws: int = 999, seed: int = 0
) -> ShiftReport:
    """Compare an unlabelled batch with the calibration data, layer by layer.

    Args:
        calibrator: a fitted `LayerEvidence`.
        features: of the batch.
        draws: random permutations; the p-value is at least ``1 / (draws + 1)``.
        seed: of the permutations.

    Returns:
        The report; ``print`` it for one line.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(300, 3, generator=g)
        >>> calibrator = LayerEvidence().fit(Features(x, {"a": x})[:200], x[:200].argmax(dim=1))
        >>> still = shift_report(calibrator, Features(x, {"a": x})[200:])
        >>> still.p_value > 0.01, still.n
        (True, 100)
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    together = None if calibrator.mixture_.window is None else "all"
    prediction = calibrator.predict(features, context=together)
    here, there = calibrator.novelty_.cpu(), calibrator.standard_novelty(features).cpu()
    rise = there.mean(dim=0) - here.mean(dim=0)
    scores = torch.cat([here.mean(dim=1), there.mean(dim=1)])
    p_value = _permutation_p(scores.numpy(), len(there), draws, seed)
    names = list(calibrator.layer_widths_)
    return ShiftReport(
        dict(zip(names, rise.tolist(), strict=True)),
        p_value,
        float(prediction.confidence.mean()),
        len(features),
    )


def _permutation_p(score: np.ndarray, n_last: int, draws: int, seed: int) -> float:
    """Share of permutations (the observed order included) whose last ``n_last`` have as large a mean.

    Only the smaller of the two parts is drawn, one permutation at a time: what is left has the other mean.
    So neither time nor memory grows with the larger part.
    """
    random = np.random.default_rng(seed)
    whole, n_first = float(score.sum()), len(score) - n_last
    size = min(n_first, n_last)
    drawn = np.array(
        [score[random.choice(len(score), size, replace=False, shuffle=False)].sum() for _ in range(draws)]
    )
    last = drawn if size == n_last else whole - drawn
    observed = float(score[n_first:].sum())
    larger = int((last >= observed - 1e-12 * n_last).sum())
    return (larger + 1) / (draws + 1)
