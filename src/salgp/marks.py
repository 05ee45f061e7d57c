"""What files of ours say of themselves: a file is replaced only where it says so.

Kept apart from `salgp.storage`, so that the command line refuses a target before PyTorch is loaded.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

__all__ = ["KINDS", "PREDICTION_TABLE", "SUFFIXES", "is_of_kind", "is_ours"]

PREDICTION_TABLE = b"salgp-prediction-table"
"""``format`` in the metadata of a Parquet file of predictions: columns of the same names prove nothing."""

KINDS = {
    "features": (b'"format":"salgp-features"',),
    "prediction": (b'"format":"salgp-prediction"',),
    "prediction sets": (b'"kind":"salgp-sets"',),
    "rule": (b'"salgp-rule"',),
    "exported graph": (b"made by salgp",),
    "report": (b'<meta name="generator" content="salgp">',),
    "monitor history": (b"shift_evidence", b"promise_evidence"),
    "monitor page": (b'<meta name="generator" content="salgp monitor">',),
}
"""What every file of a kind says and hardly any other."""
SUFFIXES = {
    ".safetensors": (b'"format":"salgp-',),
    ".csv": (b"label,", b",network_confidence"),
    ".parquet": (PREDICTION_TABLE,),
    ".html": (b'<meta name="generator" content="salgp',),
    ".onnx": KINDS["exported graph"],
    ".pt2": KINDS["exported graph"],
}
"""What every file of ours with a suffix says, whatever its kind."""


def is_ours(path: Path) -> bool:
    """Does a file say what those of salgp with its suffix say? An empty one is nobody's, and may be replaced.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "page.html")
        ...     _ = path.write_text("<html>mine</html>")
        ...     is_ours(path)
        False
    """
    return _says(path, SUFFIXES.get(path.suffix))


def is_of_kind(path: Path, kind: str) -> bool:
    """Does a file say what those of one of `KINDS` say, whatever its name? An empty one is nobody's."""
    return _says(path, KINDS[kind])


def _says(path: Path, marks: Sequence[bytes] | None) -> bool:
    if path.stat().st_size == 0:
        return True
    if marks is None:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return all(content.find(mark) >= 0 for mark in marks)
