"""The engine on made data: every study end to end, kill and resume, records that are never torn or
repeated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from salgp.io import LockedError, locked
from salgp_study import run
from salgp_study.methods import methods_of
from salgp_study.predictions import read_prediction
from salgp_study.presets import PRESETS, Experiment, list_studies
from salgp_study.run import open_runs, run_study
from salgp_study.scores import score_prediction
from salgp_study.store import append_record, read_records

VOLATILE = ("seconds",)


def comparable(out: Path) -> list[dict[str, Any]]:
    return sorted(
        ({k: v for k, v in r.items() if k not in VOLATILE} for r in read_records(out)), key=lambda r: r["key"]
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smoke")
    for name in list_studies():
        run_study(name, "smoke", (0,), out)
    return out


def test_every_study_ran_with_every_row(smoke: Path) -> None:
    records = read_records(smoke)
    assert {r["study"] for r in records} == set(list_studies())
    for study in ("mstar-convnet", "mstar-aconvnet", "mstar-resnet18", "spcc-rnn", "plasticc-rnn"):
        methods = {r["method"] for r in records if r["study"] == study}
        wanted = {
            "Uncalibrated (Baseline)",
            "Temperature Scaled (init 0.5)",
            "Isotonic",
            "BBQ (alpha 0.1)",
            "Deep GP",
            "SAL-GP (sum)",
        }
        wanted |= {f"Single GP (Layer {k})" for k in range(1, 6)} | {f"SAL-GP (ML) L{k}" for k in range(1, 6)}
        wanted |= {
            "SAL-GP (HL) G",
            "SAL-GP (ML) G(1-3)",
            "SAL-GP (HL) G(3-5)",
            "Class-specific global",
            "Class-specific layer-wise",
        }
        assert wanted <= methods
    assert {r["fit_on"] for r in records if r["study"] == "mstar-convnet"} == {"train", "validation"}
    assert {r["pooling"] for r in records if r["study"] == "mstar-convnet"} == {"none", "avg", "max"}
    assert {r["fraction"] for r in records if r["study"] == "mstar-fractions"} == {1.0, 0.5, 0.25, 0.1}


def test_records_are_unique_whole_and_sane(smoke: Path) -> None:
    records = read_records(smoke)
    assert len({r["key"] for r in records}) == len(records)
    for r in records:
        assert 0 <= r["ece"] <= r["mce"] <= 1
        assert r["n"] == (
            r["sizes"][r["test"]]
            if r["test"] != "pooled"
            else r["sizes"]["17" if r["protocol"] == "paper" else "15"] + r["sizes"]["30"]
        )
        assert {"salgp", "torch", "python"} <= set(r["versions"])
    by_network: dict[tuple[Any, ...], set[float]] = {}
    for r in records:
        by_network.setdefault((r["study"], r["fraction"], r["seed"], r["test"]), set()).add(r["accuracy"])
    assert all(len(found) == 1 for found in by_network.values()), "calibration never changes accuracy"
    unknown = [r for r in records if r["study"] == "spcc-rnn" and r["n_unknown"]]
    assert unknown
    assert all(0 <= r["ood_auroc_confidence"] <= 1 for r in unknown)


def test_a_second_run_does_nothing(smoke: Path) -> None:
    before = (smoke / "records.jsonl").read_bytes()
    lines: list[str] = []
    run_study("mstar-soc", "smoke", (0,), smoke, progress=lines.append)
    assert lines == []
    assert (smoke / "records.jsonl").read_bytes() == before


def test_cached_predictions_are_the_scored_ones(smoke: Path) -> None:
    records = [
        r for r in read_records(smoke) if r["study"] == "mstar-convnet" and r["fit_on"] == "validation"
    ]
    for name in (
        "Uncalibrated (Baseline)",
        "SAL-GP (ML) G",
        "SAL-GP (HL) L3",
        "SAL-GP (ML) G(1-3)",
        "Single GP (Layer 2)",
    ):
        record = next(r for r in records if r["method"] == name and r["test"] == "pooled")
        prediction, labels, raw = read_prediction(smoke, record)
        scores = score_prediction(prediction, labels)
        assert {k: scores[k] for k in ("ece", "nll", "auroc")} == {
            k: record[k] for k in ("ece", "nll", "auroc")
        }
        assert (raw == prediction.confidence.float()).all() == (name.startswith("Uncalibrated"))


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from dataclasses import replace
from salgp_study import presets, run
from salgp_study.presets import Experiment
groups = ("conventional", "single", "ml")
small = Experiment("mstar", "convnet", poolings=("avg",), groups=groups, fit_on=("validation",))
presets.STUDIES["kill"] = ("made for the test", (small,))
slow = replace(presets.PRESETS["smoke"], epochs={"convnet": 6})
presets.PRESETS["smoke"] = slow
print("ready", flush=True)
run.run_study("kill", "smoke", (0,), sys.argv[1], progress=lambda line: print(line, flush=True))
"""


def start(out: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out)], stdout=subprocess.PIPE, text=True, env=environment
    )


def kill_after(process: subprocess.Popen[str], word: str, how: signal.Signals) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            break
    process.send_signal(how)
    process.wait()
    process.stdout.close()


def test_kill_and_resume_gives_the_same_records(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole")
    said, _ = whole.communicate()
    assert whole.returncode == 0
    out = tmp_path / "cut"
    ways = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    for word, how in zip(("epoch 3/", "Isotonic", "Single GP (Layer 3)"), ways, strict=True):
        kill_after(start(out), word, how)
        with (out / "records.jsonl").open("a") as file:
            file.write('{"key": "torn')
    last = start(out)
    resumed, _ = last.communicate()
    assert last.returncode == 0
    assert comparable(out) == comparable(tmp_path / "whole")
    assert "epoch" not in resumed, "finished training was repeated"
    assert len(resumed.splitlines()) < len(said.splitlines())


def test_fit_on_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Experiment("mstar", "convnet", poolings=("avg",), groups=("conventional",))
    monkeypatch.setattr(run, "STUDIES", {"small": ("", (small,))})
    run_study("small", "smoke", (0,), tmp_path, fit_on=("both",))
    records = read_records(tmp_path)
    assert {r["fit_on"] for r in records} == {"both"}
    with pytest.raises(KeyError, match="train, validation, both"):
        run_study("small", "smoke", (0,), tmp_path, fit_on=("test",))


def test_one_process_runs_a_study_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Experiment("mstar", "convnet", poolings=("avg",), groups=("conventional",))
    monkeypatch.setattr(run, "STUDIES", {"small": ("", (small,))})
    with locked(tmp_path / "cache" / "small-0"), pytest.raises(LockedError, match="is being written by"):
        run_study("small", "smoke", (0,), tmp_path)
    assert read_records(tmp_path) == []


def test_seeds_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run,
        "STUDIES",
        {
            "small": (
                "",
                (Experiment("spcc", "rnn", "spectroscopic", poolings=("none",), groups=("conventional",)),),
            )
        },
    )
    run_study("small", "smoke", (0, 1), tmp_path)
    nll = {r["seed"]: r["nll"] for r in read_records(tmp_path) if r["method"].startswith("Uncal")}
    assert nll[0] != nll[1]


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mstar-convnet"):
        run_study("imagenet", "smoke", (0,), tmp_path)
    with pytest.raises(KeyError, match="smoke, cpu, paper"):
        run_study("mstar-soc", "gpu", (0,), tmp_path)
    with pytest.raises(FileNotFoundError, match="SALGP_DATA"):
        run_study("mstar-soc", "cpu", (0,), tmp_path, data=tmp_path)
    with pytest.raises(FileNotFoundError, match="zenodo"):
        run_study("plasticc-rnn", "cpu", (0,), tmp_path, data=tmp_path)


def test_presets_hold_the_papers_numbers() -> None:
    paper = PRESETS["paper"]
    assert (paper.epochs["convnet"], paper.epochs["aconvnet"], paper.epochs["resnet18"]) == (100, 100, 50)
    own = methods_of("adam", 5, paper.gp.get("mstar", {}))
    assert {(m.arguments["max_steps"], m.arguments["learning_rate"]) for m in own} == {(2000, 5e-3)}
    assert paper.n_test == 25_000
    recipe = next(iter(open_runs("mstar-convnet", "smoke", (0,), "unused"))).recipe
    assert (recipe.learning_rate, recipe.batch, recipe.step, recipe.gamma) == (5e-4, 32, 100, 0.1)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    append_record(tmp_path, {"a": 1})
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write("rubbish\n")
    with pytest.raises(ValueError, match="line 2"):
        read_records(tmp_path)
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])["a"] == 1
