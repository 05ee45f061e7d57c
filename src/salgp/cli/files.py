"""What commands read and write: features with what they say of their network, and calibrators.

Features are one safetensors file, a folder (or file) of Parquet shards with the same columns, or class scores
of any framework as ``.npz`` or ``.csv``. A calibrator is a folder; its part ``origin`` tells which network
and file it was fitted on, and what the class scores were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli.console import Console
from salgp.cli.preflight import CALIBRATOR, check_target

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.calibrators import Calibrator
    from salgp.features import Features

__all__ = [
    "PREDICTION_FORMAT",
    "FeatureFile",
    "check_same_network",
    "check_source",
    "first_rows",
    "is_large",
    "kind_of",
    "labels_of",
    "note_shared",
    "origin_of",
    "of_network",
    "original_samples",
    "read_calibrator",
    "read_features",
    "read_labelled",
    "read_origin",
    "read_reference",
    "save_calibrator",
    "write_metadata",
]

METADATA = "network.json"
"""Beside Parquet shards: what a safetensors file of features has in its header."""
LARGE = 200_000
"""Rows of feature stores beyond which a calibrator is fitted out of core."""
TABLES = (".npz", ".csv")
"""Files of class scores, see `salgp.io.class_scores`."""
PREDICTION_FORMAT = "salgp-prediction"


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
        from salgp.io import FormatError, reading

        if "classes" not in self.metadata:
            return None
        with reading(self.path, "features with a list of class names"):
            names = [str(name) for name in list(json.loads(self.metadata["classes"]))]
            for name in names:
                if any("\ud800" <= c <= "\udfff" for c in name):
                    raise FormatError(f"{self.path}: the class name {name!r} is not text in UTF-8")
        return names

    @property
    def origin(self) -> dict[str, Any]:
        """What a calibrator remembers of the features it was fitted on."""
        return origin_of(self.path.name, len(self.features), self.metadata, self.classes)


def origin_of(name: str, n: int, metadata: Mapping[str, str], classes: list[str] | None) -> dict[str, Any]:
    """What a calibrator remembers of the data it was fitted on.

    Args:
        name: of the data.
        n: rows.
        metadata: what they say of their network.
        classes: names of the classes.
    """
    import salgp

    told = {"features": name, "n": n, "salgp": salgp.__version__, "network": metadata.get("network")}
    known = {"output": metadata.get("output"), "classes": classes}
    return told | {key: value for key, value in known.items() if value is not None}


def read_features(path: Path, probs: Sequence[str] | None = None) -> FeatureFile:
    """Features from a safetensors file, Parquet, or a table of class scores.

    Args:
        path: file or folder.
        probs: columns of a table that hold the probabilities of the classes.
    """
    kind = kind_of(path)
    if kind == "parquet" and (path / "manifest.json").is_file():
        from salgp.store.store import FeatureStore

        return FeatureFile(path, *FeatureStore(path).to_features(), _beside(path))
    if kind == "parquet" or path.suffix in TABLES:
        return _read_scores(path, probs)
    if kind in ("calibrator", "prediction", "image folder"):
        raise ValueError(f"{path} is a {kind}, but features were expected here; are two arguments swapped?")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without Parquet shards; features are one .safetensors file, a folder of "
            f".parquet files, or class scores as .npz or .csv"
        )
    from salgp.features import load_features
    from salgp.io import read_tensors

    return FeatureFile(path, *load_features(path), read_tensors(path)[1])


def _read_scores(path: Path, probs: Sequence[str] | None) -> FeatureFile:
    """Class scores as features; with their meaning, class names and unused columns as metadata."""
    from salgp.features import Features
    from salgp.io import reading
    from salgp.io.class_scores import read_scores
    from salgp.labels import as_labels

    scores = read_scores(path, probs)
    make = Features.from_logits if scores.output == "logits" else Features.from_probs
    with reading(path, "class scores"):
        features = make(scores.values, scores.layers)
        labels = scores.labels
        y = None if labels is None else as_labels(labels, len(features), features.n_classes)
    metadata = {"output": scores.output}
    metadata |= {} if scores.classes is None else {"classes": json.dumps(scores.classes)}
    metadata |= {"unused": ", ".join(scores.unused)} if scores.unused else {}
    return FeatureFile(path, features, y, metadata)


def read_labelled(path: Path, probs: Sequence[str] | None = None) -> tuple[FeatureFile, Tensor]:
    """Features that must have labels."""
    loaded = read_features(path, probs)
    return loaded, labels_of(loaded)


def labels_of(loaded: FeatureFile) -> Tensor:
    """Its labels; refused where it has none."""
    if loaded.labels is None:
        raise ValueError(
            f"{loaded.path} has no labels, and this needs them; store them under 'labels' (extract "
            f"does where the data have them)"
        )
    return loaded.labels


def original_samples(console: Console, loaded: FeatureFile) -> FeatureFile:
    """The samples themselves; augmented ones, which are there to be fitted on, are left out."""
    from salgp.calibrators.rows import without_augmented

    plain, rows = without_augmented(loaded.features)
    augmented = len(loaded.features) - len(plain)
    if augmented:
        console.say(
            f"note: {loaded.path.name} holds {augmented:,} augmented samples; they are left out, and its "
            f"{len(plain):,} samples count"
        )
    return replace(loaded, features=plain, labels=None if loaded.labels is None else loaded.labels[rows])


def read_reference(
    console: Console, path: Path | None, given: FeatureFile, data: Features, any_network: bool
) -> tuple[Features, Tensor] | None:
    """Features and labels of the training data, with the layers of ``data``, which came from ``given``."""
    if path is None:
        return None
    loaded = original_samples(console, read_labelled(path)[0])
    check_same_network(given, loaded, any_network)
    known = loaded.features.select(data.layer_names)
    return of_network(known, any_network), labels_of(loaded)


def of_network(features: Features, any_network: bool) -> Features:
    """The features, bound to their network or, where the user says so, to none."""
    return replace(features, network=None) if any_network else features


def note_shared(console: Console, test: tuple[str, Features], others: Mapping[str, Features]) -> None:
    """Say that test samples are among those that a calibrator learns from: it looks better than it is.

    Args:
        console: to say it.
        test: name and features of the test data.
        others: features it is fitted on, by the names of their options.
    """
    from salgp.calibrators.checks import SHARED, rows_in
    from salgp.calibrators.rows import originals

    name, tested = test
    for other, known in others.items():
        shared = rows_in(tested.logits, known[originals(known)[0]].logits)
        if shared > SHARED * len(tested):
            console.say(
                f"note: {shared:,} of {len(tested):,} samples of {name} are in {other} too: scores on them "
                f"are too good; keep the sets apart (where a table has few values, equal rows are harmless)"
            )


def read_calibrator(folder: Path, any_network: bool = False) -> Calibrator:
    """A fitted calibrator from its folder, for features of its own network, or of any."""
    from salgp.calibrators import load_calibrator

    kind = kind_of(folder)
    if kind in ("features", "prediction", "parquet"):
        holds = "predictions" if kind == "prediction" else "features"
        raise ValueError(
            f"{folder} holds {holds}, but a calibrator was expected here; are two arguments swapped?"
        )
    if not folder.exists():
        raise FileNotFoundError(f"no such calibrator: {folder}; make one with salgp fit")
    calibrator = load_calibrator(folder)
    if any_network:
        calibrator.network_ = None
    return calibrator


def read_origin(folder: Path) -> dict[str, Any]:
    """Where a calibrator came from; empty if it was not made by the command line."""
    from salgp.calibrators.loading import read_parts

    return dict(read_parts(folder).get("origin", {}))


def check_source(calibrator: Path, loaded: FeatureFile, any_network: bool) -> None:
    """Refuse features known to come from another network than the calibrator's, or of another meaning."""
    _check_origin(f"{calibrator} was fitted on", read_origin(calibrator), loaded, any_network)


def check_same_network(given: FeatureFile, loaded: FeatureFile, any_network: bool) -> None:
    """Refuse features known to come from another network than ``given``, or of another meaning."""
    _check_origin(str(given.path), given.origin, loaded, any_network)


def _check_origin(of: str, origin: Mapping[str, Any], loaded: FeatureFile, any_network: bool) -> None:
    found = loaded.origin
    mine, theirs = origin.get("network"), found["network"]
    if mine and theirs and mine != theirs and not any_network:
        raise ValueError(
            f"{loaded.path} was extracted from another network than {of} ({theirs[:8]} against {mine[:8]}); "
            f"extract it again with the same weights, or pass --any-network"
        )
    meant, means = origin.get("output"), found.get("output")
    if meant and means and meant != means:
        raise ValueError(
            f"{loaded.path}: the class scores were read as {means}, those of {of} as {meant}; read both "
            f"alike: salgp extract --output, or the columns' names"
        )
    expected, classes = origin.get("classes"), found.get("classes")
    if expected and classes and list(expected) != list(classes):
        what = "in another order" if sorted(expected) == sorted(classes) else "for other classes"
        raise ValueError(
            f"{loaded.path}: the class scores stand {what} ({', '.join(classes[:3])}, ...) than in {of} "
            f"({', '.join(expected[:3])}, ...); write the same columns in the same order"
        )


def save_calibrator(folder: Path, calibrator: Calibrator, source: FeatureFile, n: int, force: bool) -> None:
    """Write the calibrator's folder.

    Args:
        folder: target.
        calibrator: fitted.
        source: the features it was fitted on; what they say of their network is kept, so that `salgp.load`
            can put both together.
        n: rows it was fitted on.
        force: replace an existing folder.
    """
    from salgp.calibrators.base import save_calibrator
    from salgp.io import check_kind
    from salgp.network.reader import FORMAT, FORMAT_VERSION

    parts: dict[str, Any] = {"origin": source.origin | {"n": n}}
    if "module" in source.metadata:
        network = json.loads(source.metadata["module"])
        check_kind(source.path, network, FORMAT, FORMAT_VERSION)
        needed = calibrator.layer_widths_ if calibrator.needs_layers else ()
        network["taps"] = [tap for tap in network.get("taps") or () if tap["name"] in needed]
        parts["network"] = network
    check_target(folder, force)
    save_calibrator(folder, calibrator, **parts)


def write_metadata(folder: Path, metadata: Mapping[str, str]) -> Path:
    """Keep beside Parquet shards what a safetensors file has in its header."""
    from salgp.io import write_header

    return write_header(folder / METADATA, "salgp-network", 1, metadata)


def kind_of(path: Path) -> str:
    """What a path holds: ``features``, ``prediction``, ``calibrator``, ``parquet``, ``safetensors`` or
    ``unknown``.
    """
    from salgp.io import read_tensors

    if path.is_dir():
        if (path / CALIBRATOR).is_file():
            return "calibrator"
        return "parquet" if any(path.glob("*.parquet")) else "unknown"
    if path.suffix == ".parquet":
        return "parquet"
    try:
        _, metadata = read_tensors(path)
    except (OSError, ValueError):
        return "unknown"
    return {"salgp-features": "features", PREDICTION_FORMAT: "prediction"}.get(
        metadata.get("format", ""), "safetensors"
    )


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


def _beside(folder: Path) -> dict[str, str]:
    from salgp.io import read_header

    return read_header(folder / METADATA, "salgp-network", 1) if (folder / METADATA).is_file() else {}
