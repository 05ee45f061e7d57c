"""What a data set of the suite is: a trained network, its data, and the shifts it is tested under.

A `Case` is one network and one draw of calibration samples. It holds the recipes of its test sets, not the
samples: a `TestSet` makes them when it is read, so that fifty corrupted copies of a data set never sit in
memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from salgp.network.augment.families import Family

__all__ = ["Case", "TestSet", "tensor_batches"]

BATCH = 128


@dataclass(frozen=True)
class TestSet:
    """One test set of a case.

    Args:
        name: of the set; severities are part of it.
        kind: ``in`` (domain), ``shift``, or ``unknown`` (classes the network does not know).
        make: gives the samples; labels are the last tensor.
        like: the family of augmentations it resembles, or None. Such a shift is no surprise, so such
            sets are reported apart.
        severity: 1 is mild; 0 where there is no scale.
    """

    __test__ = False  # not a test of pytest's

    name: str
    kind: str
    make: Callable[[], TensorDataset]
    like: str | None = None
    severity: int = 0


def tensor_batches(data: TensorDataset) -> Iterable[Any]:
    """Batches of tensors, the labels last, in order."""
    return DataLoader(data, BATCH)


@dataclass(frozen=True)
class Case:
    """A trained network with its reference, calibration and test data.

    Args:
        name: of the data set.
        seed: of the draw, and of the network where it is trained here.
        network: in evaluation mode.
        reference: training samples, which methods may compare against.
        calibration: held-out labelled samples.
        tests: recipes of the test sets.
        perturb: the augmentation, see `salgp.network.augment.families.families_for`.
        layers: taken from the network.
        batches: how samples are given to the network.
        shared: what is the same for every seed: ``reference``, and kinds of test sets.
    """

    name: str
    seed: int
    network: nn.Module
    reference: TensorDataset
    calibration: TensorDataset
    tests: tuple[TestSet, ...]
    perturb: str | tuple[str | Family, ...] = "auto"
    layers: str | tuple[str, ...] = "auto"
    batches: Callable[[TensorDataset], Iterable[Any]] = field(default=tensor_batches)
    shared: tuple[str, ...] = ()
