"""What `calibrate` costs beside its forward passes: CIFAR-10, the public ResNet-20.

1,000 calibration images, augmented samples of them and 10,000 reference images, batches of 128. The time
inside the network is measured where `calibrate` calls it; *bare* is what the same number of images takes in
the bare network, in the same run. The rest is perturbing images, pooling, moving data, and the fit.

    SALGP_DATA=folder python benchmarks/calibrate.py
    SALGP_DATA=folder python benchmarks/calibrate.py --threads 2
    SALGP_DATA=folder python benchmarks/calibrate.py --write benchmarks/results/calibrate.md

The second table shows what forward passes bring: fits of the default method to fewer and more augmented
samples of each original and family, and to part of the reference. ECE (15 bins of equal width), NLL of being
correct and AUROC of spotting errors are means over corruptions that no family imitates, at the middle
severity.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from history import record_page
from torch import nn
from torch.utils.data import DataLoader, Subset

import salgp
from salgp import metrics
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.network.augment.families import families_for
from salgp.network.extract import TRIALS, CalibrationData, read_calibration_data
from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.sets import cifar

HEAD = """# What calibrate costs

`OMP_NUM_THREADS=1 python benchmarks/calibrate.py`. A row such as "0.5, 100%" is half an augmented sample of
each original and family, and the whole reference.

"""
MOST = 3
"""Augmented samples of each original and family that the second table goes up to."""


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


@dataclass(frozen=True)
class Spent:
    """What one call of `calibrate` cost, and the classifier it made."""

    classifier: salgp.CalibratedClassifier
    images: int
    whole: Clock
    network: Clock
    fit: Clock


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", type=int, default=1000)
    parser.add_argument("--reference", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="write the tables here instead of printing them")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    case = cifar_case(arguments.reference)
    text = "\n".join(part(case, arguments) for part in (cost, overhead, curve))
    if arguments.write is None:
        print(text)
    else:
        arguments.write.write_text(HEAD + text, encoding="utf-8")
        record_page("calibrate", text)


def cifar_case(n_reference: int) -> Case:
    """CIFAR-10 and the public ResNet-20, with so many reference images."""
    with mock.patch.object(cifar, "N_REFERENCE", n_reference):
        return cifar.cifar10(20)(0, None, Path())


def cost(case: Case, arguments: argparse.Namespace) -> str:
    """Table of what one call costs, beside the bare network."""
    calibration = Subset(case.calibration, range(arguments.calibration))
    loaders = [DataLoader(data, arguments.batch) for data in (calibration, case.reference)]
    spent = spent_on_calibrate(case.network, *loaders)
    whole, network, passed = spent.whole, spent.network, spent.images
    bare = bare_time(case.network, calibration, arguments.batch)
    rows = {
        "calibrate": whole,
        "inside the network": network,
        f"bare network, {passed:,} images": Clock(bare.cpu * passed, bare.wall * passed),
        "fit": spent.fit,
        "everything beside the network": Clock(whole.cpu - network.cpu, whole.wall - network.wall),
    }
    lines = [
        f"## calibrate, CIFAR-10 ResNet-20, {arguments.calibration:,} calibration and "
        f"{arguments.reference:,} reference images, threads: {arguments.threads}, "
        f"load {os.getloadavg()[0]:.1f} at the end\n",
        "| | processor s | wall clock s | of the processor time inside the network |\n|---|---|---|---|",
    ]
    for name, clock in rows.items():
        share = clock.cpu / network.cpu
        lines.append(f"| {name} | {clock.cpu:.1f} | {clock.wall:.1f} | {100 * share:.0f} % |")
    return "\n".join([*lines, ""])


def spent_on_calibrate(network: nn.Module, calibration: Any, reference: Any) -> Spent:
    """One call of `salgp.calibrate` with the default method, and the time inside the network and the fit."""
    whole, passes, fit = Clock(), Clock(), Clock()

    def forward(model: nn.Module, batch: Any) -> Any:
        passes.calls.append(len(batch[0]))
        return model(batch[0])

    with mock.patch.object(LayerEvidence, "fit", fit.of(LayerEvidence.fit)):
        classifier = whole.of(salgp.calibrate)(
            network,
            calibration,
            reference=reference,
            reader=salgp.Reader(forward=passes.of(forward)),
            progress=False,
        )
    classifier.taps = replace(classifier.taps, forward=None)
    return Spent(classifier, sum(passes.calls), whole, passes, fit)


def overhead(case: Case, arguments: argparse.Namespace) -> str:
    """Table of what a prediction costs beside the bare network; both take turns, medians are given."""
    calibration = Subset(case.calibration, range(arguments.calibration))
    loader, reference = (DataLoader(data, arguments.batch) for data in (calibration, case.reference))
    much: Any = {"reference": reference, "perturb": ["noise", "gain"], "progress": False}
    classifier = salgp.calibrate(case.network, loader, **much)
    images = torch.stack([calibration[i][0] for i in range(250)])
    lines = [
        "## Overhead of a prediction, eager\n",
        "| batch | bare, ms | reading it, ms | prediction, ms | overhead |\n|---|---|---|---|---|",
    ]
    for n, repeat in ((1, 400), (32, 60), (250, 9)):
        calls = (torch.no_grad()(case.network), classifier.features, classifier)
        bare, read, whole = (1000 * clock.cpu for clock in in_turns(calls, images[:n], repeat))
        lines.append(f"| {n} | {bare:.2f} | {read:.2f} | {whole:.2f} | {100 * (whole / bare - 1):.0f} % |")
    return "\n".join([*lines, ""])


def in_turns(calls: Iterable[Callable[[Any], Any]], x: Any, repeat: int) -> list[Clock]:
    """Median times of several calls on the same input; the calls take turns."""
    clocks: list[tuple[Callable[[Any], Any], list[Clock]]] = [(call, []) for call in calls]
    for _ in range(repeat):
        for call, spent in clocks:
            spent.append(Clock())
            spent[-1].of(call)(x)
    return [median_clock(spent) for _, spent in clocks]


def median_clock(clocks: Sequence[Clock]) -> Clock:
    """Median processor time and median wall-clock time."""
    return Clock(median(clock.cpu for clock in clocks), median(clock.wall for clock in clocks))


def curve(case: Case, arguments: argparse.Namespace) -> str:
    """Table of quality against forward passes."""
    calibration = Subset(case.calibration, range(arguments.calibration))
    loaders = [DataLoader(data, arguments.batch) for data in (calibration, case.reference)]
    thrice = [replace(f, name=f"{f.name} {k}") for f in families_for("images") for k in range(MOST)]
    data = read_calibration_data(
        case.network, loaders[0], salgp.Reader(), thrice, reference=loaders[1], progress=False
    )
    tests = [x for x in case.tests if x.kind == "in" or (x.like is None and x.severity == 2)]
    read = {x.name: labelled(case, x, data.reader, arguments.batch) for x in tests}
    lines = [
        "## Quality against passes\n",
        "| augmented of each original and family, of the reference "
        "| passes | ECE | NLL | AUROC | ECE in domain |",
        "|---|---|---|---|---|---|",
    ]
    for per_sample, share in [*((m, 1.0) for m in (0.1, 0.25, 0.5, 1, 2, 3)), (1, 0.5), (1, 0.1)]:
        rows, passes = chosen(data, per_sample, share)
        known = None if data.reference is None else tuple(x[:: round(1 / share)] for x in data.reference)
        fitted = LayerEvidence().fit(data.features[rows], data.labels[rows], known)
        scores = {name: scored(fitted, *found) for name, found in read.items()}
        in_domain = scores.pop("test")[0]
        means = torch.tensor(list(scores.values())).mean(dim=0).tolist()
        cells = [f"{per_sample:g}, {share:.0%}", f"{passes:,}", *(f"{x:.3f}" for x in (*means, in_domain))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def chosen(data: CalibrationData, per_sample: float, share: float) -> tuple[torch.Tensor, int]:
    """Rows of the originals and of so many augmented samples of each, and the forward passes they take."""
    families = data.features.families
    assert families is not None
    assert data.reference is not None
    n = int((families == 0).sum())
    n_families = len(data.augmentation.families) // MOST  # type: ignore[union-attr]
    count = round(per_sample * n)
    mixed = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    rows = [torch.arange(n)]
    for number in range(n_families):  # one sample of each original after the other, `MOST` times
        own = ((families - 1) // MOST == number).logical_and(families > 0).nonzero()[:, 0]
        rows.append(own[mixed[:count]] if count < n else own[:count])
    trials = TRIALS * (n_families + 1)
    return torch.cat(rows), n + trials + count * n_families + round(share * len(data.reference[1]))


def labelled(
    case: Case, test: TestSet, reader: salgp.Reader, batch: int
) -> tuple[salgp.Features, torch.Tensor]:
    """Features and labels of at most 3,000 samples of a test set."""
    samples = test.make()
    some = Subset(samples, range(min(len(samples), 3000)))
    features, labels = salgp.extract(case.network, DataLoader(some, batch), reader=reader, progress=False)
    assert labels is not None
    return features, labels


def scored(
    fitted: LayerEvidence, features: salgp.Features, labels: torch.Tensor
) -> tuple[float, float, float]:
    """ECE, NLL and AUROC of a test set."""
    s, correct = fitted.predict(features).confidence, features.correct(labels)
    return tuple(float(score(s, correct)) for score in (metrics.ece, metrics.nll_correct, metrics.auroc))  # type: ignore[return-value]


@torch.no_grad()
def bare_time(model: nn.Module, data: Any, batch: int) -> Clock:
    """Of one image, the median of three passes over the data."""
    images = [x for x, _ in DataLoader(data, batch)]
    model(images[0])
    clocks = [Clock() for _ in range(3)]
    for clock in clocks:
        clock.of(lambda: [model(x) for x in images])()
    n = sum(len(x) for x in images)
    spent = median_clock(clocks)
    return Clock(spent.cpu / n, spent.wall / n)


if __name__ == "__main__":
    main()
