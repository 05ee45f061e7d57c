"""Saved calibrators: one version is loaded, a killed writer leaves a whole one, no other file is touched."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import salgp
from salgp.calibrators import get, load_calibrator
from salgp.features import Features
from salgp.io import files, serialize, tensors

LABELS = torch.arange(60) % 3
MODEL = nn.Linear(3, 3)
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
SAVING = """
import sys, torch, salgp
from torch import nn
model = nn.Linear(3, 3)
model.load_state_dict(torch.load(sys.argv[2], weights_only=True))
x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
both = []
for k in (0, 1):
    loader, reader = [(x, (torch.arange(60) + k) % 3)], salgp.Reader(seed=k)
    both.append(salgp.calibrate(model, loader, method="temperature", reader=reader))
print("ready", flush=True)
while True:
    for one in both:
        one.save(sys.argv[1])
"""


def classifiers() -> list[salgp.CalibratedClassifier]:
    return [
        salgp.calibrate(MODEL, [(X, (LABELS + k) % 3)], method="temperature", reader=salgp.Reader(seed=k))
        for k in (0, 1)
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_load_is_of_one_version_while_another_process_saves(tmp_path: Path) -> None:
    """The calibrator and what is read from the network belong together, also after the writer is killed."""
    known = [(one.calibrator.temperature_, one.taps.seed) for one in classifiers()]
    folder = classifiers()[0].save(tmp_path / "c")
    torch.save(MODEL.state_dict(), tmp_path / "weights.pt")
    command = [sys.executable, "-W", "ignore", "-c", SAVING, str(folder), str(tmp_path / "weights.pt")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    seen = set()
    for _ in range(150):
        found = salgp.load(folder, MODEL)
        seen.add((found.calibrator.temperature_, found.taps.seed))
    process.kill()
    process.wait()
    process.stdout.close()
    found = salgp.load(folder, MODEL)
    assert seen | {(found.calibrator.temperature_, found.taps.seed)} <= set(known)


def test_a_load_opens_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of one version and values of the next would not go together where the method changes too."""
    opened: list[object] = []
    real = files.open_regular

    def counted(path: Path) -> object:
        opened.append(path)
        return real(path)

    folder = get("temperature").fit(Features(X), LABELS).save(tmp_path)
    monkeypatch.setattr(files, "open_regular", counted)
    monkeypatch.setattr(serialize, "open_regular", counted)
    monkeypatch.setattr(tensors, "open_regular", counted)
    load_calibrator(folder)
    assert opened == [folder / "calibrator.safetensors"]


def test_other_files_of_a_folder_are_left_alone(tmp_path: Path) -> None:
    fitted = get("temperature").fit(Features(X), LABELS)
    (tmp_path / "thesis.tex").write_text("years of work")
    fitted.save(tmp_path)
    fitted.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibrator.safetensors", "thesis.tex"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "calibrator.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="left alone"):
        fitted.save(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError, match="symbolic link"):
        fitted.save(tmp_path / "link")
    with pytest.raises(FileExistsError, match="thesis"):
        fitted.save(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_without_a_calibrator_says_what_is_expected(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=r"no calibrator\.safetensors"):
            load_calibrator(folder)


@pytest.mark.filterwarnings("ignore")
def test_no_update_is_lost_between_threads() -> None:
    g = torch.Generator().manual_seed(0)
    world = Features(torch.randn(120, 3, generator=g), {"a": torch.randn(120, 4, generator=g)})
    labels = torch.arange(120) % 3
    fitted = salgp.SALGP("sum", max_steps=2).fit(world[:60], labels[:60])
    n = fitted.fitted_.posterior.alpha.shape[0]
    start = threading.Barrier(4)

    def update(k: int) -> None:
        start.wait()
        fitted.update(world[60 + 10 * k : 70 + 10 * k], labels[60 + 10 * k : 70 + 10 * k])

    threads = [threading.Thread(target=update, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fitted.fitted_.posterior.alpha.shape[0] == n + 40
