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
    assert "What the fit found" not in text
    with pytest.raises(FileExistsError):
        classifier.report([(x[80:], y[80:])], path)
    with pytest.raises(ValueError, match="needs labels"):
        classifier.report([x], tmp_path / "other.html")


def test_the_report_holds_what_the_fit_found(tmp_path: Path) -> None:
    """Also that the layers answer better than a network whose last layer is spoilt."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (300,), generator=g)
    x = 3.0 * torch.eye(3)[y] + 0.5 * torch.randn(300, 3, generator=g)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.eye(3))
            layer.bias.zero_()
        model[2].weight[0, 0] = 0.1
    parts = [(x[rows], y[rows]) for rows in (slice(100), slice(100, 200), slice(200, 300))]
    classifier = salgp.calibrate(model, [parts[0]], reference=[parts[1]], perturb=False)
    assert "consider replacing its last layer" in classifier.verdict_
    text = classifier.report([parts[2]], tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"What the fit found on the calibration data: {classifier.verdict_[:50]}" in text
    assert "consider replacing its last layer" in text
