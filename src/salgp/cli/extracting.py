"""``salgp extract``: run the user's network over the user's data and keep what a calibrator needs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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

__all__ = ["image_options", "register"]

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


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(
        app,
        "extract",
        "salgp extract my_network.py:make data.npz --weights net.safetensors -o calibration.safetensors",
    )(extract)


def extract(
    shell: Shell,
    model: Model,
    data: Data,
    out: Out,
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights of the network: .safetensors, or .pt/.pth/.ckpt with tensors only."),
    ] = None,
    layers: Annotated[
        str, typer.Option(help="auto, or layer names, globs and positions, separated by commas.")
    ] = "auto",
    pooling: Annotated[
        str, typer.Option(help="How layers are pooled, e.g. auto, spatial-avg, channel-max, flatten.")
    ] = "auto",
    output: Annotated[
        str, typer.Option(help="What the network returns: logits, probabilities or log-probabilities.")
    ] = "logits",
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Arrays passed to the network, in order, with commas between; 'f*' stacks a table's columns."
        ),
    ] = None,
    prepare: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Your own preprocessing: a function of the named arrays that returns the network's input.",
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Class names in the order of the network's outputs.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Multiply the inputs, e.g. by 0.00392157 for bytes.")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Size images are brought to: HEIGHT or HEIGHT,WIDTH.")
    ] = None,
    gray: Annotated[bool, typer.Option(help="Read images as gray.")] = False,
    image_mean: Annotated[str | None, typer.Option(help="Mean of each channel, taken off.")] = None,
    image_std: Annotated[
        str | None, typer.Option(help="Standard deviation of each channel, divided by.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.")] = 64,
    max_width: Annotated[int | None, typer.Option(min=1, help="Project wider layers to this width.")] = None,
    perturb: Annotated[
        bool, typer.Option(help="Add perturbed copies of the samples: calibration data for use under shift.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Device to run on, e.g. cuda.")] = None,
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
    folder = Path(model.removeprefix(HUGGING_FACE)) if model.startswith(HUGGING_FACE) else None
    loader = open_inputs(
        data,
        batch_size=batch_size,
        inputs=files.split_names(inputs),
        classes=files.split_names(classes),
        images=images,
        scale=scale,
        by_name=folder is not None,
        tokenizer=folder,
        prepare=None if prepare is None else import_object(prepare, "--prepare"),
    )
    network = open_network(model, weights)
    if weights is None and not has_own_weights(model):
        shell.say("note: no --weights given; the network is used as the factory made it")
    options = {"layers": _layers(layers), "pooling": pooling, "output": output, "max_width": max_width}
    network = network if device is None else _moved(network, device)
    if out.suffix == ".safetensors":
        reader, features, labels = _run(shell, network, loader, options, perturb)
        features.save(out, labels, _metadata(network, reader, loader.classes))
        n, widths = len(features), features.widths
    else:
        reader, n, widths = _run_to_store(shell, network, loader, out, options)
        files.write_metadata(out, _metadata(network, reader, loader.classes))
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


def _metadata(network: nn.Module, reader: Reader, classes: list[str] | None) -> dict[str, str]:
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


def _layers(text: str) -> Any:
    if text == "auto":
        return "auto"
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
