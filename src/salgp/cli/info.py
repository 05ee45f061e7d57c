"""``salgp info``: what is in a file or folder, whatever command wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import salgp
from salgp.cli.checks import CALIBRATOR, SHARDS, check_inputs
from salgp.cli.console import Console

__all__ = []

ANY_VERSION = 10**9
"""Files that are only shown may be of any version."""
MOST = 20
"""Entries of a list that are shown."""
OTHERS = {
    ".html": "a page; open it in a browser",
    ".onnx": "a graph; salgp extract takes one as MODEL, onnxruntime runs what salgp export wrote",
    ".pt2": "an exported program; torch.export.load opens it",
    ".py": "code; name a network in it as FILE.py:FUNCTION",
    **dict.fromkeys((".pt", ".pth", ".ckpt"), "weights; give them to extract or calibrate with --weights"),
}
"""Files that other programs show better, and what to do with them."""
AnyPath = Annotated[Path | None, typer.Argument(help="Any file or folder of salgp. None: list the methods.")]


def info(console: Console, path: AnyPath = None) -> None:
    """Say what is in a file or folder that salgp wrote or reads; without one, list the methods.

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
    """Kind and contents of a file or folder."""
    if path.is_dir():
        return _folder(path)
    if path.suffix in (".npz", ".csv", ".parquet"):
        return _table(path)
    if path.suffix == ".json":
        return _values(path)
    if path.suffix == ".safetensors":
        return _tensors(path)
    unknown = "a kind of file that salgp neither writes nor reads"
    raise ValueError(f"{path}: {OTHERS.get(path.suffix, unknown)}")


def _folder(path: Path) -> dict[str, Any]:
    """Told apart by the file that each kind of folder has."""
    known = {CALIBRATOR: _calibrator, SHARDS: _shards, "monitor.json": _monitor}
    for name, describe_folder in known.items():
        if (path / name).is_file():
            return describe_folder(path)
    if any(path.glob("*.parquet")):
        return _features(path)
    raise ValueError(f"{path}: a folder that salgp did not write, and without Parquet shards")


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
        "files": sorted(found.name for found in path.iterdir() if found.name[0] != "."),
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
        "mean confidence": round(float(f.confidence.mean()), 4) if len(f) else None,
        "accuracy": None if labels is None else float(f.correct(labels).double().mean()),
        "output": loaded.metadata.get("output"),
        "network": loaded.metadata.get("network"),
        "class names": loaded.classes,
    }


def _tensors(path: Path) -> dict[str, Any]:
    from salgp.io import read_tensors, reading

    tensors, metadata = read_tensors(path)
    if metadata.get("format") == "salgp-features":
        return _features(path)
    kind = metadata.pop("kind", metadata.get("format", "tensors"))
    with reading(path, "what salgp wrote"):
        fields = json.loads(metadata.pop("value", "{}")).get("fields", {})
        plain = {name: x for name, x in fields.items() if not isinstance(x, dict)}
    shapes = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in tensors.items()}
    return {"kind": kind.removeprefix("salgp-"), **metadata, **plain, **shapes}


def _table(path: Path) -> dict[str, Any]:
    """Arrays by name: class scores that a calibrator takes, predictions, or any others."""
    from salgp.io.arrays import read_arrays

    arrays = read_arrays(path)
    if "network_confidence" in arrays:
        kind = "prediction"
    elif any(name.partition(".")[0] in ("logits", "probs") for name in arrays):
        kind = "class scores"
    else:
        kind = "table" if all(x.ndim == 1 for x in arrays.values()) else "arrays"
    rows = max((len(x) for x in arrays.values() if x.ndim), default=0)
    return {"kind": kind, "rows": rows, **{name: f"{x.shape} {x.dtype}" for name, x in arrays.items()}}


def _shards(path: Path) -> dict[str, Any]:
    """A folder with a list of its shards: a feature store, or scores."""
    listed = _values(path / SHARDS)
    if "store" in listed["kind"]:
        return _features(path)
    shards = listed["shards"]
    rows = sum(int(shard["rows"]) for shard in shards)
    return {"kind": listed["kind"], "samples": rows, "shards": len(shards), "complete": listed["complete"]}


def _monitor(path: Path) -> dict[str, Any]:
    from salgp.io import read_lines

    settings = {name.replace("_", " "): value for name, value in _values(path / "monitor.json").items()}
    return settings | {"kind": "monitor", "batches": len(read_lines(path / "log.jsonl"))}


def _values(path: Path) -> dict[str, Any]:
    """Contents of a JSON file with a checksum."""
    from salgp.io import read_header, read_json

    listed = read_json(path)
    kind = str(listed.get("format")) if isinstance(listed, dict) else ""
    if not kind.startswith("salgp-") or "sha256" not in listed:
        raise ValueError(
            f"{path}: a JSON file that salgp did not write, or a part of a folder; name the folder"
        )
    found = read_header(path, kind, ANY_VERSION)
    return {"kind": kind.removeprefix("salgp-")} | {k: x for k, x in found.items() if k != "sha256"}
