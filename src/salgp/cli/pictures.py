"""Pictures of the samples for a report: each is read when it is asked for, since a page shows only a few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from salgp.cli.inputs import Inputs

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Pictures"]


@dataclass(frozen=True, eq=False)
class Pictures:
    """A sequence of pictures.

    Args:
        data: one picture per sample as the first input.

    Example:
        >>> import torch
        >>> pixels = torch.zeros(5, 1, 4, 4)
        >>> pictures = Pictures(Inputs(5, 2, lambda rows: (pixels[rows],)))
        >>> len(pictures), pictures[3].shape
        (5, (1, 4, 4))
    """

    data: Inputs

    def __len__(self) -> int:
        return self.data.n

    def __getitem__(self, row: int) -> np.ndarray[Any, Any]:
        picture = self.data.take(slice(row, row + 1))[0][0]
        return picture.float().numpy()  # type: ignore[no-any-return]
