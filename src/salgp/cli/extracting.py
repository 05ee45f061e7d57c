"""``salgp extract``: run the user's network over the user's data and keep what a calibrator needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from salgp.cli import files, options
from salgp.cli.given import (
    DataOptions,
    check_numbering,
    image_options,
    layer_names,
    metadata_of,
    network_of,
    note_guessing,
)
from salgp.cli.inputs import Inputs
from salgp.cli.shell import Shell, UsageError, command
from salgp.cli.targets import check_inputs, check_store, check_target

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.features import Features
    from salgp.network.reader import Reader

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(
        app,
        "extract",
        "salgp extract my_network.py:make data.npz --weights net.pt -o calibration.safetensors",
    )(extract)


def extract(
    shell: Shell,
    model: options.Model,
    data: options.Data,
    out: options.Out,
    weights: options.Weights = None,
    layers: options.Layers = "auto",
    pooling: options.Pooling = "auto",
    output: options.Output = "logits",
    inputs: options.InputNames = None,
    prepare: options.Prepare = None,
    classes: options.Classes = None,
    scale: options.Scale = None,
    image_size: options.ImageSize = None,
    gray: options.Gray = False,
    image_mean: options.ImageMean = None,
    image_std: options.ImageStd = None,
    batch_size: options.BatchSize = 64,
    max_width: options.MaxWidth = None,
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
        check_store(out, data, weights)
    images = image_options(model, image_size, gray, image_mean, image_std)
    loader = DataOptions(model, batch_size, inputs, classes, images, scale, prepare).open(data)
    network = network_of(shell, model, weights, device)
    check_numbering(network, loader)
    read = {"layers": layer_names(layers), "pooling": pooling, "output": output}
    read["max_width"] = max_width
    if one_file:
        n, widths, accuracy = _to_file(shell, network, loader, out, read, perturb)
    else:
        n, widths, accuracy = _to_store(shell, network, loader, out, read)
    labelled = loader.labels is not None
    right = "" if accuracy is None else f"; the network is right on {accuracy:.1%}"
    shown = ", ".join(f"{name} ({width})" for name, width in widths.items())
    samples = f"{loader.n:,} samples {'with' if labelled else 'without'} labels"
    copies = f", and {n - loader.n:,} perturbed copies," if n > loader.n else ""
    shell.finish(
        {"out": str(out), "n": n, "layers": widths, "labelled": labelled, "accuracy": accuracy},
        f"{samples}{copies} in {out}{right}\nlayers: {shown or 'none'}",
    )


@dataclass(frozen=True, eq=False)
class _Shown:
    """A loader that tells a progress bar how far it is; may be read several times."""

    loader: Inputs
    advance: Callable[..., None]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self.loader):
            yield batch
            self.advance(min(self.loader.batch_size, self.loader.n - i * self.loader.batch_size))


def _to_file(
    shell: Shell, network: nn.Module, loader: Inputs, out: Path, read: Mapping[str, Any], perturb: bool
) -> tuple[int, dict[str, int], float | None]:
    reader, features, labels = _in_memory(shell, network, loader, read, perturb)
    features.save(out, labels, metadata_of(network, reader, loader.classes))
    return len(features), features.widths, note_guessing(shell, features, labels)


def _in_memory(
    shell: Shell, network: nn.Module, loader: Inputs, read: Mapping[str, Any], perturb: bool
) -> tuple[Reader, Features, Tensor | None]:
    from salgp.logits import check_finite
    from salgp.network.reader import Reader
    from salgp.network.reading import collect, read_batches
    from salgp.network.rehearsal import rehearse

    reader = Reader(**read)
    if perturb:
        with shell.progress("extracting samples and perturbed copies"):
            made = rehearse(network, loader, reader, progress=False, tokenizer=loader.tokenizer)
            return made.reader, made.features, made.labels
    with shell.progress("extracting", total=loader.n) as advance:
        found = collect(read_batches(network, _Shown(loader, advance), reader, progress=False))
    check_finite(found[1].logits)
    return found


def _to_store(
    shell: Shell, network: nn.Module, loader: Inputs, out: Path, read: Mapping[str, Any]
) -> tuple[int, dict[str, int], float | None]:
    from salgp.network.reader import Reader
    from salgp.network.reading import collect, read_batches
    from salgp.store import extract_to_store

    first = read_batches(network, itertools.islice(loader, 1), Reader(**read), progress=False)
    reader, _, _ = collect(first)  # settled, for what the store says of its network
    with shell.progress("extracting", total=loader.n) as advance:
        store = extract_to_store(network, _Shown(loader, advance), out, **read)
    files.write_metadata(out, metadata_of(network, reader, loader.classes))
    return len(store), store.widths, None
