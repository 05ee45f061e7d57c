"""The command line against hostile names and careless targets: nothing obeyed, nothing lost."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.table import Table
from safetensors.torch import save_file

import salgp
from salgp.cli import main
from salgp.cli.console import Console, visible
from salgp.io import files, locked
from salgp.io.arrays import harmless
from salgp.io.files import LOCK

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
    assert Path("[red]x/calibrator.safetensors").is_file()
    assert "[red]x/calibrator.safetensors exists" in fit(run, "[red]x")[2]
    code, said, err = run("info", "\x1b[31m[/]:smile:")
    assert code == 1
    assert "\x1b" not in said + err
    assert "[/]:smile:" in err


def test_explanations_of_hostile_classes(run: Run) -> None:
    assert run("fit", "f.safetensors", "-m", "layer-evidence", "-o", "cal")[0] == 0
    code, said, err = run("explain", "cal", "f.safetensors", *(f"--sample={row}" for row in range(120)))
    assert code == 0
    assert "\x1b" not in said + err
    assert "[red]x" in said
    assert "\\x1b[31mevil" in said


@pytest.mark.parametrize("text", ["[/]", "[bold]", "\x1b[2J", "\x9b", "\u202e", ":smile:", "a\rb", "\\[x]"])
def test_any_text_reaches_the_terminal_as_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", title=text, caption=text)
    table.add_row(text)
    Console().finish({}, f"value {text}", table)
    Console().say(text)
    said, err = capsys.readouterr()
    assert said.count(visible(text)) == 4
    assert visible(text) in err
    assert visible(text).isprintable()


def test_force_replaces_only_what_is_ours(run: Run) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("years")
    assert fit(run, "thesis")[0] == 0
    assert Path("thesis/chapter.tex").read_text() == "years", "other files of a folder are left alone"
    Path("mine").mkdir()
    Path("mine/calibrator.safetensors").write_text("mine")
    code, _, err = fit(run, "mine", "--force")
    assert code == 1
    assert "left alone" in err
    assert Path("mine/calibrator.safetensors").read_text() == "mine"
    assert fit(run, "cal")[0] == 0
    assert fit(run, "cal", "--force")[0] == 0
    assert sorted(p.name for p in Path().iterdir()) == ["cal", "f.safetensors", "mine", "thesis"]


OUTPUTS = {
    "p.csv": ("apply", "cal", "f.safetensors"),
    "p.parquet": ("apply", "cal", "f.safetensors"),
    "r.html": ("report", "cal", "f.safetensors"),
    "h.onnx": ("export", "cal"),
    "h.pt2": ("export", "cal"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_force_replaces_only_files_that_are_ours(run: Run, name: str) -> None:
    assert fit(run, "cal")[0] == 0
    target, line = Path(name), (*OUTPUTS[name], "-o", name)
    mine = b"label,answer\n1,2\n<html>confidence</html>"
    target.write_bytes(mine)
    for more in ((), ("--force",)):
        code, _, err = run(*line, *more)
        assert code == 1
        assert name in err
        assert len(err.strip().splitlines()) == 1
        assert target.read_bytes() == mine
    assert "left alone" in err
    target.write_bytes(b"")  # as mktemp leaves it
    assert run(*line, "--force")[0] == 0
    assert run(*line)[0] == 1
    assert run(*line, "--force")[0] == 0
    assert target.stat().st_size > 100


def test_columns_of_our_names_do_not_make_a_file_ours(run: Run) -> None:
    assert fit(run, "cal")[0] == 0
    mine = pa.table({"label": [1], "confidence": [0.5], "network_confidence": [0.7]})
    pq.write_table(mine, "p.parquet")
    code, _, err = run(*OUTPUTS["p.parquet"], "-o", "p.parquet", "--force")
    assert code == 1
    assert "left alone" in err
    assert pq.read_table("p.parquet") == mine


def test_the_page_of_a_monitor_replaces_only_its_own(run: Run) -> None:
    assert fit(run, "cal")[0] == 0
    line = ("monitor", "cal", "--state", "watch", "-o", "page.html")
    Path("page.html").write_text("<html>mine</html>")
    code, _, err = run(*line, "--reference", "f.safetensors")
    assert code == 1
    assert "left alone" in err
    assert Path("page.html").read_text() == "<html>mine</html>"
    assert not Path("watch").exists()
    Path("page.html").unlink()
    assert run(*line, "--reference", "f.safetensors")[0] == 0
    assert run("monitor", "cal", "f.safetensors", *line[2:])[0] == 0, "and again, over its own"


@pytest.mark.parametrize(
    "name", ["calibration.safetensors", "test.safetensors", "report.html", "train.safetensors"]
)
def test_calibrate_writes_over_no_file_of_the_user(run: Run, name: str, tmp_path: Path) -> None:
    """Above all not over the data that it reads, where it is told to write beside them."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 4, generator=g), torch.arange(90) % 3
    Path("net.py").write_text(
        "import torch\n\ndef make():\n    torch.manual_seed(0)\n    return torch.nn.Linear(4, 3)\n"
    )
    for data in ("calibration.safetensors", "test.safetensors", "train.safetensors"):
        save_file({"x": x, "labels": y}, data)
    mine = Path(name)
    if name == "report.html":
        mine.write_text("<html>mine</html>")
        Path("out").mkdir()
        mine = mine.rename("out/report.html")
    before = mine.read_bytes()
    out = "out" if name == "report.html" else "."
    line = (
        "calibrate",
        "net.py:make",
        "--calibration",
        "calibration.safetensors",
        "--test",
        "test.safetensors",
    )
    for more in ((), ("--force",)):
        code, _, err = run(*line, "-m", "temperature", "-o", out, *more)
        assert code == 1, err
        assert len(err.strip().splitlines()) == 1
        assert any(why in err for why in ("is also an input", "exists already", "left alone"))
    assert mine.read_bytes() == before
    assert not Path(out, "calibrator").exists()


def test_a_second_calibrate_leaves_nothing_of_the_first(run: Run) -> None:
    """Without the test data it was given before, their features are not there either."""
    x, y = torch.randn(90, 4, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 3
    Path("net.py").write_text(
        "import torch\n\ndef make():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))\n"
    )
    save_file({"x": x, "labels": y}, "data.safetensors")
    line = ("calibrate", "net.py:make", "--calibration", "data.safetensors", "-o", "out")
    more = ("--train", "data.safetensors", "--test", "data.safetensors")
    assert run(*line, *more)[0] == 0
    assert sorted(path.name for path in Path("out").glob("[!.]*")) == [
        "calibrator.safetensors",
        "report.html",
        "test.safetensors",
    ]
    assert run(*line, "--force")[0] == 0
    assert [path.name for path in Path("out").glob("[!.]*")] == ["calibrator.safetensors"]


def test_two_calibrations_do_not_share_a_folder(run: Run) -> None:
    """The calibrator of one once stood beside the features of the other."""
    x, y = torch.randn(90, 4, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 3
    Path("net.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(4, 3)\n")
    save_file({"x": x, "labels": y}, "data.safetensors")
    line = ("calibrate", "net.py:make", "--calibration", "data.safetensors", "--test", "data.safetensors")
    with locked("my out"):
        code, _, err = run(*line, "-m", "temperature", "-o", "my out")
        assert code == 1
        assert "process" in err
        assert [path.name for path in Path("my out").iterdir()] == [LOCK]
    code, out, _ = run(*line, "-m", "temperature", "-o", "my out")
    assert code == 0
    assert "salgp explain 'my out' 'my out/test.safetensors'" in " ".join(out.split())
    assert run("calibrate", "net.py:none", *line[2:], "-o", "new")[0] != 0
    assert not Path("new").exists(), "a folder made for nothing is taken away"


def test_links_are_refused_untouched(run: Run) -> None:
    assert fit(run, "real")[0] == 0
    before = Path("real/calibrator.safetensors").read_bytes()
    Path("link").symlink_to("real")
    Path("out.csv").symlink_to("elsewhere.csv")
    for line in [("fit", "f.safetensors", "-o", "link"), ("apply", "real", "f.safetensors", "-o", "out.csv")]:
        code, _, err = run(*line, "--force")
        assert code == 1
        assert "symbolic link" in err
    assert Path("link").is_symlink()
    assert Path("out.csv").is_symlink()
    assert not Path("elsewhere.csv").exists()
    assert Path("real/calibrator.safetensors").read_bytes() == before


def test_apply_never_writes_over_its_calibrator(run: Run) -> None:
    assert fit(run, "cal")[0] == 0
    before = Path("cal/calibrator.safetensors").read_bytes()
    code, _, err = run("apply", "cal", "f.safetensors", "-o", "cal/calibrator.safetensors", "--force")
    assert code == 2, "a suffix it does not write"
    assert "safetensors" in err
    assert Path("cal/calibrator.safetensors").read_bytes() == before
    assert run("apply", "cal", "f.safetensors", "-o", "cal/p.csv")[0] == 0, "beside it there is room"


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


@pytest.mark.parametrize("name", ["s.npz", "s.parquet", "shards/s.parquet"])
def test_small_files_that_become_large_are_refused_before(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A million equal numbers take a few hundred bytes; here 256 MB are called large from 1 MB on."""
    path, zeros = Path(name), np.zeros(200_000, np.float32)
    path.parent.mkdir(exist_ok=True)
    columns = {"probs.0": zeros, "probs.1": zeros + 1}
    if path.suffix == ".npz":
        np.savez_compressed(path, **columns)
    else:
        pq.write_table(pa.table(columns), path, compression="zstd")
    given = path.parent if path.parent.name else path
    assert run("fit", str(given), "-m", "temperature", "-o", "cal")[2] != "", "no labels, but it was read"
    monkeypatch.setattr(files, "LARGE", 1_000_000)
    code, _, err = run("fit", str(given), "-m", "temperature", "-o", "cal")
    assert code == 1
    assert "that say they become" in err


def test_every_word_of_a_suggested_command_is_quoted(run: Run) -> None:
    """A folder named to run code when the hint is pasted: the suffix was not quoted."""
    evil = "f.$(touch PWNED)"
    Path(evil).mkdir()
    g = torch.Generator().manual_seed(0)
    columns = {f"probs.{k}": torch.rand(200, generator=g).numpy() for k in range(2)}
    columns["probs.1"] = 1 - columns["probs.0"]
    pq.write_table(pa.table({**columns, "label": np.arange(200) % 2}), f"{evil}/s.parquet")
    code, out, _ = run("fit", evil, "-m", "temperature", "-o", "c;1")
    assert code == 0
    assert "next: salgp evaluate 'c;1' 'TEST.$(touch PWNED)'" in out
    code, out, _ = run("monitor", "c;1", "--state", "w `x`", "--reference", evil)
    assert "next: salgp monitor 'c;1' NEW.safetensors --state 'w `x`'" in out


def test_class_names_that_are_no_text_are_refused(run: Run) -> None:
    features, labels = salgp.load_features("f.safetensors")
    features.save("g.safetensors", labels, {"classes": '["a", "b", "\\ud800"]'})
    for line in (("fit", "g.safetensors", "-o", "cal"), ("info", "g.safetensors")):
        code, _, err = run(*line)
        assert code == 1
        assert "g.safetensors" in err
    assert not Path("cal").exists()


@pytest.mark.parametrize("suffix", [".csv", ".json", ".npz", ".parquet", ".onnx", ".pt", ".safetensors"])
@pytest.mark.parametrize("line", ["info {}", "export cal -o h.onnx --rule {}", "fit {} -o new"])
def test_pipes_and_devices_are_not_waited_for(run: Run, suffix: str, line: str) -> None:
    assert fit(run, "cal")[0] == 0
    os.mkfifo(f"pipe{suffix}")
    Path(f"zero{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        code, _, err = run(*line.format(f"{name}{suffix}").split())
        assert code == 1
        assert f"{name}{suffix}" in err


def test_a_latin_1_table_is_named(run: Run) -> None:
    Path("t.csv").write_bytes("caf\xe9,label\n1,2\n".encode("latin-1"))
    code, _, err = run("info", "t.csv")
    assert code == 1
    assert "t.csv" in err
    assert "UTF-8" in err
