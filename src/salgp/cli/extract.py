"""``salgp extract``: run the user's network over the user's data and keep what a calibrator needs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from salgp.cli import options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.datasets import check_numbering, note_guessing
from salgp.cli.options import DataOptions, NetworkOptions, ReadingOptions
from salgp.cli.preflight import check_apart, check_inputs, check_target

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.features import Features
    from salgp.io.loader import FileLoader
    from salgp.network.reader import Reader
    from salgp.store import FeatureStore

__all__ = ["register"]

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help=".npz, .safetensors, .parquet, .csv, or a folder of images or Parquet shards.",
    ),
]
Perturbed = Annotated[
    bool, typer.Option("--perturb", help="Add augmented samples: calibration data for use under shift.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    line = "salgp extract my_network.py:make data.npz --weights net.pt -o calibration.safetensors"
    command(app, "extract", line)(extract)


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
    """
    check_inputs(data, network.weights)
    one_file = out.suffix == ".safetensors"
    _check_out(out, one_file, perturb, force, data, network.weights)
    loader, reader = how.open(network.model, data), reading.reader()
    model = network.open(console)
    accuracy = None
    if one_file:
        reader, features, labels = _read(console, model, loader, reader, perturb)
        check_numbering(how, loader, features.n_classes)
        _save(model, reader, loader, features, labels, out)
        accuracy = note_guessing(console, features, labels)
        n, widths = len(features), features.widths
    else:
        store = _to_store(console, model, loader, reader, out, how)
        n, widths = len(store), store.widths
    labelled = loader.labels is not None
    right = "" if accuracy is None else f"; the network is right on {accuracy:.1%}"
    shown = ", ".join(f"{name} ({width})" for name, width in widths.items())
    samples = f"{loader.n:,} samples {'with' if labelled else 'without'} labels"
    augmented = f", and {n - loader.n:,} augmented ones," if n > loader.n else ""
    console.finish(
        {"out": str(out), "n": n, "layers": widths, "labelled": labelled, "accuracy": accuracy},
        f"{samples}{augmented} in {out}{right}\nlayers: {shown or 'none'}",
    )


def _check_out(out: Path, one_file: bool, perturb: bool, force: bool, *inputs: Path | None) -> None:
    if one_file:
        check_target(out, "features", force, *inputs)
        return
    check_apart(out, *inputs)
    if perturb:
        raise UsageError("--perturb writes one file; give --out a name that ends in .safetensors")
    if out.exists() and not out.is_dir():
        raise FileExistsError(
            f"{out} is no folder, and one of Parquet shards is to be written; choose another name, or one "
            f"that ends in .safetensors for a single file"
        )


def _read(
    console: Console, model: nn.Module, loader: FileLoader, reader: Reader, perturb: bool
) -> tuple[Reader, Features, Tensor | None]:
    """The resolved reader, features and labels."""
    from salgp.logits import check_finite
    from salgp.network.extract import read_calibration_data
    from salgp.network.reader import collect, read_batches

    progress = console.shows_progress
    if perturb:
        how = {"progress": progress, "tokenizer": loader.tokenizer}
        made = read_calibration_data(model, loader, reader, "auto", **how)
        return made.reader, made.features, made.labels
    found = collect(read_batches(model, loader, reader, progress=progress))
    check_finite(found[1].logits)
    return found


def _save(
    model: nn.Module, reader: Reader, loader: FileLoader, features: Features, labels: Tensor | None, out: Path
) -> None:
    from salgp.files import network_metadata

    features.save(out, labels, network_metadata(model, reader, loader.classes))


def _to_store(
    console: Console, model: nn.Module, loader: FileLoader, reader: Reader, out: Path, how: DataOptions
) -> FeatureStore:
    from salgp.files import network_metadata, write_metadata
    from salgp.network.reader import collect, read_batches
    from salgp.store import extract_to_store

    first = read_batches(model, itertools.islice(loader, 1), reader, progress=False)
    resolved, features, _ = collect(first)  # for what the store says of its network
    check_numbering(how, loader, features.n_classes)
    store = extract_to_store(model, loader, out, reader=reader, progress=console.shows_progress)
    write_metadata(out, network_metadata(model, resolved, loader.classes))
    return store
