"""The thirteen networks of `unseen_networks.py`: convolutional, transformer, recurrent, perceptrons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import unseen_networks_data as data
from torch import Generator, Tensor, nn
from torch.nn import functional
from unseen_networks_data import Samples

__all__ = ["NETWORKS", "Drawn", "UnseenNetwork", "batches", "draw"]

MOST = 6000
"""Samples of a data set that are used."""


@dataclass(frozen=True)
class Training:
    """How a network is trained with Adam."""

    epochs: int
    rate: float = 2e-3
    batch: int = 64


@dataclass(frozen=True)
class UnseenNetwork:
    """A data set, a network for it, and the shifts it will meet.

    Args:
        name: of the network.
        what: the network in a few words.
        read: data out of the folder of wheels.
        build: an untrained network.
        shifts: shifted sets out of the test samples.
        n_train: training samples.
        n_calibration: calibration samples; all others are test samples.
        training: how it is trained.
        standardise: inputs by mean and standard deviation of the training samples.
        wrong_training: share of training labels that are drawn anew.
        wrong_labels: share of all labels that are drawn anew.
    """

    name: str
    what: str
    read: Callable[[Path], Samples]
    build: Callable[[], nn.Module]
    shifts: Callable[[Samples, Generator], dict[str, Samples]]
    n_train: int
    n_calibration: int
    training: Training
    standardise: bool = False
    wrong_training: float = 0.0
    wrong_labels: float = 0.0


@dataclass(frozen=True, eq=False)
class Drawn:
    """A trained network with the samples of one draw."""

    model: nn.Module
    train: Samples
    calibration: Samples
    test: Samples
    shifted: dict[str, Samples]


def draw(network: UnseenNetwork, wheels: Path, seed: int) -> Drawn:
    """Divide the data at random, train the network, and shift the test samples."""
    torch.manual_seed(seed + 11)
    generator = torch.Generator().manual_seed(seed + 5)
    inputs, labels = network.read(wheels)
    rows = torch.randperm(len(labels), generator=generator)[:MOST]
    n, m = network.n_train, network.n_calibration
    inputs, labels = inputs[rows], _relabelled(labels[rows], network.wrong_labels, generator)
    inputs = _standardised(inputs, inputs[:n]) if network.standardise else inputs
    train = inputs[:n], _relabelled(labels[:n], network.wrong_training, generator)
    test = inputs[n + m :], labels[n + m :]
    model = trained(network.build(), train, network.training)
    shifted = network.shifts(test, generator)
    return Drawn(model, train, (inputs[n : n + m], labels[n : n + m]), test, shifted)


def trained(model: nn.Module, train: Samples, how: Training) -> nn.Module:
    """Train by cross entropy; of a network with one output, that output is the log-odds of class 1."""
    inputs, labels = train
    optimizer = torch.optim.Adam(model.parameters(), how.rate)
    model.train()
    for _ in range(how.epochs):
        for rows in torch.randperm(len(labels)).split(how.batch):
            if len(rows) < 2:  # batch norm needs two
                continue
            optimizer.zero_grad()
            _loss(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


def batches(samples: Samples, size: int = 128) -> list[Samples]:
    """Samples as a loader yields them."""
    inputs, labels = samples
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.float())
    return functional.cross_entropy(outputs, labels)


def _relabelled(labels: Tensor, share: float, generator: Generator) -> Tensor:
    """A share of the labels drawn anew from all classes."""
    anew = torch.rand(len(labels), generator=generator) < share
    drawn = torch.randint(0, int(labels.max()) + 1, labels.shape, generator=generator)
    return torch.where(anew, drawn, labels)


def _standardised(inputs: Tensor, train: Tensor) -> Tensor:
    """Every column, or channel over all steps, by mean and standard deviation of the training samples."""
    flat = train.flatten(0, -2)
    return (inputs - flat.mean(0)) / flat.std(0).clamp_min(1e-6)


# --- networks -----------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Two convolutions with stride, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 12, 5, 2, 2)
        self.second = nn.Conv2d(12, 24, 3, 2, 1)
        self.hidden = nn.Linear(24 * 49, 48)
        self.out = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = functional.relu(self.second(functional.relu(self.first(images))))
        return self.out(functional.relu(self.hidden(maps.flatten(1))))


class RowTransformer(nn.Module):
    """A transformer of three layers over the rows of an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.embed = nn.Linear(28, width)
        self.position = nn.Parameter(0.1 * torch.randn(1, 28, width))
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        encoded = self.encoder(self.embed(rows) + self.position)
        return self.out(self.norm(encoded.mean(1)))


class Recurrent(nn.Module):
    """A GRU; its last state goes through two linear layers."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, 32, batch_first=True)
        self.hidden = nn.Linear(32, 24)
        self.out = nn.Linear(24, classes)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.gru(series)
        return self.out(functional.relu(self.hidden(states[:, -1])))


class SeriesConvolutions(nn.Module):
    """Two convolutions over time and their mean."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, 16, 5, padding=2)
        self.second = nn.Conv1d(16, 24, 5, 2, padding=2)
        self.out = nn.Linear(24, classes)

    def forward(self, series: Tensor) -> Tensor:
        maps = functional.relu(self.first(series.transpose(1, 2)))
        return self.out(functional.relu(self.second(maps)).mean(2))


class OneLogit(nn.Module):
    """A perceptron for two classes with a single output."""

    def __init__(self, columns: int, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(columns, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, columns: Tensor) -> Tensor:
        return self.out(functional.relu(self.second(functional.relu(self.first(columns)))))


def normed_convolutions() -> nn.Module:
    """Three convolutions with batch norm and dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout2d(0.2)),
        *(nn.Conv2d(32, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 10)),
    )


def perceptron(columns: int, classes: int, width: int = 48) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(columns, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, classes),
    )


def image_perceptron(width: int = 128) -> nn.Module:
    """The same on the pixels of an image."""
    return nn.Sequential(nn.Flatten(), *perceptron(784, 10, width))


def dropped_perceptron(columns: int, classes: int, width: int = 96) -> nn.Module:
    """Two hidden layers, dropout on them and on the inputs."""
    return nn.Sequential(
        *(nn.Dropout(0.4), nn.Linear(columns, width), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(width, width), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(width, classes)),
    )


_DIGITS = UnseenNetwork(
    name="digits, convolutions",
    what="two convolutions, two linear layers",
    read=data.digit_images,
    build=Convolutions,
    shifts=data.image_shifts,
    n_train=800,
    n_calibration=500,
    training=Training(12),
)
_SEGMENTS = UnseenNetwork(
    name="segments, perceptron",
    what="two hidden layers",
    read=data.segments,
    build=lambda: perceptron(18, 7),
    shifts=data.table_shifts,
    n_train=500,
    n_calibration=400,
    training=Training(60),
    standardise=True,
)

NETWORKS = (
    _DIGITS,
    replace(
        _DIGITS,
        name="digits, batch norm",
        what="three convolutions with batch norm and dropout",
        build=normed_convolutions,
        n_train=1500,
    ),
    replace(
        _DIGITS,
        name="digits, transformer",
        what="three layers over the rows of an image",
        read=data.digit_rows,
        build=RowTransformer,
        shifts=data.row_shifts,
        n_train=2000,
        training=Training(14, 3e-3),
    ),
    replace(
        _DIGITS,
        name="digits, overfitted",
        what="a perceptron, 150 epochs on 300 images",
        build=image_perceptron,
        n_train=300,
        training=Training(150),
    ),
    replace(
        _DIGITS,
        name="digits, wrong training labels",
        what="two convolutions; 30 % of the training labels drawn anew",
        n_train=1500,
        training=Training(15),
        wrong_training=0.3,
    ),
    UnseenNetwork(
        name="vowels, recurrent",
        what="a GRU",
        read=data.vowels,
        build=lambda: Recurrent(12, 9),
        shifts=data.sequence_shifts,
        n_train=150,
        n_calibration=220,
        training=Training(40, 4e-3, 32),
        standardise=True,
    ),
    UnseenNetwork(
        name="power demand, convolutions",
        what="two convolutions over time",
        read=data.power_demand,
        build=lambda: SeriesConvolutions(1, 2),
        shifts=data.sequence_shifts,
        n_train=150,
        n_calibration=300,
        training=Training(60, 4e-3, 32),
    ),
    _SEGMENTS,
    replace(
        _SEGMENTS,
        name="segments, dropout",
        what="two hidden layers, dropout on inputs and layers",
        build=lambda: dropped_perceptron(18, 7),
        training=Training(120),
    ),
    replace(
        _SEGMENTS,
        name="segments, wrong labels",
        what="two hidden layers; 15 % of all labels drawn anew, those of calibration and test too",
        wrong_labels=0.15,
    ),
    UnseenNetwork(
        name="phishing, perceptron",
        what="two hidden layers",
        read=data.phishing,
        build=lambda: perceptron(9, 2),
        shifts=data.table_shifts,
        n_train=300,
        n_calibration=350,
        training=Training(50),
        standardise=True,
    ),
    UnseenNetwork(
        name="bananas, one output",
        what="two hidden layers and a single logit",
        read=data.bananas,
        build=lambda: OneLogit(2),
        shifts=data.table_shifts,
        n_train=400,
        n_calibration=500,
        training=Training(60, 5e-3),
        standardise=True,
    ),
    UnseenNetwork(
        name="shuttle, perceptron",
        what="two hidden layers, few anomalies",
        read=data.shuttle,
        build=lambda: perceptron(9, 2, 32),
        shifts=data.table_shifts,
        n_train=600,
        n_calibration=800,
        training=Training(40),
        standardise=True,
    ),
)
"""All of them."""
