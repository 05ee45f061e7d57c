"""`salgp monitor` stopped at any moment, by any signal: what it keeps is what it would have kept unharmed.

The command runs in a forked process, so that a kill costs a moment and not an import of torch.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from salgp import Features, Monitor
from salgp.calibrators import get
from salgp.cli import main
from salgp.monitor import records
from salgp.monitor.records import Record

BATCHES = 8

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrator, features from home and a few batches, as files."""
    folder = tmp_path_factory.mktemp("signals")
    g = torch.Generator().manual_seed(0)
    for name, n in [("fit", 200), ("home", 120), *((f"day{k:02d}", 40) for k in range(BATCHES))]:
        logits = 2 * torch.randn(n, 3, generator=g)
        labels = torch.distributions.Categorical(logits=0.7 * logits).sample()
        Features(logits).save(folder / f"{name}.safetensors", labels)
        if name == "fit":
            get("temperature").fit(Features(logits), labels).save(folder / "cal")
    return folder


def watch(work: Path, state: str, *options: str) -> list[str]:
    return ["monitor", str(work / "cal"), *options, "--state", str(work / state), "--quiet"]


def begin(command: list[str]) -> int:
    """The command in a process of its own; its number."""
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        code = main(command)
    finally:
        os._exit(code)


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kept(folder: Path) -> tuple[bytes, list[Record]]:
    """Everything a monitor keeps but the times."""
    monitor = Monitor.open(folder)
    state = monitor._state
    content = b"".join(x.tobytes() for x in records._arrays(state).values())
    return content, [replace(record, time="", monitor="") for record in monitor.log]


def test_a_monitor_stopped_at_any_moment_goes_on_as_if_unharmed(work: Path) -> None:
    days = [str(work / f"day{k:02d}.safetensors") for k in range(BATCHES)]
    for state in ("whole", "killed"):
        home = str(work / "home.safetensors")
        assert finish(begin(watch(work, state, "--reference", home))) == 0
    start = time.monotonic()
    assert finish(begin(watch(work, "whole", *days))) == 0
    takes = time.monotonic() - start
    rng = random.Random(0)
    codes = set()
    delays = sorted(rng.uniform(0, takes) for _ in range(12))  # the first ones long before the end
    for how, delay in zip([signal.SIGKILL, signal.SIGTERM, signal.SIGINT] * 4, delays, strict=True):
        before = set((work / "killed").glob("*.part"))
        child = begin(watch(work, "killed", *days))
        time.sleep(delay)
        os.kill(child, how)
        codes.add(finish(child))
        assert how is not signal.SIGINT or set((work / "killed").glob("*.part")) <= before
    assert finish(begin(watch(work, "killed", *days))) == 0
    assert kept(work / "killed") == kept(work / "whole")
    assert codes & {-signal.SIGKILL, -signal.SIGTERM, 130}, "no signal came in time"


@pytest.mark.parametrize("step", ["_write_state", "append_line"])
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_beside_any_write_loses_nothing(
    work: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """The worst moments: one of state and log is written, the other one is not, or not yet whole."""
    days = [str(work / f"day{k:02d}.safetensors") for k in range(3)]
    torn, other = f"torn{step}{after}", f"other{step}{after}"
    home = ("--reference", str(work / "home.safetensors"))
    assert finish(begin(watch(work, torn, *days[:1], *home))) == 0
    real = getattr(records, step)

    def die(*given: object) -> None:
        if after:
            real(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(records, step, die)
    assert finish(begin(watch(work, torn, *days))) == -signal.SIGKILL
    monkeypatch.undo()
    assert finish(begin(watch(work, torn, *days))) == 0
    assert finish(begin(watch(work, other, *days, *home))) == 0
    assert kept(work / torn) == kept(work / other)
