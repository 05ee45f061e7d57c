"""Radar chips, light curves, and a table of the sky; the first two with the networks of the study.

MSTAR is trained at 15 degrees depression; 17 degrees is near enough to count as in domain, 30 degrees is a
shift that no corruption imitates, and corrupted 17-degree chips are the others. SPCC is trained on the bright
spectroscopic supernovae; the deep photometric ones, unknown types among them, are the shift. The table has
one row per object of PLAsTiCC: trained on the wide survey, the deep fields are the shift.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from salgp_study.curve_families import light_curves
from salgp_study.lightcurves import read_columns
from salgp_study.run import Run, open_runs
from salgp_study.sources import data_folder
from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.images import corrupted_sets
from salgp_study.suite.sets.small import table_case

__all__ = ["objects", "radar", "supernovae"]

N_CORRUPTED = 500
TABLE_SIZES = (3_000, 1_000)
FLUXES = tuple(f"tflux_{band}" for band in "ugrizy")
COLUMNS = ("gal_l", "gal_b", "hostgal_photoz", "hostgal_photoz_err", "distmod", "mwebv", *FLUXES)
"""What is known of an object of the PLAsTiCC table."""


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
    """SPCC; a third of the spectroscopic validation objects is kept for testing in domain.

    Read are the five depths of the recurrent part and, behind them, the layers that see the metadata too.
    The augmentation is what is known of a photometric survey: its objects are further away.
    """
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
    layers = (*run.network.taps, "auto")  # type: ignore[misc]
    assert run.splits.standard is not None
    families = light_curves(run.splits.standard)
    return Case("spcc-rnn", seed, run.network, sets["train"], calibration, tests, families, layers)


def objects(seed: int, data: Path | None, cache: Path) -> Case:
    """PLAsTiCC, fourteen classes of objects from place, host galaxy and colours, without light curves."""
    found = read_columns(data_folder(data) / "plasticc_train_metadata.parquet", ("ddf", "target", *COLUMNS))
    deep = torch.from_numpy(found["ddf"] == 1)
    columns = {name: np.nan_to_num(found[name].astype(np.float64)) for name in COLUMNS}
    for name in FLUXES:
        columns[name] = np.log1p(columns[name])
    x = torch.from_numpy(np.stack(list(columns.values()), axis=1))
    _, y = torch.unique(torch.from_numpy(found["target"].astype(np.int64)), return_inverse=True)
    wide = (~deep).nonzero()[:, 0]
    rows = wide[torch.randperm(len(wide), generator=torch.Generator().manual_seed(seed))]
    train = x[rows[: TABLE_SIZES[0]]]
    x = ((x - train.mean(dim=0)) / train.std(dim=0)).float()
    shift = TestSet("deep fields", "shift", lambda: TensorDataset(x[deep], y[deep]))
    return table_case("plasticc-table", seed, x, y, rows, TABLE_SIZES, (64, 64, 32), (shift,))


def _trained(study: str, preset: str, seed: int, data: Path | None, cache: Path) -> Run:
    return next(iter(open_runs(study, preset, (seed,), cache / "networks", data)))


def _part(data: TensorDataset, rows: Tensor) -> TensorDataset:
    return TensorDataset(*(x[rows] for x in data.tensors))
