"""Features of every case on disk, so that methods are compared on the same numbers.

A folder ``<set>-<seed>`` holds ``reference``, ``calibration`` (originals and augmented samples) and one
file per test set, all as `salgp.features` writes them. What a file is stands in its metadata. A run that was
killed continues with the first file that is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import TensorDataset

from salgp.features import Features, load_features
from salgp.network.extract import extract, read_calibration_data
from salgp.network.reader import Reader
from salgp_study.suite.case import Case, TestSet

__all__ = [
    "CachedCase",
    "CachedTest",
    "case_folder",
    "is_complete",
    "read_case",
    "read_test",
    "read_tests",
    "write_case",
]

Labelled = tuple[Features, Tensor]
DONE = "done"
FITTED = ("reference", "calibration")
"""What methods are fitted on; every other file is a test set."""


@dataclass(frozen=True, eq=False)
class CachedTest:
    """Features of a test set, and what it is: see `salgp_study.suite.case.TestSet`."""

    name: str
    kind: str
    like: str | None
    severity: int
    features: Features
    labels: Tensor


@dataclass(frozen=True, eq=False)
class CachedCase:
    """Features of one data set and seed.

    Args:
        name: of the data set.
        seed: of the draw.
        reference: training samples.
        calibration: originals first, then augmented samples.
        tests: in domain first.
    """

    name: str
    seed: int
    reference: Labelled
    calibration: Labelled
    tests: list[CachedTest]


def case_folder(cache: Path, name: str, seed: int) -> Path:
    """Where the features of a case are kept."""
    return cache / f"{name}-{seed}"


def is_complete(folder: Path) -> bool:
    """Was everything of a case written?"""
    return (folder / DONE).is_file()


def write_case(case: Case, cache: Path, say: Callable[[str], None] = print) -> Path:
    """Write what is missing of a case."""
    folder = case_folder(cache, case.name, case.seed)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    if not (folder / "calibration.safetensors").is_file():
        _write_calibration(case, folder)
        say(f"{folder.name}: calibration, {time.time() - started:.0f} s")
    if not (folder / "reference.safetensors").is_file():
        _write(case, folder, "reference", "reference", lambda: case.reference, {})
    for test in case.tests:
        if not (folder / f"{_stem(test)}.safetensors").is_file():
            _write(case, folder, _stem(test), test.kind, test.make, _metadata(test))
            say(f"{_stem(test)} ({folder.name}): {time.time() - started:.0f} s")
    (folder / DONE).touch()
    return folder


def read_case(folder: Path) -> CachedCase:
    """Everything of a case; raises where its features are not complete."""
    if not is_complete(folder):
        raise FileNotFoundError(
            f"{folder}: no complete features here; write them first: "
            f"python -m salgp_study.suite features --sets {folder.name.rpartition('-')[0]}"
        )
    name, _, seed = folder.name.rpartition("-")
    reference, calibration = (_labelled(folder / f"{part}.safetensors") for part in FITTED)
    return CachedCase(name, int(seed), reference, calibration, read_tests(folder))


def read_tests(folder: Path) -> list[CachedTest]:
    """All test sets of a case, in domain first."""
    paths = sorted(folder.glob("*.safetensors"))
    tests = [read_test(p) for p in paths if p.stem not in FITTED]
    return sorted(tests, key=lambda t: (t.kind != "in", t.kind, t.name))


def read_test(path: Path) -> CachedTest:
    """One test set."""
    features, labels = _labelled(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    return CachedTest(
        about["name"], about["kind"], about["like"] or None, int(about["severity"]), features, labels
    )


def _write_calibration(case: Case, folder: Path) -> None:
    batches, reader = case.batches(case.calibration), Reader(layers=case.layers, seed=case.seed)
    found = read_calibration_data(case.network, batches, reader, case.perturb, progress=False)
    assert found.augmentation is not None
    families, scales = found.augmentation.families, found.augmentation.scales
    shown = ",".join(f"{name}={scale:g}" for name, scale in zip(families, scales, strict=True))
    about = {"families": ",".join(families), "scales": shown}
    found.features.save(folder / "calibration.safetensors", found.labels, about)


def _labelled(path: Path) -> Labelled:
    features, labels = load_features(path)
    assert labels is not None
    return features, labels


def _write(
    case: Case,
    folder: Path,
    stem: str,
    kind: str,
    make: Callable[[], TensorDataset],
    metadata: dict[str, str],
) -> None:
    """Write one file, or use that of another seed where it is the same."""
    path = folder / f"{stem}.safetensors"
    if kind in case.shared and _linked(path, case.name):
        return
    features, labels = _read(case, make())
    features.save(path, labels, metadata)


def _read(case: Case, data: TensorDataset) -> Labelled:
    """Features in a random order, so that any stretch of rows is a random sample."""
    reader = Reader(layers=case.layers)
    features, labels = extract(case.network, case.batches(data), reader=reader, progress=False)
    assert labels is not None
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(len(labels)))
    return features[order], labels[order]


def _stem(test: TestSet) -> str:
    return "test" if test.kind == "in" else f"{test.kind}-{test.name.replace(' ', '-')}"


def _metadata(test: TestSet) -> dict[str, str]:
    return {"name": test.name, "kind": test.kind, "like": test.like or "", "severity": str(test.severity)}


def _linked(path: Path, name: str) -> bool:
    for other in sorted(path.parent.parent.glob(f"{name}-*/{path.name}")):
        os.link(other, path)
        return True
    return False
