"""The full PLAsTiCC set by its official names, read in parts, and the pictures of the data."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from salgp_study.drawings import draw_chips, draw_flow, draw_flux_distributions, draw_lightcurve_grid
from salgp_study.presets import PRESETS, Experiment
from salgp_study.sources import data_folder, names_of_tests, open_source
from salgp_study.toy_data import toy_chips, toy_lightcurves

pytest.importorskip("pyarrow", reason="light curves need pyarrow")

HEAD = "object_id,mjd,passband,flux,flux_err,detected\n"
META = "object_id,ra,decl,mwebv,hostgal_photoz,hostgal_photoz_err,target,true_target\n"


def curves(ids: range, steps: int) -> str:
    return HEAD + "".join(f"{i},{t},{t % 6},{i + t}.5,1.0,1\n" for i in ids for t in range(steps))


def metadata(ids: range, classes: tuple[int, ...]) -> str:
    return META + "".join(
        f"{i},0,0,0,0.1,0.1,{classes[i % len(classes)]},{classes[i % len(classes)]}\n" for i in ids
    )


def full_set(folder: Path) -> Path:
    (folder / "plasticc_train_lightcurves.csv.gz").write_bytes(gzip.compress(curves(range(20), 12).encode()))
    (folder / "plasticc_train_metadata.csv.gz").write_bytes(
        gzip.compress(metadata(range(20), (42, 90)).encode())
    )
    for part, ids in ((1, range(100, 110)), (2, range(110, 130))):
        (folder / f"plasticc_test_lightcurves_{part:02d}.csv.gz").write_bytes(
            gzip.compress(curves(ids, 18).encode())
        )
    (folder / "plasticc_test_metadata.csv.gz").write_bytes(
        gzip.compress(metadata(range(100, 130), (42, 90, 991)).encode())
    )
    return folder


def test_plasticc_by_its_official_names(tmp_path: Path) -> None:
    preset = replace(PRESETS["cpu"], n_test=12)
    splits = open_source("plasticc", preset, full_set(tmp_path)).splits(Experiment("plasticc", "rnn"), 0)
    assert splits.class_names == ("42", "90")
    assert splits.sizes["train"] + splits.sizes["validation"] == 20
    test = splits.tests["photometric"]
    assert len(test) == 12
    assert set(test.tensors[-1].tolist()) <= {-1, 0, 1}
    assert -1 in test.tensors[-1].tolist()
    assert torch.isfinite(test.tensors[0]).all()


def test_other_test_curves_are_other_data(tmp_path: Path) -> None:
    def seen() -> str:
        return open_source("plasticc", PRESETS["cpu"], tmp_path).fingerprint

    full_set(tmp_path)
    before = seen()
    assert seen() == before
    part = tmp_path / "plasticc_test_lightcurves_02.csv.gz"
    part.write_bytes(gzip.compress(curves(range(110, 130), 17).encode(), mtime=0))
    assert seen() != before


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="plasticc_train_lightcurves"):
        open_source("plasticc", PRESETS["cpu"], tmp_path)
    with pytest.raises(KeyError, match="mstar, plasticc, spcc"):
        open_source("cifar", PRESETS["cpu"], tmp_path)


def test_names_and_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of_tests(Experiment("mstar", "convnet", "soc")) == ("15", "30", "pooled")
    assert names_of_tests(Experiment("spcc", "rnn")) == ("photometric",)
    monkeypatch.setenv("SALGP_DATA", "elsewhere")
    assert data_folder() == Path("elsewhere")
    assert data_folder("here") == Path("here")
    monkeypatch.delenv("SALGP_DATA")
    with pytest.raises(FileNotFoundError, match="SALGP_DATA"):
        data_folder()


def test_pictures_of_the_data() -> None:
    made = toy_lightcurves()
    chips = toy_chips()
    panels = draw_chips(chips).axes
    assert len(panels) == 3 * (1 + len(set(chips.depression.tolist())))
    assert all(ax.images for ax in panels)
    assert len(draw_lightcurve_grid(made, (0, 1, 2), "gr").axes) == 6
    assert draw_flux_distributions(made, "flux error", "gr").axes
    assert draw_flow().axes
