"""The page itself: the template filled in, with its style and script inside, everything escaped.

The script is allowed by its hash, so that nothing else on the page can run.

Thumbnails as PNG inside the page.
"""

import importlib.metadata
import io
import math
import platform
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

import numpy as np

from salgp import __version__
from salgp.explanation import shown_term
from salgp.extras import require
from salgp.metrics import METRICS
from salgp.report.selective import ASSURANCE
from salgp.report.text import share
from salgp.svg import without_control_characters

__all__ = []


def page(**context: Any) -> str:
    """The whole page as a string."""
    require("jinja2")
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(percent=percent, signed=_signed, share=share, number=_number, term=shown_term)
    css, js = Markup(_part("css")), Markup(_part("js"))
    shown = [metric for metric in METRICS.values() if metric.heading]
    context |= {"assurance": ASSURANCE, "shown": shown, "versions": _versions()}
    template = environment.from_string(_part("html"))
    text = template.render(context, css=css, js=js, script_hash=_digest(js))
    return without_control_characters(text.replace(" %", "\N{NO-BREAK SPACE}%"))


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _part(kind: str) -> str:
    return files("salgp.report").joinpath(f"page.{kind}").read_text(encoding="utf-8")


def _versions() -> dict[str, str]:
    packages = ("torch", "numpy", "scipy", "scikit-learn")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "salgp": __version__} | found


def percent(x: float, digits: int = 0) -> str:
    """A share in per cent.

    Example:
        >>> percent(0.125, 1)
        '12.5 %'
    """
    return f"{100 * x:.{digits}f} %"


def _signed(x: float) -> str:
    """Points with their sign; none where they round to nothing.

    Example:
        >>> _signed(0.123), _signed(-0.0001)
        ('+12.3', '0.0')
    """
    text = f"{100 * x:+.1f}"
    return "0.0" if text[1:] == "0.0" else text.replace("-", "\N{MINUS SIGN}")


def _number(x: float | None) -> str:
    return "n/a" if x is None or x != x else f"{x:.3f}"


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
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


def to_pixels(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes ``(H, W)`` or ``(H, W, 3)``, at most `SIDE` pixels wide and high."""
    given = x = np.asarray(image)
    if x.ndim == 3 and x.shape[0] in (1, 3) and x.shape[2] not in (1, 3):
        x = x.transpose(1, 2, 0)
    if x.ndim == 3 and x.shape[2] == 1:
        x = x[:, :, 0]
    if x.ndim not in (2, 3) or x.shape[2:] not in ((), (3,)) or 0 in x.shape:
        shapes = "(H, W), (C, H, W) or (H, W, C) with 1 or 3 channels"
        raise ValueError(f"an image must have shape {shapes}, got {given.shape}")
    step = math.ceil(max(x.shape[:2]) / SIDE)
    x = x[::step, ::step]
    return x if x.dtype == np.uint8 else _stretched(x.astype(float))


def _stretched(x: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    finite = x[np.isfinite(x)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    scaled = (x - low) / max(high - low, 1e-12)
    bounded = np.nan_to_num(scaled, nan=0.0, posinf=1.0, neginf=0.0)
    return np.asarray(bounded * 255, dtype=np.uint8)
