"""``--context``: samples that were met together, on the command line as in Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import salgp
from salgp.cli import main

sys.path.insert(0, str(Path(__file__).parent / "calibrators" / "evidence"))
from test_calibrator import fitted, world


def test_apply_in_windows_is_the_library_s_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features, labels = world(120, 3, 1.0)
    calibrator = fitted()
    calibrator.save(tmp_path / "cal")
    features.save(tmp_path / "f.safetensors", labels)
    names = [str(tmp_path / name) for name in ("cal", "f.safetensors", "p.safetensors")]
    assert main(["apply", names[0], names[1], "-o", names[2], "--context", "40", "-q"]) == 0
    expected = salgp.load(tmp_path / "cal").predict(salgp.Features.load(names[1]), context=40)
    assert torch.equal(load_file(names[2])["confidence"], expected.confidence)
    assert main(["evaluate", names[0], names[1], "--context", "all"]) == 0
    assert main(["evaluate", names[0], names[1], "--context", "-3"]) == 2
    assert "the number of samples in a window" in capsys.readouterr().err
