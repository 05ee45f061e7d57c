"""A fitted calibrator as two files: its arguments and learned values as JSON, its arrays as safetensors.

`salgp.calibrators.loading` reads them back. A rule (`salgp.decide.Rule`) may be kept beside them. It promises
something of the confidences it was chosen on, so it stays only where the same calibrator is saved again, byte
for byte; a new calibrator takes the place of both, and a warning says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from salgp.storage import check_replaceable, pack, write_folder, write_json, write_tensors

__all__ = ["FORMAT_VERSION", "KIND", "check_place", "save_folder", "write_calibrator"]

KIND = "salgp-calibrator"
FORMAT_VERSION = 4
GUESTS = ("salgp-rule",)
"""Kinds of files that may be put beside a calibrator, and belong to it."""


class Fitted(Protocol):
    """What is needed of a calibrator to write it down."""

    @property
    def name(self) -> str:
        """Short name."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Arguments of the constructor."""


def save_folder(folder: str | os.PathLike[str], write: Callable[[Path], object]) -> Path:
    """Let ``write`` fill the folder of a calibrator, whole or not at all."""
    return write_folder(folder, write, KIND, GUESTS)


def check_place(folder: Path) -> None:
    """Refuse a place where `save_folder` would not put a calibrator."""
    check_replaceable(folder, KIND, GUESTS)


def write_calibrator(calibrator: Fitted, folder: Path) -> None:
    """Put the two files of a fitted calibrator into a folder that is being written."""
    tensors: dict[str, Tensor] = {}
    learned = {k: v for k, v in vars(calibrator).items() if k.endswith("_") and not k.startswith("_")}
    header = {
        "format": KIND,
        "format_version": FORMAT_VERSION,
        "calibrator": calibrator.name,
        "state": pack(learned, tensors),
        "config": pack(calibrator.get_params(deep=False), tensors, "config"),
    }
    write_tensors(folder / "calibrator.safetensors", tensors, {"format": KIND})
    write_json(folder / "calibrator.json", header)
