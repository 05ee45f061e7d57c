"""``salgp monitor``: one calibrator for life, and no sample counted twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import sample
from sealing import edit_header

import salgp
from salgp import Monitor
from salgp.cli import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A monitor of temperature scaling, begun on quiet data."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("fit", "home", "monday", "tuesday")):
        features, labels = sample(200, seed=seed)
        features.save(tmp_path / f"{name}.safetensors", None if name == "monday" else labels)
        features.save(tmp_path / f"{name}-labelled.safetensors", labels)

    def call(line: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(line.split())
        said = capsys.readouterr()
        return code, " ".join((said.err + said.out).split())

    for method in ("temperature", "isotonic"):
        assert call(f"fit fit.safetensors -m {method} -o {method}")[0] == 0
    assert call("monitor temperature --state watch --reference home.safetensors")[0] == 0
    return call


def test_another_calibrator_is_refused(run: Run) -> None:
    code, said = run("monitor isotonic monday.safetensors --state watch")
    assert code == 1
    assert "watch was started with another calibrator" in said
    assert "start a new monitor in another folder" in said
    assert Monitor.open("watch").log == ()


def test_the_same_calibrator_elsewhere_is_taken(run: Run, tmp_path: Path) -> None:
    shutil.move(tmp_path / "temperature", tmp_path / "moved")
    assert run("monitor moved monday.safetensors --state watch")[0] == 0
    assert run("fit fit-labelled.safetensors -m temperature -o again")[0] == 0
    assert run("monitor again tuesday.safetensors --state watch")[0] == 0
    assert len(Monitor.open("watch").log) == 2


def test_a_monitor_that_knows_no_calibrator_takes_any(run: Run, tmp_path: Path) -> None:
    """As those begun by earlier versions, and in Python."""
    features, _ = sample(100, seed=9)
    prediction = salgp.calibrators.load_calibrator("temperature").predict(features)
    Monitor.start(prediction, "old")
    assert Monitor.open("old").settings.calibrator is None
    edit_header(tmp_path / "old" / "monitor.json", without_calibrator)
    assert run("monitor isotonic monday.safetensors --state old")[0] == 0


def without_calibrator(header: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in header.items() if key != "calibrator"}


def test_labelled_samples_under_another_name_are_not_counted_twice(run: Run) -> None:
    assert run("monitor temperature monday.safetensors --state watch")[0] == 0
    code, said = run("monitor temperature monday-labelled.safetensors --state watch")
    assert code == 0
    assert "monday-labelled.safetensors was counted before as monday.safetensors, and is not counted" in said
    assert "its labels are new: give it as --late" in said
    code, said = run("monitor temperature --late monday-labelled.safetensors --state watch")
    assert "no batch of exactly" not in said
    assert [(record.n, record.labelled) for record in Monitor.open("watch").log] == [(200, 0), (0, 200)]


def test_late_labels_of_samples_never_fed_are_noted(run: Run) -> None:
    assert run("monitor temperature monday.safetensors --state watch")[0] == 0
    code, said = run("monitor temperature --late tuesday-labelled.safetensors --state watch")
    assert code == 0
    assert "no batch of exactly the samples of tuesday-labelled.safetensors was fed before" in said
