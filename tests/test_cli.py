"""The command line: every command, twenty wrong uses, and the whole way from a user's own network to a
report.
"""

from __future__ import annotations

import csv
import errno
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import sequential_cnn
from safetensors.torch import save_file
from sealing import edit_tensors

import salgp
from salgp.cli import main
from salgp.export import LOWEST_TORCH
from salgp.io import write_tensors

NETWORK = """
from torch import nn


def make():
    maps = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*maps, nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


def number():
    return 3
"""


def made_features(n: int, seed: int, classes: int = 3, width: int = 4) -> tuple[salgp.Features, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    z = torch.randn(n, classes, generator=g)
    z[torch.arange(n), y] += 1.5
    layers = {
        "conv": torch.randn(n, width, generator=g) + z[:, :1],
        "fc": z + 0.3 * torch.randn(n, classes, generator=g),
    }
    return salgp.Features(2 * z, layers), y


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and bad files, made once; tests only read them."""
    torch.manual_seed(987)  # the network of a test is another one: tests start with a seed of their own
    where = tmp_path_factory.mktemp("files")
    for name, seed, n in (("cal", 1, 120), ("test", 2, 150)):
        features, labels = made_features(n, seed)
        features.save(where / f"{name}.safetensors", labels, {"network": "a" * 64})
    features, labels = made_features(40, 3)
    features.save(where / "unlabelled.safetensors")
    features.save(where / "other.safetensors", labels, {"network": "b" * 64})
    made_features(40, 4, width=7)[0].save(where / "wider.safetensors", labels)
    made_features(40, 4, classes=5)[0].save(where / "classes5.safetensors", labels)
    salgp.Features(torch.full((4, 3), torch.nan)).save(
        where / "nan.safetensors", torch.zeros(4, dtype=torch.int64)
    )
    salgp.Features(torch.zeros(4, 1)).save(where / "one.safetensors", torch.zeros(4, dtype=torch.int64))
    features.save(where / "range.safetensors", labels + 3)
    write_tensors(where / "key.safetensors", {"scores": torch.zeros(3, 2)}, {})
    write_tensors(
        where / "newer.safetensors",
        {"logits": torch.zeros(3, 2)},
        {"format": "salgp-features", "format_version": "99"},
    )
    (where / "empty.safetensors").write_bytes(b"")
    (where / "cut.safetensors").write_bytes((where / "cal.safetensors").read_bytes()[:500])
    (where / "file").write_text("in the way")
    (where / "there.onnx").write_text("in the way")
    (where / "net.py").write_text(NETWORK)
    np.savez(
        where / "names.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.array(["cat", "dog", "cat", "dog"])
    )
    np.savez(where / "data.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.arange(4) % 3)
    np.savez(where / "flat.npz", x=np.zeros((4, 7), np.float32), y=np.arange(4) % 3)
    np.savez(where / "two.npz", a=np.zeros((4, 2), np.float32), b=np.zeros((4, 2), np.float32))
    np.savez(where / "bytes.npz", x=np.zeros((4, 1, 8, 8), np.uint8))
    save_file({"0.weight": torch.zeros(2, 2)}, where / "weights.safetensors")
    assert (
        main(["fit", str(where / "cal.safetensors"), "-o", str(where / "cal"), "-m", "temperature", "-q"])
        == 0
    )
    layered = ["-m", "sal-gp", "-q"]
    assert main(["fit", str(where / "cal.safetensors"), "-o", str(where / "layered"), *layered]) == 0
    assert (
        main(
            [
                "extract",
                f"{where / 'net.py'}:make",
                str(where / "data.npz"),
                "-o",
                str(where / "own.safetensors"),
                "-q",
            ]
        )
        == 0
    )
    assert (
        main(["fit", str(where / "own.safetensors"), "-o", str(where / "own"), "-m", "uncalibrated", "-q"])
        == 0
    )
    shutil.copytree(where / "cal", where / "newer")
    newer = where / "newer" / "calibrator.safetensors"
    edit_tensors(newer, lambda tensors, metadata: metadata.update(format_version="99"))
    return where


@pytest.fixture
def run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Run a line: ``IN`` is the folder of files, ``OUT`` an empty one."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([part.replace("IN", str(folder)).replace("OUT", str(tmp_path)) for part in line.split()])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@dataclass(frozen=True)
class Wrong:
    """A wrong use: the line, what is said, the exit code, and what to break first."""

    name: str
    line: str
    says: str
    code: int = 1
    breaks: Callable[[pytest.MonkeyPatch], None] | None = field(default=None)


def _no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("salgp.io.files.os.replace", full)


def _interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("salgp.calibrators.base.write_value", stop)


def _bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise AttributeError("nothing here")

    monkeypatch.setattr("salgp.files.read_features", crash)


EXPORT = "export IN/own IN/net.py:make"
FIT = "-o OUT/cal -m temperature"
WRONG = [
    Wrong("missing file", f"fit IN/nothing.safetensors {FIT}", "no such file"),
    Wrong("wrong key", f"fit IN/key.safetensors {FIT}", "no tensor named 'logits'; found scores"),
    Wrong("not a number", f"fit IN/nan.safetensors {FIT}", "logits holds NaN or infinity in row 0"),
    Wrong(
        "labels as strings",
        "extract IN/net.py:make IN/names.npz -o OUT/f.safetensors",
        "the labels are names (cat, dog",
    ),
    Wrong("swapped arguments", "apply IN/test.safetensors IN/cal -o OUT/p.csv", "two arguments swapped"),
    Wrong("calibrator as features", f"fit IN/cal {FIT}", "is a calibrator, but features were expected"),
    Wrong(
        "other network, by fingerprint",
        "apply IN/cal IN/other.safetensors -o OUT/p.csv",
        "another network",
    ),
    Wrong(
        "other network, by width",
        "apply IN/layered IN/wider.safetensors -o OUT/p.csv",
        "is it the same network?",
    ),
    Wrong(
        "other classes",
        "apply IN/cal IN/classes5.safetensors -o OUT/p.csv",
        "fitted on 3 classes, got class scores of 5",
    ),
    Wrong(
        "file in place of folder",
        "fit IN/cal.safetensors -m temperature -o IN/file/cal",
        "is a file, not a folder",
    ),
    Wrong("disk full", f"fit IN/cal.safetensors {FIT}", "No space left on device", breaks=_no_space),
    Wrong(
        "disk full, prediction",
        "apply IN/cal IN/test.safetensors -o OUT/p.csv",
        "No space left on device",
        breaks=_no_space,
    ),
    Wrong(
        "Ctrl-C in the middle",
        f"fit IN/cal.safetensors {FIT}",
        "nothing was left half-written",
        130,
        _interrupt,
    ),
    Wrong("features of a newer version", f"fit IN/newer.safetensors {FIT}", "newer version of salgp"),
    Wrong(
        "calibrator of a newer version",
        "apply IN/newer IN/test.safetensors -o OUT/p.csv",
        "newer version of salgp",
    ),
    Wrong("existing output", "fit IN/cal.safetensors -m temperature -o IN/cal", "pass --force"),
    Wrong(
        "output is input",
        "extract IN/net.py:make IN/test.safetensors --force -o IN/test.safetensors",
        "is also an input",
    ),
    Wrong(
        "unknown method",
        "fit IN/cal.safetensors -o OUT/cal -m magic",
        "no calibrator called 'magic'; known:",
        2,
    ),
    Wrong(
        "unknown methods",
        "compare IN/cal.safetensors --method temperature,magic",
        "no calibrator called 'magic'",
        2,
    ),
    Wrong(
        "unknown layer",
        f"fit IN/cal.safetensors {FIT} --layers conv,nose",
        "no layer named 'nose'; known layers: conv, fc",
    ),
    Wrong(
        "unknown layer of a network",
        "extract IN/net.py:make IN/data.npz -o OUT/f.safetensors --layers nose",
        "nose",
    ),
    Wrong("empty file", f"fit IN/empty.safetensors {FIT}", "not a whole safetensors file"),
    Wrong("truncated file", f"fit IN/cut.safetensors {FIT}", "not a whole safetensors file"),
    Wrong("one column", f"fit IN/one.safetensors {FIT}", "at least 2 columns"),
    Wrong("label out of range", f"fit IN/range.safetensors {FIT}", "is out of range: expected 0..2"),
    Wrong("no labels", f"fit IN/unlabelled.safetensors {FIT}", "has no labels"),
    Wrong("unknown option", f"fit IN/cal.safetensors {FIT} --fast", "see salgp fit --help", 2),
    Wrong("missing argument", "fit", "Missing argument", 2),
    Wrong("unknown command", "calibrat", "No such command", 2),
    Wrong("unknown suffix", "apply IN/cal IN/test.safetensors -o OUT/p.doc", ".parquet", 2),
    Wrong("no such row", "explain IN/cal IN/test.safetensors --sample 999", "the rows of", 2),
    Wrong(
        "model without a name",
        "extract IN/net.py IN/data.npz -o OUT/f.safetensors",
        "path/to/file.py:name",
    ),
    Wrong(
        "model not in the file",
        "extract IN/net.py:build IN/data.npz -o OUT/f.safetensors",
        "has no 'build'; it has make, number",
    ),
    Wrong(
        "no such module",
        "extract nowhere.net:make IN/data.npz -o OUT/f.safetensors",
        "cannot import 'nowhere.net'",
    ),
    Wrong(
        "not a network",
        "extract IN/net.py:number IN/data.npz -o OUT/f.safetensors",
        "gives a int; expected a torch.nn.Module",
    ),
    Wrong(
        "foreign weights",
        "extract IN/net.py:make IN/data.npz --weights IN/weights.safetensors -o OUT/f.safetensors",
        "does not fit the network",
    ),
    Wrong(
        "file in place of shards",
        "extract IN/net.py:make IN/data.npz -o IN/file --force",
        "is no folder, and one of Parquet shards is to be written",
    ),
    Wrong(
        "shards over the data",
        "extract IN/net.py:make IN/data.npz -o IN/data.npz --force",
        "is also an input",
    ),
    Wrong(
        "data of another shape",
        "extract IN/net.py:make IN/flat.npz -o OUT/f.safetensors",
        "the network does not accept inputs of shape (n, 7) of torch.float32; its own error: Expected 3D",
    ),
    Wrong(
        "calibration data of another shape",
        "calibrate IN/net.py:make --calibration IN/flat.npz -o OUT/all",
        "the network does not accept inputs of shape (n, 7) of torch.float32; its own error: Expected 3D",
    ),
    Wrong(
        "test data of another shape",
        "calibrate IN/net.py:make --calibration IN/data.npz --test IN/flat.npz -m uncalibrated -o OUT/all",
        "the network does not accept inputs of shape (n, 7)",
    ),
    Wrong("not a model folder", "extract hf:IN IN/data.npz -o OUT/f.safetensors", "no config.json"),
    Wrong(
        "several inputs",
        "extract IN/net.py:make IN/two.npz -o OUT/f.safetensors",
        "Name arrays with --inputs",
    ),
    Wrong(
        "unknown input",
        "extract IN/net.py:make IN/two.npz --inputs c -o OUT/f.safetensors",
        "no array named 'c'; it has a, b",
    ),
    Wrong("bytes", "extract IN/net.py:make IN/bytes.npz -o OUT/f.safetensors", "--scale"),
    Wrong("unknown data", "extract IN/net.py:make IN/net.py -o OUT/f.safetensors", "unknown kind of data"),
    Wrong("report over a text", "report IN/cal IN/test.safetensors -o IN/file", "left alone"),
    Wrong(
        "too few class names",
        "report IN/cal IN/test.safetensors -o OUT/r.html --classes a,b",
        "2 class names for 3 classes",
    ),
    Wrong("export to what", "export IN/cal -o OUT/head.exe", "ends in .onnx or .pt2", 2),
    Wrong("export over a file", "export IN/cal -o IN/there.onnx", "left alone"),
    Wrong(
        "weights without network",
        "export IN/cal --weights IN/weights.safetensors -o OUT/h.onnx",
        "--weights goes with MODEL",
        2,
    ),
    Wrong("network without example", f"{EXPORT} -o OUT/h.onnx", "MODEL needs DATA", 2),
    Wrong(
        "no word on the network",
        "export IN/cal IN/net.py:make IN/data.npz -o OUT/h.onnx",
        "how its features were read",
    ),
    Wrong(
        "export with other weights",
        f"{EXPORT} IN/data.npz -o OUT/h.onnx",
        "other weights",
    ),
    Wrong("one file to score", "score IN/cal IN/test.safetensors -o OUT/s", "works on a folder of shards", 2),
    Wrong(
        "no such device",
        "extract IN/net.py:make IN/data.npz --device abacus -o OUT/f.safetensors",
        "--device abacus: not available here",
        2,
    ),
    Wrong("info on a script", "info IN/net.py", "net.py"),
    Wrong("info on nothing", "info IN/nothing", "no such file or folder"),
    Wrong(
        "a fault of our own",
        f"fit IN/cal.safetensors {FIT}",
        "AttributeError: nothing here (--debug shows where)",
        breaks=_bug,
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_use(
    wrong: Wrong, run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if " hf:" in wrong.line:
        pytest.importorskip("transformers")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    if wrong.breaks is not None:
        wrong.breaks(monkeypatch)
    code, out, err = run(wrong.line)
    lines = [line for line in err.splitlines() if not line.startswith("note:")]
    assert (code, len(lines), out) == (wrong.code, 1, ""), err
    assert lines[0].startswith("salgp: ")
    assert wrong.says in lines[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nothing, whole or half, was left
    assert {
        p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    } == before


def test_a_real_interrupt(folder: Path, tmp_path: Path) -> None:
    """SIGINT while the user's network is being built: exit code 130, one sentence, no file."""
    waiting = (
        "import pathlib, time\n\n\ndef make():\n    pathlib.Path('started').touch()\n    time.sleep(120)\n"
    )
    (tmp_path / "slow.py").write_text(waiting)
    call = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from salgp.cli "
        "import main; raise SystemExit(main())"
    )
    arguments = ["extract", "slow.py:make", str(folder / "data.npz"), "-o", "f.safetensors"]
    process = subprocess.Popen(
        [sys.executable, "-c", call, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 100
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "salgp: stopped; nothing was left half-written"
    assert {p.name for p in tmp_path.iterdir()} <= {"slow.py", "started", "__pycache__"}


def test_debug_shows_the_traceback(run: Any) -> None:
    with pytest.raises(FileNotFoundError):
        run(f"fit IN/nothing.safetensors {FIT} --debug")


def test_apply_in_every_format_is_the_library_s_prediction(run: Any, folder: Path, tmp_path: Path) -> None:
    for suffix in ("csv", "parquet"):
        code, out, _ = run(f"apply IN/layered IN/test.safetensors -o OUT/p.{suffix} --json")
        assert code == 0
        assert json.loads(out)["n"] == 150
    import pyarrow.parquet as pq

    features = salgp.Features.load(folder / "test.safetensors")
    expected = salgp.load(folder / "layered").predict(features)
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = pq.read_table(tmp_path / "p.parquet")
    arrays = expected.numpy()
    np.testing.assert_array_equal(table["confidence"].to_numpy(), arrays["confidence"])
    np.testing.assert_array_equal(table["std"].to_numpy(), arrays["std"])
    np.testing.assert_array_equal(table["correction.fc"].to_numpy(), expected.layers.mean[:, 1].numpy())
    for name in ("confidence", "correction.fc"):
        found = [float(row[name]) for row in rows]
        np.testing.assert_allclose(found, table[name].to_numpy(), rtol=1e-12)


def test_evaluate_scores_both_sides(run: Any, folder: Path) -> None:
    code, out, _ = run("evaluate IN/cal IN/test.safetensors --json")
    scores = json.loads(out)
    features, labels = salgp.load_features(folder / "test.safetensors")
    expected = salgp.evaluate(salgp.load(folder / "cal").predict(features), labels)
    assert code == 0
    assert scores["temperature"] == pytest.approx(expected.as_dict())
    assert scores["uncalibrated"]["accuracy"] == scores["temperature"]["accuracy"]
    assert "ECE" in run("evaluate IN/cal IN/test.safetensors")[1]


def test_explain_names_the_layers(run: Any) -> None:
    code, out, _ = run("explain IN/layered IN/test.safetensors --sample 3 --sample 5 --json")
    samples = json.loads(out)["samples"]
    assert code == 0
    assert [s["row"] for s in samples] == [3, 5]
    assert set(samples[0]["points"]) == {"conv", "fc", "confidence"}
    for s in samples:
        assert s["network_confidence"] + sum(s["points"].values()) == pytest.approx(s["confidence"], abs=1e-6)
    assert "conv" in run("explain IN/layered IN/test.safetensors ")[1]


def test_compare_sorts_and_splits(run: Any) -> None:
    line = "compare IN/cal.safetensors --method uncalibrated,temperature,histogram --json"
    results = [json.loads(run(line)[1]) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["n_fit"] + results[0]["n_test"] == 120
    values = [s["nll_correct"] for s in results[0]["scores"].values()]
    assert values == sorted(values)
    assert json.loads(run(f"{line} --test IN/test.safetensors")[1])["n_test"] == 150


def test_copies_stay_with_their_sample_and_are_never_scored(run: Any, tmp_path: Path) -> None:
    features, labels = made_features(60, 5)
    three = salgp.Features(
        features.logits.repeat(3, 1),
        {k: x.repeat(3, 1) for k, x in features.layers.items()},
        torch.arange(60).repeat(3),
    )
    three.save(tmp_path / "copies.safetensors", labels.repeat(3))
    features.save(tmp_path / "plain.safetensors", labels)
    line = "--method temperature,perturbed-temperature --json"
    copies, plain = (
        json.loads(run(f"compare OUT/{name}.safetensors {line}")[1]) for name in ("copies", "plain")
    )
    assert (copies["n_fit"], copies["n_test"]) == (90, 30)
    assert (
        copies["scores"]["temperature"] == plain["scores"]["temperature"]
    )  # which learns from originals only
    for name in ("copies", "plain"):
        assert run(f"fit OUT/{name}.safetensors -m temperature -o OUT/{name} -q")[0] == 0
    assert salgp.load(tmp_path / "copies").temperature_ == salgp.load(tmp_path / "plain").temperature_


def test_compare_goes_on_where_a_method_cannot(run: Any, tmp_path: Path) -> None:
    features, labels = made_features(60, 5)
    features.select([]).save(tmp_path / "logits.safetensors", labels)
    code, out, _ = run("compare OUT/logits.safetensors --method temperature,residual-gp --json")
    assert code == 0
    assert "hidden layers" in json.loads(out)["left_out"]["residual-gp"]
    code, _, err = run("compare OUT/logits.safetensors --method residual-gp")
    assert code == 1
    assert "no method could be fitted" in err


def test_force_replaces_a_whole_calibrator(run: Any, tmp_path: Path) -> None:
    assert run("fit IN/cal.safetensors -o OUT/cal -m temperature")[0] == 0
    assert run("fit IN/cal.safetensors -o OUT/cal -m platt --force")[0] == 0
    assert salgp.load(tmp_path / "cal").name == "platt"
    assert [p.name for p in tmp_path.iterdir()] == ["cal"]


def test_a_failed_replacement_keeps_the_old_one(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("fit IN/cal.safetensors -o OUT/cal -m temperature")[0] == 0
    _no_space(monkeypatch)
    assert run("fit IN/cal.safetensors -o OUT/cal -m platt --force")[0] == 1
    assert salgp.load(tmp_path / "cal").name == "temperature"
    assert [p.name for p in tmp_path.iterdir()] == ["cal"]


def test_parquet_shards_are_features_too(run: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    features, labels = made_features(90, 6)
    features.save(tmp_path / "f.safetensors", labels)
    (tmp_path / "shards").mkdir()
    for i, rows in enumerate((slice(0, 50), slice(50, 90))):
        columns = {"logits": features.logits[rows].tolist(), "labels": labels[rows].tolist()}
        columns |= {f"layers.{k}": x[rows].tolist() for k, x in features.layers.items()}
        pq.write_table(pa.table(columns), tmp_path / "shards" / f"{i}.parquet")
    one, two = (
        json.loads(run(f"evaluate IN/cal OUT/{name} --json")[1]) for name in ("shards", "f.safetensors")
    )
    assert one == two


def test_without_arguments_the_help_is_shown(run: Any) -> None:
    code, out, err = run("")
    assert (code, err) == (2, "")
    assert "salgp demo" in out


@pytest.mark.parametrize(
    "line",
    [
        "info",
        "info IN/cal",
        "info IN/cal.safetensors",
    ],
)
def test_info_and_lists(line: str, run: Any) -> None:
    code, out, _ = run(line)
    assert code == 0
    assert out
    assert json.loads(run(f"{line} --json")[1])


def commands() -> dict[str, Any]:
    """Every command with its full name: ``salgp fit``, ``salgp score``, ..."""
    from typer.main import get_command

    from salgp.cli import app

    found: dict[str, Any] = {}
    waiting = {"salgp": get_command(app)}
    while waiting:
        name, one = waiting.popitem()
        inner = getattr(one, "commands", None)
        if inner is None:
            found[name] = one
        else:
            waiting |= {f"{name} {part}": value for part, value in inner.items()}
    return found


def test_every_command_has_help(run: Any) -> None:
    shown = run("--help")[1]
    for name in (
        "demo",
        "calibrate",
        "extract",
        "fit",
        "apply",
        "evaluate",
        "explain",
        "compare",
        "report",
        "export",
        "info",
        "score",
    ):
        assert name in shown
    assert "<bool>" not in shown
    for name in commands():
        code, out, _ = run(f"{name.removeprefix('salgp ')} --help")
        assert code == 0
        assert f"Example:  {name}" in out
        assert "<bool>" not in out


@pytest.mark.parametrize("name", commands())
def test_examples_in_the_help_are_right_as_typed(name: str) -> None:
    """Every example is of its own command, and its arguments and options exist and have values of the right
    kind.
    """
    one = commands()[name]
    examples = re.findall(r"Example:  (.*)", one.epilog)
    assert examples
    for example in examples:
        words = shlex.split(example)
        assert words[: len(name.split())] == name.split()
        one.make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("page", ["README.md", "docs", "examples"])
def test_command_lines_in_the_documents_are_right(page: str) -> None:
    """Every ``salgp ...`` line in a shell block parses, with the options it names."""
    root = Path(__file__).parents[1] / page
    known = commands()
    for path in (
        [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in (".md", ".py"))
    ):
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            name = next(
                (n for n in sorted(known, key=len, reverse=True) if words[: len(n.split())] == n.split()),
                None,
            )
            if words[:1] == ["salgp"] and words[1:2] not in (
                ["--help"],
                ["--version"],
                ["--install-completion"],
            ):
                assert name is not None, f"{path.name}: {line}"
                rest = words[len(name.split()) :]
                if "--help" not in rest:
                    known[name].make_context(name, rest)


LIGHT = [
    "--help",
    "--version",
    "fit --help",
    "fit nothing.npz -o cal",
    "fit file -o cal -m temprature",
    "fit file -o file",
    "apply nothing file -o p.csv",
    "apply file file -o p.doc",
    "evaluate file nothing",
    "compare file --method temprature",
    "extract net.py:make nothing.npz -o f.safetensors",
    "calibrate net.py:make --calibration nothing.npz -o out",
    "report nothing file -o r.html",
    "export nothing -o head.onnx",
    "score nothing file -o scored",
    "info nothing",
]


def test_help_and_refused_commands_do_not_import_torch(tmp_path: Path) -> None:
    """What needs no network says so at once: PyTorch takes seconds to load."""
    (tmp_path / "file").write_text("in the way")
    code = f"""
import sys
from salgp.cli import main
for line in {LIGHT!r}:
    main(line.split())
    heavy = [name for name in ("torch", "numpy", "sklearn", "safetensors") if name in sys.modules]
    assert not heavy, f"{{line}} imports {{heavy}}"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_shell_completion_is_offered() -> None:
    environment = {
        "_SALGP_COMPLETE": "complete_bash",
        "COMP_WORDS": "salgp ev",
        "COMP_CWORD": "1",
        "PATH": "",
    }
    code = "from salgp.cli import main; raise SystemExit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert "evaluate" in done.stdout


def test_end_to_end_with_a_network_of_the_user(run: Any, folder: Path, tmp_path: Path) -> None:
    """extract -> fit -> compare -> report -> apply -> export (alone, whole), by command line alone; both
    agree with the library.
    """
    g = torch.Generator().manual_seed(0)
    for name, n in (("train", 150), ("cal", 150), ("test", 200)):
        y = torch.randint(0, 3, (n,), generator=g)
        x = 0.8 * torch.randn(n, 1, 8, 8, generator=g) + (y[:, None, None, None] - 1) * torch.linspace(
            -1, 1, 8
        )
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=y.numpy())
    (tmp_path / "net.py").write_text(NETWORK)
    _train(tmp_path)
    for name in ("train", "cal", "test"):
        line = (
            f"extract OUT/net.py:make OUT/{name}.npz --weights OUT/w.safetensors -o "
            f"OUT/{name}.safetensors --classes low,<b>mid</b>,high"
        )
        assert run(line)[0] == 0
    assert (
        run("fit OUT/cal.safetensors --reference OUT/train.safetensors -m sal-gp -o OUT/calibrator")[0] == 0
    )
    assert (
        run(
            "compare OUT/cal.safetensors --test OUT/test.safetensors --method uncalibrated,temperature,sal-gp"
        )[0]
        == 0
    )
    assert (
        run(
            "report OUT/calibrator OUT/test.safetensors --images OUT/test.npz --new-data "
            "OUT/train.safetensors -o OUT/report.html"
        )[0]
        == 0
    )
    assert run("apply OUT/calibrator OUT/test.safetensors -o OUT/p.csv")[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;mid&lt;/b&gt;" in page
    assert "<b>mid" not in page
    pytest.importorskip("torch", LOWEST_TORCH)
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert run("export OUT/calibrator -o OUT/head.onnx")[0] == 0
    whole = "export OUT/calibrator OUT/net.py:make OUT/test.npz --weights OUT/w.safetensors"
    assert run(f"{whole} -o OUT/whole.onnx")[0] == 0
    assert run(f"{whole} -o OUT/whole.pt2 --json")[0] == 0
    assert "pass --force" in run(f"{whole} -o OUT/whole.pt2")[2]
    _compare_with_exported(tmp_path)


def test_extract_to_shards_and_score(run: Any, tmp_path: Path) -> None:
    assert run("extract IN/net.py:make IN/data.npz -o OUT/shards")[0] == 0
    assert run("extract IN/net.py:make IN/data.npz -o OUT/f.safetensors")[0] == 0
    whole, stored = (json.loads(run(f"info OUT/{name} --json")[1]) for name in ("f.safetensors", "shards"))
    assert whole["layers"] == stored["layers"]
    features, labels = salgp.store.FeatureStore(tmp_path / "shards").to_features()  # of the same network
    salgp.calibrators.get("uncalibrated").fit(features, labels).save(tmp_path / "cal")
    code, out, _ = run("score OUT/cal OUT/shards -o OUT/scored --workers 1 --json")
    assert code == 0
    assert json.loads(out)["rows"] == 4


def test_python_runs_the_package_as_the_command(folder: Path) -> None:
    line = [sys.executable, "-m", "salgp"]
    told = subprocess.run([*line, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == f"salgp {salgp.__version__}"
    wrong = subprocess.run([*line, "fit"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "Missing argument" in wrong.stderr


def test_extract_with_perturbed_copies(run: Any, tmp_path: Path) -> None:
    data = np.random.default_rng(0).normal(size=(12, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=data, y=np.arange(12) % 3)
    assert run("extract IN/net.py:make OUT/data.npz --perturb -o OUT/f.safetensors -q")[0] == 0
    features = salgp.Features.load(tmp_path / "f.safetensors")
    assert features.groups is not None
    assert len(features) > 12
    assert set(features.groups.tolist()) == set(range(12))
    assert run("extract IN/net.py:make OUT/data.npz --perturb -o OUT/shards")[0] == 2


@pytest.mark.parametrize("options", ["--gray", "--gray --image-size 8,8 --normalize 0.5:0.5"])
def test_extract_from_an_image_folder(options: str, run: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog", "eel"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(2):
            image.fromarray(np.full((8, 8), 40 * i, np.uint8)).save(tmp_path / "images" / name / f"{i}.png")
    assert run(f"extract IN/net.py:make OUT/images -o OUT/f.safetensors {options}")[0] == 0
    labels = salgp.load_features(tmp_path / "f.safetensors")[1]
    assert labels is not None
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert json.loads(run("info OUT/f.safetensors --json")[1])["class names"] == ["cat", "dog", "eel"]


def test_extract_with_named_labels_and_a_module_of_this_folder(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    assert run("extract net:make IN/names.npz --classes dog,cat,eel -o OUT/f.safetensors")[0] == 0
    labels = salgp.load_features(tmp_path / "f.safetensors")[1]
    assert labels is not None
    assert labels.tolist() == [1, 0, 1, 0]
    monkeypatch.delitem(sys.modules, "net", raising=False)


def test_texts_are_rehearsed_with_the_tokenizer_of_the_folder(run: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from salgp.network.augment.families import KINDS

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "ship",
        "sails",
        "plane",
        "flies",
        "car",
        "drives",
        "far",
        "fast",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    texts = ["the ship sails far", "the plane flies fast", "the car drives"] * 4
    lines = ["text,label", *(f"{text},{i % 3}" for i, text in enumerate(texts))]
    (tmp_path / "texts.csv").write_text("\n".join(lines))
    assert run("extract hf:OUT/model OUT/texts.csv --perturb -o OUT/f.safetensors -q")[0] == 0
    features, labels = salgp.load_features(tmp_path / "f.safetensors")
    assert features.families is not None
    assert int(features.families.max()) == len(KINDS["text"])
    assert labels is not None
    assert len(features) == 12 * (1 + len(KINDS["text"]))


def test_extract_from_hugging_face_and_parquet(run: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import pyarrow as pa
    import pyarrow.parquet as pq

    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    columns = {
        "input_ids": [[1, 2, 3], [4, 5, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [0, 2],
    }
    pq.write_table(pa.table(columns), tmp_path / "text.parquet")
    logging = transformers.utils.logging
    logging.enable_progress_bar()
    assert run("extract hf:OUT/model OUT/text.parquet -o OUT/f.safetensors -q") == (0, "", "")
    assert logging.is_progress_bar_enabled(), "the setting of somebody else's library is as it was"
    features, labels = salgp.load_features(tmp_path / "f.safetensors")
    assert features.n_classes == 3
    assert len(features.layers) >= 2
    assert labels is not None
    pytest.importorskip("torch", LOWEST_TORCH)
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert run("fit OUT/f.safetensors -m uncalibrated -o OUT/cal")[0] == 0
    assert run("export OUT/cal hf:OUT/model OUT/text.parquet -o OUT/whole.onnx -q") == (
        0,
        "",
        "",
    )
    found = _run_onnx(
        tmp_path / "whole.onnx", {name: np.asarray(columns[name]) for name in ("input_ids", "attention_mask")}
    )
    np.testing.assert_allclose(found["probs"], features.probs.numpy(), atol=1e-5)


def test_demo(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EPOCHS": 3, "N_TRAIN": 200, "N_CALIBRATION": 150, "N_TEST": 200}.items():
        monkeypatch.setattr(f"salgp.demo.{name}", value)
    code, out, _ = run("demo --out OUT/demo --json")
    found = json.loads(out)
    assert code == 0
    assert Path(found["report"]).is_file()
    for scores in found["scores"].values():
        assert list(scores) == ["network alone", "temperature", "SAL-GP (paper)", "layer evidence"]
        assert len({s["accuracy"] for s in scores.values()}) == 1  # calibration never changes an answer
    assert "Calibrated, it claims" in found["words"]
    assert "exists already" in run("demo --out OUT/demo")[2]


def _train(where: Path) -> None:
    """Train the user's network a little, so that there is something to calibrate."""
    from salgp.files import open_network

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = open_network(f"{where / 'net.py'}:make")
    data = np.load(where / "train.npz", allow_pickle=False)
    x, y = torch.as_tensor(data["x"]), torch.as_tensor(data["y"])
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(40):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()
        optimiser.step()
    save_file(network.state_dict(), where / "w.safetensors")


def _compare_with_exported(where: Path) -> None:
    """Head and whole graph, by onnxruntime and by torch.export, for all samples and for one: as predicted."""
    features = salgp.Features.load(where / "test.safetensors")
    expected = salgp.load(where / "calibrator").predict(features).numpy()
    x = np.load(where / "test.npz", allow_pickle=False)["x"]
    named = {
        "logits": features.logits.numpy(),
        **{f"layers.{k}": v.numpy() for k, v in features.layers.items()},
    }
    for rows in (slice(None), slice(0, 1), slice(3, 20)):
        found = [
            _run_onnx(where / "head.onnx", {k: v[rows] for k, v in named.items()}),
            _run_onnx(where / "whole.onnx", {"input": x[rows]}),
        ]
        values = torch.export.load(where / "whole.pt2").module()(torch.as_tensor(x[rows]))
        found.append(dict(zip(found[0], (v.numpy() for v in values), strict=True)))
        for result in found:
            assert list(result) == ["label", "confidence", "std", "lower", "upper", "probs"]
            for name, value in result.items():
                np.testing.assert_allclose(value, expected[name][rows], atol=1e-5, err_msg=name)


def _run_onnx(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))


def test_the_user_s_network_is_used_as_it_is(tmp_path: Path) -> None:
    from salgp.files import open_network

    (tmp_path / "mine.py").write_text("from networks import sequential_cnn\nnet = sequential_cnn()\n")
    (tmp_path / "networks.py").write_text("raise RuntimeError('the installed one is meant')\n")
    assert type(open_network(f"{tmp_path / 'mine.py'}:net")) is type(sequential_cnn())
