"""A calibrated classifier writes its own report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import salgp

pytest.importorskip("jinja2")


def test_the_report_of_a_classifier_is_that_of_its_prediction(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 3, generator=g)
    y = (x + torch.randn(160, 3, generator=g)).argmax(dim=1)
    classifier = salgp.calibrate(nn.Sequential(nn.Flatten()), [(x[:80], y[:80])], method="platt")
    path = classifier.report([(x[80:], y[80:])], tmp_path / "report.html", class_names=["ant", "bee", "cow"])
    text = path.read_text(encoding="utf-8")
    assert "80 labelled predictions" in text
    assert "cow" in text
    with pytest.raises(FileExistsError):
        classifier.report([(x[80:], y[80:])], path)
    with pytest.raises(ValueError, match="needs labels"):
        classifier.report([x], tmp_path / "other.html")
