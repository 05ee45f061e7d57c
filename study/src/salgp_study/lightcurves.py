"""Multi-band light curves (SPCC 2010, PLAsTiCC) as padded tensors a recurrent network can read.

Curves come as long tables with PLAsTiCC's column names, in CSV (plain or gzip) or Parquet, and one metadata
row per object. Per object, time starts at its first observation in units of 100 days; flux and its error are
divided by the object's brightest well-measured flux and squashed by ``asinh``; the logarithm of that scale
joins the metadata, so no brightness is lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.extras import require
from salgp.io import FormatError, reading

__all__ = ["META_COLUMNS", "LightCurves", "load_lightcurves", "load_plasticc", "load_spcc", "read_columns"]

META_COLUMNS = ("ra", "decl", "mwebv", "hostgal_photoz", "hostgal_photoz_err")
"""What is known of an object besides its curve; the logarithm of the flux scale follows."""
_CURVE_COLUMNS = ("object_id", "mjd", "passband", "flux", "flux_err")
_DAYS = 100.0


@dataclass(frozen=True, eq=False)
class LightCurves:
    """Light curves of ``n`` objects.

    Args:
        curves: ``(n, n_bands, T, 4)``: time, flux, flux error, and 1 where observed; padding is zero and
            comes last.
        meta: ``(n, m)`` raw metadata features; the last is the logarithm of the flux scale.
        target: ``(n,)`` class names.
        object_id: ``(n,)`` identifiers.
        spectroscopic: ``(n,)`` is the object in the (biased) spectroscopic training set?
    """

    curves: Tensor
    meta: Tensor
    target: np.ndarray[Any, Any]
    object_id: Tensor
    spectroscopic: Tensor

    def __len__(self) -> int:
        return len(self.meta)

    def __getitem__(self, rows: Tensor) -> LightCurves:
        return LightCurves(
            self.curves[rows],
            self.meta[rows],
            self.target[rows.numpy()],
            self.object_id[rows],
            self.spectroscopic[rows],
        )

    def labels(self, known: Sequence[str]) -> Tensor:
        """Class index of each object in ``known``; -1 for any other class."""
        index = {name: k for k, name in enumerate(known)}
        return torch.tensor([index.get(str(name), -1) for name in self.target])


def load_spcc(folder: str | os.PathLike[str], max_steps: int = 64) -> LightCurves:
    """The 2010 supernova challenge: ``spcc_lightcurves`` and ``spcc_metadata`` (.parquet, .csv or .csv.gz) in
    ``folder``.
    """
    where = Path(folder)
    return load_lightcurves(
        _find(where, "spcc_lightcurves"),
        _find(where, "spcc_metadata"),
        "true_type",
        "spectro",
        n_bands=4,
        max_steps=max_steps,
    )


def load_plasticc(
    curves: str | os.PathLike[str], metadata: str | os.PathLike[str], max_steps: int = 128
) -> LightCurves:
    """PLAsTiCC with its official names, e.g. ``training_set.csv.gz`` and ``training_set_metadata.csv``.

    The unblinded ``true_target`` is the class where present, else ``target``.
    """
    names = set(read_columns(metadata))
    target = "true_target" if "true_target" in names else "target"
    return load_lightcurves(curves, metadata, target, None, n_bands=6, max_steps=max_steps)


def load_lightcurves(
    curves: str | os.PathLike[str],
    metadata: str | os.PathLike[str],
    target: str,
    spectroscopic: str | None,
    n_bands: int,
    max_steps: int,
    keep: np.ndarray[Any, Any] | None = None,
) -> LightCurves:
    """Read a curve table and its metadata; objects without any observation are left out.

    Args:
        curves: table with object_id, mjd, passband, flux, flux_err.
        metadata: table with object_id, the metadata features and ``target``.
        target: metadata column with the class.
        spectroscopic: boolean metadata column, or None where every object counts as training object.
        n_bands: number of passbands, numbered from 0.
        max_steps: longest sequence kept per band; longer ones are thinned evenly.
        keep: read only these objects; a table without any of them gives no objects.
    """
    points = read_columns(curves, _CURVE_COLUMNS)
    if keep is not None:
        inside = np.isin(points["object_id"], keep)
        points = {name: values[inside] for name, values in points.items()}
    objects = read_columns(
        metadata, ("object_id", target, *META_COLUMNS, *([spectroscopic] if spectroscopic else []))
    )
    with reading(curves, "observations of bands, times and fluxes"):
        _check_points(points, n_bands, curves, allow_empty=keep is not None)
    with reading(metadata, "objects with metadata that match the curves"):
        return _joined(points, objects, curves, metadata, target, spectroscopic, n_bands, max_steps, keep)


def _joined(
    points: Mapping[str, np.ndarray[Any, Any]],
    objects: Mapping[str, np.ndarray[Any, Any]],
    curves: str | os.PathLike[str],
    metadata: str | os.PathLike[str],
    target: str,
    spectroscopic: str | None,
    n_bands: int,
    max_steps: int,
    keep: np.ndarray[Any, Any] | None,
) -> LightCurves:
    """Curves and metadata of the objects that both tables know."""
    ids = np.sort(objects["object_id"][np.isin(objects["object_id"], points["object_id"])])
    if not len(ids) and keep is None:
        raise FormatError(f"{curves}: none of its objects is in {metadata}")
    row = np.argsort(objects["object_id"], kind="stable")[np.searchsorted(np.sort(objects["object_id"]), ids)]
    sequences, log_scale = _pad(points, ids, n_bands, max_steps)
    meta = np.stack(
        [np.nan_to_num(objects[c][row].astype(np.float64)) for c in META_COLUMNS] + [log_scale], axis=1
    )
    chosen = objects[spectroscopic][row].astype(bool) if spectroscopic else np.ones(len(ids), bool)
    return LightCurves(
        torch.from_numpy(sequences),
        torch.from_numpy(meta).float(),
        objects[target][row].astype(str),
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(chosen),
    )


def read_columns(path: str | os.PathLike[str], needed: Sequence[str] = ()) -> dict[str, np.ndarray[Any, Any]]:
    """Read the ``needed`` columns (all, if none are named) of a CSV, gzipped CSV or Parquet table as arrays.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "t.csv").write_text("object_id,flux\\n7,1.5\\n8,-2\\n")
        ...     read_columns(folder + "/t.csv", ["flux"])
        {'flux': array([ 1.5, -2. ])}
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}; set SALGP_DATA to the folder that holds it")
    with reading(path, "a readable CSV, CSV.gz or Parquet table"):
        table = _read_table(path)
        table.validate(full=True)
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise FormatError(f"{path}: no column {missing[0]!r}; found {', '.join(table.column_names)}")
    return {name: table[name].to_numpy() for name in (needed or table.column_names)}


def _read_table(path: str | os.PathLike[str]) -> Any:
    require("pyarrow")
    import pyarrow.csv
    import pyarrow.parquet

    if str(path).endswith(".parquet"):
        return pyarrow.parquet.read_table(path)
    return pyarrow.csv.read_csv(path)


def _find(folder: Path, stem: str) -> Path:
    for ending in (".parquet", ".csv", ".csv.gz"):
        if (folder / f"{stem}{ending}").is_file():
            return folder / f"{stem}{ending}"
    raise FileNotFoundError(
        f"{folder}: no {stem}.parquet, .csv or .csv.gz here; set SALGP_DATA to the folder that holds it"
    )


def _check_points(
    points: Mapping[str, np.ndarray[Any, Any]], n_bands: int, path: str | os.PathLike[str], allow_empty: bool
) -> None:
    bands = points["passband"]
    if len(bands) == 0 and not allow_empty:
        raise FormatError(f"{path}: the table has no rows")
    if len(bands) and (bands.min() < 0 or bands.max() >= n_bands):
        raise FormatError(f"{path}: passbands {bands.min()}..{bands.max()} found, expected 0..{n_bands - 1}")
    for name in ("mjd", "flux", "flux_err"):
        bad = np.flatnonzero(~np.isfinite(points[name].astype(np.float64)))
        if len(bad):
            raise FormatError(
                f"{path}: {name} is not a finite number in row {bad[0]} ({len(bad)} rows in all)"
            )


def _pad(
    points: Mapping[str, np.ndarray[Any, Any]], ids: np.ndarray[Any, Any], n_bands: int, max_steps: int
) -> tuple[Any, Any]:
    inside = np.isin(points["object_id"], ids)
    who = np.searchsorted(ids, points["object_id"][inside])
    band, mjd = points["passband"][inside], points["mjd"][inside].astype(np.float64)
    order = np.lexsort((mjd, band, who))
    who, band, mjd = who[order], band[order].astype(np.int64), mjd[order]
    flux, error = (points[name][inside][order].astype(np.float64) for name in ("flux", "flux_err"))
    scale, first = np.ones(len(ids)), np.full(len(ids), np.inf)
    np.maximum.at(scale, who, np.abs(flux) - error)
    np.minimum.at(first, who, mjd)
    values = np.stack(
        [
            (mjd - first[who]) / _DAYS,
            np.arcsinh(flux / scale[who]),
            np.arcsinh(error / scale[who]),
            np.ones(len(who)),
        ],
        axis=1,
    )
    keep, step = _thin(who * n_bands + band, max_steps)
    out = np.zeros((len(ids), n_bands, step.max(initial=0) + 1, 4), np.float32)
    out[who[keep], band[keep], step] = values[keep]
    return out, np.log10(scale)


def _thin(group: np.ndarray[Any, Any], max_steps: int) -> tuple[Any, Any]:
    """Which rows stay where groups, one after the other, may have ``max_steps`` rows, and their steps."""
    _, start, size = np.unique(group, return_index=True, return_counts=True)
    length = np.repeat(size, size)
    position = np.arange(len(group)) - np.repeat(start, size)
    step = np.where(length > max_steps, position * max_steps // length, position)
    keep = np.ones(len(group), bool)
    keep[1:] = (step[1:] != step[:-1]) | (group[1:] != group[:-1])
    return keep, step[keep]
