"""Small data sets that come with scikit-learn: digits as images, and tables.

Networks are trained here in seconds. They are small on purpose: few calibration samples and a handful of
errors are what a user often has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.columns import corrupted_tables
from salgp_study.suite.images import corrupted_sets
from salgp_study.train import seeded

__all__ = ["digits", "table", "table_case", "tabular_digits", "weak_digits"]


def digits(seed: int, data: Path | None, cache: Path) -> Case:
    """8 x 8 digits, 1,000 to train a small convolutional network, 300 to calibrate."""
    return _digits("digits", seed, 1_000)


def weak_digits(seed: int, data: Path | None, cache: Path) -> Case:
    """The same with 500 to train."""
    return _digits("digits-weak", seed, 500)


def tabular_digits(seed: int, data: Path | None, cache: Path) -> Case:
    """Pixels as a table; trained on the 60 % most upright digits, tested on the slanted ones too."""
    from sklearn.datasets import load_digits

    found = load_digits()
    slant = np.abs(_slant(found.images, found.target))
    far = torch.tensor(slant > np.quantile(slant, 0.6))
    x = torch.tensor(found.data / 16.0, dtype=torch.float32)
    x = (x - x[~far].mean(dim=0)) / (x[~far].std(dim=0) + 0.1)
    y = torch.tensor(found.target)
    near = _shuffled((~far).nonzero()[:, 0], seed)
    slanted = TestSet("slanted", "shift", lambda: TensorDataset(x[far], y[far]))
    return table_case("tabular-digits", seed, x, y, near, (450, 250), (64, 64, 32), (slanted,))


def table(name: str, sizes: tuple[int, int]) -> Callable[[int, Path | None, Path], Case]:
    """A table of scikit-learn's by the name of its loader: ``sizes`` samples to train and to calibrate."""

    def build(seed: int, data: Path | None, cache: Path) -> Case:
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")()
        rows = _shuffled(torch.arange(len(found.target)), seed)
        x = torch.tensor(found.data, dtype=torch.float32)
        train = x[rows[: sizes[0]]]
        x = (x - train.mean(dim=0)) / (train.std(dim=0) + 1e-6)
        y = torch.tensor(found.target).long()
        return table_case(f"tabular-{name.replace('_', '-')}", seed, x, y, rows, sizes, (32, 32, 16))

    return build


def _digits(name: str, seed: int, n_train: int) -> Case:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = _shuffled(torch.arange(len(found.target)), seed)
    x = torch.tensor(found.images / 16.0, dtype=torch.float32)[order, None]
    y = torch.tensor(found.target)[order]
    train, rest = slice(0, n_train), slice(n_train + 300, None)
    calibration = slice(n_train, n_train + 300)
    network = train_small(_small_convnet, x[train], y[train], 25, seed)
    in_domain = TestSet("test", "in", lambda: TensorDataset(x[rest], y[rest]))
    return Case(
        name,
        seed,
        network,
        TensorDataset(x[train], y[train]),
        TensorDataset(x[calibration], y[calibration]),
        (in_domain, *corrupted_sets(x[rest], y[rest])),
    )


def table_case(
    name: str,
    seed: int,
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    sizes: tuple[int, int],
    widths: Sequence[int],
    more: tuple[TestSet, ...] = (),
) -> Case:
    """A case of standardised rows: the first to train an MLP, then to calibrate, the rest to test.

    Args:
        name: of the data set.
        seed: of the network.
        x: ``(n, d)``.
        y: ``(n,)``.
        rows: in the order they are used.
        sizes: samples to train and to calibrate.
        widths: of the hidden layers.
        more: further test sets.
    """
    a, b, t = rows[: sizes[0]], rows[sizes[0] : sum(sizes)], rows[sum(sizes) :]
    build = partial(_mlp, (x.shape[1], *widths), int(y.max()) + 1)
    in_domain = TestSet("test", "in", lambda: TensorDataset(x[t], y[t]))
    return Case(
        name,
        seed,
        train_small(build, x[a], y[a], 40, seed),
        TensorDataset(x[a], y[a]),
        TensorDataset(x[b], y[b]),
        (in_domain, *more, *corrupted_tables(x[t], y[t])),
    )


def train_small(build: Callable[[], nn.Module], x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    """Train a network with Adam, everything in memory."""
    with seeded(seed):
        network = build()
        optimiser = torch.optim.Adam(network.parameters(), 1e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(32):
                optimiser.zero_grad()
                cross_entropy(network(x[rows]), y[rows]).backward()
                optimiser.step()
    return network.eval()


def _small_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


def _mlp(widths: Sequence[int], n_classes: int) -> nn.Module:
    pairs = pairwise(widths)
    blocks = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in pairs]
    return nn.Sequential(*blocks, nn.Linear(widths[-1], n_classes))


def _shuffled(rows: Tensor, seed: int) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def _slant(images: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Shear of each digit from its second moments, less the median of its class."""
    rows, columns = np.mgrid[:8, :8]
    mass = images.sum((1, 2))
    middle_column = (images * columns).sum((1, 2)) / mass
    middle_row = (images * rows).sum((1, 2)) / mass
    dx = columns - middle_column[:, None, None]
    dy = rows - middle_row[:, None, None]
    slant = (images * dx * dy).sum((1, 2)) / (images * dy**2).sum((1, 2))
    usual = np.array([np.median(slant[target == k]) for k in range(10)])
    return slant - usual[target]
