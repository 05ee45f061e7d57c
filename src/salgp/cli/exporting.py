"""``salgp export``: a fitted calibrator, or the user's network with it, as one graph that runs
without salgp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.given import image_options, network_of
from salgp.cli.inputs import open_inputs
from salgp.cli.networks import HUGGING_FACE
from salgp.cli.options import AnyNetwork, Cal, Force, Gray, ImageSize, InputNames, Scale, Weights
from salgp.cli.shell import Shell, UsageError, command
from salgp.cli.targets import check_inputs, check_target

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.export import Example
    from salgp.module import CalibratedClassifier

__all__ = ["register"]

SUFFIXES = (".onnx", ".pt2")
"""As in `salgp.export.TARGETS`, known before torch is loaded."""
SAMPLES = 3
"""In the example batch; its size is left open in the graph."""

Target = Annotated[Path, typer.Option("--out", "-o", help="Target: .onnx, or .pt2 for torch.export.")]
Network = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="Put this network into the graph; named as in extract."),
]
ExampleData = Annotated[
    Path | None,
    typer.Option("--data", help="Data the network takes, as in extract; its first samples give the shape."),
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="D,D,...", help="Instead of --data: shape of one sample, e.g. 3,224,224; once per input."
    ),
]
RuleFile = Annotated[
    Path | None,
    typer.Option("--rule", help="Rule of salgp.decide (rule.json): the graph then also says when to act."),
]

WithContext = Annotated[
    bool,
    typer.Option(
        "--context",
        help="The graph takes the sums over a window (context), gives each sample's part (sample_context).",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    whole = (
        "salgp export cal --model my_network.py:make --weights net.safetensors --data test.npz -o whole.onnx"
    )
    command(app, "export", "salgp export cal -o head.onnx", whole)(export)


def export(
    shell: Shell,
    calibrator: Cal,
    out: Target,
    model: Network = None,
    weights: Weights = None,
    data: ExampleData = None,
    input_shape: InputShape = None,
    inputs: InputNames = None,
    scale: Scale = None,
    image_size: ImageSize = None,
    gray: Gray = False,
    any_network: AnyNetwork = False,
    rule: RuleFile = None,
    context: WithContext = False,
    force: Force = False,
) -> None:
    """Export a fitted calibrator, alone or with its network, for onnxruntime or torch; salgp is not needed to
    run it.

    Alone, logits and layer features go in; with --model, what the network takes (already scaled and
    standardised). The label, the calibrated confidence with its error bar, and the class probabilities come
    out, for any batch size.
    """
    _check_usage(out, model, {"--weights": weights, "--data": data, "--input-shape": input_shape})
    shapes = [_numbers(text) for text in input_shape or []]
    check_inputs(calibrator, data, weights, rule)
    check_target(out, force, calibrator, data, weights, rule)
    fitted = files.read_calibrator(calibrator)
    from salgp.decide import Rule
    from salgp.export import export_classifier, export_head

    chosen = None if rule is None else Rule.load(rule)

    if model is None:
        with shell.progress(f"exporting {fitted.name}"):
            export_head(fitted, out, chosen, context)
    else:
        classifier = _classifier(shell, calibrator, model, weights, any_network)
        example = _shaped(shapes) if data is None else _taken(data, model, inputs, scale, image_size, gray)
        with shell.progress(f"exporting the network and {fitted.name}"):
            export_classifier(classifier, example, out, chosen, context)
    what = fitted.name if model is None else f"{model} with {fitted.name}"
    size = out.stat().st_size
    told = {"out": str(out), "bytes": size, "network": model is not None}
    shell.finish(told, f"exported {what} to {out} ({size:,} bytes)")


def _check_usage(out: Path, model: str | None, needs_model: Mapping[str, Any]) -> None:
    if out.suffix not in SUFFIXES:
        raise UsageError(f"--out {out}: expected a name that ends in .onnx or .pt2")
    alone = [name for name, value in needs_model.items() if value]
    if model is None and alone:
        raise UsageError(
            f"{alone[0]} goes with --model, which puts the network into the graph; without it "
            f"the calibrator is exported alone"
        )
    has_data, has_shape = bool(needs_model["--data"]), bool(needs_model["--input-shape"])
    if model is not None and has_data == has_shape:
        raise UsageError(
            "--model needs one example of the network's input: either --data FILE or "
            "--input-shape, e.g. --input-shape 3,224,224"
        )


def _classifier(
    shell: Shell, folder: Path, model: str, weights: Path | None, any_network: bool
) -> CalibratedClassifier:
    """The user's network with the calibrator, which must have been fitted on features of it."""
    from salgp.module import CalibratedClassifier, load
    from salgp.network.fingerprint import fingerprint

    if not (folder / "module.json").is_file():
        raise ValueError(
            f"{folder} does not say how its features were read from the network; extract and "
            f"fit again with this version of salgp, "
            "or leave --model out to export the calibrator alone"
        )
    network = network_of(shell, model, weights, None)
    known = files.read_origin(folder).get("network")
    if known and known != fingerprint(network).weights and not any_network:
        raise ValueError(
            f"{model} has other weights than the network {folder} was fitted on; give that "
            f"network's --weights, or pass --any-network"
        )
    classifier = load(folder, network, strict=False)
    assert isinstance(classifier, CalibratedClassifier)
    return classifier


def _shaped(shapes: list[list[int]]) -> list[Tensor]:
    import torch

    g = torch.Generator().manual_seed(0)
    return [torch.randn(SAMPLES, *shape, generator=g) for shape in shapes]


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--input-shape {text}: expected the shape of one sample, whole numbers separated "
            f"by commas, e.g. 3,224,224"
        )
    return [int(part) for part in parts]


def _taken(
    data: Path, model: str, inputs: str | None, scale: float | None, image_size: str | None, gray: bool
) -> Example:
    """The first samples of the data, as the network takes them; a single one is repeated."""
    import torch

    folder = Path(model.removeprefix(HUGGING_FACE)) if model.startswith(HUGGING_FACE) else None
    images = image_options(model, image_size, gray, None, None)
    names = files.split_names(inputs)
    found = open_inputs(
        data,
        batch_size=SAMPLES,
        inputs=names,
        images=images,
        scale=scale,
        by_name=folder is not None,
        tokenizer=folder,
        labels=False,
    )
    batch = found.take(slice(0, min(SAMPLES, found.n)))

    def enough(x: Tensor) -> Tensor:
        return torch.cat([x] * SAMPLES)[:SAMPLES]

    return (
        {k: enough(x) for k, x in batch.items()} if isinstance(batch, Mapping) else [enough(x) for x in batch]
    )
