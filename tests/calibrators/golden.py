"""Predictions of every calibrator on one made world: kept in ``golden.npz``, so that a change of the house is
not a change of results.

``python tests/calibrators/golden.py [NAME ...]`` writes the file anew, or these calibrators in it; do that
only where a change of results is meant, and say so in the changelog.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salgp import Features
from salgp.calibrators import get
from salgp.calibrators.registry import CLASSES

FILE = Path(__file__).with_suffix(".npz")
SETTINGS: dict[str, dict[str, Any]] = {
    "density-aware": {"k": 10},
    "latent-gp": {"n_inducing": 6},
}


def world(n: int, seed: int, shift: float = 0.0) -> tuple[Features, torch.Tensor]:
    """Three layers that know the class less and less well, logits from the last, labels with noise."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (n,), generator=g)
    centres = 2.0 * torch.randn(4, 6, generator=torch.Generator().manual_seed(99)).double()
    layers = {}
    for j, name in enumerate(("early", "middle", "late")):
        noise = torch.randn(n, 6, generator=g).double()
        layers[name] = centres[label] + (2.2 - 0.4 * j + shift) * noise
    logits = 1.4 * layers["late"] @ centres.T / 4 + 0.3 * torch.randn(n, 4, generator=g).double()
    return Features(logits, layers), label


def problem() -> tuple[Features, torch.Tensor, tuple[Features, torch.Tensor], Features]:
    """Calibration set with augmented samples, labels, reference, and what to predict."""
    clean, labels = world(120, 0)
    augmented = [Features(f.logits, f.layers) for f in (world(120, 0, 0.4)[0], world(120, 0, 0.8)[0])]
    parts = [
        Features(f.logits, f.layers, torch.arange(120), torch.full((120,), number))
        for number, f in enumerate([clean, *augmented])
    ]
    return Features.concatenate(parts), labels.repeat(3), world(200, 1), world(60, 2, 0.3)[0]


def predictions(name: str) -> dict[str, np.ndarray]:
    """Confidence, standard deviation and layer terms of one calibrator."""
    features, labels, reference, new = problem()
    calibrator = get(name, **SETTINGS.get(name, {}))
    if not calibrator.uses_augmented:
        features, labels = features[:120], labels[:120]
        features = Features(features.logits, features.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        found = calibrator.fit(features, labels, reference).predict(new)
    out = {"confidence": found.confidence.double().numpy()}
    if calibrator.takes_context:
        out["in context"] = calibrator.predict(new, context="all").confidence.double().numpy()
    if found.std is not None:
        out["std"] = found.std.double().numpy()
    if found.layers is not None:
        out["terms"] = found.layers.mean.double().numpy()
    return out


def main() -> None:
    """Write the file."""
    chosen = sys.argv[1:] or list(CLASSES)
    with np.load(FILE, allow_pickle=False) as kept:
        arrays = {key: kept[key] for key in kept.files if key.partition("/")[0] not in chosen}
    arrays |= {f"{name}/{key}": x for name in chosen for key, x in predictions(name).items()}
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
