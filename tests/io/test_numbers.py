"""Numbers of NumPy, and tensors of one number, are stored as Python's own wherever something is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample
from torch import nn

import salgp
from salgp import Prediction
from salgp.calibrators import Calibrator
from salgp.decide import Rule, choose_threshold
from salgp.io import append_line, pack, plain_number, read_header, read_lines, unpack, write_header
from salgp.sets import PredictionSets, fit_sets


def predicted(n: int = 400) -> tuple[Prediction, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    s = 0.5 + 0.5 * torch.rand(n, generator=g)
    wrong = torch.rand(n, generator=g) > s
    return Prediction(torch.zeros(n, dtype=torch.long), torch.stack([s, 1 - s], 1), s), wrong.long()


def test_every_way_of_writing_takes_them(tmp_path: Path) -> None:
    given = {"n": np.int64(3), "share": np.float32(0.5), "on": np.bool_(True), "one": torch.tensor(2)}
    plain = {"n": 3, "share": 0.5, "on": True, "one": 2}
    assert read_header(write_header(tmp_path / "a.json", "example", 1, given), "example", 1) == plain
    append_line(tmp_path / "log.jsonl", given)
    assert read_lines(tmp_path / "log.jsonl") == [plain]
    packed = json.loads(json.dumps(pack({np.int64(1): np.float32(0.5)}, {})))
    assert unpack(packed, {}) == {1: 0.5}


@pytest.mark.parametrize("value", [np.zeros(2), torch.zeros(2), np.longdouble(1), 1j, object()])
def test_nothing_else_is_taken_for_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot store a"):
        plain_number(value)


def test_what_is_no_number_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"a\.b: cannot store a object"):
        pack({"a": {"b": object()}}, {})


@pytest.mark.parametrize(
    "calibrator",
    [
        salgp.LayerEvidence(size=np.int64(20), width=np.int32(5), over_prediction=np.bool_(False)),  # type: ignore[arg-type]
        salgp.SALGP("sum", n_inducing=np.int64(20)),  # type: ignore[arg-type]
        salgp.calibrators.get("histogram", n_bins=np.int64(7)),
    ],
    ids=["evidence", "salgp", "histogram"],
)
@pytest.mark.filterwarnings("ignore")
def test_calibrators_are_saved_and_loaded(tmp_path: Path, calibrator: Calibrator) -> None:
    features, labels = sample(120, seed=0)
    calibrator.fit(features, labels).save(tmp_path / "c")
    again = salgp.load(tmp_path / "c")
    assert torch.equal(again.predict(features).confidence, calibrator.predict(features).confidence)


@pytest.mark.filterwarnings("ignore")
def test_a_calibrated_network_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(200, 3)
    calibrated = salgp.calibrate(
        model, [(x, model(x).argmax(1))], reader=salgp.Reader(seed=np.int64(1), labels_at=np.int64(1))
    )
    calibrated.save(tmp_path / "c")
    assert torch.equal(salgp.load(tmp_path / "c", model)(x).confidence, calibrated(x).confidence)


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
def test_rules_and_sets_are_saved_and_loaded(tmp_path: Path, number: Any) -> None:
    p, y = predicted()
    rule = choose_threshold(p, y, error=number(0.25), assurance=number(0.9))
    rule.save(tmp_path / "rule.json")
    assert Rule.load(tmp_path / "rule.json") == rule
    costs = choose_threshold(p, y, cost_wrong=number(10.0), cost_ask=number(1.0))
    costs.save(tmp_path / "costs.json")
    assert Rule.load(tmp_path / "costs.json").cost_wrong == 10.0
    sets = fit_sets(p, y, number(0.9), "raps", penalty=number(0.1), rank=np.int64(1))  # type: ignore[arg-type]
    sets.save(tmp_path / "sets.safetensors")
    again = PredictionSets.load(tmp_path / "sets.safetensors")
    assert torch.equal(again(p), sets(p))
    assert type(again.coverage) is float
