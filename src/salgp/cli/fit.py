"""``salgp fit``: a calibrator from labelled features, in memory or out of core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import options
from salgp.cli.console import Console, command, pasteable
from salgp.cli.predictions import check_alike, read_samples
from salgp.cli.preflight import CALIBRATOR, check_apart, check_inputs, check_target

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.calibrators import Calibrator
    from salgp.features import Features
    from salgp.files import FeatureFile

__all__ = ["fitting_rows", "notes_on", "read_reference", "register"]

LARGE = 200_000
"""Rows of feature stores beyond which a calibrator is fitted out of core."""
LayerSubset = Annotated[
    str | None, typer.Option("--layers", help="Use only these layers, separated by commas.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    scores = "salgp fit scores.csv --probs ant,bee -o cal"
    command(app, "fit", "salgp fit calibration.safetensors -o cal", scores)(fit)


def fit(
    console: Console,
    features: options.FeaturesFile,
    out: options.Out,
    method: options.Method = None,
    reference: options.Reference = None,
    layers: LayerSubset = None,
    probs: options.Probs = None,
    force: options.Force = False,
) -> None:
    """Fit a calibrator on labelled features, or on any framework's logits or probabilities, and save it.

    Class scores come as .npz, .csv or .parquet: arrays 'logits' or 'probs', 'labels', and embeddings as
    'layers.NAME'; in a table one column per class, e.g. probs.cat, probs.dog, label, or named by --probs.
    """
    check_inputs(features, reference)
    check_apart(out, features, reference)
    check_target(out / CALIBRATOR, "calibrator", force)
    options.check_method(method)
    from salgp.calibrators.base import check_place
    from salgp.calibrators.registry import method_for
    from salgp.files import read_features

    check_place(out)
    if layers is None and _is_large(features, reference):
        _fit_large(console, method_for(method), features, reference, out)
        return
    loaded = read_features(features, options.split_names(probs))
    chosen = options.split_names(layers)
    data = loaded.features if chosen is None else loaded.features.select(chosen)
    calibrator = method_for(method, bool(data.layers))
    known = read_reference(console, reference, loaded, data)
    data, labels = fitting_rows(calibrator, data, loaded.known_labels)
    for note in notes_on(calibrator, loaded, data, known is not None):
        console.say(f"note: {note}")
    counted = _counted(data)
    with console.progress(f"fitting {calibrator.name} on {counted}"):
        calibrator.fit(data, labels, known)
    columns = [] if probs is None else ["--probs", probs]
    following = pasteable("salgp", "evaluate", out, f"TEST{features.suffix}", *columns)
    _finish(console, calibrator, loaded, len(data), out, f"{counted}; saved in {out}\nnext: {following}")


def _is_large(*folders: Path | None) -> bool:
    """Are all of these feature stores, and do they have more than `LARGE` rows together?"""
    from salgp.store.store import FeatureStore

    given = [folder for folder in folders if folder is not None]
    if not all((folder / "manifest.json").is_file() for folder in given):
        return False
    return sum(len(FeatureStore(folder)) for folder in given) > LARGE


def _fit_large(
    console: Console, calibrator: Calibrator, features: Path, reference: Path | None, out: Path
) -> None:
    """Fit out of core to a folder of shards."""
    from salgp.files import first_shard
    from salgp.store import fit_store

    loaded, n = first_shard(features)
    if reference is not None:
        check_alike(str(features), loaded.origin, first_shard(reference)[0])
    with console.progress(f"fitting {calibrator.name} on {n:,} samples, out of core"):
        fit_store(calibrator, features, reference=reference)
    _finish(console, calibrator, loaded, n, out, f"{n:,} samples, out of core; saved in {out}")


def _finish(
    console: Console, calibrator: Calibrator, source: FeatureFile, n: int, out: Path, shown: str
) -> None:
    """Save the calibrator with what its data say of their network, so that `salgp.load` can put both
    together.
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
    save_calibrator(out, calibrator, **parts)
    told = {"calibrator": str(out), "method": calibrator.name, "n": n}
    layers = {"layers": list(calibrator.layer_widths_)}
    console.finish(told | layers, f"fitted {calibrator.name} on {shown}")


def read_reference(
    console: Console, path: Path | None, given: FeatureFile, data: Features
) -> tuple[Features, Tensor] | None:
    """Features and labels of the training data, with the layers of ``data``, which came from ``given``."""
    if path is None:
        return None
    loaded = read_samples(console, path, labelled=True)
    check_alike(str(given.path), given.origin, loaded)
    return loaded.features.select(data.layer_names), loaded.known_labels


def fitting_rows(calibrator: Calibrator, features: Features, labels: Tensor) -> tuple[Features, Tensor]:
    """What a method learns from: augmented samples only where it uses them, else the original samples."""
    from salgp.calibrators.rows import without_augmented

    if calibrator.uses_augmented or features.groups is None:
        return features, labels
    plain, rows = without_augmented(features)
    return plain, labels[rows]


def notes_on(calibrator: Calibrator, loaded: FeatureFile, data: Features, reference: bool) -> list[str]:
    """What the user should know about the data a calibrator is fitted on."""
    notes = []
    if loaded.metadata.get("unused"):
        notes.append(f"columns not used: {loaded.metadata['unused']}")
    if calibrator.uses_augmented and data.groups is None:
        from_network = loaded.metadata.get("network") is not None
        how = "salgp extract --perturb makes some" if from_network else "expect it to hold for such data only"
        notes.append(f"no augmented samples in {loaded.path.name}: nothing is learned about shift; {how}")
    if calibrator.uses_reference and not reference:
        notes.append(
            "no --reference given: the calibration samples are compared with each other; features of the "
            "training data serve better"
        )
    return notes


def _counted(features: Features) -> str:
    from salgp.calibrators.rows import originals

    n = len(originals(features)[0])
    augmented = f" and {len(features) - n:,} augmented ones" if len(features) > n else ""
    return f"{n:,} samples{augmented}"
