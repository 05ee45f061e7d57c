"""The comparison of speed: it runs from end to end, and names a library that is missing."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from samples import sample

import salgp

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("speed")


def test_a_missing_library_is_named_in_one_line(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "faiss" else name)
    with pytest.raises(SystemExit, match=r"^not installed: faiss-cpu; pip install [^\n]+ faiss-cpu$"):
        speed.check_libraries()


def test_density_aware_calibration_by_faiss_is_ours(speed: ModuleType) -> None:
    pytest.importorskip("faiss")
    features, labels = sample(200)
    reference = sample(300, seed=1)
    theirs = speed.FaissDensityAware(10).fit(features, labels, reference[0])
    ours = salgp.calibrators.get("density-aware", k=10).fit(features, labels, reference)
    torch.testing.assert_close(
        torch.from_numpy(theirs.distances(features)), ours._distances(features).float(), atol=1e-4, rtol=1e-4
    )
    np.testing.assert_allclose(theirs.predict(features), ours.predict(features).probs, atol=0.02)


def test_the_quick_page_has_every_row_and_value(speed: ModuleType) -> None:
    for module in speed.LIBRARIES:
        pytest.importorskip(module)
    command = [sys.executable, str(FOLDER / "speed.py"), "--quick", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = importlib.import_module("history").figures_of(done.stdout)
    rows = {name.split(": ")[1] for name in figures}
    assert len(rows) == 9
    assert all(value > 0 for value in figures.values())
    assert all(f"1 thread: {row}: fit, wall s" in figures for row in rows)
    assert sum("250 at once, wall ms" in name for name in figures) == 8
