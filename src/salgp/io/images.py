"""Images as tensors: files of a folder, one sub-folder per class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from salgp.io.files import check_size, open_regular, reading

__all__ = ["ImageOptions", "Pictures"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class ImageOptions:
    """How images become tensors: ``(C, H, W)`` in [0, 1], then standardised.

    Args:
        size: height and width, or None to keep the images' own.
        gray: one channel instead of three.
        mean: taken off each channel.
        std: each channel is divided by.
    """

    size: tuple[int, int] | None = None
    gray: bool = False
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)


def read_image(path: Path, options: ImageOptions) -> Tensor:
    """One image as ``(C, H, W)``; one far larger than its file is refused before it is decoded.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Image.new("RGB", (4, 2)).save(folder + "/x.png")
        ...     read_image(Path(folder, "x.png"), ImageOptions(gray=True)).shape
        torch.Size([1, 2, 4])
    """
    pixels = torch.from_numpy(_pixels(path, options))
    x = pixels.reshape(*pixels.shape[:2], -1).permute(2, 0, 1).div_(255)
    mean = torch.tensor(options.mean).reshape(-1, 1, 1)
    std = torch.tensor(options.std).reshape(-1, 1, 1)
    return x.sub_(mean).div_(std).contiguous()


def _pixels(path: Path, options: ImageOptions) -> NDArray[np.float32]:
    """``(H, W)`` or ``(H, W, 3)`` bytes as floats."""
    from PIL import Image

    with reading(path, "a readable image"), open_regular(path) as file, Image.open(file) as image:
        bytes_each = 5 if options.size is not None else 20  # decoded and converted; then in single precision
        check_size(path, image.width * image.height * bytes_each)
        decoded = image.convert("L" if options.gray else "RGB")
        if options.size is not None:
            decoded = decoded.resize(options.size[::-1])
        return np.array(decoded, dtype=np.float32)


def image_files(folder: Path) -> list[Path]:
    """Images in a folder and those below, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


@dataclass(frozen=True, eq=False)
class Pictures:
    """Samples as pictures; each is read when it is asked for, since a report shows only a few.

    Args:
        n: how many there are.
        take: rows ``start..stop`` as a tuple of inputs, the first of which is the picture.

    Example:
        >>> pictures = Pictures(5, lambda rows: (torch.zeros(5, 1, 4, 4)[rows],))
        >>> len(pictures), pictures[3].shape
        (5, (1, 4, 4))
    """

    n: int
    take: Callable[[slice], Any]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> NDArray[Any]:
        picture: Tensor = self.take(slice(row, row + 1))[0][0]
        return picture.float().numpy()
