"""``--context``: samples that were met together, on the command line as in Python."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import salgp
from salgp.cli import main
from salgp.io.arrays import read_arrays
from salgp.store.scoring import read_scores
from salgp.store.store import write_store

sys.path.insert(0, str(Path(__file__).parent / "calibrators" / "evidence"))
from test_calibrator import fitted, world


def test_apply_in_windows_is_the_library_s_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features, labels = world(120, 3, 1.0)
    calibrator = fitted()
    calibrator.save(tmp_path / "cal")
    features.save(tmp_path / "f.safetensors", labels)
    names = [str(tmp_path / name) for name in ("cal", "f.safetensors", "p.parquet")]
    assert main(["apply", names[0], names[1], "-o", names[2], "--context", "40", "-q"]) == 0
    expected = salgp.load(tmp_path / "cal").predict(salgp.Features.load(names[1]), context=40)
    found = read_arrays(names[2])["confidence"]
    np.testing.assert_array_equal(found, expected.confidence.numpy())
    assert main(["evaluate", names[0], names[1], "--context", "all"]) == 0
    assert main(["evaluate", names[0], names[1], "--context", "-3"]) == 2
    assert "the number of samples in a window" in capsys.readouterr().err


@pytest.mark.parametrize("context", ["all", "40"])
def test_score_in_context_is_the_library_s_prediction(tmp_path: Path, context: str) -> None:
    """Shards of 80 samples: windows of 40 fit into them, and all of them make one context."""
    features, labels = world(200, 3, 1.0)
    calibrator = fitted()
    calibrator.save(tmp_path / "cal")
    store = write_store([(features, labels)], tmp_path / "store", rows=80)
    cal, shards, out = (str(tmp_path / name) for name in ("cal", "store", "out"))
    assert main(["score", cal, shards, "-o", out, "--context", context, "--workers", "1", "-q"]) == 0
    plain = store.to_features()[0]
    together = "all" if context == "all" else 40
    expected = salgp.load(tmp_path / "cal").predict(plain, context=together).confidence
    found = torch.from_numpy(read_scores(out)["confidence"])
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=0)
    assert not torch.allclose(found, calibrator.predict(plain).confidence.float(), atol=1e-3)


def test_score_continues_in_the_same_context_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features, labels = world(60, 3, 1.0)
    fitted().save(tmp_path / "cal")
    write_store([(features, labels)], tmp_path / "store", rows=30)
    cal, shards, out = (str(tmp_path / name) for name in ("cal", "store", "out"))
    assert main(["score", cal, shards, "-o", out, "--context", "30", "-q"]) == 0
    assert main(["score", cal, shards, "-o", out, "--context", "30", "-q"]) == 0
    assert main(["score", cal, shards, "-o", out, "-q"]) == 1
    assert "context" in capsys.readouterr().err


def test_score_refuses_a_context_that_a_method_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features, labels = world(60, 3, 1.0)
    salgp.calibrators.get("temperature").fit(features, labels).save(tmp_path / "cal")
    write_store([(features, labels)], tmp_path / "store")
    names = [str(tmp_path / name) for name in ("cal", "store", "out")]
    assert main(["score", names[0], names[1], "-o", names[2], "--context", "all", "-q"]) == 1
    assert "takes no context" in capsys.readouterr().err
