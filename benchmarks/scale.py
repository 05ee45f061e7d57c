"""Scale: fitting out of core and batch scoring, locally and on Ray, in one table.

``python benchmarks/scale.py --out benchmarks/results/scale.md``. Stores are made once under ``--work`` and
reused. Every row is a process of its own, so that its peak memory is its own. Wall-clock time depends on what
else the machine does; processor seconds say what the work itself costs (those of Ray's workers are not seen).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from history import record_page
from torch import Tensor

from salgp import SALGP, LayerEvidence
from salgp.features import Features
from salgp.store import fit_store, score, write_store

LAYERS, WIDTH, CLASSES, LATENT = 5, 64, 10, 8
CHUNK = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=int, default=1_000_000, help="rows of the training set")
    parser.add_argument("--calibration", type=int, default=100_000, help="rows with augmented ones")
    parser.add_argument("--score", type=int, default=1_000_000, help="samples that are scored")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "salgp-scale")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, default={}, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        return report_task(given.task, given.arguments)
    lines = [
        f"# Scale, measured by `python benchmarks/scale.py`: {LAYERS} layers x {WIDTH} numbers, "
        f"{CLASSES} classes, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n",
        "| what | rows | seconds | rows/s | processor s | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for line in rows(given):
        print(line, flush=True)
        lines.append(line)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")
        record_page("scale", "\n".join(lines))
    return None


def rows(a: argparse.Namespace) -> Iterator[str]:
    """One line for each measurement."""
    reference, calibration = store_of(a.work, a.reference), augmented_of(a.work, a.calibration)
    scored, saved = store_of(a.work, a.score), {m: str(a.work / m) for m in ("evidence", "gp")}
    stores = {"store": str(calibration), "reference": str(reference), "workers": a.workers}
    what = f"fit layer evidence out of core, {a.calibration:,} calibration rows"
    yield measured(what, a.reference, "evidence", {**stores, "save": saved["evidence"]})
    given = {"store": str(reference), "save": saved["gp"], "workers": a.workers}
    yield measured("fit SAL-GP on a subset, 256 inducing rows", a.reference, "gp", given)
    given = {"store": str(scored), "workers": a.workers}
    for method in saved:
        one = {**given, "calibrator": saved[method]}
        yield measured(f"score, {method}", a.score, "score", one)
    ray = {**given, "calibrator": saved["evidence"], "engine": "ray"}
    yield measured("score, evidence, Ray, its start included", a.score, "score", ray)
    yield measured("the same, one worker killed", a.score, "score", {**ray, "kill": True})


def measured(what: str, n: int, task: str, arguments: dict[str, Any]) -> str:
    """A line of the table: the task in a process of its own."""
    command = [sys.executable, __file__, "--task", task, "--arguments", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{task} {arguments} failed:\n{done.stderr}")
    r = json.loads(done.stdout.splitlines()[-1])
    rate = n / r["seconds"]
    return f"| {what} | {n:,} | {r['seconds']:.1f} | {rate:,.0f} | {r['cpu']:.1f} | {r['rss']:.0f} |"


def report_task(task: str, arguments: dict[str, Any]) -> None:
    """Do a task, and print what it cost."""
    warnings.simplefilter("ignore")
    start, used = time.perf_counter(), _processor_seconds()
    TASKS[task](**arguments)
    seconds, cpu = time.perf_counter() - start, _processor_seconds() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "cpu": cpu, "rss": peak}))


def fit_evidence(store: str, reference: str, workers: int, save: str) -> None:
    fit_store(LayerEvidence(), store, reference=reference, workers=workers).save(save)


def fit_gp(store: str, workers: int, save: str) -> None:
    fit_store(SALGP(n_inducing=256, inference="inducing"), store, workers=workers).save(save)


def score_store(store: str, calibrator: str, workers: int, engine: str = "local", kill: bool = False) -> None:
    if kill:
        threading.Thread(target=_kill_a_worker, daemon=True).start()
    with tempfile.TemporaryDirectory() as out:
        score(store, calibrator, out, workers=workers, engine=engine)


TASKS = {"evidence": fit_evidence, "gp": fit_gp, "score": score_store}


def made(n: int, seed: int) -> tuple[Features, Tensor]:
    """Layers that see a latent variable through noise, over-confident logits, labels from flatter ones."""
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10**6)
    h = torch.randn(n, LATENT, generator=g)
    layers = {}
    for i in range(LAYERS):
        seen = h @ torch.randn(LATENT, WIDTH, generator=fixed)
        layers[f"layer{i}"] = torch.relu(seen + 0.5 * torch.randn(n, WIDTH, generator=g))
    logits = 1.5 * h @ torch.randn(LATENT, CLASSES, generator=fixed)
    return Features(logits, layers), torch.multinomial((0.6 * logits).softmax(1), 1, generator=g)[:, 0]


def store_of(work: Path, n: int) -> Path:
    """A store of ``n`` rows, made where it is not there yet."""
    folder = work / f"store-{n}"
    if not (folder / "manifest.json").exists():
        parts = (made(min(CHUNK, n - i), i) for i in range(0, n, CHUNK))
        write_store(parts, folder, dtype="float16", rows=65_536)
    return folder


def augmented_of(work: Path, n: int) -> Path:
    """A store of about ``n`` rows: originals, and two of each with noise on layers and logits."""
    folder = work / f"augmented-{n}"

    def parts() -> Iterator[tuple[Features, Tensor]]:
        for start in range(0, n // 3, CHUNK // 3):
            count = min(CHUNK // 3, n // 3 - start)
            clean, labels = made(count, 10**5 + start)
            for family in range(3):
                g, noise = torch.Generator().manual_seed(family), 0.4 * family
                layers = {k: x + noise * torch.randn(x.shape, generator=g) for k, x in clean.layers.items()}
                logits = clean.logits + noise * torch.randn(clean.logits.shape, generator=g)
                strength = torch.full((count,), 0.5 * family)
                origin = (start + torch.arange(count), torch.full((count,), family), strength)
                yield Features(logits, layers, *origin), labels

    if not (folder / "manifest.json").exists():
        write_store(parts(), folder, dtype="float16", rows=65_536)
    return folder


def _processor_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def _kill_a_worker() -> None:
    """SIGKILL the first busy Ray worker below this process, a second into its work."""
    while True:
        time.sleep(0.2)
        command = ["ps", "-eo", "pid,ppid,args"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
        parents = {int(line.split()[0]): int(line.split()[1]) for line in listed}
        busy = [int(line.split()[0]) for line in listed if "ray::_piece" in line]
        mine = [pid for pid in busy if os.getpid() in _ancestors(pid, parents)]
        if mine:
            time.sleep(1)
            os.kill(mine[0], signal.SIGKILL)
            return


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


if __name__ == "__main__":
    main()
