"""MSTAR radar chips, from one ``.npz`` or from a folder of raw Phoenix files as the public discs have them.

A Phoenix file is an ASCII header of ``key= value`` lines, whose length the header itself tells, then
big-endian float32 magnitude, then phase. Chips come in several sizes that correlate with the class, so only
the centre is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.io import FormatError, reading
from salgp.io.arrays import read_npz

__all__ = ["Chips", "centre_crop", "load_mstar", "load_mstar_folder", "read_phoenix"]

CLASS_NAMES = ("2S1", "BMP2", "BRDM2", "BTR60", "BTR70", "D7", "T62", "T72", "ZIL131", "ZSU23-4")
_COLUMNS = ("x", "label", "depression", "class_names")


@dataclass(frozen=True, eq=False)
class Chips:
    """Radar chips with what the protocols need to split them.

    Args:
        x: ``(n, size, size)`` magnitude in [0, 1].
        label: ``(n,)`` class index; -1 for a target that is not in ``class_names``.
        depression: ``(n,)`` nominal depression angle in degrees.
        class_names: names of the classes.
    """

    x: Tensor
    label: Tensor
    depression: Tensor
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.label)


def load_mstar(path: str | os.PathLike[str]) -> Chips:
    """Read chips from a ``.npz`` with ``x`` (uint8), ``label``, ``depression`` and ``class_names``; a folder
    is read as raw Phoenix files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(
        ...         folder + "/c.npz",
        ...         x=np.zeros((2, 4, 4), np.uint8),
        ...         label=[0, 1],
        ...         depression=[15, 17],
        ...         class_names=["A", "B"],
        ...     )
        ...     chips = load_mstar(folder + "/c.npz")
        >>> len(chips), chips.class_names
        (2, ('A', 'B'))
    """
    where = Path(path)
    if where.is_dir():
        return load_mstar_folder(where)
    columns = _read_npz(where)
    with reading(where, "chips with labels and depression angles"):
        if columns["x"].dtype != np.uint8 or columns["x"].ndim != 3:
            raise FormatError(
                f"{where}: expected chips (n, rows, columns) of bytes, got {columns['x'].dtype}"
            )
        x = torch.from_numpy(columns["x"]).float() / 255
        names = tuple(str(name) for name in columns["class_names"])
        label, depression = (torch.as_tensor(columns[name]).long() for name in ("label", "depression"))
        if not len(x) == len(label) == len(depression):
            raise FormatError(f"{where}: {len(x)} chips, {len(label)} labels, {len(depression)} angles")
    return Chips(x, label, depression, names)


def load_mstar_folder(folder: str | os.PathLike[str], size: int = 128) -> Chips:
    """Read every Phoenix file below ``folder``; each chip is scaled by its own maximum and cropped or padded
    to ``size``.
    """
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file() and _is_phoenix(p))
    if not files:
        raise FileNotFoundError(
            f"{folder}: no Phoenix chips in this folder (files that start with '[PhoenixHeaderVer')"
        )
    chips = [read_phoenix(file) for file in files]
    x = torch.stack(
        [centre_crop(magnitude / magnitude.amax().clamp(min=1e-12), size) for magnitude, _ in chips]
    )
    label = torch.tensor([_class_of(header) for _, header in chips])
    depression = torch.tensor([round(float(header["DesiredDepression"])) for _, header in chips])
    return Chips(x, label, depression, CLASS_NAMES)


def read_phoenix(path: str | os.PathLike[str]) -> tuple[Tensor, dict[str, str]]:
    """Magnitude ``(rows, columns)`` and header of one raw chip."""
    content = Path(path).read_bytes()
    header = _read_header(content, path)
    with reading(path, "a Phoenix chip with whole numbers in its header"):
        rows, columns = int(header["NumberOfRows"]), int(header["NumberOfColumns"])
        start = int(header["PhoenixHeaderLength"]) + int(header.get("native_header_length", 0))
    if min(rows, columns) < 1 or start < 0:
        raise FormatError(f"{path}: {rows} x {columns} magnitudes from byte {start}, expected at least one")
    if len(content) < start + 4 * rows * columns:
        raise FormatError(
            f"{path}: cut short, {rows} x {columns} magnitudes need "
            f"{start + 4 * rows * columns} bytes, the file has {len(content)}"
        )
    magnitude = np.frombuffer(content, ">f4", rows * columns, start).reshape(rows, columns).astype(np.float32)
    if not np.isfinite(magnitude).all() or (magnitude < 0).any():
        raise FormatError(
            f"{path}: the magnitudes hold NaN, infinity or negative values; is the header length right?"
        )
    return torch.from_numpy(magnitude), header


def centre_crop(x: Tensor, size: int) -> Tensor:
    """Cut the centre ``size x size`` of ``(..., rows, columns)``, or pad with zeros where it is smaller.

    Example:
        >>> centre_crop(torch.ones(2, 6), 4)
        tensor([[0., 0., 0., 0.],
                [1., 1., 1., 1.],
                [1., 1., 1., 1.],
                [0., 0., 0., 0.]])
    """
    out = x.new_zeros((*x.shape[:-2], size, size))
    (rows, to_rows), (columns, to_columns) = _overlap(x.shape[-2], size), _overlap(x.shape[-1], size)
    out[..., to_rows, to_columns] = x[..., rows, columns]
    return out


def _overlap(have: int, want: int) -> tuple[slice, slice]:
    keep, source, target = min(have, want), max(have - want, 0) // 2, max(want - have, 0) // 2
    return slice(source, source + keep), slice(target, target + keep)


def _read_npz(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}; set SALGP_DATA to the folder that holds it")
    columns = read_npz(path)
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        raise FormatError(f"{path}: no array named {', '.join(missing)}; expected {', '.join(_COLUMNS)}")
    return columns


def _is_phoenix(path: Path) -> bool:
    with path.open("rb") as file:
        return b"[PhoenixHeaderVer" in file.read(64)


def _read_header(content: bytes, path: str | os.PathLike[str]) -> dict[str, str]:
    if b"[PhoenixHeaderVer" not in content[:64]:
        raise FormatError(f"{path}: not a Phoenix file, it does not start with '[PhoenixHeaderVer'")
    text = content[:8192].split(b"[EndofPhoenixHeader]")[0].decode("latin-1")
    header = {
        key.strip(): value.strip()
        for key, _, value in (line.partition("=") for line in text.splitlines())
        if value
    }
    needed = ("PhoenixHeaderLength", "NumberOfRows", "NumberOfColumns", "DesiredDepression")
    wrong = [key for key in needed if not re.fullmatch(r"\d{1,9}\.?\d{0,9}", header.get(key, ""), re.ASCII)]
    if wrong:
        raise FormatError(
            f"{path}: the header has no number for {wrong[0]} (found {header.get(wrong[0], 'nothing')!r})"
        )
    return header


def _class_of(header: Mapping[str, str]) -> int:
    target = header.get("TargetType", "").upper().replace("_", "").replace("-", "")
    hits = [
        k
        for k, name in enumerate(CLASS_NAMES)
        if target.startswith(name.replace("-", "")) or name.replace("-", "").startswith(target or "?")
    ]
    return hits[0] if hits else -1
