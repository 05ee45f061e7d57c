"""``salgp extract``: run the user's network over the user's data and keep what a calibrator needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import salgp
from salgp.cli import options
from salgp.cli.checks import check_apart, check_inputs, check_target
from salgp.cli.console import Console, UsageError
from salgp.cli.inputs import check_numbering, note_guessing
from salgp.cli.options import DataOptions, NetworkOptions, ReadingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.io.loader import FileLoader

__all__ = []

Data = Annotated[
    Path,
    Argument(
        metavar="DATA", help=".npz, .safetensors, .parquet, .csv, or a folder of images or Parquet shards."
    ),
]
Perturbed = Annotated[bool, Option("--perturb", help="Add augmented samples, for use under shift.")]


def extract(
    console: Console,
    *,
    network: NetworkOptions,
    data: Data,
    out: options.Out,
    perturb: Perturbed = False,
    reading: ReadingOptions,
    how: DataOptions,
    force: options.Force = False,
) -> None:
    """Run a network over data and write its logits and pooled layers, with the labels where there are some.

    A name ending in .safetensors makes one file; any other makes a folder of Parquet shards, of any size,
    which a stopped run continues.

    Example:
        salgp extract my_network.py:make data.npz --weights net.pt -o calibration.safetensors
    """
    check_inputs(data, network.weights)
    _check_out(out, perturb, force, data, network.weights)
    loader, reader = how.open(network.model, data), reading.reader()
    model = network.open(console)
    if out.suffix == ".safetensors":
        found = _write_file(console, model, loader, reader, out, how, perturb)
    else:
        found = _write_store(console, model, loader, reader, out, how)
    told: dict[str, Any] = {"out": str(out), "labelled": loader.labels is not None, **found}
    console.finish(told, _in_words(loader.n, **told))


def _in_words(
    samples: int, out: str, labelled: bool, n: int, layers: Mapping[str, int], accuracy: float | None
) -> str:
    counted = f"{samples:,} samples {'with' if labelled else 'without'} labels"
    augmented = f", and {n - samples:,} augmented ones," if n > samples else ""
    right = "" if accuracy is None else f"; the network is right on {accuracy:.1%}"
    shown = ", ".join(f"{name} ({width})" for name, width in layers.items())
    return f"{counted}{augmented} in {out}{right}\nlayers: {shown or 'none'}"


def _check_out(out: Path, perturb: bool, force: bool, *inputs: Path | None) -> None:
    if out.suffix == ".safetensors":
        check_target(out, "features", force, *inputs)
        return
    check_apart(out, *inputs)
    if perturb:
        raise UsageError("--perturb writes one file; give --out a name that ends in .safetensors")
    if out.exists() and not out.is_dir():
        advice = "choose another name, or one that ends in .safetensors for a single file"
        raise FileExistsError(f"{out} is no folder, and one of Parquet shards is to be written; {advice}")


def _write_file(
    console: Console, model: Any, loader: FileLoader, reader: Any, out: Path, how: DataOptions, perturb: bool
) -> dict[str, Any]:
    """Write one file of features; give their number, layers and the network's accuracy."""
    from salgp.logits import check_finite
    from salgp.network.extract import read_calibration_data
    from salgp.network.reader import collect, read_batches

    labels: Tensor | None
    progress = console.shows_progress
    if perturb:
        reader = replace(reader, tokenizer=loader.tokenizer)
        made = read_calibration_data(model, loader, reader, "auto", progress=progress)
        reader, features, labels = made.reader, made.features, made.labels
    else:
        reader, features, labels = collect(read_batches(model, loader, reader, progress=progress))
        check_finite(features.logits)
    check_numbering(how, loader, features.n_classes)
    features.save(out, labels, salgp.files.network_metadata(model, reader, loader.classes))
    accuracy = note_guessing(console, features, labels)
    return {"n": len(features), "layers": features.widths, "accuracy": accuracy}


def _write_store(
    console: Console, model: Any, loader: FileLoader, reader: Any, out: Path, how: DataOptions
) -> dict[str, Any]:
    """Write a folder of shards; give the number of samples and the layers."""
    from salgp.network.reader import collect, read_batches

    first = read_batches(model, itertools.islice(loader, 1), reader, progress=False)
    resolved, features, _ = collect(first)  # for the description of the network in the store
    check_numbering(how, loader, features.n_classes)
    progress = console.shows_progress
    store = salgp.store.extract_to_store(model, loader, out, reader=reader, progress=progress)
    salgp.files.write_metadata(out, salgp.files.network_metadata(model, resolved, loader.classes))
    return {"n": len(store), "layers": store.widths, "accuracy": None}
