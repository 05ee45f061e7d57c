"""The house can be extended from outside by one file: a calibrator, a kernel, a metric, a data set or an
export target.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import salgp
from salgp import Features

CALIBRATOR = """
from salgp import Prediction
from salgp.calibrators import Calibrator, register

@register
class Halfway(Calibrator):
    "Halfway between the network's confidence and its accuracy."
    name = "halfway"
    gives_confidence_only = True
    def _fit(self, features, labels, reference):
        self.accuracy_ = float(features.correct(labels).double().mean())
    def _predict(self, features):
        confidence = (features.confidence + self.accuracy_) / 2
        return Prediction.from_confidence(features, confidence, temperature=self.rest_temperature_)
"""
KERNEL = """
from salgp.gp.kernels import KERNELS


def cauchy(square):
    value = 1.0 / (1.0 + square)
    return value, lambda: 2.0 * square * value.square()


KERNELS["cauchy"] = cauchy
"""
METRIC = """
import numpy as np
from salgp.metrics import register
from salgp.metrics.metric import as_binary, as_scores
from salgp.metrics.metric import mean_of, metric

@register
@metric("Overclaim", "Mean of confidence above correctness.", larger_is_better=False, heading="over")
def overclaim(confidence, correct):
    s = as_scores(confidence, "confidence")
    return mean_of(np.maximum(s - as_binary(correct, "correct", len(s)), 0))
"""
DATA_SET = """
import torch
from torch.utils.data import TensorDataset
from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.sets import SETS

def blobs(seed, data, cache):
    g = torch.Generator().manual_seed(seed)
    centres = 2 * torch.eye(3)
    def draw(n, noise=1.0):
        y = torch.randint(3, (n,), generator=g)
        return TensorDataset(centres[y] + noise * torch.randn(n, 3, generator=g), y)
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).eval()
    tests = (TestSet("test", "in", lambda: draw(60)), TestSet("noisy", "shift", lambda: draw(60, 2.0)))
    return Case("blobs", seed, network, draw(90), draw(60), tests, perturb=("noise",))

SETS["blobs"] = blobs
"""
TARGET = """
from salgp.export import TARGETS, Target

def listed(program, names, outputs):
    "The graph for people to read."
    return f"{', '.join(names)} -> {', '.join(outputs)}{chr(10)}{program.graph}".encode()

TARGETS[".txt"] = Target("a list of operations", listed)
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a module of one file and imports it; what it added is taken back afterwards."""
    from salgp import calibrators, export
    from salgp.gp import kernels
    from salgp.metrics import scores
    from salgp_study.suite import sets

    monkeypatch.syspath_prepend(str(tmp_path))
    tables = (calibrators.registry._REGISTERED, kernels.KERNELS, scores.METRICS, sets.SETS, export.TARGETS)
    before = [dict(table) for table in tables]

    def load(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield load
    for table, kept in zip(tables, before, strict=True):
        table.clear()  # type: ignore[attr-defined]
        table.update(kept)  # type: ignore[attr-defined]
    for name in ("their_calibrator", "their_kernel", "their_metric", "their_data_set", "their_target"):
        sys.modules.pop(name, None)


def world(n: int = 120) -> tuple[Features, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(n, 3, generator=g)
    labels = torch.multinomial(torch.softmax(z / 2, 1), 1, generator=g)[:, 0]
    return Features(z, {"a": torch.randn(n, 4, generator=g)}), labels


def test_a_calibrator_fits_saves_loads_and_is_listed(outside: Any, tmp_path: Path) -> None:
    module = outside("their_calibrator", CALIBRATOR)
    features, labels = world()
    fitted = salgp.calibrators.get("halfway").fit(features, labels)
    loaded = salgp.load(fitted.save(tmp_path / "kept"))
    assert type(loaded) is module.Halfway
    assert torch.equal(loaded.predict(features).probs, fitted.predict(features).probs)
    assert "halfway" in salgp.calibrators.names()
    classifier = salgp.calibrate(torch.nn.Linear(3, 3), [(features.logits, labels)], method="halfway")
    assert classifier(features.logits).confidence.shape == (120,)


@pytest.mark.filterwarnings("ignore:hyperparameters ended on their bounds")  # a random layer tells nothing
def test_a_kernel_fits_and_loads(outside: Any, tmp_path: Path) -> None:
    outside("their_kernel", KERNEL)
    features, labels = world()
    fitted = salgp.SALGP(kernel="cauchy").fit(features, labels)
    loaded = salgp.load(fitted.save(tmp_path / "kept"))
    assert torch.equal(loaded.predict(features).probs, fitted.predict(features).probs)


def test_a_metric_is_scored_tabled_resampled_and_reported(outside: Any) -> None:
    module = outside("their_metric", METRIC)
    features, labels = world()
    prediction = salgp.calibrators.get("temperature").fit(features, labels).predict(features)
    correct = prediction.label == labels
    expected = float((prediction.confidence - correct.float()).clamp_min(0).mean())
    comparison = salgp.metrics.compare({"temperature": prediction}, labels)
    assert comparison.rows["temperature"].overclaim == pytest.approx(expected, abs=1e-6)
    assert "overclaim" in str(comparison)
    found = salgp.metrics.bootstrap(module.overclaim, prediction.confidence, correct, n_resamples=20)
    assert found.lower <= expected <= found.upper
    page = salgp.report.render(features, labels, prediction, method="temperature")
    assert "Mean of confidence above correctness." in page
    table = pytest.importorskip("salgp.cli.console").score_table(comparison, "scores")
    assert "over\N{DOWNWARDS ARROW}" in [column.header for column in table.columns]


def test_a_data_set_is_cached_and_read_back(outside: Any, tmp_path: Path) -> None:
    from salgp_study.suite.cache import read_case, write_case
    from salgp_study.suite.sets import SETS

    outside("their_data_set", DATA_SET)
    folder = write_case(SETS["blobs"](0, None, tmp_path), tmp_path, say=lambda line: None)
    case = read_case(folder)
    assert len(case.reference[0]) == 90


def test_an_export_target_is_written(outside: Any, tmp_path: Path) -> None:
    from salgp.export import export_head

    outside("their_target", TARGET)
    fitted = salgp.calibrators.get("temperature").fit(*world())
    text = export_head(fitted, tmp_path / "head.txt").read_text()
    assert text.startswith("logits -> label, confidence, probs\ngraph()")
    with pytest.raises(ValueError, match=r"\.onnx \(ONNX\) or \.pt2 \(torch\.export\) or \.txt"):
        export_head(fitted, tmp_path / "head.doc")
