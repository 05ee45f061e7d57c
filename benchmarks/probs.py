"""Multi-class likelihood and Brier score of ``probs``, whose rest is shared by the tempered softmax.

``python benchmarks/probs.py CACHE/SET-SEED ...`` reads feature caches of the shift suite (``python -m
salgp_study.suite features``) and prints, in domain and as the mean over all shifts, temperature scaling
beside layer evidence with the rest shared by the raw softmax, by the tempered one, and by the tempered one
under the label's own confidence (what `Prediction.from_confidence` does).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salgp import Features
from salgp.calibrators import get
from salgp.features import load_features
from salgp.metrics import brier, nll, nll_correct
from salgp.prediction import spread_confidence

ROWS = ("temperature", "raw softmax", "tempered, flips", "tempered, label on top")


def main() -> None:
    """Print one table for each cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("caches", nargs="+", type=Path)
    for folder in parser.parse_args().caches:
        print(f"\n{folder.name}: NLL / Brier / NLL of correctness")
        for kind, scores in table(folder).items():
            for name, row in zip(ROWS, np.mean(scores, axis=0), strict=True):
                print(f"  {kind:9} {name:24} " + " / ".join(f"{x:.4f}" for x in row))


def table(folder: Path) -> dict[str, list[np.ndarray]]:
    """Scores ``(rows, 3)`` of each test set, by kind."""
    calibration, labels = load_features(folder / "calibration.safetensors")
    assert labels is not None
    original = slice(None) if calibration.families is None else calibration.families == 0
    temperature = get("temperature").fit(Features(calibration.logits[original]), labels[original])
    reference = load_features(folder / "reference.safetensors")
    ours = get("layer-evidence").fit(calibration, labels, reference)
    found: dict[str, list[np.ndarray]] = {}
    for path in [folder / "test.safetensors", *sorted(folder.glob("shift-*.safetensors"))]:
        features, truth = load_features(path)
        assert truth is not None
        confidence = ours.predict(features).confidence.double()
        probs = [
            temperature.predict(features).probs,
            *spreads(features, confidence, temperature.temperature_),
        ]
        kind = "in domain" if path.stem == "test" else "shifted"
        found.setdefault(kind, []).append(np.array([scores(p, features.label, truth) for p in probs]))
    return found


def spreads(features: Features, confidence: Tensor, temperature: float) -> list[Tensor]:
    """The three ways to share the rest."""
    z, label = features.logits.double(), features.label
    raw, tempered = torch.softmax(z, 1), torch.softmax(z / temperature, 1)
    return [
        spread_confidence(raw, label, confidence, allow_flips=True),
        spread_confidence(tempered, label, confidence, allow_flips=True),
        spread_confidence(tempered, label, confidence),
    ]


def scores(probs: Tensor, label: Tensor, truth: Tensor) -> list[float]:
    """NLL, Brier score, and NLL of correctness."""
    own = probs.gather(1, label[:, None])[:, 0]
    return [nll(probs, truth), brier(probs, truth), nll_correct(own, label == truth)]


if __name__ == "__main__":
    main()
