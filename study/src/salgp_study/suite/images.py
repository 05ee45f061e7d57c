"""Corruptions of images in the spirit of CIFAR-10-C: eighteen kinds, each with a severity in (0, 1].

All take images ``(n, c, h, w)`` in [0, 1] and give images in [0, 1]; `IMAGE_CORRUPTIONS` says for each which
family of augmentations it resembles. Strengths are near those of that set: severity 0.3 is mild, 1 is hard.
The code is our own.

Reference: Hendrycks and Dietterich, Benchmarking neural network robustness to common corruptions, 2019.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, conv2d, grid_sample, interpolate, pad
from torch.utils.data import TensorDataset

from salgp.extras import require
from salgp_study.suite.case import TestSet

__all__ = ["IMAGE_CORRUPTIONS", "SEVERITIES", "Corruption", "corrupted_sets"]

Corrupt = Callable[[Tensor, float, torch.Generator], Tensor]
SEVERITIES = (0.3, 0.6, 1.0)
"""Severities 1, 2 and 3."""


@dataclass(frozen=True)
class Corruption:
    """A corruption and the family of augmentations it resembles, if any."""

    corrupt: Corrupt
    like: str | None = None

    def __call__(self, x: Tensor, severity: float, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.corrupt(x, severity, generator).clamp(0, 1)


def _gaussian_noise(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    return x + 0.1 * severity * _normal(x, generator)


def _shot_noise(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Photons counted: fewer of them is worse."""
    photons = 40 / severity**1.5
    return torch.poisson(x * photons, generator=generator) / photons


def _impulse_noise(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Salt and pepper."""
    draw = torch.rand(x.shape, generator=generator)
    share = 0.08 * severity
    return x.masked_fill(draw < share / 2, 0.0).masked_fill(draw > 1 - share / 2, 1.0)


def _speckle_noise(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    return x * (1 + 0.25 * severity * _normal(x, generator))


def _gaussian_blur(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    width = 1.3 * severity * x.shape[-1] / 32
    reach = max(1, math.ceil(3 * width))
    t = torch.arange(-reach, reach + 1, dtype=x.dtype)
    line = torch.exp(-0.5 * (t / width).square())
    return _convolved(x, line[:, None] * line[None, :])


def _defocus_blur(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """A disc, its edge one pixel soft."""
    radius = 0.4 + 1.4 * severity * x.shape[-1] / 32
    reach = math.ceil(radius)
    t = torch.arange(-reach, reach + 1, dtype=x.dtype)
    distance = (t[:, None].square() + t[None, :].square()).sqrt()
    return _convolved(x, (radius + 0.5 - distance).clamp(0, 1))


def _motion_blur(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """The mean along a line, in a direction of its own for each image."""
    length = 0.16 * severity
    angle = math.pi * torch.rand(len(x), generator=generator)
    steps = torch.linspace(-length, length, 9)
    moves = ((s * torch.cos(angle), s * torch.sin(angle)) for s in steps)
    return torch.stack([_placed(x, dx=dx, dy=dy) for dx, dy in moves]).mean(dim=0)


def _zoom_blur(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    zooms = torch.linspace(1.0, 1.0 + 0.45 * severity, 8)
    return torch.stack([_placed(x, scale=1 / float(z)) for z in zooms]).mean(dim=0)


def _fog(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """A cloud of several octaves laid over the image."""
    share = 0.75 * severity
    cloud = _cloud(x, generator)
    return (1 - share) * x + share * (0.4 + 0.6 * cloud)


def _brightness(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    return x + 0.4 * severity


def _contrast(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (1 - 0.85 * severity) * (x - mean)


def _saturate(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Colours pushed away from grey, or towards it for every other image; grey images get a gamma."""
    if x.shape[1] == 1:
        return x ** (1 + 1.5 * severity)
    grey = x.mean(dim=1, keepdim=True)
    factor = torch.full((len(x), 1, 1, 1), 1 + 4 * severity)
    factor[::2] = 1 - severity
    return grey + factor * (x - grey)


def _pixelate(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Square blocks of two, three and four pixels; of more where images are larger."""
    h, w = x.shape[-2:]
    block = 1 + round(3 * severity * max(1.0, h / 32))
    whole = pad(x, (0, -w % block, 0, -h % block), mode="replicate")
    coarse = avg_pool2d(whole, block)
    return coarse.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :h, :w]


def _jpeg(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    require("PIL")
    from PIL import Image

    quality = round(70 - 52 * severity)
    pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    out = np.empty_like(pixels)
    for i, image in enumerate(pixels):
        with io.BytesIO() as file:
            Image.fromarray(image.squeeze()).save(file, "JPEG", quality=quality)
            with Image.open(file) as read:
                out[i] = np.asarray(read).reshape(image.shape)
    return torch.from_numpy(out).permute(0, 3, 1, 2).to(x) / 255


def _elastic(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Every pixel moved by a smooth random field."""
    coarse = torch.randn((len(x), 2, 5, 5), generator=generator)
    field = interpolate(coarse, size=x.shape[-2:], mode="bicubic", align_corners=True)
    grid = _identity_grid(x) + 0.16 * severity * field.permute(0, 2, 3, 1)
    return grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _occlusion(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """A square of up to six tenths of the width, at a random place, set to the mean of the image."""
    width = x.shape[-1]
    side = round(0.6 * severity * width)
    corner = torch.randint(width - side + 1, (len(x), 2), generator=generator)[:, :, None]
    pixel = torch.arange(width)
    rows, columns = ((pixel >= corner) & (pixel < corner + side)).unbind(dim=1)  # (n, width) each
    hidden = (rows[:, :, None] & columns[:, None, :])[:, None]
    return torch.where(hidden, x.mean(dim=(1, 2, 3), keepdim=True), x)


def _rotation(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    side = torch.where(torch.rand(len(x), generator=generator) < 0.5, -1.0, 1.0)
    return _placed(x, angle=side * severity * math.pi / 4)


def _translation(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    angle = 2 * math.pi * torch.rand(len(x), generator=generator)
    return _placed(x, dx=0.6 * severity * torch.cos(angle), dy=0.6 * severity * torch.sin(angle))


IMAGE_CORRUPTIONS: dict[str, Corruption] = {
    "gaussian noise": Corruption(_gaussian_noise, "noise"),
    "shot noise": Corruption(_shot_noise, "noise"),
    "impulse noise": Corruption(_impulse_noise),
    "speckle noise": Corruption(_speckle_noise, "noise"),
    "gaussian blur": Corruption(_gaussian_blur, "blur"),
    "defocus blur": Corruption(_defocus_blur, "blur"),
    "motion blur": Corruption(_motion_blur, "blur"),
    "zoom blur": Corruption(_zoom_blur, "blur"),
    "fog": Corruption(_fog),
    "brightness": Corruption(_brightness, "gain"),
    "contrast": Corruption(_contrast, "gain"),
    "saturate": Corruption(_saturate),
    "pixelate": Corruption(_pixelate, "pixelate"),
    "jpeg": Corruption(_jpeg, "quantise"),
    "elastic": Corruption(_elastic),
    "occlusion": Corruption(_occlusion, "occlude"),
    "rotation": Corruption(_rotation, "affine"),
    "translation": Corruption(_translation, "affine"),
}
"""Every corruption of images by name."""


def corrupted_sets(
    x: Tensor,
    y: Tensor,
    prepare: Callable[[Tensor], Tensor] | None = None,
    levels: Sequence[int] = (1, 2, 3),
) -> tuple[TestSet, ...]:
    """One test set per corruption and severity.

    Args:
        x: images in [0, 1].
        y: labels.
        prepare: makes of images what the network reads.
        levels: severities wanted.
    """

    def make(corruption: Corruption, severity: float, seed: int) -> TensorDataset:
        images = corruption(x, severity, seed)
        return TensorDataset(images if prepare is None else prepare(images), y)

    sets = []
    for number, (name, corruption) in enumerate(IMAGE_CORRUPTIONS.items()):
        for level in levels:
            recipe = partial(make, corruption, SEVERITIES[level - 1], 1000 * level + number)
            sets.append(TestSet(f"{name} {level}", "shift", recipe, corruption.like, level))
    return tuple(sets)


def _normal(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """The same kernel, made to sum to one, on every channel; edges are repeated."""
    c, reach = x.shape[1], len(kernel) // 2
    weight = (kernel / kernel.sum()).expand(c, 1, *kernel.shape)
    return conv2d(pad(x, (reach, reach, reach, reach), mode="replicate"), weight, groups=c)


def _placed(
    x: Tensor,
    *,
    angle: Tensor | float = 0.0,
    scale: float = 1.0,
    dx: Tensor | float = 0.0,
    dy: Tensor | float = 0.0,
) -> Tensor:
    """Images rotated, zoomed and shifted; shifts are in half widths."""
    a, dx, dy = (torch.as_tensor(v, dtype=x.dtype).expand(len(x)) for v in (angle, dx, dy))
    cos, sin = scale * torch.cos(a), scale * torch.sin(a)
    rows = torch.stack([cos, -sin, dx, sin, cos, dy], dim=1).reshape(-1, 2, 3)
    grid = affine_grid(rows, list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="border", align_corners=False)


def _identity_grid(x: Tensor) -> Tensor:
    same = torch.eye(2, 3).expand(len(x), 2, 3)
    return affine_grid(same, list(x.shape), align_corners=False)


def _cloud(x: Tensor, generator: torch.Generator) -> Tensor:
    """Smooth noise of four octaves in [0, 1], one field per image."""
    total = torch.zeros(len(x), 1, *x.shape[-2:])
    for octave in range(4):
        cells = 2 + 2**octave
        coarse = torch.rand((len(x), 1, cells, cells), generator=generator)
        total += interpolate(coarse, size=x.shape[-2:], mode="bilinear", align_corners=True) / 2**octave
    low, high = total.amin(dim=(1, 2, 3), keepdim=True), total.amax(dim=(1, 2, 3), keepdim=True)
    return (total - low) / (high - low)
