"""From scores to decisions by command line: rules, prediction sets, columns by name, and their files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from samples import sample
from torch import nn

import salgp
from salgp.cli import add_plugins, main
from salgp.decide import Rule, choose_threshold
from salgp.files import read_features
from salgp.io.arrays import read_arrays
from salgp.sets import PredictionSets, fit_sets

Run = Callable[[str], tuple[int, str, str]]
CLASSES = ("ant", "bee", "cow")
NET = """
import torch


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))


def softmax():
    return torch.nn.Sequential(make(), torch.nn.Softmax(1))
"""


def write_table(path: Path, n: int, seed: int) -> None:
    """Probabilities of overconfident predictions in columns called by the classes."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 3, generator=g) * 3
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=g)[:, 0]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", *CLASSES, "label"])
        for i, (probs, label) in enumerate(zip(logits.softmax(1).tolist(), labels.tolist(), strict=True)):
            rows.writerow([i, *probs, CLASSES[label]])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    for seed, (name, n) in enumerate({"cal": 400, "labelled": 600, "new": 50}.items()):
        write_table(tmp_path / f"{name}.csv", n, seed)
    (tmp_path / "net.py").write_text(NET)

    def call(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(line.split())
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def fitted(run: Run) -> Run:
    code, _, err = run("fit cal.csv --probs ant,bee,cow -o c -m temperature")
    assert code == 0, err
    return run


def labelled() -> tuple[salgp.Prediction, torch.Tensor]:
    loaded = read_features("labelled.csv", CLASSES)
    return salgp.load("c").predict(loaded.features), loaded.known_labels


def test_a_rule_is_the_library_s_and_is_applied(fitted: Run) -> None:
    code, out, err = fitted("decide c labelled.csv --probs ant,bee,cow --error 0.3 -o rule.json")
    assert code == 0, err
    expected = choose_threshold(*labelled(), error=0.3)
    assert Rule.load("rule.json") == expected
    assert expected.promise in out
    assert "next: salgp apply c NEW --rule rule.json" in out
    code, out, err = fitted("apply c new.csv --probs ant,bee,cow --rule rule.json -o p.csv --json")
    assert code == 0, err
    with Path("p.csv").open() as file:
        rows = list(csv.DictReader(file))
    acted = [row["act"] == "True" for row in rows]
    assert acted == [float(row["confidence"]) > expected.threshold[0] for row in rows]
    assert json.loads(out)["acted_on"] == sum(acted) > 0


@pytest.mark.parametrize(
    ("more", "how"),
    [
        ("--costs 10,1", {"cost_wrong": 10, "cost_ask": 1}),
        ("--by class --error 0.2", {"per_class": True, "error": 0.2}),
        ("--assurance 0.8", {"assurance": 0.8}),
    ],
)
def test_rules_of_every_kind(fitted: Run, more: str, how: dict[str, float]) -> None:
    assert fitted(f"decide c labelled.csv --probs ant,bee,cow -o rule.json {more}")[0] == 0
    assert Rule.load("rule.json") == choose_threshold(*labelled(), **how)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("decide c labelled.csv --probs ant,bee,cow -o rule.json --costs 10", "WRONG,ASK"),
        ("decide c labelled.csv --probs ant,bee,cow -o rule.json --by magic", "class"),
        ("decide c labelled.csv --probs ant,bee,cow -o rule.txt", ".json"),
        ("decide c labelled.csv --probs ant,wasp -o rule.json", "wasp"),
        ("decide c labelled.csv -o rule.json", "--probs"),
        ("sets c labelled.csv --probs ant,bee,cow -o s.safetensors --by magic", "by"),
        ("sets c labelled.csv --probs ant,bee,cow -o s.csv", ".safetensors"),
        ("apply c new.csv --probs ant,bee,cow --rule new.csv -o p.csv", "new.csv"),
        ("apply c new.csv --probs bee,ant,cow -o p.csv", "same order"),
    ],
)
def test_wrong_uses_write_nothing(fitted: Run, line: str, word: str, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    code, _, err = fitted(line)
    assert code in (1, 2)
    assert word in err
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "line", ["decide c cal.csv -o r.json --error 0.3", "sets c cal.csv -o s.safetensors"]
)
def test_samples_of_the_fit_are_noticed(fitted: Run, line: str) -> None:
    code, _, err = fitted(f"{line} --probs ant,bee,cow")
    assert code == 0
    assert "note: c was fitted on a file of this name, cal.csv" in err
    assert "note" not in fitted(f"{line} --probs ant,bee,cow --force".replace("cal.csv", "labelled.csv"))[2]


def test_a_rule_over_a_file_of_somebody_else_is_refused(fitted: Run, tmp_path: Path) -> None:
    (tmp_path / "rule.json").write_text("{}")
    for more in ("", " --force"):
        assert fitted(f"decide c labelled.csv --probs ant,bee,cow -o rule.json{more}")[0] == 1
    assert (tmp_path / "rule.json").read_text() == "{}"


def test_sets_are_the_library_s_and_are_applied(fitted: Run) -> None:
    line = "sets c labelled.csv --probs ant,bee,cow --coverage 0.8 --by class -o s.safetensors"
    code, out, err = fitted(line)
    assert code == 0, err
    assert "next: salgp apply c NEW --sets s.safetensors" in out
    found, expected = PredictionSets.load("s.safetensors"), fit_sets(*labelled(), coverage=0.8, by="class")
    torch.testing.assert_close(found.quantile, expected.quantile)
    for suffix in ("csv", "parquet"):
        code, out, err = fitted(
            f"apply c new.csv --probs ant,bee,cow --sets s.safetensors -o p.{suffix} --json"
        )
        assert code == 0, err
    table = read_arrays("p.parquet")
    stored = np.stack([table[f"set.{name}"] for name in CLASSES], axis=1)
    with Path("p.csv").open() as file:
        rows = [[row[f"set.{name}"] == "True" for name in CLASSES] for row in csv.DictReader(file)]
    assert rows == stored.tolist()
    assert json.loads(out)["mean_set_size"] == pytest.approx(stored.sum(1).mean())


def test_what_calibrate_writes_is_a_calibrator_for_every_reader(run: Run) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=g)
    np.savez("d.npz", x=x.numpy(), y=np.arange(90) % 3)
    code, out, err = run("calibrate net.py:make --calibration d.npz --test d.npz -o X -m platt")
    assert code == 0, err
    assert 'salgp.load("X", model)' in out
    namespace: dict[str, Callable[[], nn.Module]] = {}
    exec(NET, namespace)
    classifier = salgp.load("X", namespace["make"]())
    assert isinstance(classifier, salgp.CalibratedClassifier)
    assert salgp.load("X").name == "platt"
    assert classifier(x).probs.shape == (90, 3)
    for line in (
        "export X -o head.pt2",
        "export X net.py:make d.npz -o whole.pt2",
        "apply X X/test.safetensors -o p.csv",
        "info X",
    ):
        code, _, err = run(line)
        assert code == 0, err


def test_the_meaning_of_the_outputs_travels_with_the_features(run: Run) -> None:
    """A network that ends in softmax, read as logits here and as probabilities there: ECE .140, no word."""
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    np.savez("d.npz", x=x.numpy(), y=np.arange(90) % 3)
    assert run("extract net.py:make d.npz -o logits.safetensors")[0] == 0
    assert run("extract net.py:softmax d.npz --output probabilities -o probs.safetensors")[0] == 0
    assert json.loads(run("info probs.safetensors --json")[1])["output"] == "probabilities"
    assert run("fit logits.safetensors -o c -m temperature")[0] == 0
    for line in (
        "evaluate c probs.safetensors",
        "apply c probs.safetensors -o p.csv",
        "compare logits.safetensors --test probs.safetensors --method platt",
        "evaluate c new.csv --probs ant,bee,cow",
    ):
        code, _, err = run(line)
        assert code == 1
        assert "probabilities" in err
        assert "logits" in err


def test_commands_of_other_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that works is there; one that is broken says so when it is called, and stops nothing else."""

    class Point:
        def __init__(self, name: str, works: bool) -> None:
            self.name, self.value, self.works = name, f"package_{name}:register", works

        def load(self) -> Callable[[typer.Typer], None]:
            if not self.works:
                raise ImportError("no module named 'nowhere'")
            return lambda app: app.command("good")(lambda: print("done")) and None

    monkeypatch.setattr("salgp.cli.entry_points", lambda group: [Point("good", True), Point("bad", False)])
    app = typer.Typer()
    add_plugins(app)
    app(["good"], standalone_mode=False)
    assert capsys.readouterr().out == "done\n"
    assert app(["bad", "run", "--fast"], standalone_mode=False) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "nowhere" in said[0]


@pytest.mark.parametrize("method", ["layer-evidence", "sal-gp", "temperature"])
def test_a_calibrator_is_read_by_a_process_that_did_not_write_it(method: str, tmp_path: Path) -> None:
    """Types of what was learned are known only after the method's own modules are imported."""
    features, labels = sample(120)
    calibrator = salgp.calibrators.get(method).fit(features, labels)
    calibrator.save(tmp_path / "cal")
    code = f"import salgp; print(salgp.load({str(tmp_path / 'cal')!r}).name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == method, done.stderr[-300:]
