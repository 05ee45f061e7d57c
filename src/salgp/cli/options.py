"""Arguments and options that commands share: each is said once, with its help.

A command lists what it takes, one name a line; what a name means to the user stands here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salgp.calibrators.registry import CLASSES, entry_points
from salgp.cli.console import UsageError, did_you_mean

__all__ = [
    "AnyNetwork",
    "BatchSize",
    "CalibrationData",
    "CalibratorFolder",
    "Classes",
    "Compared",
    "Context",
    "Data",
    "Device",
    "Engine",
    "Error",
    "FeaturesFile",
    "FieldLabels",
    "Folder",
    "Force",
    "Gray",
    "ImageSize",
    "InputNames",
    "Layers",
    "Method",
    "Model",
    "Normalize",
    "Out",
    "Output",
    "Perturbed",
    "Pooling",
    "Prepare",
    "Probs",
    "Reference",
    "RuleFile",
    "Scale",
    "Seed",
    "TestData",
    "TrainingData",
    "Weights",
    "Workers",
    "check_method",
    "known_methods",
    "split_names",
]


def known_methods() -> list[str]:
    """Names of all calibrators, for completion and messages."""
    return [*CLASSES, *entry_points()]


def check_method(*methods: str | None) -> None:
    """Refuse names that no calibrator has, and suggest the nearest."""
    known = known_methods()
    for name in methods:
        if name is not None and name not in (*known, "auto"):
            raise UsageError(
                f"no calibrator called {name!r}; {did_you_mean(name, known)}known: {', '.join(known)}"
            )


def split_names(text: str | None) -> list[str] | None:
    """Comma-separated names; None stays None.

    Example:
        >>> split_names("a, b")
        ['a', 'b']
    """
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


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
FeaturesFile = Annotated[
    Path,
    typer.Argument(
        metavar="FEATURES",
        help="Features: .safetensors, a folder of Parquet shards, or class scores (.npz, .csv, .parquet).",
    ),
]
CalibratorFolder = Annotated[Path, typer.Argument(metavar="CAL", help="Folder of a fitted calibrator.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the result is written.")]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder of everything that is written.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing result.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]

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
    str | None,
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
        help="Your own preprocessing: a function that takes the dictionary of columns (or arrays) by name "
        "and returns the network's input.",
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
Normalize = Annotated[
    str | None,
    typer.Option(
        "--normalize",
        metavar="MEAN:STD",
        help="Standardise images in [0, 1], per channel: imagenet, or e.g. 0.5,0.5,0.5:0.2,0.2,0.2.",
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Samples per batch.")]
Device = Annotated[str | None, typer.Option("--device", help="Device to run on, e.g. cuda.")]
Perturbed = Annotated[
    bool, typer.Option("--perturb", help="Add augmented samples: calibration data for use under shift.")
]

Probs = Annotated[
    str | None,
    typer.Option(
        "--probs", metavar="A,B,...", help="Columns of a table that hold the classes' probabilities."
    ),
]
AnyNetwork = Annotated[
    bool, typer.Option("--any-network", help="Accept features known to come from another network.")
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="all|N",
        help="Samples met together: 'all', or windows of N consecutive ones. By default each by itself.",
    ),
]
FieldLabels = Annotated[
    Path | None,
    typer.Option(
        "--field-labels",
        help="Features of a few labelled samples from the same place and time, ten or more: confidences are "
        "corrected by them.",
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(
        "--reference", help="Features of the network's training data, for methods that compare against it."
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        autocompletion=known_methods,
        help="Calibrator; `salgp info` lists them. auto, the default: layer evidence where there are layers, "
        "else the best scaling by cross-validation.",
    ),
]
CalibrationData = Annotated[
    Path,
    typer.Option("--calibration", help="Labelled data the network was not trained on; some hundred samples."),
]
TrainingData = Annotated[
    Path | None, typer.Option("--train", help="The network's training data, to compare new samples with.")
]
TestData = Annotated[
    Path | None,
    typer.Option("--test", help="Labelled data to check the result on, for the table and the report."),
]
Compared = Annotated[
    str, typer.Option("--compare", help="Methods to compare with, separated by commas; empty for none.")
]
Error = Annotated[
    float | None,
    typer.Option("--error", help="Largest acceptable share of wrong answers, e.g. 0.05."),
]
RuleFile = Annotated[
    Path | None, typer.Option("--rule", help="Rule of `salgp decide`: also say for each answer, act or ask.")
]
Engine = Annotated[
    str,
    typer.Option("--engine", help="local; ray, started here; or the address of a running Ray cluster."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Pieces of work at a time. Default: one per core.")
]
