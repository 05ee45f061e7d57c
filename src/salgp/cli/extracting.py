"""``salgp extract``: run the user's network over the user's data and keep what a calibrator needs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.calibrating import Force, Out
from salgp.cli.inputs import Images, Inputs, open_inputs
from salgp.cli.networks import HUGGING_FACE, has_own_weights, import_object, open_network
from salgp.cli.shell import Shell, UsageError, command

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.features import Features
    from salgp.network.reader import Reader

__all__ = [
    "BatchSize",
    "Classes",
    "Data",
    "DataOptions",
    "Device",
    "Gray",
    "ImageMean",
    "ImageSize",
    "ImageStd",
    "InputNames",
    "Layers",
    "MaxWidth",
    "Model",
    "Output",
    "Pooling",
    "Prepare",
    "Scale",
    "Weights",
    "image_options",
    "layer_names",
    "metadata_of",
    "network_of",
    "register",
]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:factory, path/to/file.py:factory, net.onnx, or hf:FOLDER (local).",
    ),
]
Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help=".npz, .safetensors, .parquet, .csv, or a folder of images or Parquet shards.",
    ),
]


Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights", help="Weights of the network: .safetensors, or .pt/.pth/.ckpt with tensors only."
    ),
]
Layers = Annotated[
    str, typer.Option("--layers", help="auto, or layer names, globs and positions, separated by commas.")
]
Pooling = Annotated[
    str,
    typer.Option("--pooling", help="How layers are pooled, e.g. auto, spatial-avg, channel-max, flatten."),
]
Output = Annotated[
    str,
    typer.Option("--output", help="What the network returns: logits, probabilities or log-probabilities."),
]
InputNames = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        help="Arrays passed to the network, in order, with commas between; 'f*' stacks a table's columns.",
    ),
]
Prepare = Annotated[
    str | None,
    typer.Option(
        "--prepare",
        metavar="FILE.py:NAME",
        help="Your own preprocessing: a function of the named arrays that returns the network's input.",
    ),
]
Classes = Annotated[
    str | None, typer.Option("--classes", help="Class names in the order of the network's outputs.")
]
Scale = Annotated[
    float | None, typer.Option("--scale", help="Multiply the inputs, e.g. by 0.00392157 for bytes.")
]
ImageSize = Annotated[
    str | None, typer.Option("--image-size", help="Size images are brought to: HEIGHT or HEIGHT,WIDTH.")
]
Gray = Annotated[bool, typer.Option("--gray", help="Read images as gray.")]
ImageMean = Annotated[str | None, typer.Option("--image-mean", help="Mean of each channel, taken off.")]
ImageStd = Annotated[
    str | None, typer.Option("--image-std", help="Standard deviation of each channel, divided by.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Samples per batch.")]
MaxWidth = Annotated[
    int | None, typer.Option("--max-width", min=1, help="Project wider layers to this width.")
]
Device = Annotated[str | None, typer.Option("--device", help="Device to run on, e.g. cuda.")]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(
        app,
        "extract",
        "salgp extract my_network.py:make data.npz --weights net.pt -o calibration.safetensors",
    )(extract)


@dataclass(frozen=True)
class DataOptions:
    """How the data of one network are read; the same for every set.

    Args:
        model: as named on the command line.
        batch_size: samples per batch.
        inputs: arrays to pass.
        classes: class names.
        images: how images are read.
        scale: numbers are multiplied by it.
        prepare: the user's own preprocessing, by name.
    """

    model: str
    batch_size: int = 64
    inputs: str | None = None
    classes: str | None = None
    images: Images = field(default_factory=Images)
    scale: float | None = None
    prepare: str | None = None

    def open(self, path: Path) -> Inputs:
        """The data as batches."""
        folder = Path(self.model.removeprefix(HUGGING_FACE)) if self.model.startswith(HUGGING_FACE) else None
        return open_inputs(
            path,
            batch_size=self.batch_size,
            inputs=files.split_names(self.inputs),
            classes=files.split_names(self.classes),
            images=self.images,
            scale=self.scale,
            by_name=folder is not None,
            tokenizer=folder,
            prepare=None if self.prepare is None else import_object(self.prepare, "--prepare"),
        )


def network_of(shell: Shell, model: str, weights: Path | None, device: str | None) -> nn.Module:
    """The user's network with its weights, where it is to run."""
    network = open_network(model, weights)
    if weights is None and not has_own_weights(model):
        shell.say("note: no --weights given; the network is used as the factory made it")
    return network if device is None else _moved(network, device)


def extract(
    shell: Shell,
    model: Model,
    data: Data,
    out: Out,
    weights: Weights = None,
    layers: Layers = "auto",
    pooling: Pooling = "auto",
    output: Output = "logits",
    inputs: InputNames = None,
    prepare: Prepare = None,
    classes: Classes = None,
    scale: Scale = None,
    image_size: ImageSize = None,
    gray: Gray = False,
    image_mean: ImageMean = None,
    image_std: ImageStd = None,
    batch_size: BatchSize = 64,
    max_width: MaxWidth = None,
    perturb: Annotated[
        bool, typer.Option(help="Add perturbed copies of the samples: calibration data for use under shift.")
    ] = False,
    device: Device = None,
    force: Force = False,
) -> None:
    """Run a network over data and write its logits and pooled layers, with the labels where there are some.

    A name ending in .safetensors makes one file; any other makes a folder of Parquet shards, of any size,
    which a stopped run continues.
    """
    files.check_inputs(data, weights)
    if out.suffix == ".safetensors":
        files.check_target(out, force, data)
    elif perturb:
        raise UsageError("--perturb writes one file; give --out a name that ends in .safetensors")
    images = image_options(model, image_size, gray, image_mean, image_std)
    loader = DataOptions(model, batch_size, inputs, classes, images, scale, prepare).open(data)
    network = network_of(shell, model, weights, device)
    options = {
        "layers": layer_names(layers, model),
        "pooling": pooling,
        "output": output,
        "max_width": max_width,
    }
    if out.suffix == ".safetensors":
        reader, features, labels = _run(shell, network, loader, options, perturb)
        features.save(out, labels, metadata_of(network, reader, loader.classes))
        n, widths = len(features), features.widths
    else:
        reader, n, widths = _run_to_store(shell, network, loader, out, options)
        files.write_metadata(out, metadata_of(network, reader, loader.classes))
    shell.finish(
        {"out": str(out), "n": n, "layers": widths, "labelled": loader.labels is not None},
        f"{n:,} samples {'with' if loader.labels is not None else 'without'} labels in {out}\n"
        f"layers: {', '.join(f'{name} ({width})' for name, width in widths.items()) or 'none'}",
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


def _run(
    shell: Shell, network: nn.Module, loader: Inputs, options: Mapping[str, Any], perturb: bool
) -> tuple[Reader, Features, Tensor | None]:
    from salgp.network.reader import Reader
    from salgp.network.reading import collect, read_batches
    from salgp.network.rehearsal import rehearse

    reader = Reader(**options)
    if perturb:
        with shell.progress("extracting samples and perturbed copies"):
            return rehearse(network, loader, reader, progress=False)
    with shell.progress("extracting", total=loader.n) as advance:
        return collect(read_batches(network, _Shown(loader, advance), reader, progress=False))


def _run_to_store(
    shell: Shell, network: nn.Module, loader: Inputs, out: Path, options: Mapping[str, Any]
) -> tuple[Reader, int, dict[str, int]]:
    from salgp.store import extract_to_store

    seen: list[Reader] = []
    next(_batches(network, itertools.islice(loader, 1), options, seen), None)
    with shell.progress("extracting", total=loader.n) as advance:
        store = extract_to_store(network, _Shown(loader, advance), out, **options)
    return seen[0], len(store), store.widths


def _batches(
    network: nn.Module, loader: Iterable[Any], options: Mapping[str, Any], seen: list[Reader]
) -> Iterator[tuple[Features, Tensor | None]]:
    """Features and labels, batch by batch; ``seen`` learns what is read from the network."""
    from salgp.network.reader import Reader
    from salgp.network.reading import read_batches

    for reading in read_batches(network, loader, Reader(**options), progress=False):
        seen[:] = [reading.reader]
        yield reading.features, reading.labels


def _moved(network: nn.Module, device: str) -> nn.Module:
    try:
        return network.to(device)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch that was built without it
        raise UsageError(
            f"--device {device}: not available here ({str(error).splitlines()[0][:120]})"
        ) from error


def metadata_of(network: nn.Module, reader: Reader, classes: list[str] | None) -> dict[str, str]:
    """What a features file says of its network: enough to put network and calibrator together again."""
    import salgp
    from salgp.module import module_header

    header = module_header(network, reader)
    known = header["fingerprint"]
    kept = {
        "network": known["weights"],
        "network_structure": known["structure"],
        "salgp": salgp.__version__,
        "module": json.dumps(header),
    }
    return kept | ({} if classes is None else {"classes": json.dumps(classes)})


def layer_names(text: str, model: str = "") -> Any:
    """``auto``, or names and positions; of an ONNX network, ``auto`` means every tensor it hands out.

    Example:
        >>> layer_names("conv1,-1")
        ['conv1', -1]
    """
    if text == "auto":
        return "hidden.*" if model.endswith(".onnx") else "auto"
    return [int(name) if name.lstrip("-").isdigit() else name for name in files.split_names(text) or []]


def image_options(model: str, size: str | None, gray: bool, mean: str | None, std: str | None) -> Images:
    """The options given, and for a Hugging Face folder what its ``preprocessor_config.json`` says."""
    stored: dict[str, Any] = {}
    path = Path(model.removeprefix(HUGGING_FACE)) / "preprocessor_config.json"
    if model.startswith(HUGGING_FACE) and path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
    known = stored.get("size", {})
    default = (
        (int(known["height"]), int(known["width"])) if isinstance(known, dict) and "height" in known else None
    )
    sides = _floats("--image-size", size)
    return Images(
        default if sides is None else (int(sides[0]), int(sides[-1])),
        gray,
        _floats("--image-mean", mean) or stored.get("image_mean") or (0.0,),
        _floats("--image-std", std) or stored.get("image_std") or (1.0,),
    )


def _floats(option: str, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected numbers separated by commas") from error
