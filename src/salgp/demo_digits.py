"""Digits drawn with a pen, 28 by 28 pixels: data for the demo that need no download.

Each digit is a few strokes. A hand draws them differently every time: slanted, bent, with another pen. A
camera in the field adds what no augmentation has: a turned sheet, blur, shadow, noise.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Digits", "draw_digits", "photograph"]

SIDE = 28
"""Pixels of an edge."""
BENT = 0.075
"""How far a hand bends its strokes, in parts of the picture."""
CHUNK = 250
"""Pictures drawn at a time."""


@dataclass(frozen=True, eq=False)
class Digits:
    """Images ``(n, 1, 28, 28)`` in [0, 1], ink bright, and labels ``(n,)``."""

    images: Tensor
    labels: Tensor

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches in order."""
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=100)


def draw_digits(n: int, seed: int = 0) -> Digits:
    """Digits by a hand that is never the same.

    Example:
        >>> digits = draw_digits(20)
        >>> digits.images.shape, digits.labels[:3]
        (torch.Size([20, 1, 28, 28]), tensor([4, 9, 3]))
    """
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (n,), generator=g)
    strokes = _STROKES[labels].split(CHUNK)
    images = [_ink(_by_hand(part, g), g) for part in strokes]
    return Digits(torch.cat(images), labels)


def photograph(digits: Digits, seed: int = 0) -> Digits:
    """The same digits as a camera in the field sees them: turned, blurred, in shadow, noisy.

    Example:
        >>> digits = draw_digits(5)
        >>> photograph(digits).images.shape
        torch.Size([5, 1, 28, 28])
    """
    g = torch.Generator().manual_seed(seed + 1)
    turned = _turned(digits.images, g)
    blur = _one_each(turned, g)
    pooled = functional.avg_pool2d(turned, 3, stride=1, padding=1)
    blurred = (1 - blur) * turned + blur * pooled
    across = torch.linspace(-1, 1, SIDE)
    side = across * (2 * _one_each(turned, g) - 1)
    shaded = blurred * (0.75 + 0.35 * side)
    noise = 0.3 * _one_each(turned, g) * torch.randn(shaded.shape, generator=g)
    return Digits((shaded + noise).clamp(0, 1), digits.labels)


def _one_each(digits: Tensor, g: torch.Generator) -> Tensor:
    """A random number for each digit, ``(n, 1, 1, 1)``."""
    return torch.rand(len(digits), 1, 1, 1, generator=g)


def _by_hand(strokes: Tensor, g: torch.Generator) -> Tensor:
    """Slant, turn, size and bend of each digit; ``(n, S, 2, 2)`` end points of short lines."""
    n = len(strokes)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, generator=g)

    angle, slant = uniform(-0.2, 0.2), uniform(-0.25, 0.35)
    width, height = uniform(0.7, 1.1), uniform(0.85, 1.1)
    cos, sin = angle.cos(), angle.sin()
    entries = [cos * width, -sin - slant, sin, cos * height]
    turn = torch.stack(entries, 1).reshape(n, 1, 2, 2)
    points = (strokes - 0.5) @ turn.mT
    frequency, phase = uniform(2.0, 7.0, 1, 1, 2), uniform(0.0, 6.3, 1, 1, 2)
    height_of_bend = uniform(-BENT, BENT, 1, 1, 2)
    bend = height_of_bend * torch.sin(frequency * points.flip(-1) + phase)
    return 0.5 + points + bend + uniform(-0.06, 0.06, 1, 1, 2)


def _ink(strokes: Tensor, g: torch.Generator) -> Tensor:
    """Bright where a pixel is nearer to a stroke than half the pen's width, ``(n, 1, 28, 28)``."""
    pen = 0.03 + 0.035 * _one_each(strokes, g)
    return torch.sigmoid((pen - _distance(strokes)) * 90)


def _distance(strokes: Tensor) -> Tensor:
    """From each pixel to the nearest line, ``(n, 1, 28, 28)``."""
    axis = (torch.arange(SIDE) + 0.5) / SIDE
    pixels = torch.cartesian_prod(axis, axis).flip(1)[:, None]  # (p, 1, 2)
    start, end = strokes[:, None].unbind(dim=3)
    along = end - start
    length = along.square().sum(-1).clamp_min(1e-9)
    share = ((pixels - start) * along).sum(-1) / length
    nearest = start + share.clamp(0, 1)[..., None] * along
    squared = (pixels - nearest).square().sum(-1)
    distance = squared.amin(dim=2).sqrt()  # (n, p)
    return distance.reshape(-1, 1, SIDE, SIDE)


def _turned(images: Tensor, g: torch.Generator) -> Tensor:
    share = torch.rand(len(images), generator=g)
    angle = (2 * share - 1) * math.radians(32)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    entries = [cos, -sin, zero, sin, cos, zero]
    matrix = torch.stack(entries, 1).reshape(-1, 2, 3)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


DRAWN = (
    "0.5 0.5 0.2 0.32 0 4 12",
    "0.38 0.3, 0.52 0.18, 0.52 0.82",
    "0.5 0.34 0.19 0.16 -2 0.5 8, 0.3 0.82, 0.72 0.82",
    "0.48 0.34 0.18 0.16 -2 1 8; 0.48 0.66 0.2 0.16 -1 2 8",
    "0.56 0.18, 0.28 0.6, 0.74 0.6; 0.6 0.4, 0.6 0.84",
    "0.68 0.18, 0.36 0.18, 0.34 0.46; 0.48 0.62 0.2 0.19 -1.4 1.6 8",
    "0.62 0.18, 0.4 0.42, 0.33 0.6; 0.5 0.65 0.17 0.17 0 4 10",
    "0.3 0.2, 0.7 0.2, 0.44 0.82",
    "0.5 0.34 0.15 0.15 0 4 9; 0.5 0.66 0.18 0.17 0 4 9",
    "0.5 0.36 0.17 0.17 0 4 10; 0.67 0.36, 0.62 0.6, 0.5 0.84",
)
"""Strokes of each digit in the unit square, x to the right and y down: points, and arcs for `_arc`."""
Point = list[float]


def _arc(numbers: list[float]) -> list[Point]:
    """Points on an ellipse: centre, half axes, start and end in quarters of a turn clockwise from the right,
    and the number of lines.
    """
    x, y, rx, ry, start, end, n = numbers
    steps = range(int(n) + 1)
    quarters = [start + (end - start) * i / n for i in steps]
    angles = [quarter * math.pi / 2 for quarter in quarters]
    return [[x + rx * math.cos(a), y + ry * math.sin(a)] for a in angles]


def _points(stroke: str) -> list[Point]:
    points: list[Point] = []
    for part in stroke.split(","):
        numbers = list(map(float, part.split()))
        points += [numbers] if len(numbers) == 2 else _arc(numbers)
    return points


def _lines(digit: str) -> list[tuple[Point, Point]]:
    strokes = map(_points, digit.split(";"))
    return [line for stroke in strokes for line in itertools.pairwise(stroke)]


def _all_lines() -> Tensor:
    """``(10, S, 2, 2)``: every digit as short lines, filled up with points."""
    digits = list(map(_lines, DRAWN))
    most = max(map(len, digits))
    for lines in digits:
        end = lines[-1][1]
        lines += [(end, end)] * (most - len(lines))
    return torch.tensor(digits)


_STROKES = _all_lines()
