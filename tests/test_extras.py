"""A missing optional library is named, with the extra that brings it, from Python as on the command line."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample

import salgp
from salgp.cli import main
from salgp.extras import EXTRAS

ROOT = Path(__file__).parents[1]


def test_every_extra_is_one_of_the_package() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(known)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hide a library, as if it were not installed."""
    found = importlib.util.find_spec

    def hide(name: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else found(n, *a))

    return hide


def draw(folder: Path) -> Any:
    return salgp.plots.reliability_diagram(torch.rand(20), torch.rand(20) > 0.5)


def report(folder: Path) -> Any:
    features, labels = sample(80)
    prediction = salgp.calibrators.get("platt").fit(features, labels).predict(features)
    return salgp.report.build(folder / "r.html", features, labels, prediction)


def store(folder: Path) -> Any:
    from salgp.store import write_store

    return write_store([sample(20)], folder / "store")


def onnx(folder: Path) -> Any:
    from salgp.onnx import OnnxNetwork

    return OnnxNetwork(folder / "net.onnx")


def export(folder: Path) -> Any:
    from salgp.export import export_head

    return export_head(salgp.calibrators.get("platt").fit(*sample(80)), folder / "head.onnx")


def monitor(folder: Path) -> Any:
    features, labels = sample(200)
    home = salgp.calibrators.get("platt").fit(features, labels).predict(features)
    return salgp.Monitor.start(home, folder / "watch").page(folder / "watch.html")


def ray(folder: Path) -> Any:
    from salgp.store import score, write_store

    write_store([sample(20)], folder / "store")
    salgp.calibrators.get("platt").fit(*sample(80)).save(folder / "cal")
    return score(folder / "store", folder / "cal", folder / "out", engine="ray")


def progress(folder: Path) -> Any:
    from salgp.store import extract_to_store

    loader = [(torch.zeros(2, 4), torch.tensor([0, 1]))]
    return extract_to_store(torch.nn.Linear(4, 3), loader, folder / "store", progress=True)


@pytest.mark.parametrize(
    ("library", "use"),
    [
        ("matplotlib", draw),
        ("jinja2", report),
        ("pyarrow", store),
        ("onnxruntime", onnx),
        ("onnxscript", export),
        ("jinja2", monitor),
        ("ray", ray),
        ("rich", progress),
    ],
)
def test_from_python(library: str, use: Any, without: Any, tmp_path: Path) -> None:
    without(library)
    with pytest.raises(ModuleNotFoundError, match=rf"{library}.*pip install \"salgp\[{EXTRAS[library]}\]\""):
        use(tmp_path)


def test_on_the_command_line(without: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features, labels = sample(80)
    features.save(tmp_path / "f.safetensors", labels)
    assert main(["fit", str(tmp_path / "f.safetensors"), "-o", str(tmp_path / "cal"), "-m", "platt"]) == 0
    without("jinja2")
    line = ["report", str(tmp_path / "cal"), str(tmp_path / "f.safetensors"), "-o", str(tmp_path / "r.html")]
    assert main(line) == 1
    assert 'pip install "salgp[report]"' in capsys.readouterr().err
