"""Whoever saves a file replaces one of its own kind, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from salgp import Features, Monitor, Prediction
from salgp.calibrators import get
from salgp.classifier import CalibratedClassifier, calibrate
from salgp.decide import Rule
from salgp.export import export_classifier, export_head
from salgp.file_signatures import KINDS, is_of_kind
from salgp.sets import fit_sets

LABELS = torch.arange(90) % 3
FEATURES = Features(2 * torch.randn(90, 3, generator=torch.Generator().manual_seed(0)) + torch.eye(3)[LABELS])
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))


def prediction() -> Prediction:
    return Prediction.from_confidence(FEATURES, FEATURES.confidence)


def network() -> CalibratedClassifier:
    return calibrate(torch.nn.Linear(4, 3), [(X, torch.arange(60) % 3)], method="uncalibrated")


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "f.safetensors": ("features", FEATURES.save),
    "rule.json": ("rule", Rule((0.9,), error=0.05, n=1000, kept=700, wrong=20).save),
    "sets.safetensors": ("prediction sets", lambda path: fit_sets(prediction(), LABELS).save(path)),
    "watch.html": ("monitor page", lambda path: Monitor.start(prediction()).page(path)),
    "head.pt2": ("exported graph", lambda path: export_head(get("uncalibrated").fit(FEATURES, LABELS), path)),
    "whole.onnx": ("exported graph", lambda path: export_classifier(network(), X[:4], path)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, name: str) -> None:
    kind, write = WRITERS[name]
    path = tmp_path / name
    path.write_text("years of work")
    with pytest.raises(FileExistsError, match=f"holds no {kind} that salgp wrote; it is left alone"):
        write(path)
    assert path.read_text() == "years of work"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_the_same_kind_is_replaced(tmp_path: Path, name: str) -> None:
    kind, write = WRITERS[name]
    path = tmp_path / name
    path.write_bytes(b"")  # as mktemp leaves it
    for _ in range(2):
        write(path)
        assert is_of_kind(path, kind)
    assert [other for other in KINDS if is_of_kind(path, other)] == [kind]


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, name: str) -> None:
    kind, write = WRITERS[name]
    path = tmp_path / name
    other = FEATURES.save if kind != "features" else WRITERS["rule.json"][1]
    other(path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=f"holds no {kind}"):
        write(path)
    assert path.read_bytes() == before


def test_links_pipes_and_folders_are_refused_without_being_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(FEATURES.save(tmp_path / "f.safetensors"))
    for name in ("pipe", "link", ""):
        with pytest.raises(FileExistsError):
            FEATURES.save(tmp_path / name)


def test_a_rule_is_known_however_its_json_is_laid_out(tmp_path: Path) -> None:
    path = tmp_path / "rule.json"
    rule = Rule((0.9,), error=0.05, n=1000, kept=700, wrong=20)
    rule.save(path)
    path.write_text(path.read_text().replace("\n", "").replace(": ", ":"))
    assert Rule.load(path) == rule
    rule.save(path)
