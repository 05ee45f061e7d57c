"""What is monitored of a prediction, one column of numbers per feature.

The confidence, the predicted class, the novelty, and every layer's term of the correction, each where the
calibrator has it. So an alarm can say what shifted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from salgp.logits import log_odds
from salgp.monitor.martingale import CELLS, cells
from salgp.prediction import Prediction

__all__ = ["BANDS", "band_counts", "band_of_cells", "effects", "feature_cells", "feature_names"]

BANDS = 64
"""Bands of equal weight in the reference, to measure effect sizes with."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def feature_names(prediction: Prediction) -> tuple[str, ...]:
    """Names of the features this kind of prediction has.

    Example:
        >>> import torch
        >>> feature_names(Prediction(torch.tensor([0]), torch.tensor([[0.9, 0.1]]), torch.tensor([0.9])))
        ('confidence', 'class')
    """
    novelty = () if prediction.novelty is None else ("novelty",)
    layers = () if prediction.layers is None else tuple(f"layer {name}" for name in prediction.layers.names)
    return ("confidence", "class", *novelty, *layers)


def feature_cells(prediction: Prediction) -> IntArray:
    """``(n, J)`` cells of the features."""
    confidence = prediction.confidence.detach().cpu().double()
    columns = [log_odds(confidence, 1e-9).numpy(), np.zeros(len(prediction))]
    if prediction.novelty is not None:
        columns.append(prediction.novelty.detach().cpu().double().numpy())
    if prediction.layers is not None:
        columns += list(prediction.layers.mean.detach().cpu().double().numpy().T)
    values = np.stack(columns, 1)
    if not np.isfinite(values).all():
        raise ValueError("a prediction to be monitored must be finite; it has NaN or infinite entries")
    found = cells(values)
    found[:, 1] = np.minimum(prediction.label.cpu().numpy(), CELLS - 1)
    return found


def band_of_cells(reference: IntArray) -> IntArray:
    """``(J, CELLS)`` which of the reference's `BANDS` each cell belongs to, by counts ``(J, CELLS)``."""
    middle = reference.cumsum(1) - reference / 2
    share = middle / np.maximum(reference.sum(1, keepdims=True), 1)
    return np.minimum((share * BANDS).astype(np.int64), BANDS - 1)


def band_counts(values: IntArray, bands: IntArray) -> IntArray:
    """``(J, BANDS)`` how many of the cells ``(n, J)`` fall into each band."""
    return np.stack([np.bincount(bands[j][column], minlength=BANDS) for j, column in enumerate(values.T)])


def effects(reference: IntArray, now: IntArray) -> FloatArray:
    """``(J,)`` Cliff's delta, from -1 to 1: P(now > reference) - P(now < reference), by counts ``(J, B)``.

    Unlike a p-value it does not grow with the number of samples.

    Example:
        >>> effects(np.array([[1, 1]]), np.array([[0, 2]]))
        array([0.5])
    """
    below = reference.cumsum(1) - reference
    above = reference.sum(1, keepdims=True) - below - reference
    pairs = np.maximum(reference.sum(1) * now.sum(1), 1)
    return (now * (below - above)).sum(1) / pairs
