"""Radar chips: the raw format, crops, and clear words for broken files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from salgp.io import FormatError
from salgp_study.mstar import centre_crop, load_mstar, load_mstar_folder, read_phoenix

DATA = Path(os.environ.get("SALGP_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "mstar_raw").is_dir(), reason="the MSTAR files are not in SALGP_DATA"
)


def write_chip(
    path: Path, values: np.ndarray, target: str = "t72_tank", angle: str = "17", cut: int = 0
) -> Path:
    rows, columns = values.shape
    lines = [
        "",
        "[PhoenixHeaderVer01.04]",
        "PhoenixHeaderLength= 00300",
        "native_header_length= 0",
        f"NumberOfColumns= {columns}",
    ]
    lines += [
        f"NumberOfRows= {rows}",
        f"TargetType= {target}",
        f"DesiredDepression= {angle}",
        "[EndofPhoenixHeader]",
        "",
    ]
    content = (
        "\n".join(lines).encode("latin-1").ljust(300, b"\0")
        + values.astype(">f4").tobytes()
        + np.zeros_like(values).astype(">f4").tobytes()
    )
    path.write_bytes(content[: len(content) - cut])
    return path


def test_made_phoenix_file_reads_back(tmp_path: Path) -> None:
    values = np.arange(12.0).reshape(3, 4)
    magnitude, header = read_phoenix(write_chip(tmp_path / "HB1.015", values))
    np.testing.assert_array_equal(magnitude, values)
    assert header["TargetType"] == "t72_tank"


def test_folder_crops_scales_and_labels(tmp_path: Path) -> None:
    write_chip(tmp_path / "a.015", np.full((6, 6), 2.0), "zsu23-4_gun", "15")
    write_chip(tmp_path / "b.015", np.full((2, 2), 5.0), "slicey", "30")
    (tmp_path / "readme.txt").write_text("not a chip")
    chips = load_mstar(tmp_path)
    assert chips.label.tolist() == [9, -1]
    assert chips.depression.tolist() == [15, 30]
    assert chips.x.shape == (2, 128, 128)
    assert float(chips.x.max()) == 1.0
    assert int((chips.x[0] > 0).sum()) == 36


def test_centre_crop_keeps_the_centre() -> None:
    x = torch.zeros(9, 9)
    x[4, 4] = 1
    assert centre_crop(x, 5)[2, 2] == 1
    assert centre_crop(x, 9).equal(x)
    assert centre_crop(torch.ones(3, 5, 5), 8).sum() == 75


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: p.write_bytes(b"hello") and p, "not a Phoenix file"),
        (lambda p: write_chip(p, np.ones((4, 4)), cut=100), "cut short"),
        (lambda p: write_chip(p, np.full((4, 4), np.nan)), "NaN"),
        (lambda p: write_chip(p, np.ones((4, 4)), angle="steep"), "DesiredDepression"),
        (lambda p: write_chip(p, np.ones((4, 4)), angle="\xb97"), "DesiredDepression"),  # a digit, no number
        (lambda p: write_chip(p, np.ones((4, 4)), angle="9" * 400), "DesiredDepression"),
    ],
)
def test_broken_chip_names_the_file_and_the_reason(tmp_path: Path, make, reason: str) -> None:
    path = tmp_path / "HB9.000"
    make(path)
    with pytest.raises(FormatError, match=f"HB9.000.*{reason}"):
        read_phoenix(path)


def test_broken_or_incomplete_npz(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK not really")
    with pytest.raises(FormatError, match=r"a\.npz"):
        load_mstar(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros((1, 2, 2), np.uint8))
    with pytest.raises(FormatError, match="label"):
        load_mstar(tmp_path / "b.npz")
    with pytest.raises(FileNotFoundError, match="SALGP_DATA"):
        load_mstar(tmp_path / "c.npz")
    with pytest.raises(FileNotFoundError, match="Phoenix"):
        load_mstar_folder(tmp_path)


@pytest.mark.data
@needs_data
def test_real_raw_chips_agree_with_the_npz() -> None:
    chips = load_mstar_folder(DATA / "mstar_raw")
    assert chips.label.tolist() == [1, 4, 7, 7, 1, 1, 4, 7, 7, -1]
    assert chips.depression.tolist() == [15] * 4 + [17] * 5 + [30]
    assert torch.isfinite(chips.x).all()
    slicy, header = read_phoenix(DATA / "mstar_raw" / "30_DEG_SLICY_HB15269.015")
    assert slicy.shape == (54, 54)
    assert header["TargetType"] == "slicey"
    rendered = load_mstar(DATA / "mstar_chips.npz")
    names = np.load(DATA / "mstar_chips.npz")["fname"]
    row = next(i for i, n in enumerate(names) if "HB03787.015" in n)
    raw, _ = read_phoenix(DATA / "mstar_raw" / "17_DEG_T72_SN_132_HB03787.015")
    pair = torch.stack(
        [
            centre_crop(raw, 64).clamp(max=raw.quantile(0.999)).flatten(),
            centre_crop(rendered.x[row], 64).flatten(),
        ]
    )
    assert float(torch.corrcoef(pair)[0, 1]) > 0.9
