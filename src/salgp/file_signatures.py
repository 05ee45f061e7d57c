"""File signatures: only files that salgp wrote, and of the same kind, are overwritten.

Kept apart from `salgp.io`, so that the command line refuses a target before PyTorch is loaded.
"""

import os
import stat
from mmap import ACCESS_READ, mmap
from pathlib import Path

__all__ = ["KINDS", "PREDICTION_TABLE", "is_of_kind", "refuse_foreign", "refuse_link", "refuse_special"]

PREDICTION_TABLE = b"salgp-prediction-table"
"""``format`` in the metadata of a Parquet file of predictions: columns of the same names prove nothing."""

KINDS = {
    "calibrator": (b'"format":"salgp-calibrator"',),
    "features": (b'"format":"salgp-features"',),
    "CSV prediction": (b"label,", b",network_confidence"),
    "Parquet prediction": (PREDICTION_TABLE,),
    "prediction sets": (b'"format":"salgp-sets"',),
    "rule": (b'"salgp-rule"',),
    "exported graph": (b"made by salgp",),
    "report": (b'<meta name="generator" content="salgp">',),
    "monitor history": (b"shift_evidence", b"accuracy_evidence"),
    "monitor page": (b'<meta name="generator" content="salgp monitor">',),
}
"""Bytes that every file of a kind holds, and hardly any other."""


def refuse_link(path: Path) -> None:
    """Refuse to write through or over a symbolic link: what it points to is somebody else's."""
    if path.is_symlink():
        raise FileExistsError(f"{path} is a symbolic link; salgp writes to no link, name the target itself")


def refuse_special(path: Path) -> None:
    """Refuse links, folders, devices and pipes: a rename would take the place even of ``/dev/null``."""
    refuse_link(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is a folder, a device or a pipe, not a file; choose another name")


def refuse_foreign(path: str | os.PathLike[str], kind: str) -> None:
    """Refuse to replace a file that salgp did not write, or wrote as something else.

    Args:
        path: of the file that is to be written; missing and empty ones may be replaced.
        kind: what is to be written, one of `KINDS`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "rule.json")
        ...     _ = path.write_text("mine")
        ...     try:
        ...         refuse_foreign(path, "rule")
        ...     except FileExistsError as error:
        ...         print(str(error).removeprefix(f"{path} "))
        exists and holds no rule that salgp wrote; it is left alone: choose another name
    """
    target = Path(path)
    refuse_special(target)
    if target.is_file() and not is_of_kind(target, kind):
        raise FileExistsError(
            f"{target} exists and holds no {kind} that salgp wrote; it is left alone: choose another name"
        )


def is_of_kind(path: Path, kind: str) -> bool:
    """Has a file the signature of one of `KINDS`, whatever its name? An empty one may be replaced too."""
    return path.stat().st_size == 0 or _holds(path, KINDS[kind])


def _holds(path: Path, parts: tuple[bytes, ...]) -> bool:
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        return all(content.find(part) >= 0 for part in parts)
