"""A fitted calibrator as two files: its arguments and learned values as JSON, its arrays as safetensors.

`salgp.calibrators.loading` reads them back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from salgp.storage import pack, write_json, write_tensors

__all__ = ["FORMAT_VERSION", "KIND", "write_calibrator"]

KIND = "salgp-calibrator"
FORMAT_VERSION = 2


class Fitted(Protocol):
    """What is needed of a calibrator to write it down."""

    @property
    def name(self) -> str:
        """Short name."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Arguments of the constructor."""


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
