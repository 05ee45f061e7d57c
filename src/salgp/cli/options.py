"""Arguments and options that commands share: each is said once, with its help.

A command lists what it takes, one name a line; what a name means to the user stands here. `NetworkOptions`,
`ReadingOptions` and `DataOptions` are groups of options: one value in a command, several on the command line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import salgp
from salgp.calibrators.registry import check_names, known_names
from salgp.cli.console import Console, UsageError

if TYPE_CHECKING:
    from torch import nn

    from salgp.io.images import ImageOptions
    from salgp.io.loader import FileLoader

__all__ = ["Engine"]

IMAGENET = "0.485,0.456,0.406:0.229,0.224,0.225"

FeaturesFile = Annotated[
    Path,
    Argument(
        metavar="FEATURES",
        help="Features: .safetensors, a folder of Parquet shards, or class scores (.npz, .csv, .parquet).",
    ),
]
CalibratorFolder = Annotated[Path, Argument(metavar="CAL", help="Folder of a fitted calibrator.")]
Out = Annotated[Path, Option("--out", "-o", help="Where the result is written.")]
Force = Annotated[bool, Option("--force", help="Replace an existing result.")]
Probs = Annotated[str | None, Option(metavar="A,B,...", help="Columns with the classes' probabilities.")]
Context = Annotated[str | None, Option(metavar="all|N", help="Samples met together: all, or N in a row.")]
FieldLabels = Annotated[
    Path | None,
    Option(help="Features of ten or more labelled samples from the same place and time, to correct by."),
]
Reference = Annotated[Path | None, Option(help="Features of the training data, to compare with.")]
Method = Annotated[
    str | None,
    Option(
        "--method",
        "-m",
        autocompletion=known_names,
        help="Calibrator; `salgp info` lists them. auto: layer evidence with layers, else stacked scaling.",
    ),
]
Error = Annotated[float | None, Option(help="Largest acceptable share of wrong answers, e.g. 0.05.")]
RuleFile = Annotated[Path | None, Option(help="Rule of `salgp decide`: also say act or ask.")]
Engine = Annotated[str, Option(help="local, ray (started here), or the address of a Ray cluster.")]


def check_method(*methods: str | None) -> None:
    """Refuse names that no calibrator has, and suggest the nearest."""
    try:
        check_names(*(name for name in methods if name not in (None, "auto")))
    except KeyError as error:
        raise UsageError(error.args[0]) from error


def split_names(text: str | None) -> list[str] | None:
    """Comma-separated names; None stays None.

    Example:
        >>> split_names("a, b")
        ['a', 'b']
    """
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def context_of(text: str | None) -> int | str | None:
    """The value of ``--context``.

    Example:
        >>> context_of("40"), context_of("all")
        (40, 'all')
    """
    if text in (None, "all"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--context {text}: expected 'all' or the number of samples in a window")
    return int(text)


@dataclass(frozen=True)
class NetworkOptions:
    """The user's network, its weights, and where it is to run."""

    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="package.module:factory, path/to/file.py:factory, net.onnx, or hf:FOLDER (local).",
        ),
    ]
    weights: Annotated[Path | None, Option(help=".safetensors, or .pt/.pth/.ckpt of tensors only.")] = None
    device: Annotated[str | None, Option(help="Device to run on, e.g. cuda.")] = None

    def open(self, console: Console) -> nn.Module:
        """The network, ready to be read."""
        network = salgp.files.open_network(self.model, self.weights)
        if self.weights is None and not salgp.files.has_own_weights(self.model):
            console.say("note: no --weights given; the network is used as the factory made it")
        try:
            return network if self.device is None else network.to(self.device)
        except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch built without it
            why = str(error).splitlines()[0][:120]
            raise UsageError(f"--device {self.device}: not available here ({why})") from error


@dataclass(frozen=True)
class ReadingOptions:
    """Options of how a network is read."""

    layers: Annotated[str, Option(help="auto, or names, globs and positions, with commas.")] = "auto"
    pooling: Annotated[str, Option(help="How layers are pooled, e.g. spatial-avg, flatten.")] = "auto"
    output: Annotated[str | None, Option(help="logits, probabilities, log-probabilities, sigmoids.")] = None

    def reader(self) -> salgp.Reader:
        """The same for Python; numbers among the layers are positions."""
        return salgp.Reader(_layers(self.layers), self.pooling, output=self.output)


def _layers(text: str) -> Any:
    if text == "auto":
        return text
    return [int(name) if name.lstrip("-").isdecimal() else name for name in split_names(text) or ()]


@dataclass(frozen=True)
class DataOptions:
    """Options of how data are read; the same for every set."""

    inputs: Annotated[str | None, Option(help="Input arrays, in order; 'f*' stacks columns.")] = None
    prepare: Annotated[
        str | None,
        Option(metavar="FILE.py:NAME", help="Your function that makes the inputs of the columns by name."),
    ] = None
    classes: Annotated[str | None, Option(help="Class names in the order of the outputs.")] = None
    scale: Annotated[float | None, Option(help="Factor of the inputs, 0.00392157 for bytes.")] = None
    image_size: Annotated[str | None, Option(help="HEIGHT or HEIGHT,WIDTH to bring images to.")] = None
    gray: Annotated[bool, Option("--gray", help="Read images as gray.")] = False
    normalize: Annotated[
        str | None,
        Option(metavar="MEAN:STD", help="Per channel of images: imagenet, or e.g. 0.5,0.5,0.5:0.2,0.2,0.2."),
    ] = None
    batch_size: Annotated[int, Option(min=1, help="Samples per batch.")] = 64

    def open(
        self, model: str, path: Path, classes: list[str] | None = None, labels: bool = True
    ) -> FileLoader:
        """The data as batches for ``model``; ``classes`` stand for those of the option, where it is not
        given.
        """
        folder = salgp.files.hugging_face_folder(model)
        return salgp.files.open_data(
            path,
            batch_size=self.batch_size,
            inputs=split_names(self.inputs),
            classes=split_names(self.classes) or classes,
            images=self._images(folder),
            scale=self.scale,
            by_name=folder is not None,
            tokenizer=None if folder is None else salgp.files.open_tokenizer(folder),
            labels=labels,
            prepare=None if self.prepare is None else salgp.files.import_object(self.prepare),
        )

    def _images(self, folder: Path | None) -> ImageOptions:
        """The options given, and for a Hugging Face folder what its ``preprocessor_config.json`` says."""
        from salgp.io.images import ImageOptions

        config = None if folder is None else folder / "preprocessor_config.json"
        known = json.loads(config.read_text(encoding="utf-8")) if config and config.is_file() else {}
        size, mean, std = known.get("size"), known.get("image_mean"), known.get("image_std")
        sides = [size["height"], size["width"]] if isinstance(size, dict) and "height" in size else []
        if self.image_size is not None:
            sides = _numbers("--image-size", self.image_size)
        if self.normalize is not None:
            text = IMAGENET if self.normalize == "imagenet" else self.normalize
            mean, std = (_numbers("--normalize", part) for part in text.partition(":")[::2])
        shape = (int(sides[0]), int(sides[-1])) if sides else None
        return ImageOptions(shape, self.gray, mean or (0.0,), std or (1.0,))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected numbers separated by commas") from error
