"""Who is trained on what, calibrated on what, and tested on what.

MSTAR ``paper``: train on 15 degrees depression, test on 17 and 30. ``soc``: train on 17, test on 15 (the
usual standard operating condition) and 30 (EOC-1). A stratified fifth of the training chips is held out for
validation and calibration. SPCC and PLAsTiCC: train on the spectroscopic objects, test on the photometric
ones, with the rare types held out of training as unknown classes (label -1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from salgp_study.lightcurves import LightCurves
from salgp_study.mstar import Chips

__all__ = ["MSTAR_PROTOCOLS", "SPCC_UNKNOWN", "Splits", "curve_splits", "mstar_splits", "stratified"]

MSTAR_PROTOCOLS: Mapping[str, tuple[int, tuple[int, ...]]] = {"paper": (15, (17, 30)), "soc": (17, (15, 30))}
"""Protocol name -> depression angle of training, angles of testing."""
SPCC_UNKNOWN = ("IIL", "IIP", "Ibc")
"""Types of fewer than 20 spectroscopic objects, held out of training."""


@dataclass(frozen=True, eq=False)
class Splits:
    """Data of one run: each a `TensorDataset` of inputs and, last, labels.

    Args:
        train: what the network is trained on.
        validation: held out of the same distribution, for calibration.
        tests: test sets by name.
        class_names: the classes the network knows.
        standard: centre and spread ``(m,)`` by which metadata were standardised, where there are some.
    """

    train: TensorDataset
    validation: TensorDataset
    tests: Mapping[str, TensorDataset]
    class_names: tuple[str, ...]
    standard: tuple[Tensor, Tensor] | None = None

    @property
    def all(self) -> dict[str, TensorDataset]:
        """Every split by name: ``train``, ``validation``, then the test sets."""
        return {"train": self.train, "validation": self.validation, **self.tests}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples of every split."""
        return {name: len(data) for name, data in self.all.items()}


def mstar_splits(
    chips: Chips, protocol: str = "paper", fraction: float = 1.0, seed: int = 0, held_out: float = 0.2
) -> Splits:
    """Split MSTAR chips.

    Args:
        chips: all of them.
        protocol: ``"paper"`` or ``"soc"``.
        fraction: share of the training angle's chips that is used at all, drawn per class.
        seed: of the draws.
        held_out: share of those kept for validation.
    """
    if protocol not in MSTAR_PROTOCOLS:
        raise KeyError(f"no protocol called {protocol!r}; known: {', '.join(MSTAR_PROTOCOLS)}")
    angle, tested = MSTAR_PROTOCOLS[protocol]
    rows = torch.nonzero((chips.depression == angle) & (chips.label >= 0))[:, 0]
    used, _ = stratified(chips.label[rows], fraction, seed)
    validation, train = stratified(chips.label[rows[used]], held_out, seed + 1)

    def data(index: Tensor) -> TensorDataset:
        return TensorDataset(chips.x[index, None], chips.label[index])

    tests = {str(a): data(torch.nonzero(chips.depression == a)[:, 0]) for a in tested}
    return Splits(data(rows[used[train]]), data(rows[used[validation]]), tests, chips.class_names)


def curve_splits(
    curves: LightCurves,
    unknown: Sequence[str] = SPCC_UNKNOWN,
    fraction: float = 1.0,
    seed: int = 0,
    held_out: float = 0.24,
    n_test: int | None = None,
) -> Splits:
    """Split light curves into spectroscopic training and validation objects and a photometric test set.

    Args:
        curves: all of them.
        unknown: types left out of training; in the test set they have label -1.
        fraction: share of the spectroscopic objects that is used at all, drawn per class.
        seed: of the draws.
        held_out: share of those kept for validation.
        n_test: size of a random part of the test set, or None for all of it.
    """
    known = sorted({str(t) for t in curves.target[curves.spectroscopic.numpy()]} - set(unknown))
    labels = curves.labels(known)
    rows = torch.nonzero(curves.spectroscopic & (labels >= 0))[:, 0]
    used, _ = stratified(labels[rows], fraction, seed)
    validation, train = stratified(labels[rows[used]], held_out, seed + 1)
    test = torch.nonzero(~curves.spectroscopic)[:, 0]
    if n_test is not None and n_test < len(test):
        order = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))
        test = test[order[:n_test].sort().values]
    known_meta = curves.meta[rows[used[train]]]
    centre, spread = known_meta.mean(dim=0), known_meta.std(dim=0)
    spread = torch.where(spread > 1e-6, spread, 1.0)  # a column that never varies is left in its own unit

    def data(index: Tensor) -> TensorDataset:
        return TensorDataset(curves.curves[index], (curves.meta[index] - centre) / spread, labels[index])

    return Splits(
        data(rows[used[train]]),
        data(rows[used[validation]]),
        {"photometric": data(test)},
        tuple(known),
        (centre, spread),
    )


def stratified(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ``share`` of each class (at least one sample of each); return the sorted rows drawn, and the
    others.

    Example:
        >>> drawn, rest = stratified(torch.arange(100) % 4, 0.2, seed=0)
        >>> len(drawn), torch.bincount(drawn % 4)
        (20, tensor([5, 5, 5, 5]))
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share drawn must be above 0 and at most 1, got {share}")
    random = np.random.default_rng(seed)
    drawn = torch.zeros(len(labels), dtype=torch.bool)
    for value in sorted(set(labels.tolist())):
        rows = torch.nonzero(labels == value)[:, 0].numpy()
        drawn[random.permutation(rows)[: max(1, round(share * len(rows)))]] = True
    return torch.nonzero(drawn)[:, 0], torch.nonzero(~drawn)[:, 0]
