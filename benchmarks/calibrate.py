"""What `calibrate` costs beside its forward passes: CIFAR-10, the public ResNet-20.

1,000 calibration images with their copies and 10,000 reference images, batches of 128. The time inside the
network is measured where `calibrate` calls it; *bare* is what the same number of images takes in the bare
network, in the same run. The rest is perturbing images, pooling, moving data, and the fit.

    SALGP_DATA=folder python benchmarks/calibrate.py
    SALGP_DATA=folder python benchmarks/calibrate.py --threads 2
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import salgp
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp_study.suite.sets import cifar


@dataclass
class Clock:
    """Processor and wall-clock seconds spent in calls."""

    cpu: float = 0.0
    wall: float = 0.0
    calls: list[int] = field(default_factory=list)

    def of(self, function: Any) -> Any:
        """The function, timed."""

        def timed(*given: Any, **named: Any) -> Any:
            cpu, wall = time.process_time(), time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.cpu += time.process_time() - cpu
                self.wall += time.perf_counter() - wall

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", type=int, default=1000)
    parser.add_argument("--reference", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    print(table(parser.parse_args()))


def table(arguments: argparse.Namespace) -> str:
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    with mock.patch.object(cifar, "N_REFERENCE", arguments.reference):
        case = cifar.cifar10(20)(0, None, Path())
    calibration = Subset(case.calibration, range(arguments.calibration))
    loaders = [DataLoader(data, arguments.batch) for data in (calibration, case.reference)]
    whole, network, fit = Clock(), Clock(), Clock()

    def forward(model: nn.Module, batch: Any) -> Any:
        network.calls.append(len(batch[0]))
        return model(batch[0])

    with mock.patch.object(LayerEvidence, "fit", fit.of(LayerEvidence.fit)):
        whole.of(salgp.calibrate)(
            case.network,
            loaders[0],
            reference=loaders[1],
            reader=salgp.Reader(forward=network.of(forward)),
            progress=False,
        )
    passed, bare = sum(network.calls), bare_time(case.network, calibration, arguments.batch)
    rows = {
        "calibrate": whole,
        "inside the network": network,
        f"bare network, {passed:,} images": Clock(bare.cpu * passed, bare.wall * passed),
        "fit": fit,
        "everything beside the network": Clock(whole.cpu - network.cpu, whole.wall - network.wall),
    }
    lines = [
        f"## calibrate, CIFAR-10 ResNet-20, {arguments.calibration:,} calibration and "
        f"{arguments.reference:,} reference images, threads: {arguments.threads}, "
        f"load {os.getloadavg()[0]:.1f} at the end\n",
        "| | processor s | wall clock s | of the processor time inside the network |\n|---|---|---|---|",
    ]
    for name, spent in rows.items():
        share = spent.cpu / network.cpu
        lines.append(f"| {name} | {spent.cpu:.1f} | {spent.wall:.1f} | {100 * share:.0f} % |")
    return "\n".join([*lines, ""])


@torch.no_grad()
def bare_time(model: nn.Module, data: Any, batch: int) -> Clock:
    """Of one image, on average over a pass."""
    images = [x for x, _ in DataLoader(data, batch)]
    model(images[0])
    clock = Clock()
    clock.of(lambda: [model(x) for x in images])()
    n = sum(len(x) for x in images)
    return Clock(clock.cpu / n, clock.wall / n)


if __name__ == "__main__":
    main()
