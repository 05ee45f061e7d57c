"""Hypothesis strategies: features and calibration problems as networks give them, down to the odd corners.

Numbers range from zeros and ties to the largest a type holds; sets from two samples of one class to a few
dozen; layers from one column to several. Everything is finite: what is not is refused elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from salgp.features import Features

__all__ = ["features", "problems", "predictions"]

SCALES = (0.0, 1e-30, 1e-3, 1.0, 1.0, 1.0, 30.0, 1e4, 1e30, 3.4e38)
"""Sizes of logits, the usual ones more often."""


@st.composite
def features(
    draw: Any, n: int | None = None, n_classes: int | None = None, with_layers: bool = True
) -> Features:
    """Features of a made-up network.

    Args:
        draw: of hypothesis.
        n: samples; drawn where not given.
        n_classes: likewise.
        with_layers: give it hidden layers.
    """
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    rows = draw(st.integers(2, 40)) if n is None else n
    c = draw(st.integers(2, 5)) if n_classes is None else n_classes
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.float16]))
    top = torch.finfo(dtype).max
    scale = min(draw(st.sampled_from(SCALES)), top)
    logits = (torch.randn(rows, c, generator=g).double().clamp(-1, 1) * scale).clamp(-top, top)
    if draw(st.booleans()):
        logits[0] = logits[0, 0]  # a row of ties
    layers = {}
    for k in range(draw(st.integers(1, 3)) if with_layers else 0):
        width, spread = draw(st.integers(1, 4)), draw(st.sampled_from((0.0, 1e-6, 1.0, 1e4)))
        layers[f"layer{k}"] = (spread * torch.randn(rows, width, generator=g)).to(torch.float32)
    return Features(logits.to(dtype), layers)


@st.composite
def problems(draw: Any) -> tuple[Features, Tensor]:
    """Features with true classes; some unknown, perhaps all of one class."""
    found = draw(features())
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    labels = torch.randint(-1 if draw(st.booleans()) else 0, found.n_classes, (len(found),), generator=g)
    return found, torch.zeros_like(labels) if draw(st.integers(0, 9)) == 0 else labels


@st.composite
def predictions(draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities ``(n, c)``, confidences of the label, and true classes: what metrics are given."""
    found, labels = draw(problems())
    probs = found.probs.double()
    return probs, probs.amax(dim=1), labels
