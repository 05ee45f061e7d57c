"""``salgp fit``: a calibrator from labelled features, in memory or out of core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import salgp
from salgp.calibrators.registry import method_for
from salgp.cli import options
from salgp.cli.checks import CALIBRATOR, SHARDS, check_apart, check_inputs, check_target
from salgp.cli.console import Console, pasteable
from salgp.cli.inputs import check_alike, read_alike

if TYPE_CHECKING:
    from torch import Tensor

    from salgp import Features
    from salgp.calibrators import Calibrator
    from salgp.files import FeatureFile

    Labelled = tuple[Features, Tensor]
    Fitted = tuple[Calibrator, FeatureFile, int, str]
    """A fitted calibrator, what it was fitted on, and its rows, as a number and in words."""

__all__ = []

LARGE = 200_000
"""Rows of feature stores beyond which a calibrator is fitted out of core."""
LayerSubset = Annotated[str | None, Option(help="Use only these layers, separated by commas.")]


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

    Example:
        salgp fit calibration.safetensors -o cal
        salgp fit scores.csv --probs ant,bee -o cal
    """
    check_inputs(features, reference)
    check_apart(out, features, reference)
    check_target(out / CALIBRATOR, "calibrator", force)
    options.check_method(method)
    from salgp.calibrators.base import check_place

    check_place(out)
    if layers is None and _is_large(features, reference):
        found = _fit_large(console, method, features, reference)
    else:
        loaded = salgp.files.read_features(features, options.split_names(probs))
        found = _fit(console, method, loaded, reference, options.split_names(layers))
    calibrator, source, n, counted = found
    _save(out, calibrator, source, n)
    columns = [] if probs is None else ["--probs", probs]
    following = pasteable("salgp", "evaluate", out, f"TEST{features.suffix}", *columns)
    told = {"calibrator": str(out), "method": calibrator.name, "n": n}
    told["layers"] = list(calibrator.layer_widths_)
    console.finish(told, f"fitted {calibrator.name} on {counted}; saved in {out}\nnext: {following}")


def _fit(
    console: Console, method: str | None, loaded: FeatureFile, reference: Path | None, layers: Any
) -> Fitted:
    """Fit in memory; notes say what is odd about the data."""
    data = loaded.features if layers is None else loaded.features.select(layers)
    calibrator = method_for(method, bool(data.layers))
    known = read_reference(console, reference, loaded, data)
    data, labels = fitting_rows(calibrator, data, loaded.known_labels)
    for note in notes_on(calibrator, loaded, data, known is not None):
        console.say(f"note: {note}")
    n = len(data.originals[0])
    more = f" and {len(data) - n:,} augmented ones" if len(data) > n else ""
    counted = f"{n:,} samples{more}"
    with console.progress(f"fitting {calibrator.name} on {counted}"):
        return calibrator.fit(data, labels, known), loaded, len(data), counted


def _is_large(*folders: Path | None) -> bool:
    """Are all of these feature stores, and do they have more than `LARGE` rows together?"""
    given = list(filter(None, folders))
    stores = all((folder / SHARDS).is_file() for folder in given)
    return stores and sum(map(len, map(salgp.store.FeatureStore, given))) > LARGE


def _fit_large(console: Console, method: str | None, features: Path, reference: Path | None) -> Fitted:
    """Fit out of core to a folder of shards."""
    calibrator = method_for(method)
    loaded, n = salgp.files.first_shard(features)
    if reference is not None:
        check_alike(features, loaded.origin, salgp.files.first_shard(reference)[0])
    counted = f"{n:,} samples, out of core"
    with console.progress(f"fitting {calibrator.name} on {counted}"):
        return salgp.store.fit_store(calibrator, features, reference=reference), loaded, n, counted


def _save(out: Path, calibrator: Calibrator, source: FeatureFile, n: int) -> None:
    """Save the calibrator with the description of the network in its data, so that `salgp.load` can put both
    together.
    """
    from salgp.calibrators.base import save_calibrator

    known = {"network": _network(calibrator, source)} if "module" in source.metadata else {}
    save_calibrator(out, calibrator, origin=source.origin | {"n": n}, **known)


def _described_network(source: FeatureFile) -> dict[str, Any]:
    from salgp.io import check_kind
    from salgp.network.reader import FORMAT, FORMAT_VERSION

    network: dict[str, Any] = json.loads(source.metadata["module"])
    check_kind(source.path, network, FORMAT, FORMAT_VERSION)
    return network


def _network(calibrator: Calibrator, source: FeatureFile) -> dict[str, Any]:
    """Description of the network, with the layers that the calibrator needs."""
    network = _described_network(source)
    needed = calibrator.layer_widths_ if calibrator.needs_layers else ()
    network["taps"] = [tap for tap in network.get("taps") or () if tap["name"] in needed]
    return network


def read_reference(console: Console, path: Path | None, like: FeatureFile, data: Features) -> Labelled | None:
    """Features and labels of the training data, with the layers of ``data``, which came from ``like``."""
    if path is None:
        return None
    loaded = read_alike(console, path, None, like)
    return loaded.features.select(data.layer_names), loaded.known_labels


def fitting_rows(calibrator: Calibrator, features: Features, labels: Tensor) -> Labelled:
    """What a method learns from: augmented samples only where it uses them, else the original samples."""
    if calibrator.uses_augmented or features.groups is None:
        return features, labels
    plain, rows = features.without_augmented()
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
        better = "features of the training data serve better"
        notes.append(f"no --reference given: the calibration samples are compared with each other; {better}")
    return notes
