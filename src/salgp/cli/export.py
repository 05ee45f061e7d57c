"""``salgp export``: a fitted calibrator, alone or with the user's network, as one graph without salgp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.data_options import DataOptions, network_of
from salgp.cli.preflight import check_inputs, check_suffix, check_target

if TYPE_CHECKING:
    from torch import Tensor

    from salgp import CalibratedClassifier
    from salgp.export import Example

__all__ = ["register"]

SUFFIXES = (".onnx", ".pt2")
"""As in `salgp.export.TARGETS`, known before torch is loaded."""
SAMPLES = 3
"""In the example batch; its size is left open in the graph."""

Target = Annotated[Path, typer.Option("--out", "-o", help="Target: .onnx, or .pt2 for torch.export.")]
Network = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Put this network into the graph; named as in extract."),
]
ExampleData = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DATA]", help="Data the network takes, as in extract; the first samples give the shape."
    ),
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
    whole = "salgp export cal my_network.py:make test.npz --weights net.safetensors -o whole.onnx"
    command(app, "export", "salgp export cal -o head.onnx", whole)(export)


def export(
    console: Console,
    calibrator: options.CalibratorFolder,
    out: Target,
    model: Network = None,
    data: ExampleData = None,
    weights: options.Weights = None,
    inputs: options.InputNames = None,
    scale: options.Scale = None,
    image_size: options.ImageSize = None,
    gray: options.Gray = False,
    rule: options.RuleFile = None,
    context: WithContext = False,
    any_network: options.AnyNetwork = False,
    force: options.Force = False,
) -> None:
    """Export a fitted calibrator, alone or with its network, for onnxruntime or torch; salgp is not needed to
    run it.

    Alone, logits and layer features go in; with MODEL and DATA, what the network takes (already scaled and
    standardised). The label, the calibrated confidence with its error bar, and the class probabilities come
    out, for any batch size.
    """
    check_suffix("--out", out, *SUFFIXES)
    if model is None and weights is not None:
        raise UsageError("--weights goes with MODEL; without it the calibrator is exported alone")
    if model is not None and data is None:
        raise UsageError("MODEL needs DATA, whose first samples give the shape of its input")
    check_inputs(calibrator, data, weights, rule)
    check_target(out, force, calibrator, data, weights, rule)
    fitted = files.read_calibrator(calibrator)
    from salgp.decide import Rule
    from salgp.export import export_classifier, export_head

    chosen = None if rule is None else Rule.load(rule)
    if model is None or data is None:
        with console.progress(f"exporting {fitted.name}"):
            export_head(fitted, out, chosen, context)
    else:
        classifier = _classifier(console, calibrator, model, weights, any_network)
        how = DataOptions(model, SAMPLES, inputs, scale=scale, image_size=image_size, gray=gray)
        example = _example(how, data)
        with console.progress(f"exporting the network and {fitted.name}"):
            export_classifier(classifier, example, out, chosen, context)
    what = fitted.name if model is None else f"{model} with {fitted.name}"
    size = out.stat().st_size
    told = {"out": str(out), "bytes": size, "network": model is not None}
    console.finish(told, f"exported {what} to {out} ({size:,} bytes)")


def _classifier(
    console: Console, folder: Path, model: str, weights: Path | None, any_network: bool
) -> CalibratedClassifier:
    """The user's network with the calibrator, which must have been fitted on features of it."""
    from salgp import CalibratedClassifier, load
    from salgp.calibrators.loading import read_parts

    if "network" not in read_parts(folder):
        raise ValueError(
            f"{folder} does not say how its features were read from the network; extract and fit again, or "
            f"leave MODEL out to export the calibrator alone"
        )
    try:
        classifier = load(folder, network_of(console, model, weights), strict=not any_network)
    except ValueError as error:
        raise ValueError(f"{model}: {error} (--weights, --any-network)") from error
    assert isinstance(classifier, CalibratedClassifier)
    return classifier


def _example(how: DataOptions, data: Path) -> Example:
    """The first samples of the data, as the network takes them; a single one is repeated."""
    import torch

    found = how.open(data, labels=False)
    batch: Any = found.take(slice(0, min(SAMPLES, found.n)))

    def enough(x: Tensor) -> Tensor:
        return torch.cat([x] * SAMPLES)[:SAMPLES]

    if isinstance(batch, Mapping):
        return {name: enough(x) for name, x in batch.items()}
    return [enough(x) for x in batch]
