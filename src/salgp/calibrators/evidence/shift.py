"""Has an unlabelled batch moved away from the calibration data, and in which layers?

Layer evidence keeps how novel each calibration sample is to every layer. Were a batch of the same kind, its
samples could be swapped with those without notice; the share of random swaps with as large a difference is
the p-value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features

__all__ = ["ShiftReport", "shift_report"]

PERMUTED_ENTRIES = 4_000_000
"""Random numbers held at once."""


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
    together = None if calibrator.evidence_.environment is None else "all"
    prediction = calibrator.predict(features, context=together)
    here, there = calibrator.novelty_.cpu(), calibrator.standard_novelty(features).cpu()
    rise = there.mean(dim=0) - here.mean(dim=0)
    p_value = _permutation_p(
        torch.cat([here.mean(dim=1), there.mean(dim=1)]),
        len(there),
        draws,
        torch.Generator().manual_seed(seed),
    )
    names = list(calibrator.layer_widths_)
    return ShiftReport(
        dict(zip(names, rise.tolist(), strict=True)),
        p_value,
        float(prediction.confidence.mean()),
        len(features),
    )


def _permutation_p(score: Tensor, n_last: int, draws: int, generator: torch.Generator) -> float:
    """Share of permutations (the observed order included) whose last ``n_last`` have as large a mean.

    Permutations are drawn a few at a time, so that memory does not grow with their number.
    """
    observed = score[-n_last:].mean()
    larger = 0
    step = max(1, PERMUTED_ENTRIES // max(len(score), 1))
    for start in range(0, draws, step):
        keys = torch.rand(min(step, draws - start), len(score), generator=generator, dtype=score.dtype)
        chosen = keys.argsort(dim=1)[:, :n_last]
        larger += int((score[chosen].mean(dim=1) >= observed - 1e-12).sum())
    return (larger + 1) / (draws + 1)
