"""Radar chips and light curves: the networks of the paper's study, trained by the study's own code.

MSTAR is trained at 15 degrees depression; 17 degrees is near enough to count as in domain, 30 degrees is a
shift that no corruption imitates, and corrupted 17-degree chips are the others. SPCC is trained on the bright
spectroscopic supernovae; the deep photometric ones, unknown types among them, are the shift.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from salgp_study.run import Run, open_runs
from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.images import corrupted_sets

__all__ = ["radar", "supernovae"]

N_CORRUPTED = 500


def radar(name: str, study: str, preset: str = "cpu") -> Callable[[int, Path | None, Path], Case]:
    """A network of an MSTAR study."""

    def build(seed: int, data: Path | None, cache: Path) -> Case:
        run = _trained(study, preset, seed, data, cache)
        sets = run.splits.all
        near = next(angle for angle in run.splits.tests if angle != "30")
        x, y = sets[near].tensors
        rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:N_CORRUPTED]
        tests = (
            TestSet(f"{near} deg", "in", lambda: sets[near]),
            TestSet("30 deg", "shift", lambda: sets["30"]),
            *corrupted_sets(x[rows], y[rows], levels=(1, 3)),
        )
        taps = tuple(run.network.taps)  # type: ignore[arg-type]
        return Case(name, seed, run.network, sets["train"], sets["validation"], tests, "images", taps)

    return build


def supernovae(seed: int, data: Path | None, cache: Path) -> Case:
    """SPCC; a third of the spectroscopic validation objects is kept for testing in domain."""
    run = _trained("spcc-rnn", "cpu", seed, data, cache)
    sets = run.splits.all
    order = torch.randperm(len(sets["validation"]), generator=torch.Generator().manual_seed(seed))
    cut = 2 * len(order) // 3
    known = sets["photometric"].tensors[-1] >= 0
    tests = (
        TestSet("spectroscopic", "in", lambda: _part(sets["validation"], order[cut:])),
        TestSet("photometric", "shift", lambda: _part(sets["photometric"], known.nonzero()[:, 0])),
        TestSet("photometric with unknown types", "unknown", lambda: sets["photometric"]),
    )
    calibration = _part(sets["validation"], order[:cut])
    taps = tuple(run.network.taps)  # type: ignore[arg-type]
    return Case("spcc-rnn", seed, run.network, sets["train"], calibration, tests, "light-curves", taps)


def _trained(study: str, preset: str, seed: int, data: Path | None, cache: Path) -> Run:
    return next(iter(open_runs(study, preset, (seed,), cache / "networks", data)))


def _part(data: TensorDataset, rows: Tensor) -> TensorDataset:
    return TensorDataset(*(x[rows] for x in data.tensors))
