"""What reading a network costs, against the bare network in the same run.

Two networks with random weights: ResNet-18 on images of 128 x 128 and a small convolutional network on 32 x
32. *Reading* is a frozen copy of the network with taps on all automatic layers, pooled. *Augmentation* is
given in forward passes over the calibration set: how often the bare network could have seen it in that time.
Everything runs on one thread; processor time is counted, contenders take turns, and the median of
``--repeat`` rounds is given, so that other work on the machine meets all of them alike.

    python benchmarks/network.py                                        # prints the tables
    python benchmarks/network.py --write benchmarks/results/network.md
    python benchmarks/network.py --compile                              # what torch.compile would bring
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from history import record_page
from torch import Tensor, nn

from salgp.network.augment.families import KINDS
from salgp.network.batches import Batch
from salgp.network.extract import TRIALS, extract
from salgp.network.reader import Reader
from salgp_study.backbones import build_backbone

CASES = [
    ("small convolutional network, 32 x 32", lambda: build_backbone("convnet", size=32), 32, 400),
    ("ResNet-18, 128 x 128", lambda: build_backbone("resnet18"), 128, 8),
]
BATCHES = (1, 16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=9, help="rounds")
    parser.add_argument("--write", type=Path, help="write the tables here instead of printing them")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile against eager; needs a C++ compiler"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.compile:
        print("\n".join(_compiling(options.repeat)))
        return
    text = "\n".join([*_reading(options.repeat), "", *_augmenting()]) + "\n"
    if options.write is None:
        print(text)
    else:
        head = "# Reading a network\n\n`python benchmarks/network.py`: processor time of one thread.\n\n"
        options.write.write_text(head + text, encoding="utf-8")
        record_page("network", text)


def _reading(repeat: int) -> list[str]:
    lines = [
        "| network | batch | bare, ms | reading, ms | ratio | lending a copy, ms |",
        "|---|---|---|---|---|---|",
    ]
    for title, make, size, _ in CASES:
        model, images = make().eval(), torch.randn(max(BATCHES), 1, size, size)
        for n in BATCHES:
            batch = Batch((images[:n],))
            reader = Reader().resolved(model, batch)
            runs = [_bare(model, images[:n]), _read(reader, model, batch), _lend(reader, model)]
            bare, read, lend = _milliseconds(runs, repeat if n == 1 else max(3, repeat // 3))
            lines.append(f"| {title} | {n} | {bare:.2f} | {read:.2f} | {read / bare:.2f} | {lend:.3f} |")
    return lines


def _bare(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def _read(reader: Reader, model: nn.Module, batch: Batch) -> Callable[[], Any]:
    return lambda: reader.read(model, batch)


def _lend(reader: Reader, model: nn.Module) -> Callable[[], Any]:
    def run() -> None:
        with reader._copies.lent(model, lambda network: None):
            pass

    return run


def _compiling(repeat: int) -> list[str]:
    """Is a compiled network faster, and after how many images has compiling paid?"""
    lines = [
        "| network | batch | to compile, s | eager, ms | compiled, ms | ratio | images until it pays |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, make, size, _ in CASES:
        model, images = make().eval(), torch.randn(64, 1, size, size)
        for n in (1, 64):
            torch._dynamo.reset()
            quick, x = torch.compile(model), images[:n]
            spent, start = _processor_seconds(), time.perf_counter()
            _bare(quick, x)()
            spent, wall = _processor_seconds() - spent, time.perf_counter() - start
            eager, compiled = _milliseconds([_bare(model, x), _bare(quick, x)], repeat)
            gain = eager - compiled
            pays = f"{1000 * spent / gain * n:,.0f}" if gain > 0 else "never"
            lines.append(
                f"| {title} | {n} | {spent:.1f} / {wall:.1f} | {eager:.2f} | {compiled:.2f} | "
                f"{compiled / eager:.2f} | {pays} |"
            )
    return lines


def _processor_seconds() -> float:
    """Of this process and of those it has started and waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _augmenting() -> list[str]:
    lines = ["| network | samples | forward passes needed | augmentation, in passes |", "|---|---|---|---|"]
    for title, make, size, n in CASES:
        model, x, y = make().eval(), torch.randn(n, 1, size, size), torch.arange(n) % 10
        loader = [(x[i : i + 64], y[i : i + 64]) for i in range(0, n, 64)]
        bare = _milliseconds([lambda: [_bare(model, x)() for x, _ in loader]], 3)[0]  # noqa: B023
        start = time.process_time()
        extract(model, loader, perturb="auto", progress=False)
        took = 1000 * (time.process_time() - start)
        needed = 1 + len(KINDS["images"]) * (1 + min(TRIALS, n) / n)
        lines.append(f"| {title} | {n} | {needed:.1f} | {took / bare:.1f} |")
    return lines


def _milliseconds(runs: Sequence[Callable[[], Any]], repeat: int) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat + 1):
        for run, own in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            own.append(1000 * (time.process_time() - start))
    return [median(own[1:]) for own in times]


if __name__ == "__main__":
    main()
