"""``salgp fit``: a calibrator from labelled features, in memory or out of core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, command, pasteable
from salgp.cli.preflight import check_inputs, check_target
from salgp.cli.settings import settings_of

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.calibrators import Calibrator
    from salgp.features import Features

__all__ = ["fitting_rows", "notes_on", "register"]

LayerSubset = Annotated[
    str | None, typer.Option("--layers", help="Use only these layers, separated by commas.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An argument of the method; may be repeated."),
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
    setting: Settings = None,
    probs: options.Probs = None,
    any_network: options.AnyNetwork = False,
    force: options.Force = False,
) -> None:
    """Fit a calibrator on labelled features, or on any framework's logits or probabilities, and save it.

    Class scores come as .npz, .csv or .parquet: arrays 'logits' or 'probs', 'labels', and embeddings as
    'layers.NAME'; in a table one column per class, e.g. probs.cat, probs.dog, label, or named by --probs.
    """
    check_inputs(features, reference)
    check_target(out, force, features, reference)
    options.check_method(method)
    _check_place(out)
    from salgp.calibrators.registry import method_for

    def made(has_layers: bool) -> Calibrator:
        calibrator = method_for(method, has_layers)
        return calibrator.set_params(**settings_of(calibrator, setting or []))

    if layers is None and files.is_large(features, reference):
        _fit_large(console, features, out, made(True), reference, any_network, force)
        return
    loaded, labels = files.read_labelled(features, options.split_names(probs))
    chosen = options.split_names(layers)
    data = loaded.features if chosen is None else loaded.features.select(chosen)
    calibrator = made(bool(data.layers))
    known = files.read_reference(console, reference, loaded, data, any_network)
    data, labels = fitting_rows(calibrator, data, labels)
    for note in notes_on(calibrator, loaded, data, known is not None):
        console.say(f"note: {note}")
    counted = _counted(data)
    with console.progress(f"fitting {calibrator.name} on {counted}"):
        calibrator.fit(data, labels, known)
    files.save_calibrator(out, calibrator, loaded, len(data), force)
    columns = [] if probs is None else ["--probs", probs]
    following = pasteable("salgp", "evaluate", out, f"TEST{features.suffix}", *columns)
    _finish(console, calibrator, out, len(data), f"{counted}; saved in {out}\nnext: {following}")


def _fit_large(
    console: Console,
    features: Path,
    out: Path,
    calibrator: Calibrator,
    reference: Path | None,
    any_network: bool,
    force: bool,
) -> None:
    """Fit out of core to a folder of shards."""
    from salgp.store import fit_store

    loaded, n = files.first_rows(features)
    if reference is not None:
        files.check_same_network(loaded, files.first_rows(reference)[0], any_network)
    with console.progress(f"fitting {calibrator.name} on {n:,} samples, out of core"):
        fit_store(calibrator, features, reference=reference)
    files.save_calibrator(out, calibrator, loaded, n, force)
    _finish(console, calibrator, out, n, f"{n:,} samples, out of core; saved in {out}")


def _finish(console: Console, calibrator: Calibrator, out: Path, n: int, shown: str) -> None:
    told: dict[str, Any] = {"calibrator": str(out), "method": calibrator.name, "n": n}
    told["layers"] = list(calibrator.layer_widths_)
    console.finish(told, f"fitted {calibrator.name} on {shown}")


def _check_place(folder: Path) -> None:
    """Refuse, before any work is done, to put a calibrator where something else is."""
    if folder.exists():
        from salgp.calibrators.base import check_place

        check_place(folder)


def fitting_rows(calibrator: Calibrator, features: Features, labels: Tensor) -> tuple[Features, Tensor]:
    """What a method learns from: augmented samples only where it uses them, else the original samples."""
    from salgp.calibrators.rows import without_augmented

    if calibrator.uses_augmented or features.groups is None:
        return features, labels
    plain, rows = without_augmented(features)
    return plain, labels[rows]


def notes_on(calibrator: Calibrator, loaded: files.FeatureFile, data: Features, reference: bool) -> list[str]:
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
