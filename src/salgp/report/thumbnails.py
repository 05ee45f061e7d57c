"""Thumbnails as PNG inside the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from salgp.extras import require

__all__ = ["data_uri", "to_pixels"]

SIDE = 96
"""Longest side of a thumbnail in pixels."""


def data_uri(image: Any) -> str:
    """A picture as a ``data:`` address.

    Args:
        image: ``(H, W)``, ``(1 or 3, H, W)`` or ``(H, W, 1 or 3)``; bytes, or numbers stretched from their
            own range.

    Example:
        >>> data_uri(np.zeros((2, 2)))[:22]
        'data:image/png;base64,'
    """
    require("PIL")
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(to_pixels(image)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def to_pixels(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes ``(H, W)`` or ``(H, W, 3)``, at most `SIDE` pixels wide and high."""
    x = np.asarray(image)
    if x.ndim == 3 and x.shape[0] in (1, 3) and x.shape[2] not in (1, 3):
        x = x.transpose(1, 2, 0)
    if x.ndim == 3 and x.shape[2] == 1:
        x = x[:, :, 0]
    if x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[2] != 3) or 0 in x.shape:
        raise ValueError(
            f"an image must have shape (H, W), (C, H, W) or (H, W, C) with 1 or 3 channels, "
            f"got {np.asarray(image).shape}"
        )
    step = max(-(-max(x.shape[:2]) // SIDE), 1)
    x = x[::step, ::step]
    return x if x.dtype == np.uint8 else _stretched(x.astype(np.float64))


def _stretched(x: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    finite = x[np.isfinite(x)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    scaled = np.nan_to_num((x - low) / max(high - low, 1e-12), nan=0.0, posinf=1.0, neginf=0.0)
    return np.asarray(scaled * 255, dtype=np.uint8)
