"""No command replaces its own inputs, or files of another kind, whatever it is told."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import salgp
from salgp.cli import main
from salgp.decide import choose_threshold
from salgp.files import read_features
from salgp.io.arrays import harmless

Run = Callable[[str], tuple[int, str]]

NET = """
import torch
def make(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
"""


def fill(where: Path) -> None:
    """A network, its data, three files of features, a rule."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    logits = 2 * torch.eye(3)[labels] + torch.randn(120, 3, generator=g)
    features = salgp.Features(logits, {"1": torch.randn(120, 6, generator=g)})
    for name in ("f", "new", "ref"):
        features.save(where / f"{name}.safetensors", labels)
    (where / "net.py").write_text(NET)
    x = np.random.default_rng(0).random((90, 4), dtype=np.float32)
    np.savez(where / "data.npz", x=x, labels=np.arange(90) % 3)
    rule = choose_threshold(
        salgp.calibrators.get("temperature").fit(features, labels).predict(features), labels
    )
    rule.save(where / "rule.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("targets")
    fill(where)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        for line in (
            "fit f.safetensors -m temperature -o cal",
            "extract net.py:make data.npz -o store",
            "apply cal f.safetensors -o p.parquet",
            "report cal f.safetensors -o r.html",
        ):
            assert main(line.split()) == 0
    return where


@pytest.fixture
def run(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    shutil.copytree(made, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")

    def call(line: str) -> tuple[int, str]:
        capfd.readouterr()
        return main(line.split()), capfd.readouterr().err

    return call


def contents() -> dict[str, str]:
    found = (path for path in sorted(Path().rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


INPUTS = [
    "monitor cal --reference f.safetensors --state watch -o f.safetensors",
    "monitor cal --reference f.safetensors --state cal",
    "monitor cal --reference f.safetensors --state store",
    "report cal f.safetensors --new-data new.safetensors -o new.safetensors --force",
    "score cal store -o store/scores",
    "fit f.safetensors --reference ref.safetensors -m layer-evidence -o ref.safetensors --force",
    "calibrate net.py:make --calibration data.npz -m temperature -o cal",
    "calibrate net.py:make --calibration data.npz -m temperature -o store",
]
OTHER_KINDS = [
    "monitor cal --reference f.safetensors --state watch -o r.html",
    "monitor cal --reference f.safetensors --state watch -o new.safetensors",
    "monitor cal --reference f.safetensors --state watch -o p.parquet",
    "report cal f.safetensors -o new.safetensors --force",
    "apply cal f.safetensors -o r.html --force",
]


@pytest.mark.parametrize("line", INPUTS + OTHER_KINDS)
def test_inputs_and_other_kinds_are_left_alone(run: Run, line: str) -> None:
    before = contents()
    code, err = run(line)
    assert code in (1, 2), err
    assert len([text for text in err.strip().splitlines() if not text.startswith("note:")]) == 1
    assert contents() == before


@pytest.mark.parametrize("page", ["store", "/dev/null", "pipe.html", "folder.html"])
def test_a_page_that_cannot_be_written_is_refused_before_a_monitor_begins(run: Run, page: str) -> None:
    os.mkfifo("pipe.html")
    Path("folder.html").mkdir()
    code, err = run(f"monitor cal --reference f.safetensors --state watch -o {page}")
    assert code in (1, 2)
    assert page in err
    assert not Path("watch").exists()


def test_what_a_command_wrote_itself_it_replaces(run: Run) -> None:
    for line in (
        "report cal f.safetensors -o r.html --force",
        "apply cal f.safetensors -o p.parquet --force",
        "extract net.py:make data.npz -o new.safetensors --force",
        "monitor cal --reference f.safetensors --state watch -o page.html",
        "monitor cal f.safetensors --state watch -o page.html",
    ):
        assert run(line)[0] == 0, line


def calibrate(*more: str) -> str:
    return " ".join(["calibrate net.py:make --calibration data.npz -m temperature -o out", *more])


def test_calibrate_takes_no_features_for_its_own_that_it_did_not_write(run: Run) -> None:
    """They may have cost hours; an earlier `calibrate` would have left a calibrator beside them."""
    Path("out").mkdir()
    Path("f.safetensors").rename("out/test.safetensors")
    before = contents()
    code, err = run(calibrate("--force"))
    assert code == 1
    assert "not of an earlier" in err
    assert contents() == before


def test_a_calibrate_that_fails_over_its_test_data_leaves_the_earlier_result(run: Run) -> None:
    assert run(calibrate("--test", "data.npz"))[0] == 0
    before = contents()
    np.savez("bad.npz", x=np.full((9, 4), np.nan, np.float32), labels=np.arange(9) % 3)
    code, err = run(calibrate("--test", "bad.npz", "--force"))
    assert code == 1, err
    after = contents()
    after.pop("bad.npz")
    assert after == before


def test_a_name_that_is_no_text_is_refused_before_anything_is_made(run: Run) -> None:
    """A folder named in another encoding: Arrow could not open it in the middle of the work."""
    for line in (
        "score cal store -o \udcff",
        "extract net.py:make data.npz -o \udcff",
        "info \udcff",
        "info a\0b",
    ):
        before = contents()
        code, err = run(line)
        assert code == 2
        assert "is not text in UTF-8" in err
        assert contents() == before


def test_labels_are_those_of_the_columns_where_these_are_numbered_from_one(run: Run) -> None:
    """Labels 1 and 2 of the columns probs.1 to probs.3 were taken for the second and the third class."""
    lines = ["probs.1,probs.2,probs.3,label", *(["0.8,0.1,0.1,1", "0.1,0.8,0.1,2"] * 20)]
    Path("one.csv").write_text("\n".join(lines))
    loaded = read_features("one.csv")
    assert loaded.classes == ["1", "2", "3"]
    assert loaded.known_labels.tolist() == [0, 1] * 20
    assert "unused" not in loaded.metadata
    Path("four.csv").write_text("\n".join([*lines, "0.1,0.8,0.1,-1"]))
    assert read_features("four.csv").known_labels[-1] == -1, "a class it does not know"
    Path("four.csv").write_text("\n".join([*lines, "0.1,0.8,0.1,4"]))
    code, err = run("fit four.csv -m temperature -o new")
    assert code == 1
    assert "four.csv: label 4 is none of the classes 1, 2, 3" in err


@pytest.mark.parametrize("cell", ["=1", "\n=1", "\r+1", "\t@x", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20x"])
def test_no_cell_of_a_table_is_a_formula(cell: str) -> None:
    assert harmless(cell) == f"'{cell}"


def test_no_calibrator_is_replaced_beside_a_rule(run: Run) -> None:
    shutil.copy("rule.json", "cal/rule.json")
    code, err = run("fit f.safetensors -m platt -o cal --force")
    assert code == 1
    assert "rule.json" in err
    assert Path("cal/rule.json").is_file()


def test_a_monitor_counts_new_data_under_an_old_name(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """A nightly job that always writes today.safetensors: each day counts, each only once."""
    assert run("monitor cal --reference f.safetensors --state watch")[0] == 0
    features, labels = salgp.load_features("f.safetensors")
    for day in range(3):
        rows = torch.arange(40) + 40 * day
        features[rows].save("today.safetensors", labels[rows])
        code, err = run("monitor cal today.safetensors --state watch")
        assert (code, err) == (0, "")
        code, err = run("monitor cal today.safetensors --state watch")
        assert code == 0
        assert "today.safetensors was counted before" in err
    assert salgp.Monitor.open("watch").status().batches == 3
    assert salgp.Monitor.open("watch").status().n == 120
