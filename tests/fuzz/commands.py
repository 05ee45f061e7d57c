"""Every command against hostile targets and inputs: nothing lost, no traceback, no wait without end.

``PYTHONPATH=tests python tests/fuzz/commands.py`` makes a folder with a network, data, features, a calibrator
and a store, and then calls each writing command with each target (somebody's files, links, pipes, devices,
names that are none), and each reading command with each input (empty, torn, foreign, endless, announced too
large). A call is bad if it ends otherwise than with 0, 1 or 2, prints a traceback, an escape or more than one
sentence, changes a file that was there, leaves files though it failed, or takes longer than two minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import salgp
from salgp.cli import main as salgp_command

SECONDS, MEMORY = 120, 6 * 2**30
NET = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
"""
WRITERS = {
    "fit f.safetensors -m temperature -o": ("", True),
    "apply cal f.safetensors -o": (".csv", True),
    "report cal f.safetensors -o": (".html", True),
    "export cal -o": (".pt2", True),
    "decide cal f.safetensors -o": (".json", True),
    "sets cal f.safetensors -o": (".safetensors", True),
    "score cal store -o": ("", False),
    "extract net.py:make data.npz -o": ("", False),
    "calibrate net.py:make --calibration data.npz -m temperature -o": ("", True),
    "monitor cal --reference f.safetensors --state": ("", False),
    "monitor cal --reference f.safetensors --state watch -o": (".html", False),
}
"""Command -> suffix of its target, and whether it knows ``--force``."""
READERS = (
    "info IN", "fit IN -m temperature -o out", "apply cal IN -o out.csv", "apply IN f.safetensors -o out.csv",
    "decide cal IN -o out.json", "sets cal IN -o out.safetensors",
    "apply cal f.safetensors --rule IN -o out.csv", "apply cal f.safetensors --sets IN -o out.csv",
    "evaluate cal IN", "evaluate IN f.safetensors", "report cal IN -o out.html", "export IN -o out.pt2",
    "export cal -o out.pt2 --rule IN", "score IN store -o out", "score cal IN -o out", "explain cal IN",
    "monitor cal --reference IN --state out", "monitor cal IN --state IN", "compare IN --method temperature",
    "calibrate net.py:make --calibration IN -m temperature -o out", "extract net.py:make IN -o out",
    "calibrate IN:make --calibration data.npz -o out", "extract net.py:make data.npz --weights IN -o out",
)  # fmt: skip


class TooLongError(Exception):
    """A call that does not come back."""


def main() -> None:
    """Try all; the number of calls and of bad ones."""
    signal.signal(signal.SIGALRM, _stop)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "160"}
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work")
        work.mkdir()
        os.chdir(work)
        prepare()
        for name, calls in (("targets", against_targets()), ("inputs", against_inputs())):
            found = [(line, why) for line, why in calls]
            for line, why in found:
                print("".join(f"{name}: {line!r}: {reason}\n" for reason in why), end="", file=sys.stderr)
            figures[name] = {"tried": len(found), "bad": sum(bool(why) for _, why in found)}
        os.chdir(folder)
    print(json.dumps(figures))
    raise SystemExit(any(part["bad"] for part in figures.values()))


def prepare() -> None:
    """What the commands work on."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % 3
    logits = 2 * torch.eye(3)[labels] + torch.randn(160, 3, generator=g)
    salgp.Features(logits, {"a": torch.randn(160, 2, generator=g)}).save("f.safetensors", labels)
    Path("net.py").write_text(NET)
    x = np.random.default_rng(0).random((90, 4), dtype=np.float32)
    np.savez("data.npz", x=x, labels=np.arange(90) % 3)
    for line in ("fit f.safetensors -m temperature -o cal", "extract net.py:make data.npz -o store"):
        code, _, said = call(line.split())
        assert code == 0, said


def against_targets() -> Iterator[tuple[list[str], list[str]]]:
    """Each writing command with each target, where it can with ``--force`` too."""
    for command, (suffix, forced) in WRITERS.items():
        for target in targets(suffix):
            for more in [[], ["--force"]] if forced else [[]]:
                targets(suffix)
                before = kept()
                line = [*command.split(), target, *more]
                code, out, err = call(line)
                yield line, [*checked(code, out, err), *changed(before, kept(), code, line)]
                clear(before)


def targets(suffix: str) -> list[str]:
    """Files, folders and links of somebody, made anew, and names that are no good."""
    Path("mine").mkdir(exist_ok=True)
    Path("mine/thesis.tex").write_text("years")
    Path(f"file{suffix}").write_text("mine")
    for name, goal in (
        ("link", f"file{suffix}"),
        ("folder", "mine"),
        ("dangling", "no"),
        ("loop", f"loop{suffix}"),
    ):
        Path(f"{name}{suffix}").unlink(missing_ok=True)
        Path(f"{name}{suffix}").symlink_to(goal)
    Path(f"pipe{suffix}").unlink(missing_ok=True)
    os.mkfifo(f"pipe{suffix}")
    ours = [f"{name}{suffix}" for name in ("file", "link", "folder", "dangling", "loop", "pipe")]
    names = [
        "x" * 300,
        f"file{suffix}/x",
        f"folder{suffix}/x",
        "/proc/x",
        "a\nb",
        "\x1b[31m",
        "[/]",
        "\udcff",
        "-",
    ]
    inputs = ["f.safetensors", "cal", "store", "net.py", "data.npz", "cal/x", "store/x"]
    return [*ours, "mine", "/dev/null", "/dev/full", *(f"{name}{suffix}" for name in names), *inputs]


def against_inputs() -> Iterator[tuple[list[str], list[str]]]:
    """Each reading command with each input."""
    make_inputs()
    clean = kept()
    known = {"f.safetensors", "net.py", "data.npz", "cal", "store", "mine"}
    given = [path.name for path in sorted(Path().iterdir()) if path.name not in known]
    for name in [*given, "/dev/null", "/proc/self/mem", "nowhere", "/"]:
        for command in READERS:
            line = command.replace("IN", name).split()
            yield line, checked(*call(line))
            clear(clean)


def make_inputs() -> None:
    """Files that are not what they should be."""
    for suffix in (".safetensors", ".npz", ".csv", ".parquet", ".json", ".onnx", ".pt"):
        Path(f"empty{suffix}").write_bytes(b"")
        Path(f"text{suffix}").write_text("hello\nworld")
        Path(f"endless{suffix}").symlink_to("/dev/zero")
        os.mkfifo(f"pipe_in{suffix}")
    head = "probs.0,probs.1,label\n"
    tables = {
        "nul": "\0,\0,0", "nan": "nan,nan,0", "negative": "-1,2,0", "large": ".5,.5," + "9" * 30,
        "quote": '".5,.5,1', "digits": "9" * 6000 + ",.5,1", "none": "", "other": ".5,.5,-3",
        "ragged": ".5,.5", "one": ".5,.5,1",
    }  # fmt: skip
    for name, row in tables.items():
        Path(f"{name}.csv").write_text(head + row + "\n")
    arrays: dict[str, Any] = {
        "objects": np.array([object()], dtype=object), "text": np.array([["a", "b"]]),
        "complex": np.ones((4, 2), complex), "rows": np.zeros((0, 3)), "width": np.zeros((3, 0)),
        "single": np.zeros((3, 1)), "cube": np.zeros((3, 2, 2)),
        "nan": np.full((9, 3), np.nan), "huge": np.full((9, 3), 1e308) * [1, -1, 0.5],
    }  # fmt: skip
    for name, logits in arrays.items():
        np.savez(f"{name}.npz", logits=logits, labels=np.zeros(len(logits), int))
    np.savez("lengths.npz", logits=np.zeros((3, 2)), labels=np.zeros(4, int))
    npy = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 3), }"
    with zipfile.ZipFile("announced.npz", "w") as file:
        file.writestr("probs.npy", npy.ljust(127) + b"\n")
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    Path("announced.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    Path("header.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"x" * 100)
    Path("deep.json").write_text("[" * 100_000)
    for name in ("manifest", "calibrator", "monitor", "contents"):
        Path(f"folder_{name}").mkdir()
        Path(f"folder_{name}/{name}.json").write_text("{")
        Path(f"waits_{name}").mkdir()
        os.mkfifo(f"waits_{name}/{name}.json")


def call(line: list[str]) -> tuple[Any, str, str]:
    """Exit code, or how it failed, with what was printed."""
    out, err = io.StringIO(), io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: Any = salgp_command(line)
    except BaseException:  # anything that reaches the user raw, or never ends
        code = traceback.format_exc()[-400:]
    finally:
        signal.alarm(0)
    return code, out.getvalue(), err.getvalue()


def checked(code: Any, out: str, err: str) -> list[str]:
    """What was wrong with an answer."""
    said = [text for text in err.strip().splitlines() if not text.startswith("note:")]
    found = [] if code in (0, 1, 2) else [f"ended with {code}"]
    found += ["an escape"] if "\x1b" in out + err else []
    found += ["a traceback"] if "Traceback" in out + err else []
    return found + ([f"said {said}"] if code in (1, 2) and len(said) != 1 else [])


def kept() -> dict[str, str]:
    """Every file, folder and link here, with what is in it."""
    return {str(path): _content(path) for path in sorted(Path().rglob("*"))}


def changed(before: dict[str, str], after: dict[str, str], code: Any, line: list[str]) -> list[str]:
    """Files that were there and are other ones; files that a failure left."""
    by_calibrator = line[0] in ("fit", "calibrate")
    replaced = line[-2:] == ["cal", "--force"] and by_calibrator and code == 0
    lost = [path for path, content in before.items() if after.get(path) != content and not replaced]
    begun = line[0] == "monitor" and line[-1].startswith("/proc")  # nobody can tell before it is tried
    left = [path for path in after if path not in before and code != 0 and not begun]
    return [f"changed {path}" for path in lost] + [f"left {path}" for path in left]


def clear(before: dict[str, str]) -> None:
    """Remove what a call made."""
    for path in sorted(set(kept()) - set(before)):
        if Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"


def _stop(*_: object) -> None:
    raise TooLongError


if __name__ == "__main__":
    main()
