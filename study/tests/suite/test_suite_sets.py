"""The data sets: networks, splits, and that no sample serves twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from trained import accuracy

from salgp_study.suite.case import Case
from salgp_study.suite.sets import SETS
from salgp_study.suite.sets.cifar import CifarResNet

DATA = Path(os.environ.get("SALGP_DATA", "absent"))
needs_data = pytest.mark.skipif(not (DATA / "cifar10.npz").is_file(), reason="SALGP_DATA has no cifar10.npz")


def rows(data: torch.utils.data.TensorDataset) -> set[bytes]:
    return {x.numpy().tobytes() for x in data.tensors[0]}


@pytest.mark.parametrize("name", ["tabular-wine", "tabular-breast-cancer"])
def test_small_sets_learn_and_keep_samples_apart(name: str, tmp_path: Path) -> None:
    case = SETS[name](0, None, tmp_path)
    parts = [case.reference, case.calibration, case.tests[0].make()]
    samples = [rows(part) for part in parts]
    assert not samples[0] & samples[1]
    assert not samples[1] & samples[2]
    assert not samples[0] & samples[2]
    assert accuracy(case.network, parts[2]) > 0.8
    assert (case.tests[0].kind, case.name, case.seed) == ("in", name, 0)


def test_seeds_draw_other_samples(tmp_path: Path) -> None:
    a, b = (SETS["tabular-wine"](seed, None, tmp_path) for seed in (0, 1))
    assert rows(a.calibration) != rows(b.calibration)


def test_resnet20_has_the_published_names() -> None:
    names = {name for name, _ in CifarResNet(20).named_parameters()}
    assert {"conv1.weight", "bn1.weight", "layer3.2.bn2.bias", "linear.weight"} <= names
    assert sum(p.numel() for p in CifarResNet(20).parameters()) == 269_722


@pytest.mark.data
@pytest.mark.slow
@needs_data
def test_cifar_comes_out_at_the_published_accuracy(tmp_path: Path) -> None:
    case: Case = SETS["cifar10-resnet20"](0, DATA, tmp_path)
    test = case.tests[0].make()
    right = accuracy(case.network, case.calibration) * 1000 + accuracy(case.network, test) * 9000
    assert round(right) == 9173
    assert not rows(case.calibration) & rows(test)
