"""Data sets of the command line: one numbering of the classes, kept apart, whole numbers, after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample
from sealing import edit_tensors
from torch import nn

import salgp
from salgp.calibrators.loading import read_parts
from salgp.cli import calibrate, main
from salgp.logits import check_finite
from salgp.network.extract import read_calibration_data
from salgp.network.reader import FORMAT_VERSION, Reader
from salgp.store import extract_to_store, write_store

Run = Callable[[str], tuple[int, str, str]]
NETWORK = """
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias.zero_()
        model[0].weight.copy_(torch.cat([torch.eye(3), -torch.eye(3)]))
        model[2].weight.copy_(3 * torch.cat([torch.eye(3), -torch.eye(3)], 1))
    return model


def colours():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), make())
"""
CALIBRATE = "calibrate net.py:make --train train.npz --calibration cal.npz --test test.npz -o out -m platt"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    for seed, name in enumerate(("train", "cal", "test")):
        save(tmp_path / f"{name}.npz", *made(80, seed))

    def call(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(line.split())
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def made(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return x, (x + 0.8 * torch.randn(n, 3, generator=g)).argmax(1)


def save(path: Path, x: torch.Tensor, y: torch.Tensor) -> None:
    np.savez(path, x=x.numpy(), y=y.numpy())


def with_nan(x: torch.Tensor, row: int) -> torch.Tensor:
    x = x.clone()
    x[row, 0] = torch.nan
    return x


def with_copies(features: salgp.Features) -> salgp.Features:
    """Every sample, and a disturbed copy of it."""
    g = torch.Generator().manual_seed(0)
    layers = {
        name: torch.cat([x, x + torch.randn(x.shape, generator=g)]) for name, x in features.layers.items()
    }
    n = len(features)
    groups, families = torch.arange(n).repeat(2), torch.arange(2).repeat_interleave(n)
    return salgp.Features(torch.cat([features.logits, features.logits / 3]), layers, groups, families)


def pictures(folder: Path, *names: str, n: int = 12) -> None:
    """Reddish, greenish and bluish pictures in a sub-folder each: the colour is the class."""
    image = pytest.importorskip("PIL.Image")
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(n):
            pixels = np.zeros((4, 4, 3), np.uint8)
            pixels[..., ["agn", "snia", "star"].index(name)] = 100 + i
            image.fromarray(pixels).save(folder / name / f"{i}.png")


def test_a_test_folder_without_one_of_the_classes_keeps_the_numbers_of_the_others(
    run: Run, tmp_path: Path
) -> None:
    pictures(tmp_path / "cal", "agn", "snia", "star")
    pictures(tmp_path / "test", "snia", "star")
    code, _, err = run("calibrate net.py:colours --calibration cal --test test -o out -m platt")
    assert code == 0, err
    features, labels = salgp.load_features(tmp_path / "out" / "test.safetensors")
    assert labels is not None
    assert labels.unique().tolist() == [1, 2]
    assert bool(features.correct(labels).all())


def test_folders_of_which_none_shows_all_classes_are_refused(run: Run, tmp_path: Path) -> None:
    pictures(tmp_path / "cal", "agn", "snia")
    pictures(tmp_path / "test", "snia", "star")
    code, _, err = run("calibrate net.py:colours --calibration cal --test test -o out -m platt")
    assert code == 1
    assert "'star' is none of the classes agn, snia" in err
    assert "--classes" in err
    given = "calibrate net.py:colours --calibration cal --test test -o out -m platt --classes agn,snia,star"
    assert run(given)[0] == 0


@pytest.mark.parametrize(
    "line", ["extract net.py:colours few -o f.safetensors", "extract net.py:colours few -o s"]
)
def test_folders_do_not_number_classes_of_a_network_that_has_others(
    line: str, run: Run, tmp_path: Path
) -> None:
    pictures(tmp_path / "few", "snia", "star")
    code, _, err = run(line)
    assert code == 1
    assert "2 sub-folders (snia, star) for a network of 3 classes" in err
    assert run(f"{line} --classes agn,snia,star")[0] == 0


def test_test_samples_that_were_learnt_from_are_noted(run: Run) -> None:
    code, _, err = run(CALIBRATE.replace("--test test.npz", "--test cal.npz"))
    assert code == 0, err
    assert "note: 80 of 80 samples of --test are in --calibration too" in err


def test_sets_that_are_apart_are_not_noted(run: Run) -> None:
    code, _, err = run(CALIBRATE)
    assert code == 0, err
    assert "samples of --test are in" not in err


@pytest.mark.parametrize("how", ["-o f.safetensors", "-o f.safetensors --perturb", "-o f --batch-size 3"])
def test_extract_refuses_nan_and_names_the_row(how: str, run: Run, tmp_path: Path) -> None:
    x, y = made(20, 0)
    save(tmp_path / "nan.npz", with_nan(x, 4), y)
    code, _, err = run(f"extract net.py:make nan.npz {how}")
    assert code == 1
    assert "NaN or infinity in row 4 (1 rows in all)" in err
    assert not (tmp_path / "f.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cal", "class scores hold"),
        ("train", "class scores of the reference hold"),
        ("test", "--test: the class"),
    ],
)
def test_calibrate_refuses_nan_and_names_set_and_row(name: str, said: str, run: Run, tmp_path: Path) -> None:
    save(tmp_path / f"{name}.npz", with_nan(made(80, 5)[0], 7), made(80, 5)[1])
    code, _, err = run(CALIBRATE.replace("platt", "layer-evidence"))
    assert code == 1
    assert said in err
    assert "row 7 (1 rows in all)" in err
    assert not (tmp_path / "out").exists()


def test_nan_is_found_before_copies_are_made_of_it() -> None:
    x, y = made(30, 0)
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="class scores hold NaN or infinity in row 11 "):
        read_calibration_data(model, [(with_nan(x, 11), y)], Reader(), ["noise"])
    with pytest.raises(ValueError, match="of the reference hold NaN or infinity in row 2 "):
        read_calibration_data(model, [(x, y)], Reader(), reference=[(with_nan(x, 2), y)])


def test_a_store_counts_rows_over_all_shards(tmp_path: Path) -> None:
    x, y = made(40, 0)
    model = nn.Sequential(nn.Linear(3, 3))
    loader = list(zip(with_nan(x, 33).split(10), y.split(10), strict=True))
    with pytest.raises(ValueError, match="NaN or infinity in row 33 "):
        extract_to_store(model, loader, tmp_path / "store", rows=10)


@pytest.mark.parametrize("layer", [False, True])
def test_a_store_of_features_that_are_not_finite_is_not_written(layer: bool, tmp_path: Path) -> None:
    features, labels = sample(200)
    x = features.layers["layer0"] if layer else features.logits
    x[133, 0] = torch.nan
    what = "layer 'layer0' holds" if layer else "the class scores hold"
    with pytest.raises(ValueError, match=f"{what} NaN or infinity in row 133 "):
        write_store([(features, labels)], tmp_path / "store", rows=50)


def test_numbers_whose_sum_overflows_are_finite() -> None:
    check_finite(torch.full((4, 2), 3e38))


@pytest.mark.parametrize("killed_in", ["salgp.cli.calibrate._write", "salgp.report.build"])
def test_a_killed_calibrate_is_begun_anew(killed_in: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(killed_in, killed)
        assert run(CALIBRATE)[0] == 130
    code, out, err = run(f"{CALIBRATE} --force")
    assert code == 0, err
    assert "report: out/report.html" in out
    assert sorted(path.name for path in Path("out").glob("[!.]*")) == sorted(calibrate.WRITTEN)
    assert "exists already" in run(CALIBRATE)[2]


def test_what_features_say_of_their_network_keeps_its_version(run: Run, tmp_path: Path) -> None:
    assert run("extract net.py:make cal.npz -o f.safetensors")[0] == 0
    assert run("fit f.safetensors -o known -m temperature")[0] == 0
    assert read_parts(tmp_path / "known")["network"]["taps"] == []

    def newer(tensors: object, metadata: dict[str, str]) -> None:
        said = json.loads(metadata["module"])
        metadata["module"] = json.dumps(said | {"format_version": FORMAT_VERSION + 1})

    edit_tensors(tmp_path / "f.safetensors", newer)
    code, _, err = run("fit f.safetensors -o later -m temperature")
    assert code == 1
    assert "f.safetensors: written by a newer version of salgp" in err
    assert not (tmp_path / "later").exists()
