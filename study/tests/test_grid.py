"""The study's grid on Ray leaves the records of the study run in one piece, and nothing is run twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from salgp_study.grid import run_grid
from salgp_study.run import run_study
from salgp_study.store import read_records

TIMES = {"seconds", "fit_seconds", "predict_seconds", "train_seconds", "versions"}


def comparable(folder: Path) -> list[dict[str, Any]]:
    records = [{k: v for k, v in record.items() if k not in TIMES} for record in read_records(folder)]
    return sorted(records, key=lambda record: record["key"])


@pytest.mark.slow
def test_ray_leaves_the_records_of_a_plain_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    lines: list[str] = []
    run_grid(["mstar-soc"], (0, 1), "smoke", tmp_path / "ray", workers=2, progress=lines.append)
    run_study("mstar-soc", "smoke", (0, 1), tmp_path / "plain")
    assert sorted(lines) == ["mstar-soc, seed 0", "mstar-soc, seed 1"]
    assert len(comparable(tmp_path / "plain")) > 10
    assert comparable(tmp_path / "ray") == comparable(tmp_path / "plain")


def test_nothing_is_run_twice_and_missing_data_are_told(tmp_path: Path) -> None:
    run_grid(["mstar-soc"], (0,), "smoke", tmp_path, engine="local")
    before = (tmp_path / "records.jsonl").read_bytes()
    run_grid(["mstar-soc"], (0,), "smoke", tmp_path, engine="local")
    assert (tmp_path / "records.jsonl").read_bytes() == before
    with pytest.raises(FileNotFoundError):
        run_grid(["mstar-soc"], (0,), "cpu", tmp_path, data=tmp_path / "nothing", engine="local")
