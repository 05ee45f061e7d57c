"""Light curves: padding, thinning, scaling, file formats, unknown classes."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from salgp.io import FormatError
from salgp_study.lightcurves import load_plasticc, load_spcc, read_columns

pa = pytest.importorskip("pyarrow", reason="light curves need pyarrow")

DATA = Path(os.environ.get("SALGP_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "spcc_metadata.parquet").is_file(), reason="the light curves are not in SALGP_DATA"
)

CURVES = (
    "object_id,mjd,passband,flux,flux_err,detected\n"
    "7,10,0,1.0,0.5,1\n7,30,0,-3.0,0.5,1\n7,20,5,9.0,1.0,1\n8,5,1,2.0,1.0,0\n9,5,1,2.0,1.0,0\n"
)
META = (
    "object_id,ra,decl,mwebv,hostgal_photoz,hostgal_photoz_err,target\n"
    "8,1,2,3,4,5,42\n7,6,7,8,,10,90\n11,0,0,0,0,0,90\n"
)


def write(folder: Path, curves: str = CURVES, meta: str = META) -> tuple[Path, Path]:
    (folder / "training_set.csv").write_text(curves)
    (folder / "training_set_metadata.csv").write_text(meta)
    return folder / "training_set.csv", folder / "training_set_metadata.csv"


def test_values_times_and_padding(tmp_path: Path) -> None:
    data = load_plasticc(*write(tmp_path))
    assert data.object_id.tolist() == [7, 8]  # 9 has no metadata, 11 no observations
    assert data.target.tolist() == ["90", "42"]
    assert data.curves.shape == (2, 6, 2, 4)
    scale = 9.0 - 1.0  # brightest flux less its error
    expected = [
        [0.0, np.arcsinh(1 / scale), np.arcsinh(0.5 / scale), 1],
        [0.2, np.arcsinh(-3 / scale), np.arcsinh(0.5 / scale), 1],
    ]
    np.testing.assert_allclose(data.curves[0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(data.curves[0, 5, 0, 0], 0.1, rtol=1e-6)
    assert float(data.curves[..., 3].sum()) == 4
    assert float(data.curves[data.curves[..., 3] == 0].abs().sum()) == 0
    np.testing.assert_allclose(data.meta[0], [6, 7, 8, 0, 10, np.log10(scale)], rtol=1e-6)


def test_classes_never_seen_are_unknown(tmp_path: Path) -> None:
    assert load_plasticc(*write(tmp_path)).labels(["42"]).tolist() == [-1, 0]


def test_gzip_and_parquet_give_the_same(tmp_path: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    curves, meta = write(tmp_path)
    reference = load_plasticc(curves, meta)
    zipped = tmp_path / "training_set.csv.gz"
    zipped.write_bytes(gzip.compress(curves.read_bytes()))
    parquet = tmp_path / "training_set.parquet"
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(curves), parquet)
    for path in (zipped, parquet):
        assert torch.equal(load_plasticc(path, meta).curves, reference.curves)


def test_long_curves_are_thinned_evenly(tmp_path: Path) -> None:
    rows = "".join(f"7,{t},0,1.0,0.1,1\n" for t in range(100))
    data = load_plasticc(
        *write(tmp_path, "object_id,mjd,passband,flux,flux_err,detected\n" + rows), max_steps=10
    )
    assert data.curves.shape[2] == 10
    np.testing.assert_allclose(data.curves[0, 0, :, 0] * 100, np.arange(0, 100, 10), atol=1e-4)


@pytest.mark.parametrize(
    ("curves", "meta", "reason"),
    [
        (CURVES.replace("flux_err", "sigma"), META, "training_set.csv.*flux_err"),
        (CURVES.replace("7,10,0", "7,10,6"), META, "passbands 0..6.*0..5"),
        (CURVES.replace("1.0,0.5,1\n7,30", ",0.5,1\n7,30"), META, "flux is not a finite number in row 0"),
        ("object_id,mjd,passband,flux,flux_err\n", META, "no rows"),
        (CURVES, META.replace("target", "kind"), "training_set_metadata.csv.*target"),
        (CURVES, META.replace("8,1", "18,1").replace("7,6", "17,6"), "none of its objects"),
    ],
)
def test_bad_tables_name_the_file_and_the_reason(tmp_path: Path, curves: str, meta: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        load_plasticc(*write(tmp_path, curves, meta))


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(FormatError, match=r"x\.parquet"):
        read_columns(tmp_path / "x.parquet")
    (tmp_path / "y.csv.gz").write_bytes(gzip.compress(CURVES.encode())[:30])
    with pytest.raises(FormatError, match=r"y\.csv\.gz"):
        read_columns(tmp_path / "y.csv.gz")
    with pytest.raises(FileNotFoundError, match="spcc_lightcurves"):
        load_spcc(tmp_path)


@pytest.mark.data
@needs_data
def test_the_hundred_real_plasticc_curves() -> None:
    data = load_plasticc(
        DATA / "plasticc_lightcurves_100_objects.parquet", DATA / "plasticc_train_metadata.parquet"
    )
    assert len(data) == 100
    points = read_columns(DATA / "plasticc_lightcurves_100_objects.parquet")
    assert int(data.curves[..., 3].sum()) == len(points["mjd"])
    assert torch.isfinite(data.curves).all()
    assert torch.isfinite(data.meta).all()
    assert len(set(data.target.tolist())) > 5


@pytest.mark.data
@needs_data
def test_spcc_counts() -> None:
    data = load_spcc(DATA)
    assert len(data) == 21_319
    assert int(data.spectroscopic.sum()) == 1_103
    assert data.curves.shape[1] == 4
    assert int((data.target == "Ia").sum()) == 5_088
