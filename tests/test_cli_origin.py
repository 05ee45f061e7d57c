"""Where features came from: the network must be the calibrator's, and augmented samples are no samples."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from samples import sample

import salgp
from salgp.cli import main
from salgp.files import write_metadata
from salgp.store import write_store

Run = Callable[[str], tuple[int, str, str]]
MINE, OTHER = {"network": "a" * 64}, {"network": "b" * 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("files")
    for name, seed, network in (("mine", 1, MINE), ("test", 2, MINE), ("other", 3, OTHER)):
        features, labels = sample(120, seed=seed)
        features.save(where / f"{name}.safetensors", labels, network)
        write_store([(features, labels)], where / name, rows=50)
        assert main(["fit", str(where / f"{name}.safetensors"), "-o", f"{where}/cal-{name}", "-q"]) == 0
        write_metadata(where / name, network)
    features, labels = sample(60, seed=4)
    disturbed(features).save(where / "copies.safetensors", labels.repeat(4), MINE)
    features.save(where / "plain.safetensors", labels, MINE)
    return where


def disturbed(features: salgp.Features) -> salgp.Features:
    """Every sample and three copies, whose scores say nothing."""
    n = len(features)
    copies = [features.logits] + [features.logits.flip(1) / k for k in (2, 3, 4)]
    layers = {name: torch.cat([x, x + 1, x + 2, x + 3]) for name, x in features.layers.items()}
    groups, families = torch.arange(n).repeat(4), torch.arange(4).repeat_interleave(n)
    return salgp.Features(torch.cat(copies), layers, groups, families)


@pytest.fixture
def run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(folder)

    def call(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([part.replace("OUT", str(tmp_path)) for part in line.split()])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.mark.parametrize(
    "line",
    [
        "score cal-mine other -o OUT/s",
        "fit mine.safetensors --reference other.safetensors -o OUT/c",
        "compare mine.safetensors --test other.safetensors --method temperature",
        "compare mine.safetensors --reference other.safetensors --method temperature",
        "report cal-mine other.safetensors -o OUT/r.html",
    ],
)
def test_features_of_another_network_are_refused(line: str, run: Run) -> None:
    code, _, err = run(line)
    assert code == 1
    assert "another network" in err


def test_a_reference_of_another_network_is_refused_out_of_core(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("salgp.cli.fit.LARGE", 10)
    line = "fit mine --reference other -o OUT/c -m temperature"
    assert "another network than mine" in run(line)[2]
    assert "out of core" in run(line.replace("other", "mine"))[1]


def test_copies_are_not_scored(run: Run) -> None:
    for command in ("evaluate cal-mine X --json", "compare mine.safetensors --test X --method platt --json"):
        plain = run(command.replace("X", "plain.safetensors"))
        found = run(command.replace("X", "copies.safetensors"))
        assert found[0] == 0, found[2]
        assert found[1] == plain[1]
    note = "note: copies.safetensors holds 180 augmented samples beside its 60 samples; they are left out"
    assert note in run("evaluate cal-mine copies.safetensors")[2]
    assert "copies" not in run("evaluate cal-mine plain.safetensors")[2]


def test_a_report_is_about_samples(run: Run, tmp_path: Path) -> None:
    line = "report cal-mine copies.safetensors -o OUT/r.html --new-data copies.safetensors"
    code, _, err = run(line)
    assert code == 0, err
    assert err.count("they are left out") == 2
    assert "60 labelled predictions" in (tmp_path / "r.html").read_text()


def test_a_reference_is_of_samples(run: Run, tmp_path: Path) -> None:
    for name in ("plain", "copies"):
        code, _, err = run(f"fit mine.safetensors --reference {name}.safetensors -o OUT/{name}")
        assert code == 0, err
        assert ("they are left out" in err) == (name == "copies")
        assert run(f"apply OUT/{name} test.safetensors -o OUT/{name}.csv")[0] == 0
    assert (tmp_path / "copies.csv").read_text() == (tmp_path / "plain.csv").read_text()


def test_a_monitor_watches_samples(run: Run) -> None:
    line = "monitor cal-mine copies.safetensors --state OUT/w --reference copies.safetensors --json"
    code, out, err = run(line)
    assert code == 0, err
    assert json.loads(out)["window_samples"] == 60


def test_every_row_gets_an_answer_from_apply(run: Run, tmp_path: Path) -> None:
    code, _, err = run("apply cal-mine copies.safetensors -o OUT/p.csv")
    assert code == 0, err
    assert "180 augmented samples beside its 60 samples; every row is answered" in err
    with (tmp_path / "p.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 240
    assert "every row is answered" in run("explain cal-mine copies.safetensors")[2]
    assert "copies" not in run("apply cal-mine plain.safetensors -o OUT/q.csv")[2]


def test_info_counts_samples_and_copies(run: Run) -> None:
    plain, found = (json.loads(run(f"info {name}.safetensors --json")[1]) for name in ("plain", "copies"))
    assert found == plain | {"augmented samples": 180}
