"""File signatures: only files that salgp wrote are overwritten.

Kept apart from `salgp.io`, so that the command line refuses a target before PyTorch is loaded.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

__all__ = ["KINDS", "PREDICTION_TABLE", "SUFFIXES", "is_of_kind", "is_ours"]

PREDICTION_TABLE = b"salgp-prediction-table"
"""``format`` in the metadata of a Parquet file of predictions: columns of the same names prove nothing."""

KINDS = {
    "calibrator": (b'"format":"salgp-calibrator"',),
    "features": (b'"format":"salgp-features"',),
    "prediction": (b'"format":"salgp-prediction"',),
    "prediction sets": (b'"kind":"salgp-sets"',),
    "rule": (b'"salgp-rule"',),
    "exported graph": (b"made by salgp",),
    "report": (b'<meta name="generator" content="salgp">',),
    "monitor history": (b"shift_evidence", b"accuracy_evidence"),
    "monitor page": (b'<meta name="generator" content="salgp monitor">',),
}
"""Bytes that every file of a kind holds, and hardly any other."""
SUFFIXES = {
    ".safetensors": (b'"format":"salgp-',),
    ".csv": (b"label,", b",network_confidence"),
    ".parquet": (PREDICTION_TABLE,),
    ".html": (b'<meta name="generator" content="salgp',),
    ".onnx": KINDS["exported graph"],
    ".pt2": KINDS["exported graph"],
}
"""Bytes that every file of ours with a suffix holds, whatever its kind."""


def is_ours(path: Path) -> bool:
    """Has a file the signature of those that salgp writes with its suffix? An empty one may be replaced too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "page.html")
        ...     _ = path.write_text("<html>mine</html>")
        ...     is_ours(path)
        False
    """
    return _holds(path, SUFFIXES.get(path.suffix))


def is_of_kind(path: Path, kind: str) -> bool:
    """Has a file the signature of one of `KINDS`, whatever its name? An empty one may be replaced too."""
    return _holds(path, KINDS[kind])


def _holds(path: Path, signature: Sequence[bytes] | None) -> bool:
    if path.stat().st_size == 0:
        return True
    if signature is None:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return all(content.find(part) >= 0 for part in signature)
