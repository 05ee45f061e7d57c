"""``salgp extract``: run the user's network over the user's data and keep what a calibrator needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.data_options import (
    DataOptions,
    check_numbering,
    layer_names,
    metadata_of,
    network_of,
    note_guessing,
)
from salgp.cli.preflight import check_apart, check_inputs, check_target

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.io.loader import FileLoader

__all__ = ["register"]

Extracted = tuple[int, dict[str, int], float | None]
"""Rows, widths of the layers, and the network's accuracy where it is known."""


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    line = "salgp extract my_network.py:make data.npz --weights net.pt -o calibration.safetensors"
    command(app, "extract", line)(extract)


def extract(
    console: Console,
    model: options.Model,
    data: options.Data,
    out: options.Out,
    weights: options.Weights = None,
    layers: options.Layers = "auto",
    pooling: options.Pooling = "auto",
    output: options.Output = None,
    inputs: options.InputNames = None,
    prepare: options.Prepare = None,
    classes: options.Classes = None,
    scale: options.Scale = None,
    image_size: options.ImageSize = None,
    gray: options.Gray = False,
    normalize: options.Normalize = None,
    batch_size: options.BatchSize = 64,
    perturb: options.Perturbed = False,
    device: options.Device = None,
    force: options.Force = False,
) -> None:
    """Run a network over data and write its logits and pooled layers, with the labels where there are some.

    A name ending in .safetensors makes one file; any other makes a folder of Parquet shards, of any size,
    which a stopped run continues.
    """
    check_inputs(data, weights)
    one_file = out.suffix == ".safetensors"
    if one_file:
        check_target(out, force, data, weights, kind="features")
    elif perturb:
        raise UsageError("--perturb writes one file; give --out a name that ends in .safetensors")
    else:
        check_apart(out, data, weights)
        _check_store(out)
    how = DataOptions(model, batch_size, inputs, classes, scale, prepare, image_size, gray, normalize)
    loader = how.open(data)
    network = network_of(console, model, weights, device)
    check_numbering(network, loader)
    read = {"layers": layer_names(layers), "pooling": pooling, "output": output}
    if one_file:
        n, widths, accuracy = _to_file(console, network, loader, out, read, perturb)
    else:
        n, widths, accuracy = _to_store(console, network, loader, out, read)
    labelled = loader.labels is not None
    right = "" if accuracy is None else f"; the network is right on {accuracy:.1%}"
    shown = ", ".join(f"{name} ({width})" for name, width in widths.items())
    samples = f"{loader.n:,} samples {'with' if labelled else 'without'} labels"
    augmented = f", and {n - loader.n:,} augmented ones," if n > loader.n else ""
    console.finish(
        {"out": str(out), "n": n, "layers": widths, "labelled": labelled, "accuracy": accuracy},
        f"{samples}{augmented} in {out}{right}\nlayers: {shown or 'none'}",
    )


def _check_store(out: Path) -> None:
    """Refuse, before any work is done, to begin or continue a folder of shards where a file is."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(
            f"{out} is no folder, and one of Parquet shards is to be written; choose another name, or one "
            f"that ends in .safetensors for a single file"
        )


@dataclass(frozen=True, eq=False)
class _Shown:
    """A loader that tells a progress bar how far it is; may be read several times."""

    loader: FileLoader
    advance: Callable[..., None]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self.loader):
            yield batch
            self.advance(min(self.loader.batch_size, self.loader.n - i * self.loader.batch_size))


def _to_file(
    console: Console,
    network: nn.Module,
    loader: FileLoader,
    out: Path,
    read: Mapping[str, Any],
    perturb: bool,
) -> Extracted:
    from salgp.logits import check_finite
    from salgp.network.augment.augmentation import augment
    from salgp.network.read import collect, read_batches
    from salgp.network.reader import Reader

    if perturb:
        with console.progress("extracting samples and augmented ones"):
            made = augment(network, loader, Reader(**read), progress=False, tokenizer=loader.tokenizer)
        reader, features = made.reader, made.features
        labels: Tensor | None = made.labels
    else:
        with console.progress("extracting", total=loader.n) as advance:
            batches = read_batches(network, _Shown(loader, advance), Reader(**read), progress=False)
            reader, features, labels = collect(batches)
        check_finite(features.logits)
    features.save(out, labels, metadata_of(network, reader, loader.classes))
    return len(features), features.widths, note_guessing(console, features, labels)


def _to_store(
    console: Console, network: nn.Module, loader: FileLoader, out: Path, read: Mapping[str, Any]
) -> Extracted:
    from salgp.network.read import collect, read_batches
    from salgp.network.reader import Reader
    from salgp.store import extract_to_store

    first = read_batches(network, itertools.islice(loader, 1), Reader(**read), progress=False)
    reader, _, _ = collect(first)  # resolved, for what the store says of its network
    with console.progress("extracting", total=loader.n) as advance:
        store = extract_to_store(network, _Shown(loader, advance), out, reader=Reader(**read))
    files.write_metadata(out, metadata_of(network, reader, loader.classes))
    return len(store), store.widths, None
