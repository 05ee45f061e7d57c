"""The command line against hostile names and careless targets: nothing obeyed, nothing lost."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.table import Table

import salgp
from salgp.cli import main
from salgp.cli.predictions import harmless
from salgp.cli.shell import Shell, visible

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    logits = 2 * torch.eye(3)[labels] + torch.randn(120, 3, generator=g)
    features = salgp.Features(logits, {"=cmd": torch.randn(120, 2, generator=g)})
    metadata = {"classes": '["[/]", "[red]x", "\\u001b[31mevil"]'}
    features.save("f.safetensors", labels, metadata)

    def call(*line: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(list(line))
        return code, *capfd.readouterr()

    return call


def fit(run: Run, out: str, *more: str) -> tuple[int, str, str]:
    return run("fit", "f.safetensors", "-m", "temperature", "-o", out, *more)


def test_names_are_printed_as_they_are(run: Run) -> None:
    code, said, _ = run("info", "f.safetensors")
    assert code == 0
    assert "[/]" in said
    assert "[red]x" in said
    assert "\x1b" not in said
    code, said, _ = fit(run, "[red]x")
    assert code == 0
    assert "[red]x" in said
    assert Path("[red]x/calibrator.json").is_file()
    assert "[red]x exists" in fit(run, "[red]x")[2]
    code, said, err = run("info", "\x1b[31m[/]:smile:")
    assert code == 1
    assert "\x1b" not in said + err
    assert "[/]:smile:" in err


def test_explanations_of_hostile_classes(run: Run) -> None:
    assert run("fit", "f.safetensors", "-m", "layer-evidence", "-o", "cal")[0] == 0
    code, said, err = run("explain", "cal", "f.safetensors", "--top", "100")
    assert code == 0
    assert "\x1b" not in said + err
    assert "[red]x" in said
    assert "\\x1b[31mevil" in said


@pytest.mark.parametrize("text", ["[/]", "[bold]", "\x1b[2J", "\x9b", "\u202e", ":smile:", "a\rb", "\\[x]"])
def test_any_text_reaches_the_terminal_as_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", title=text, caption=text)
    table.add_row(text)
    Shell().finish({}, f"value {text}", table)
    Shell().say(text)
    said, err = capsys.readouterr()
    assert said.count(visible(text)) == 4
    assert visible(text) in err
    assert visible(text).isprintable()


def test_force_replaces_only_what_is_ours(run: Run) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("years")
    for line in ((), ("--force",)):
        code, _, err = fit(run, "thesis", *line)
        assert code == 1
        assert len(err.strip().splitlines()) == 1
    assert Path("thesis/chapter.tex").read_text() == "years"
    assert fit(run, "cal")[0] == 0
    assert fit(run, "cal", "--force")[0] == 0
    Path("cal/notes.txt").write_text("mine")
    code, _, err = fit(run, "cal", "--force")
    assert code == 1
    assert "notes.txt" in err
    assert sorted(p.name for p in Path().iterdir()) == ["cal", "f.safetensors", "thesis"]


def test_links_are_refused_untouched(run: Run) -> None:
    assert fit(run, "real")[0] == 0
    before = Path("real/contents.json").read_bytes()
    Path("link").symlink_to("real")
    Path("out.csv").symlink_to("elsewhere.csv")
    for line in [("fit", "f.safetensors", "-o", "link"), ("apply", "real", "f.safetensors", "-o", "out.csv")]:
        code, _, err = run(*line, "--force")
        assert code == 1
        assert "symbolic link" in err
    assert Path("link").is_symlink()
    assert Path("out.csv").is_symlink()
    assert not Path("elsewhere.csv").exists()
    assert Path("real/contents.json").read_bytes() == before


@pytest.mark.parametrize("name", ["calibrator.safetensors", "origin.csv", "sub/x.csv"])
def test_apply_never_writes_into_its_calibrator(run: Run, name: str) -> None:
    assert fit(run, "cal")[0] == 0
    before = {p.name: p.read_bytes() for p in Path("cal").iterdir()}
    for line in (("apply", "cal", "f.safetensors", "-o", f"cal/{name}"), ("report", "cal", "f.safetensors")):
        code, _, err = run(*line, *(["-o", "cal/report.html"] if line[0] == "report" else []), "--force")
        assert code == 1
        assert "inside the input" in err
    assert {p.name: p.read_bytes() for p in Path("cal").iterdir()} == before


def test_tables_hold_no_formulas(run: Run) -> None:
    assert run("fit", "f.safetensors", "-m", "layer-evidence", "-o", "cal")[0] == 0
    assert run("apply", "cal", "f.safetensors", "-o", "out.csv")[0] == 0
    with Path("out.csv").open(newline="") as file:
        heads = next(csv.reader(file))
    assert not [head for head in heads if head[0] in "=+-@"]
    assert [harmless(x) for x in ("=1", "+1", "-1", "@a", "\t=1", "a=1", -1.5)][:5] == [
        "'=1",
        "'+1",
        "'-1",
        "'@a",
        "'\t=1",
    ]


NET = """
import torch
def make(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
def other():
    return make(1)
"""


def test_a_finished_store_keeps_its_network(run: Run) -> None:
    Path("net.py").write_text(NET)
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        np.savez(f"{name}.npz", x=rng.random((20, 4), dtype=np.float32), labels=np.arange(20) % 3)
    assert run("extract", "net.py:make", "one.npz", "-o", "store")[0] == 0
    before = {p.name: p.read_bytes() for p in Path("store").iterdir()}
    assert run("extract", "net.py:make", "one.npz", "-o", "store")[0] == 0, "the same again is fine"
    for model, data, why in [("other", "one", "weights differ"), ("make", "two", "other data")]:
        code, _, err = run("extract", f"net.py:{model}", f"{data}.npz", "-o", "store")
        assert code == 1
        assert why in " ".join(err.split())
    assert {p.name: p.read_bytes() for p in Path("store").iterdir()} == before
