"""What a fit promises of itself, beside what was measured: every data set of the shift suite.

    python study/benchmarks/self_check.py --cache CACHE --out study/results/self_check.md

A fit of layer evidence promises a calibration error from refits without the samples and the families of
augmentation they are scored on (`LayerEvidence.check_`). Here it is fitted on the cached features of the
suite, and the promise compared with the mean error over the shifted sets, none of which it has seen.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from salgp import metrics
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp_study.suite.cache import CachedTest, case_folder, is_complete, read_case
from salgp_study.suite.methods import predict_windows
from salgp_study.suite.protocol import read_protocol

SITUATIONS = {"left-out families": 0, "left-out families, in context": 50}
"""Situation of the promise -> samples of a window."""


def main() -> None:
    """Fit every case, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache/shift"))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(read_protocol().seeds))
    parser.add_argument("--out", type=Path, default=Path("study/results/self_check.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for name in read_protocol().sets:
        folders = [case_folder(options.cache, name, seed) for seed in options.seeds]
        cases = [row(folder) for folder in folders if is_complete(folder)]
        if cases:
            rows[name] = np.mean(cases, axis=0)
            print(name, rows[name].round(4), flush=True)
    options.out.write_text("\n".join(page(rows, options.seeds)) + "\n", encoding="utf-8")


def row(folder: Path) -> np.ndarray:
    """Promise (with its range) and what was measured, of single samples and in a context ``(8,)``."""
    case = read_case(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small sets warn of few samples and few errors
        calibrator = LayerEvidence().fit(*case.calibration, reference=case.reference)
    shifted = [test for test in case.tests if test.kind == "shift"]
    found: list[float] = []
    for situation, window in SITUATIONS.items():
        promised = calibrator.check_[situation][calibrator.display_name]
        found += [promised["ece"], promised["low"], promised["high"], measured(calibrator, shifted, window)]
    return np.array(found)


def measured(calibrator: LayerEvidence, shifted: list[CachedTest], window: int) -> float:
    """Mean calibration error over the shifted sets, without the bias of small sets, as it is promised."""
    errors = []
    for test in shifted:
        confidence = predict_windows(calibrator, test.features, window).confidence
        errors.append(metrics.debiased_ece(confidence, test.features.correct(test.labels)))
    return float(np.mean(errors))


def page(rows: dict[str, np.ndarray], seeds: list[int]) -> Iterator[str]:
    """The page, line by line."""
    yield "# What a fit promises of itself\n"
    yield f"Made by `python study/benchmarks/self_check.py --seeds {' '.join(map(str, seeds))}`."
    yield "Calibration error (debiased ECE) under shift: what the fit said, with the range over its families,"
    yield "and the mean over the shifted sets of the suite. Means over the draws.\n"
    yield "| data set | promised, single samples | measured | promised, context of 50 | measured |"
    yield "|---|---|---|---|---|"
    for name, values in {**rows, "**mean**": np.mean(list(rows.values()), axis=0)}.items():
        single, context = values[:4], values[4:]
        cells = [f"{v[0]:.3f} ({v[1]:.3f} to {v[2]:.3f}) | {v[3]:.3f}" for v in (single, context)]
        yield f"| {name} | {' | '.join(cells)} |"
    mean = np.mean(list(rows.values()), axis=0)
    inside = [sum(v[i + 1] <= v[i + 3] <= v[i + 2] for v in rows.values()) for i in (0, 4)]
    yield (
        f"\nMeasured / promised, of the means: {mean[3] / mean[0]:.2f} for single samples, "
        f"{mean[7] / mean[4]:.2f} with a context. The measured mean is inside the range said on "
        f"{inside[0]} and {inside[1]} of {len(rows)} data sets."
    )


if __name__ == "__main__":
    main()
