"""Draw every plot of `salgp.plots` on made-up data: ``python docs/make_gallery.py [folder]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salgp import LayerTerms, metrics, plots

HERE = Path(__file__).parent / "img" / "gallery"
LAYERS = ("conv1", "conv2", "conv3", "conv4", "fc")


def main(folder: Path = HERE) -> list[Path]:
    """Write one PNG per plot into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    return [save(draw(), folder / f"{name}.png") for name, draw in PLOTS.items()]


def save(axes: Any, path: Path) -> Path:
    """Write the figure that the axes belong to."""
    first = np.ravel(np.asarray(axes, dtype=object))[0]
    first.figure.savefig(path, dpi=90, metadata={"Software": None})
    return path


def sample(n: int = 2000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Overconfident scores, a better-calibrated version of them, and whether each prediction was correct."""
    rng = np.random.default_rng(seed)
    truth = np.clip(rng.beta(4, 1.5, n), 0.1, 1)
    correct = rng.random(n) < truth
    overconfident = truth ** (1 / 3)
    return overconfident, np.clip(truth + rng.normal(0, 0.03, n), 0, 1), correct


def reliability() -> Any:
    overconfident, _, correct = sample()
    return plots.reliability_diagram(overconfident, correct, title="uncalibrated")


def reliability_band() -> Any:
    _, calibrated, correct = sample(600)
    return plots.reliability_diagram(
        calibrated, correct, n_bins=10, band=0.9, title="calibrated, 90 % intervals"
    )


def layer_profile() -> Any:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.02, 0.05, 0.04, 0.12, 0.2])
    terms = LayerTerms(
        LAYERS,
        torch.randn(300, 5, generator=generator) * scale,
        torch.rand(300, 5, generator=generator) * scale.flip(0),
    )
    return plots.layer_profile(terms, weights=[0.1, 0.2, 0.3, 0.9, 1.4])


def risk_coverage() -> Any:
    overconfident, calibrated, correct = sample(800)
    noisy = overconfident + np.random.default_rng(1).normal(0, 0.1, 800)
    scores = {"near the truth": calibrated, "noisy": noisy, "at random": np.random.default_rng(2).random(800)}
    return plots.risk_coverage_curves({name: metrics.risk_coverage(s, correct) for name, s in scores.items()})


PLOTS: dict[str, Callable[[], Any]] = {
    "reliability": reliability,
    "reliability_band": reliability_band,
    "layer_profile": layer_profile,
    "risk_coverage": risk_coverage,
}


if __name__ == "__main__":
    for written in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE):
        print(written)
