"""Arrays from ``.npz`` archives of any origin: no pickles, and no more memory than the archive announces.

An archive may say that it becomes a thousand times larger, and an array that it has more rows than there are
bytes. Both are compared with the size of the file before any memory is taken.
"""

from __future__ import annotations

import math
import os
import zipfile
from typing import Any

import numpy as np

from salgp.io.errors import FormatError, reading
from salgp.io.files import check_size

__all__ = ["read_npz"]


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of an archive, by name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(folder + "/a.npz", x=np.arange(3))
        ...     read_npz(folder + "/a.npz")["x"]
        array([0, 1, 2])
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such file: {path}")
    with reading(path, "a whole .npz file of plain arrays"), zipfile.ZipFile(path) as archive:
        check_size(path, sum(member.file_size for member in archive.infolist()))
        for member in archive.infolist():
            _check_announced(path, archive, member)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def _check_announced(path: str | os.PathLike[str], archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuse an array whose header announces more than the archive holds of it."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    announced = math.prod(shape) * dtype.itemsize
    if announced > member.file_size:
        raise FormatError(
            f"{path}: array {member.filename!r} announces {announced:,} bytes, the archive holds "
            f"{member.file_size:,} of it"
        )
