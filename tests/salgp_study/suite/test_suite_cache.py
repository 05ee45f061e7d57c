"""Rehearsed environments and the cache: what is written is what the network gives, and a killed run
continues.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_case import clouds, made_case

from salgp.network.batches import Batch
from salgp.network.extract import extract
from salgp_study.suite.cache import case_folder, read_case, write_case
from salgp_study.suite.environments import LEVELS, rehearse_environments


def test_levels_are_geometric_from_a_twenty_fifth_to_one() -> None:
    ratios = LEVELS[1:] / LEVELS[:-1]
    assert len(LEVELS) == 8
    torch.testing.assert_close(ratios, ratios[:1].expand(7))
    torch.testing.assert_close(LEVELS[[0, -1]], torch.tensor([0.04, 1.0]))


def test_environments_are_one_copy_per_family_with_balanced_strengths() -> None:
    case = made_case()
    batches = [Batch.of(item) for item in case.batches(case.calibration)]
    found = rehearse_environments(case.network, batches, "auto", case.families, 0)
    features, n = found.features, 160
    assert len(features) == 3 * n
    assert features.families.tolist() == [0] * n + [1] * n + [2] * n
    assert torch.equal(features.groups, torch.arange(n).repeat(3))
    assert torch.equal(found.labels, case.calibration.tensors[-1].repeat(3))
    assert float(features.strengths[:n].abs().max()) == 0
    for family in (1, 2):
        _, counts = torch.unique(features.strengths[features.families == family], return_counts=True)
        assert counts.tolist() == [n // 8] * 8
    with torch.no_grad():
        torch.testing.assert_close(features.logits[:n], case.network(case.calibration.tensors[0]))


def test_stronger_environments_are_further_away() -> None:
    case = made_case()
    batches = [Batch.of(item) for item in case.batches(case.calibration)]
    features = rehearse_environments(case.network, batches, "auto", case.families, 0).features
    moved = (features.logits - features.logits[:160].repeat(3, 1)).square().mean(dim=1)
    for family in (1, 2):
        rows = features.families == family
        levels = LEVELS.to(features.strengths)
        weak, strong = (rows & torch.isclose(features.strengths, levels[j]) for j in (0, -1))
        assert float(moved[weak].mean()) < 0.1 * float(moved[strong].mean())


def test_a_case_is_written_and_read(tmp_path: Path) -> None:
    case = made_case()
    read = read_case(write_case(case, tmp_path, say=lambda line: None))
    assert [t.name for t in read.tests] == ["test", "wide 2", "wider", "strangers"]
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
