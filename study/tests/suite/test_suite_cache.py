"""The cache: what is written is what the network gives, and a killed run
continues.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_case import clouds, made_case

from salgp.network.extract import extract
from salgp_study.suite.cache import case_folder, read_case, write_case


def test_calibration_holds_originals_and_one_copy_per_family(tmp_path: Path) -> None:
    case, n = made_case(), 160
    features, labels = read_case(write_case(case, tmp_path, say=lambda line: None)).calibration
    assert features.families.tolist() == [0] * n + [1] * n + [2] * n
    assert torch.equal(labels, case.calibration.tensors[-1].repeat(3))
    assert sorted(set(features.strengths[:n].tolist())) == [0.0]
    assert len(features.strengths[n:].unique()) == 8
    with torch.no_grad():
        torch.testing.assert_close(features.logits[:n], case.network(case.calibration.tensors[0]))


def test_a_case_is_written_and_read(tmp_path: Path) -> None:
    case = made_case()
    read = read_case(write_case(case, tmp_path, say=lambda line: None))
    assert [t.name for t in read.tests] == ["test", "wide 2", "wider", "unknown samples"]
    assert [(t.kind, t.like, t.severity) for t in read.tests[:2]] == [("in", None, 0), ("shift", "noise", 2)]
    wanted, labels = extract(case.network, case.batches(clouds(120, 3)))
    found = read.tests[0]
    order = torch.randperm(120, generator=torch.Generator().manual_seed(120))
    assert torch.equal(found.labels, labels[order])
    torch.testing.assert_close(found.features.logits, wanted.logits[order])
    assert int((read.tests[-1].labels < 0).sum()) == 30


def test_a_killed_run_continues_with_what_is_missing(tmp_path: Path) -> None:
    folder = write_case(made_case(), tmp_path, say=lambda line: None)
    (folder / "done").unlink()
    (folder / "shift-wider.safetensors").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(FileNotFoundError, match="features --sets made"):
        read_case(folder)
    lines: list[str] = []
    write_case(made_case(), tmp_path, say=lines.append)
    assert [line.split(":")[0] for line in lines] == ["shift-wider (made-0)"]
    assert all((folder / name).stat().st_mtime_ns == time for name, time in before.items())


def test_shared_shifts_are_written_once(tmp_path: Path) -> None:
    write_case(made_case(0, shared=("reference", "shift")), tmp_path, say=lambda line: None)
    write_case(made_case(1, shared=("reference", "shift")), tmp_path, say=lambda line: None)
    first, second = (case_folder(tmp_path, "made", seed) for seed in (0, 1))
    name = "shift-wider.safetensors"
    assert (first / name).samefile(second / name)
    assert (first / "reference.safetensors").samefile(second / "reference.safetensors")
    assert not (first / "test.safetensors").samefile(second / "test.safetensors")
