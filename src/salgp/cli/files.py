"""What commands read and write: features and calibrators, whole or not at all.

Features are one safetensors file, a folder (or file) of Parquet shards with the same columns, or class scores
of any framework as ``.npz`` or ``.csv``. A calibrator is a folder; beside the calibrator itself it holds
``origin.json``: which network and file it was fitted on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli.predictions import PREDICTION_FORMAT
from salgp.cli.targets import check_target

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.calibrators import Calibrator
    from salgp.features import Features
__all__ = [
    "FeatureFile",
    "check_classes",
    "check_network",
    "check_same_network",
    "first_rows",
    "is_large",
    "kind_of",
    "labels_of",
    "read_calibrator",
    "read_features",
    "read_labelled",
    "read_origin",
    "save_calibrator",
    "split_names",
    "write_metadata",
]

ORIGIN = "origin.json"
METADATA = "network.json"
"""Beside Parquet shards: what a safetensors file of features has in its header."""
LARGE = 200_000
"""Rows of feature stores beyond which a calibrator is fitted out of core."""
TABLES = (".npz", ".csv")
"""Files of class scores, see `salgp.cli.scores`."""


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """A features file: features, labels (or None) and its string metadata."""

    path: Path
    features: Features
    labels: Tensor | None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def classes(self) -> list[str] | None:
        """Class names, where the file has them."""
        from salgp.storage import reading

        names = self.metadata.get("classes")
        with reading(self.path, "features with a list of class names"):
            return None if names is None else [str(name) for name in list(json.loads(names))]


def read_features(path: Path) -> FeatureFile:
    """Features from a safetensors file, Parquet, or a table of class scores."""
    from salgp.features import load_features
    from salgp.storage import read_metadata

    kind = kind_of(path)
    if kind == "parquet":
        return _read_parquet(path)
    if path.suffix in TABLES and path.is_file():
        return _read_scores(path)
    if kind in ("calibrator", "prediction", "image folder"):
        raise ValueError(f"{path} is a {kind}, but features were expected here; are two arguments swapped?")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without Parquet shards; features are one .safetensors file, a folder of "
            f".parquet files, or class scores as .npz or .csv"
        )
    features, labels = load_features(path)
    return FeatureFile(path, features, labels, read_metadata(path))


def read_labelled(path: Path) -> tuple[FeatureFile, Tensor]:
    """Features that must have labels."""
    loaded = read_features(path)
    return loaded, labels_of(loaded)


def labels_of(loaded: FeatureFile) -> Tensor:
    """Its labels; refused where it has none."""
    if loaded.labels is None:
        raise ValueError(
            f"{loaded.path} has no labels, and this needs them; store them under 'labels' (extract "
            f"does where the data have them)"
        )
    return loaded.labels


def read_calibrator(folder: Path) -> Calibrator:
    """A fitted calibrator from its folder."""
    from salgp.calibrators import load_calibrator

    kind = kind_of(folder)
    if kind in ("features", "prediction", "parquet"):
        raise ValueError(
            f"{folder} holds {'features' if kind != 'prediction' else 'predictions'}, but a "
            f"calibrator was expected here; are two arguments swapped?"
        )
    if not folder.exists():
        raise FileNotFoundError(f"no such calibrator: {folder}; make one with salgp fit")
    return load_calibrator(folder)


def read_origin(folder: Path) -> dict[str, Any]:
    """Where a calibrator came from; empty if it was not made by the command line."""
    from salgp.storage import read_header

    return read_header(folder / ORIGIN, "salgp-origin", 1) if (folder / ORIGIN).is_file() else {}


def check_network(calibrator: Path, loaded: FeatureFile, any_network: bool) -> None:
    """Refuse features that are known to come from another network than the calibrator's."""
    origin = read_origin(calibrator)
    if not any_network:
        _check_weights(loaded, f"{calibrator} was fitted on", origin.get("network"))
    check_classes(origin.get("classes"), loaded, calibrator)


def check_same_network(given: FeatureFile, loaded: FeatureFile, any_network: bool) -> None:
    """Refuse features that are known to come from another network than ``given``."""
    if not any_network:
        _check_weights(loaded, str(given.path), given.metadata.get("network"))
    check_classes(given.classes, loaded, given.path)


def check_classes(expected: Sequence[str] | None, loaded: FeatureFile, of: Path) -> None:
    """Refuse class scores whose named columns stand for other classes, or in another order, than those of
    ``of``: a class is known by its number from then on.
    """
    theirs = loaded.classes
    if expected is None or theirs is None or list(expected) == theirs:
        return
    what = "in another order" if sorted(expected) == sorted(theirs) else "for other classes"
    raise ValueError(
        f"{loaded.path}: the class scores stand {what} ({', '.join(theirs[:3])}, ...) than in {of} "
        f"({', '.join(expected[:3])}, ...); write the same columns in the same order"
    )


def _check_weights(loaded: FeatureFile, other: str, mine: str | None) -> None:
    theirs = loaded.metadata.get("network")
    if mine and theirs and mine != theirs:
        raise ValueError(
            f"{loaded.path} was extracted from another network than {other} ({theirs[:8]} against "
            f"{mine[:8]}); extract it again with the same weights, or pass --any-network"
        )


def save_calibrator(
    folder: Path, calibrator: Calibrator, origin: Mapping[str, Any], force: bool, module: str | None = None
) -> Path:
    """Write the calibrator's folder, all of it or nothing.

    Args:
        folder: target.
        calibrator: fitted.
        origin: where it came from.
        force: replace an existing folder.
        module: what the features say of their network, so that `salgp.load` can put both together.
    """
    from salgp.calibrators.saving import save_folder, write_calibrator
    from salgp.network.keeping import FORMAT
    from salgp.storage import write_header

    version, described = (0, {}) if module is None else _described(module, origin)

    def write(part: Path) -> None:
        write_calibrator(calibrator, part)
        write_header(part / ORIGIN, "salgp-origin", 1, origin)
        if module is not None:
            write_header(part / "module.json", FORMAT, version, _only_needed(described, calibrator))

    check_target(folder, force)
    return save_folder(folder, write)


def write_metadata(folder: Path, metadata: Mapping[str, str]) -> Path:
    """Keep beside Parquet shards what a safetensors file has in its header."""
    from salgp.storage import write_header

    return write_header(folder / METADATA, "salgp-network", 1, metadata)


def kind_of(path: Path) -> str:
    """What a path holds: ``features``, ``prediction``, ``calibrator``, ``parquet``, ``safetensors``, ``image
    folder`` or ``unknown``.
    """
    from salgp.storage import read_metadata

    if path.is_dir():
        if (path / "calibrator.json").is_file():
            return "calibrator"
        return "parquet" if any(path.glob("*.parquet")) else "unknown"
    if path.suffix == ".parquet":
        return "parquet"
    try:
        metadata = read_metadata(path)
    except (OSError, ValueError):
        return "unknown"
    return {"salgp-features": "features", PREDICTION_FORMAT: "prediction"}.get(
        metadata.get("format", ""), "safetensors"
    )


def split_names(text: str | None) -> list[str] | None:
    """Comma-separated names; None stays None.

    Example:
        >>> split_names("a, b")
        ['a', 'b']
    """
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _described(module: str, origin: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """What features say of their network: the version it is written in, and the rest."""
    from salgp.network.keeping import FORMAT, FORMAT_VERSION
    from salgp.storage import check_kind

    said: dict[str, Any] = json.loads(module)
    check_kind(origin.get("features", "the features"), said, FORMAT, FORMAT_VERSION)
    stated = ("format", "format_version")
    return int(said["format_version"]), {key: value for key, value in said.items() if key not in stated}


def _only_needed(module: dict[str, Any], calibrator: Calibrator) -> dict[str, Any]:
    """Only the taps this calibrator reads."""
    taps = [
        tap
        for tap in module.get("taps", [])
        if calibrator.needs_layers and tap["name"] in calibrator.layer_widths_
    ]
    return module | {"taps": taps}


def is_large(*folders: Path | None) -> bool:
    """Are all of these feature stores, and do they have more than `LARGE` rows together?"""
    from salgp.store.store import FeatureStore

    given = [folder for folder in folders if folder is not None]
    if not all((folder / "manifest.json").is_file() for folder in given):
        return False
    return sum(len(FeatureStore(folder)) for folder in given) > LARGE


def first_rows(folder: Path) -> tuple[FeatureFile, int]:
    """The first shard of a feature store, and the number of rows in all."""
    from salgp.store.store import FeatureStore

    store = FeatureStore(folder)
    return FeatureFile(folder, *store.shard(0), _beside(folder)), len(store)


def _read_parquet(path: Path) -> FeatureFile:
    if (path / "manifest.json").is_file():
        from salgp.store.store import FeatureStore

        return FeatureFile(path, *FeatureStore(path).to_features(), _beside(path))
    return _read_scores(path)


def _read_scores(path: Path) -> FeatureFile:
    from salgp.cli.scores import read_scores

    features, labels, classes, unused = read_scores(path)
    metadata = {} if classes is None else {"classes": json.dumps(classes)}
    return FeatureFile(path, features, labels, metadata | ({"unused": ", ".join(unused)} if unused else {}))


def _beside(folder: Path) -> dict[str, str]:
    from salgp.storage import read_header

    return read_header(folder / METADATA, "salgp-network", 1) if (folder / METADATA).is_file() else {}
