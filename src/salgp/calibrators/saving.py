"""A fitted calibrator as one safetensors file: its arguments, what it learned, and what belongs to it.

One file is replaced at once, so a reader gets the old calibrator or the new one with everything that belongs
to it. `salgp.calibrators.loading` reads it back.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Protocol

from salgp.file_signatures import is_of_kind
from salgp.io import refuse_foreign, value_bytes, write_value
from salgp.io.files import refuse_link

__all__ = [
    "FILE",
    "FORMAT_VERSION",
    "KIND",
    "calibrator_digest",
    "calibrator_value",
    "check_place",
    "save_calibrator",
]

KIND = "salgp-calibrator"
FORMAT_VERSION = 5
FILE = "calibrator.safetensors"
"""Name of the file inside the folder that `Calibrator.save` is given."""


class Fitted(Protocol):
    """What is needed of a calibrator to write it down."""

    @property
    def name(self) -> str:
        """Short name."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Arguments of the constructor."""


def save_calibrator(folder: str | os.PathLike[str], calibrator: Fitted, **parts: Any) -> Path:
    """Write a calibrator into a folder, over an older one where there is one.

    Args:
        folder: created where missing; other files in it are left alone.
        calibrator: fitted.
        parts: what belongs to it, such as the description of its network; nested values and tensors.

    Returns:
        The folder.
    """
    where = Path(folder)
    check_place(where)
    write_value(where / FILE, KIND, FORMAT_VERSION, {**calibrator_value(calibrator), **parts})
    return where


def check_place(folder: Path) -> None:
    """Refuse a place where `save_calibrator` would overwrite something else, or leave a rule beside a
    calibrator that it was not chosen for.
    """
    refuse_link(folder)
    refuse_foreign(folder / FILE, "calibrator")
    rules = [path for path in sorted(folder.glob("*.json")) if path.is_file() and is_of_kind(path, "rule")]
    if rules and (folder / FILE).is_file():
        raise FileExistsError(
            f"{rules[0]} was chosen for the calibrator that would be replaced; move it away, and choose the "
            f"rule again for the new one"
        )


def calibrator_value(calibrator: Fitted) -> dict[str, Any]:
    """Name, arguments and learned attributes."""
    learned = {k: v for k, v in vars(calibrator).items() if k.endswith("_") and not k.startswith("_")}
    return {"calibrator": calibrator.name, "config": calibrator.get_params(deep=False), "state": learned}


def calibrator_digest(calibrator: Fitted) -> str:
    """SHA-256 of its arguments and of what it learned; the same for the same calibrator loaded again."""
    return hashlib.sha256(value_bytes(KIND, FORMAT_VERSION, calibrator_value(calibrator))).hexdigest()
