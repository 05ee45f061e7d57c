"""The data of a study by name: real files where they are, made data for the smoke preset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salgp_study.lightcurves import LightCurves, load_lightcurves, load_plasticc, load_spcc, read_columns
from salgp_study.mstar import Chips, centre_crop, load_mstar
from salgp_study.presets import Experiment, Preset
from salgp_study.protocol import MSTAR_PROTOCOLS, SPCC_UNKNOWN, Splits, curve_splits, mstar_splits
from salgp_study.store import fingerprint
from salgp_study.toy_data import toy_chips, toy_lightcurves

__all__ = ["Source", "data_folder", "names_of_tests", "open_source"]

_TOY = "made-1"


@dataclass(frozen=True)
class Source:
    """A data set, read when first needed.

    Args:
        fingerprint: digest of the files, or the version of the made data.
        splits: gives the data of an experiment and a seed.
    """

    fingerprint: str
    splits: Callable[[Experiment, int], Splits]


def data_folder(data: str | os.PathLike[str] | None = None) -> Path:
    """Folder with the real data: the argument, else the environment variable ``SALGP_DATA``.

    Example:
        >>> data_folder("my-data").name
        'my-data'
    """
    if data is not None:
        return Path(data)
    if "SALGP_DATA" not in os.environ:
        raise FileNotFoundError(
            "no folder of real data was given: pass --data (or data=...), or set the environment variable "
            "SALGP_DATA to it"
        )
    return Path(os.environ["SALGP_DATA"])


def names_of_tests(experiment: Experiment) -> tuple[str, ...]:
    """Names of the test sets of an experiment; several are also scored together as ``pooled``."""
    if experiment.dataset != "mstar":
        return ("photometric",)
    return (*map(str, MSTAR_PROTOCOLS[experiment.protocol][1]), "pooled")


def open_source(dataset: str, preset: Preset, data: str | os.PathLike[str] | None = None) -> Source:
    """The data set called ``dataset``, made or real as the preset says."""
    if dataset not in ("mstar", "spcc", "plasticc"):
        raise KeyError(f"no data set called {dataset!r}; known: mstar, plasticc, spcc")
    if preset.toy:
        return _toy(dataset)
    folder = data_folder(data)
    return {"mstar": _mstar, "spcc": _spcc, "plasticc": _plasticc}[dataset](folder, preset)


def _toy(dataset: str) -> Source:
    if dataset == "mstar":
        chips = toy_chips()
        return Source(_TOY, lambda e, seed: mstar_splits(chips, e.protocol, e.fraction, seed, held_out=0.5))
    curves = toy_lightcurves()
    return Source(_TOY, lambda e, seed: curve_splits(curves, ("Z",), e.fraction, seed, held_out=0.5))


def _mstar(folder: Path, preset: Preset) -> Source:
    path = folder / "mstar_chips.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"no such file: {path}; set SALGP_DATA (or --data) to the folder that holds mstar_chips.npz"
        )
    chips = _once(lambda: _cropped(load_mstar(path), preset.size))
    return Source(fingerprint(path), lambda e, seed: mstar_splits(chips(), e.protocol, e.fraction, seed))


def _cropped(chips: Chips, size: int) -> Chips:
    return replace(chips, x=centre_crop(chips.x, size))


def _spcc(folder: Path, preset: Preset) -> Source:
    files = sorted(folder.glob("spcc_*"))
    curves = _once(lambda: load_spcc(folder, preset.max_steps))
    return Source(
        fingerprint(*files),
        lambda e, seed: curve_splits(curves(), SPCC_UNKNOWN, e.fraction, seed, n_test=preset.n_test),
    )


def _plasticc(folder: Path, preset: Preset) -> Source:
    train = _first(folder, ("plasticc_train_lightcurves", "training_set"))
    train_meta = _first(folder, ("plasticc_train_metadata", "training_set_metadata"))
    test_meta = _first(folder, ("plasticc_test_metadata", "unblinded_test_set_metadata"))
    tests = sorted([*folder.glob("plasticc_test_lightcurves_*"), *folder.glob("test_set_batch*")])
    if not tests:
        raise FileNotFoundError(
            f"{folder}: no plasticc_test_lightcurves_*.csv.gz or test_set_batch*.csv here"
        )
    read = _once(lambda: _both(load_plasticc(train, train_meta, preset.max_steps), tests, test_meta, preset))
    return Source(
        fingerprint(train, train_meta, test_meta, *tests),
        lambda e, seed: curve_splits(read(), (), e.fraction, seed),
    )


def _both(train: LightCurves, tests: Sequence[Path], metadata: Path, preset: Preset) -> LightCurves:
    ids = read_columns(metadata, ("object_id",))["object_id"]
    n = len(ids) if preset.n_test is None else min(preset.n_test, len(ids))
    wanted = np.random.default_rng(0).choice(ids, n, replace=False)
    parts = [
        load_lightcurves(path, metadata, "true_target", None, 6, preset.max_steps, keep=wanted)
        for path in tests
    ]
    pieces = [train, *(p for p in parts if len(p))]
    longest = max(p.curves.shape[2] for p in pieces)
    padded = [torch.nn.functional.pad(p.curves, (0, 0, 0, longest - p.curves.shape[2])) for p in pieces]
    spectroscopic = torch.cat([torch.full((len(p),), k == 0) for k, p in enumerate(pieces)])
    target = np.concatenate([p.target for p in pieces])
    return LightCurves(
        torch.cat(padded),
        torch.cat([p.meta for p in pieces]),
        target,
        torch.cat([p.object_id for p in pieces]),
        spectroscopic,
    )


def _first(folder: Path, stems: Sequence[str]) -> Path:
    for stem in stems:
        for ending in (".csv.gz", ".csv", ".parquet"):
            if (folder / f"{stem}{ending}").is_file():
                return folder / f"{stem}{ending}"
    raise FileNotFoundError(
        f"{folder}: none of {', '.join(stems)} (.csv.gz, .csv, .parquet) here; the full "
        f"PLAsTiCC set is at zenodo.org/records/2539456"
    )


def _once(read: Callable[[], Any]) -> Callable[[], Any]:
    kept: list[Any] = []

    def value() -> Any:
        if not kept:
            kept.append(read())
        return kept[0]

    return value
