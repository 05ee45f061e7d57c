"""``salgp info``: what a calibrator was fitted on, and what is in a file or folder of features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument

import salgp
from salgp.cli.checks import CALIBRATOR, check_inputs
from salgp.cli.console import Console

__all__ = []

MOST = 20
"""Entries of a list that are shown."""
Described = Annotated[
    Path | None, Argument(help="A calibrator, or features in any form. None: list the methods.")
]


def info(console: Console, path: Described = None) -> None:
    """Describe a calibrator or a file of features; without one, list the methods.

    Example:
        salgp info calibration.safetensors
    """
    if path is None:
        found = salgp.calibrators.names()
        table = Table("method", "what it is")
    else:
        check_inputs(path)
        found = describe(path)
        table = Table(show_header=False)
    for key, value in found.items():
        if value is not None:
            table.add_row(key, _text(value))
    console.finish({"methods": found} if path is None else found, table)


def _text(value: Any) -> str:
    """A value for people.

    Example:
        >>> _text({"conv": 12, "fc": 8}), _text([0.25, 1 / 3]), _text(True), _text({})
        ('conv: 12, fc: 8', '0.25, 0.3333', 'yes', 'none')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        more = f", ... ({len(value)} in all)" if len(value) > MOST else ""
        return (", ".join(map(_text, value[:MOST])) or "none") + more
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(path: Path) -> dict[str, Any]:
    """Description of a folder with a calibrator, or of features in any form."""
    return _calibrator(path) if (path / CALIBRATOR).is_file() else _features(path)


def _calibrator(path: Path) -> dict[str, Any]:
    from salgp.calibrators.loading import load_parts

    fitted, parts = load_parts(path)
    return {
        "kind": "calibrator",
        "method": fitted.name,
        "classes": fitted.n_classes_,
        "layers": fitted.layer_widths_,
        "with network": "network" in parts,
        "settings": fitted.get_params(deep=False),
        **parts.get("origin", {}),
    }


def _features(path: Path) -> dict[str, Any]:
    loaded = salgp.files.read_features(path)
    plain = loaded.without_augmented()
    f, labels = plain.features, plain.labels
    return {
        "kind": "features",
        "samples": len(f),
        "classes": f.n_classes,
        "layers": f.widths,
        "labelled": labels is not None,
        "augmented samples": len(loaded.features) - len(f),
        "mean confidence": float(f.confidence.mean()) if len(f) else None,
        "accuracy": None if labels is None else float(f.correct(labels).double().mean()),
        "output": loaded.metadata.get("output"),
        "network": loaded.metadata.get("network"),
        "class names": loaded.classes,
    }
