"""Arguments and options that commands share: each is said once, with its help.

A command lists what it takes, one name a line; what a name means to the user stands here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salgp.methods import CLASSES, entry_points

__all__ = [
    "AnyNetwork",
    "BatchSize",
    "Cal",
    "CalibrationData",
    "Classes",
    "Compared",
    "Data",
    "Device",
    "Engine",
    "Feats",
    "FieldLabels",
    "Folder",
    "Force",
    "Gray",
    "ImageMean",
    "ImageSize",
    "ImageStd",
    "InContext",
    "InputNames",
    "Layers",
    "MaxWidth",
    "Method",
    "Model",
    "Out",
    "Output",
    "Perturbed",
    "Pooling",
    "Prepare",
    "RayAddress",
    "Reference",
    "Scale",
    "Seed",
    "TestData",
    "TrainingData",
    "Weights",
    "Workers",
    "known_methods",
]


def known_methods() -> list[str]:
    """Names of all calibrators, for completion and messages."""
    return [*CLASSES, *entry_points()]


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
ImageMean = Annotated[str | None, typer.Option("--image-mean", help="Mean of each channel, taken off.")]
ImageStd = Annotated[
    str | None, typer.Option("--image-std", help="Standard deviation of each channel, divided by.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Samples per batch.")]
MaxWidth = Annotated[
    int | None, typer.Option("--max-width", min=1, help="Project wider layers to this width.")
]
Device = Annotated[str | None, typer.Option("--device", help="Device to run on, e.g. cuda.")]


Feats = Annotated[
    Path,
    typer.Argument(
        metavar="FEATURES",
        help="Features: .safetensors, a folder of Parquet shards, or class scores (.npz, .csv, .parquet).",
    ),
]
Cal = Annotated[Path, typer.Argument(metavar="CAL", help="Folder of a fitted calibrator.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the result is written.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing result.")]
AnyNetwork = Annotated[
    bool, typer.Option("--any-network", help="Accept features known to come from another network.")
]
InContext = Annotated[
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
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        autocompletion=known_methods,
        help="Calibrator; `salgp info` lists them. auto, the default: layer evidence where there are layers, "
        "else temperature scaling.",
    ),
]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder of everything that is written.")]
CalibrationData = Annotated[
    Path, typer.Option(help="Labelled data the network was not trained on; a few hundred samples.")
]
TrainingData = Annotated[
    Path | None, typer.Option(help="The network's training data, to compare new samples with.")
]
TestData = Annotated[
    Path | None, typer.Option(help="Labelled data to check the result on, for the table and the report.")
]
Compared = Annotated[str, typer.Option(help="Methods to compare with, separated by commas; empty for none.")]
Perturbed = Annotated[
    bool, typer.Option(help="Add perturbed copies of the samples: calibration data for use under shift.")
]
Engine = Annotated[str, typer.Option(help="local or ray.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Pieces of work at a time. Default: one per core.")]
RayAddress = Annotated[
    str | None, typer.Option(help="Of a running Ray cluster, e.g. auto. Default: start Ray here.")
]
