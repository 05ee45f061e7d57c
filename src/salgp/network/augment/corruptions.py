"""Perturbations of numbers: images, sequences and tables, and the outputs of layers.

Each function takes ``x (n, ...)``, a strength for each sample ``(n,)`` and a generator; strength 0 leaves a
sample as it is. Those that need to know how large a number is take a `Spread` besides, measured once on all
calibration data: for each feature of a table, each channel of images and sequences. One outlier does not
change it, and it does not depend on who shares a batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor
from torch.nn.functional import adaptive_avg_pool2d, affine_grid, conv2d, grid_sample, interpolate, pad

from salgp.logits import at_least_single

__all__ = ["Spread", "normal", "per", "uniform", "whole"]

DONORS = 512
"""Rows kept to take other values of discrete columns from."""


Columns = tuple[int, ...]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Spread:
    """Range of the values of each feature or channel.

    Args:
        centre: typical value, ready to broadcast against ``x (n, ...)``.
        scale: standard deviation without outliers, likewise.
        low: smallest usual value, likewise.
        high: largest usual value, likewise.
        discrete: sets of columns of a table that take few values; columns of one set (a one-hot code) belong
            together.
        donors: ``(m, d)`` rows of the table.
        axis: of the channels.

    Example:
        >>> table = torch.stack([torch.linspace(-1, 1, 100), 1000 * torch.linspace(-1, 1, 100)], dim=1)
        >>> (Spread.of([table]).scale[0, 1] / Spread.of([table]).scale[0, 0]).round()
        tensor(1000.)
    """

    centre: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    discrete: tuple[Columns, ...] = ()
    donors: Tensor | None = None
    axis: int = 1

    @staticmethod
    def of(parts: Sequence[Tensor], axis: int | None = None, table: bool = True) -> Spread:
        """Measure batches of the same data.

        Args:
            parts: each ``(n, ...)``.
            axis: of the channels; by default the last of two or three axes (tables, sequences), else the
                second.
            table: look for discrete columns, where there are two axes.
        """
        axes = parts[0].ndim
        if axis is None:
            axis = min(axes - 1, 2) if axes <= 3 else 1
        spread = _spread([_moments(part, axis) for part in parts])
        shape = [1] * axes
        if axes > 1:
            shape[axis] = -1
        centre, scale, low, high = (values.reshape(shape) for values in spread)
        found = Spread(centre, scale, low, high, axis=axis)
        if axes != 2 or not table:
            return found
        rows = torch.cat([part.detach() for part in parts])
        donors = rows[:: -(-len(rows) // DONORS)]
        return replace(found, discrete=_discrete(rows), donors=donors)

    def swapped(self, old: Tensor, new: Tensor, strength: Tensor, generator: Generator) -> Tensor:
        """``new`` with the discrete columns of ``old``, some of them replaced by another row's: more of them
        the greater the strength.
        """
        if not self.discrete or self.donors is None:
            return new
        donors, result = self.donors.to(old), new.clone()
        share = 1 - torch.exp(-strength)
        for columns in self.discrete:
            chosen = uniform(len(old), old, generator) < share
            row = whole(len(donors), chosen.shape, generator).to(old.device)
            own, other = old[:, columns], donors[row][:, columns]
            result[:, columns] = torch.where(chosen[:, None], other, own)
        return result


def per(strength: Tensor, x: Tensor) -> Tensor:
    return strength.reshape(-1, *[1] * (x.ndim - 1))


def normal(x: Tensor, generator: Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=generator.device).to(x)


def uniform(n: int | Columns, x: Tensor, generator: Generator) -> Tensor:
    return torch.rand(n, generator=generator, device=generator.device).to(x)


def whole(most: int, shape: Sequence[int], generator: Generator) -> Tensor:
    """Whole numbers below ``most``."""
    return torch.randint(most, shape, generator=generator, device=generator.device)


def _symmetric(n: int | Columns, x: Tensor, generator: Generator) -> Tensor:
    """Uniform in -1..1."""
    return 2 * uniform(n, x, generator) - 1


def noise(x: Tensor, strength: Tensor, generator: Generator, spread: Spread) -> Tensor:
    """Independent noise, in units of the spread of each feature or channel."""
    return x + per(strength, x) * spread.scale.to(x) * normal(x, generator)


def gain(x: Tensor, strength: Tensor, generator: Generator, spread: Spread) -> Tensor:
    """Contrast and brightness: deviations from the middle are scaled, and the middle is moved.

    The middle is the sample's mean of each channel; of a table, the typical value of each feature.
    """
    positions = [i for i in range(1, x.ndim) if i != spread.axis]
    middle = x.mean(dim=positions, keepdim=True) if positions else spread.centre.to(x)
    factor = torch.exp(1.8 * strength * _symmetric(len(x), x, generator))
    step = 0.7 * strength * normal(strength, generator)
    return (x - middle) * per(factor, x) + middle + per(step, x) * spread.scale.to(x)


def channel_gain(x: Tensor, strength: Tensor, generator: Generator, spread: Spread) -> Tensor:
    """Every channel (feature) multiplied by a log-normal factor of its own."""
    own = normal(spread.scale.to(x).repeat_interleave(len(x), 0), generator)
    return x * torch.exp(per(strength, x) * own)


def affine(x: Tensor, strength: Tensor, generator: Generator) -> Tensor:
    """Rotation (up to 1 rad), scale (up to e^0.5), shear and translation of images."""
    chance = _symmetric((len(x), 5), x, generator) * strength[:, None]
    angle, growth, shear, right, down = chance.unbind(dim=1)
    scale = torch.exp(0.5 * growth)
    cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
    numbers = [cos, 0.5 * shear - sin, 0.3 * right, sin, cos, 0.3 * down]
    matrix = torch.stack(numbers, 1).reshape(-1, 2, 3)
    grid = affine_grid(matrix, list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="border", align_corners=False)


def mixup(x: Tensor, strength: Tensor, generator: Generator, spread: Spread) -> Tensor:
    """Another sample of the batch mixed in, up to one half."""
    share = per(0.5 * strength.clamp(0, 1), x)
    other = torch.randperm(len(x), generator=generator, device=generator.device).to(x.device)
    return (1 - share) * x + share * x[other]


def blur(x: Tensor, strength: Tensor, generator: Generator) -> Tensor:
    """Gaussian blur of images; strength 1 is a standard deviation of an eighth of their width."""
    n, c, h, w = x.shape
    reach = max(1, math.ceil(0.3 * w))
    kernel = _bell(reach, strength * w / 8).repeat_interleave(c, 0)  # (n c, 2 reach + 1)
    groups = n * c
    framed = pad(x.reshape(1, groups, h, w), [reach] * 4, mode="replicate")
    along_rows = conv2d(framed, kernel[:, None, None], groups=groups)
    along_both = conv2d(along_rows, kernel[:, None, :, None], groups=groups)
    return along_both.reshape(x.shape)


def _bell(reach: int, width: Tensor) -> Tensor:
    """Weights of a Gaussian blur for each standard deviation, ``(n, 2 reach + 1)``."""
    offset = torch.arange(-reach, reach + 1).to(width)
    distance = offset / width.clamp_min(1e-3)[:, None]
    bell = torch.exp(-0.5 * distance.square())
    return bell / bell.sum(dim=1, keepdim=True)


def pixelate(x: Tensor, strength: Tensor, generator: Generator) -> Tensor:
    """Images seen with fewer pixels: strength 1 has a quarter of them on each side."""
    new = x.clone()
    sides = torch.tensor(x.shape[-2:])
    factor = 1 + 3 * strength.cpu()[:, None]
    fewer = (sides / factor).round().long().clamp_min(1)  # (n, 2)
    for size in fewer.unique(dim=0):
        if torch.equal(size, sides):
            continue
        rows = (fewer == size).all(1).to(x.device)
        coarse = adaptive_avg_pool2d(x[rows], size.tolist())
        new[rows] = interpolate(coarse, size=x.shape[-2:])
    return new


def occlude(x: Tensor, strength: Tensor, generator: Generator, spread: Spread) -> Tensor:
    """A rectangle of the image covered; strength 1 covers half of each side."""
    covered = _rectangle(x, strength, generator)
    return torch.where(covered, spread.centre.to(x), x)


def quantise(x: Tensor, strength: Tensor, generator: Generator, spread: Spread) -> Tensor:
    """Values rounded to a grid; strength 1 leaves two steps over the usual range of a channel."""
    usual = (spread.high - spread.low).to(x)
    step = 0.5 * per(strength, x) * usual
    phase = per(uniform(len(x), x, generator), x)
    grid = step.clamp_min(torch.finfo(x.dtype).tiny)
    rounded = ((x / grid + phase).round() - phase) * grid
    return torch.where(step > 0, rounded, x)


def time_warp(x: Tensor, strength: Tensor, generator: Generator) -> Tensor:
    """Steps of a sequence ``(n, T, d)`` repeated or skipped: the n-th step shown is step ``n * rate``, rate
    in e^-1..e^1.
    """
    steps = torch.arange(x.shape[1], device=x.device)
    rate = torch.exp(_symmetric(len(x), x, generator) * strength)
    shown = (steps * rate[:, None]).round().long()
    index = shown.clamp_max(len(steps) - 1)[:, :, None]
    return x.gather(1, index.expand_as(x))


def _rectangle(x: Tensor, strength: Tensor, generator: Generator) -> Tensor:
    """True inside a random rectangle of each image, ``(n, 1, h, w)``."""
    sides = torch.tensor(x.shape[-2:]).to(x)
    length = (0.5 * strength).clamp_max(0.95)[:, None] * sides  # (n, 2)
    start = uniform((len(x), 2), x, generator) * (sides - length)
    end = start + length
    rows, columns = map(_between, x.shape[-2:], start.T[..., None], end.T[..., None])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def _between(length: int, start: Tensor, end: Tensor) -> Tensor:
    """Which pixels of a side lie between two places ``(n, 1)``, by their middle; ``(n, length)``."""
    middle = torch.arange(length).to(start) + 0.5
    return (middle >= start) & (middle < end)


def _moments(x: Tensor, axis: int) -> Tensors:
    """Mean, variance, smallest and largest value over the positions of each sample and channel, (n, C)."""
    x = x.detach()
    if x.ndim == 1:
        x = x[:, None]
    flat = at_least_single(x.movedim(axis, 1).flatten(2) if x.ndim > 2 else x[..., None])
    mean = flat.mean(dim=2)
    variance = (flat - mean[:, :, None]).square().mean(dim=2)
    return mean, variance, flat.amin(2), flat.amax(2)


def _spread(moments: Sequence[Tensors]) -> Tensors:
    """Centre, scale, low and high of each channel, from moments of each sample."""
    mean, variance, low, high = (torch.cat(column) for column in zip(*moments, strict=True))  # (n, C)
    middle, between = _robust(mean)
    scale = (between.square() + variance.median(dim=0).values).sqrt()
    return middle, scale, low.quantile(0.05, dim=0), high.quantile(0.95, dim=0)


def _robust(values: Tensor) -> tuple[Tensor, Tensor]:
    """Median and standard deviation over samples ``(n, C)`` by quantiles, which outliers do not move."""
    tail, normal_width = (0.05, 3.2897) if len(values) >= 40 else (0.25, 1.3490)
    low, high = values.quantile(tail, dim=0), values.quantile(1 - tail, dim=0)
    return values.median(dim=0).values, (high - low) / normal_width


def _discrete(rows: Tensor) -> tuple[Columns, ...]:
    """Columns with few values; columns that are a one-hot code stand together."""
    if len(rows) < 5:
        return ()
    values = [len(column.unique()) for column in rows.T]
    limit = max(2, min(20, len(rows) // 10))
    few = [j for j, count in enumerate(values) if count <= limit]
    two = {j: rows[:, j] == rows[:, j].max() for j in few if values[j] == 2}
    sets: list[Columns] = []
    for j in few:
        if not any(j in columns for columns in sets):
            sets.append(_one_hot_from(j, two) or (j,))
    return tuple(sets)


def _one_hot_from(first: int, two: dict[int, Tensor]) -> Columns | None:
    """Columns from ``first`` on of which exactly one is high in every row."""
    total = torch.zeros(())
    for j in itertools.takewhile(two.__contains__, itertools.count(first)):
        total = total + two[j].long()
        if total.max() > 1:
            return None
        if total.min() == 1:
            return tuple(range(first, j + 1))
    return None
