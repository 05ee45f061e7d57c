"""``salgp export``: a fitted calibrator, alone or with the user's network, as one graph without salgp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.options import DataOptions, NetworkOptions
from salgp.cli.predictions import read_calibrator
from salgp.cli.preflight import check_inputs, check_suffix, check_target

if TYPE_CHECKING:
    from torch import Tensor

    from salgp import CalibratedClassifier
    from salgp.export import Example

__all__ = ["register"]

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
Weights = Annotated[Path | None, typer.Option("--weights", help="Weights of the network, as in extract.")]
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
    """
    check_suffix(out, ".onnx", ".pt2")
    if model is None and weights is not None:
        raise UsageError("--weights goes with MODEL; without it the calibrator is exported alone")
    if model is not None and data is None:
        raise UsageError("MODEL needs DATA, whose first samples give the shape of its input")
    check_inputs(calibrator, data, weights, rule)
    check_target(out, "exported graph", force, calibrator, data, weights, rule)
    fitted = read_calibrator(calibrator).calibrator
    from salgp.decide import Rule
    from salgp.export import export_classifier, export_head

    chosen = None if rule is None else Rule.load(rule)
    if model is None or data is None:
        with console.progress(f"exporting {fitted.name}"):
            export_head(fitted, out, chosen, context)
    else:
        classifier = _classifier(console, calibrator, NetworkOptions(model, weights))
        example = _example(how, model, data)
        with console.progress(f"exporting the network and {fitted.name}"):
            export_classifier(classifier, example, out, chosen, context)
    what = fitted.name if model is None else f"{model} with {fitted.name}"
    size = out.stat().st_size
    told = {"out": str(out), "bytes": size, "network": model is not None}
    console.finish(told, f"exported {what} to {out} ({size:,} bytes)")


def _classifier(console: Console, folder: Path, network: NetworkOptions) -> CalibratedClassifier:
    """The user's network with the calibrator, which must have been fitted on features of it."""
    from salgp import CalibratedClassifier, load

    model = network.open(console)
    try:
        classifier = load(folder, model)
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} does not say how its features were read from the network; extract and fit again, or "
            f"leave MODEL out to export the calibrator alone"
        ) from error
    assert isinstance(classifier, CalibratedClassifier)
    return classifier


def _example(how: DataOptions, model: str, data: Path) -> Example:
    """The first samples of the data, as the network takes them; a single one is repeated."""
    import torch

    found = how.open(model, data, labels=False)
    batch: Any = found.take(slice(0, min(SAMPLES, found.n)))

    def enough(x: Tensor) -> Tensor:
        return torch.cat([x] * SAMPLES)[:SAMPLES]

    if isinstance(batch, Mapping):
        return {name: enough(x) for name, x in batch.items()}
    return [enough(x) for x in batch]
