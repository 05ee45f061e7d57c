"""The study's grid leaves the records of the study, and nothing is run twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from salgp.scale import grid
from salgp.scale.grid import run_grid


def test_every_study_and_seed_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("salgp.study.run.run_study", lambda *arguments: calls.append(arguments))
    assert run_grid(["a", "b"], seeds=(0, 1), preset="smoke", out=tmp_path, engine="local") == tmp_path
    assert sorted(calls) == [(study, "smoke", (seed,), str(tmp_path), None) for study in "ab" for seed in (0, 1)]
    assert grid.run_grid([], out=tmp_path, engine="local") == tmp_path
