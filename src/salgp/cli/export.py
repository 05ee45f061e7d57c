"""``salgp export``: a fitted calibrator, alone or with the user's network, as one graph without salgp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import salgp
from salgp.cli import options
from salgp.cli.checks import check_inputs, check_suffix, check_target
from salgp.cli.console import Console, UsageError
from salgp.cli.inputs import read_calibrator
from salgp.cli.options import DataOptions, NetworkOptions

__all__ = []

SAMPLES = 3
"""In the example batch; its size is left open in the graph."""

Target = Annotated[Path, Option("--out", "-o", help="Target: .onnx, or .pt2 for torch.export.")]
Network = Annotated[str | None, Argument(metavar="[MODEL]", help="Network to put into the graph.")]
ExampleData = Annotated[Path | None, Argument(metavar="[DATA]", help="Its data, for their shape.")]
Weights = Annotated[Path | None, Option(help="Weights of the network, as in extract.")]
WithContext = Annotated[bool, Option("--context", help="Let the graph take sums over a window.")]


def export(
    console: Console,
    *,
    calibrator: options.CalibratorFolder,
    model: Network = None,
    data: ExampleData = None,
    out: Target,
    weights: Weights = None,
    rule: options.RuleFile = None,
    context: WithContext = False,
    how: DataOptions,
    force: options.Force = False,
) -> None:
    """Export a fitted calibrator, alone or with its network, for onnxruntime or torch; salgp is not needed to
    run it.

    Alone, logits and layer features go in; with MODEL and DATA, what the network takes (already scaled and
    standardised). The label, the calibrated confidence with its error bar, and the class probabilities come
    out, for any batch size.

    Example:
        salgp export cal -o head.onnx
        salgp export cal my_network.py:make test.npz --weights net.safetensors -o whole.onnx
    """
    check_suffix(out, ".onnx", ".pt2")
    _check_together(model, data, weights)
    check_inputs(calibrator, data, weights, rule)
    check_target(out, "exported graph", force, calibrator, data, weights, rule)
    fitted = read_calibrator(calibrator).calibrator
    name = fitted.name
    chosen = None if rule is None else salgp.decide.Rule.load(rule)
    if model is None or data is None:
        with console.progress(f"exporting {name}"):
            salgp.export.export_head(fitted, out, chosen, context)
    else:
        classifier = _classifier(console, calibrator, NetworkOptions(model, weights))
        example = how.open(model, data, labels=False).take(slice(0, SAMPLES))
        name = f"{model} with {name}"
        with console.progress(f"exporting {name}"):
            salgp.export.export_classifier(classifier, example, out, chosen, context)
    size = out.stat().st_size
    told = {"out": str(out), "bytes": size, "network": model is not None}
    console.finish(told, f"exported {name} to {out} ({size:,} bytes)")


def _check_together(model: str | None, data: Path | None, weights: Path | None) -> None:
    if model is None and weights is not None:
        raise UsageError("--weights goes with MODEL; without it the calibrator is exported alone")
    if model is not None and data is None:
        raise UsageError("MODEL needs DATA, whose first samples give the shape of its input")


def _classifier(console: Console, folder: Path, network: NetworkOptions) -> salgp.CalibratedClassifier:
    """The user's network with the calibrator, which must have been fitted on features of it."""
    model = network.open(console)
    try:
        return salgp.load(folder, model)
    except FileNotFoundError as error:
        why = "does not say how its features were read from the network"
        raise ValueError(
            f"{folder} {why}; extract and fit again, or leave MODEL out to export the calibrator alone"
        ) from error
