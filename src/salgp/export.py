"""Deploy anywhere: a fitted calibrator, or network and calibrator together, as `torch.export` or ONNX.

The graph takes logits and layer features (head), or the network's own inputs (whole classifier), and gives
``label, confidence, std, lower, upper, probs`` with a dynamic batch dimension; outputs the method does not have
are left out. Nothing of salgp is needed to run it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from salgp.calibrators import Calibrator
from salgp.features import Features
from salgp.module import CalibratedClassifier
from salgp.prediction import Prediction
from salgp.storage import write_whole

__all__ = ["export_classifier", "export_head"]

OUTPUTS = ("label", "confidence", "std", "lower", "upper", "probs")


def export_head(calibrator: Calibrator, path: str | os.PathLike[str]) -> Path:
    """Export a fitted calibrator: logits and layer features in, calibrated confidence out.

    Args:
        calibrator: fitted.
        path: target; ``.onnx`` for ONNX, ``.pt2`` for `torch.export`.

    Returns:
        The path written.

    Example:
        >>> import tempfile
        >>> g = torch.Generator().manual_seed(0)
        >>> features = Features(torch.randn(50, 3, generator=g))
        >>> from salgp.calibrators import get
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_head(get("temperature").fit(features, torch.arange(50) % 3), folder + "/head.pt2").suffix
        '.pt2'
    """
    calibrator._check_fitted()
    head = _Head(calibrator)
    g = torch.Generator().manual_seed(0)
    example = (torch.randn(3, calibrator.n_classes_, generator=g), *(torch.randn(3, d, generator=g) for d in calibrator.layer_widths_.values()))
    names = ["logits", *(f"layers.{name}" for name in calibrator.layer_widths_)]
    return _export(head, example, names, path)


def export_classifier(classifier: CalibratedClassifier, example: Tensor | Sequence[Tensor], path: str | os.PathLike[str]) -> Path:
    """Export network and calibrator as one graph (feed-forward networks).

    Args:
        classifier: calibrated classifier.
        example: one batch of inputs, as the network takes it; at least two samples.
        path: target; ``.onnx`` or ``.pt2``.

    Returns:
        The path written.
    """
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    classifier(*inputs)  # settles what is tapped
    names = [f"input{i}" if i else "input" for i in range(len(inputs))]
    return _export(_Whole(classifier), inputs, names, path)


class _Head(nn.Module):
    """Calibrator as a module of plain tensors."""

    def __init__(self, calibrator: Calibrator) -> None:
        super().__init__()
        self.calibrator = calibrator

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        logits, layers = inputs[0], inputs[1:]
        return _outputs(self.calibrator._predict(Features(logits, dict(zip(self.calibrator.layer_widths_, layers, strict=True)))))


class _Whole(nn.Module):
    """Network, taps and calibrator as one module of plain tensors."""

    def __init__(self, classifier: CalibratedClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        features = self.classifier.features(*inputs)
        calibrator = self.classifier.calibrator
        return _outputs(calibrator._predict(features.select(list(calibrator.layer_widths_)) if calibrator.needs_layers else features))


def _outputs(prediction: Prediction) -> tuple[Tensor, ...]:
    values = [getattr(prediction, name) for name in OUTPUTS]
    return tuple(value for value in values if value is not None)


def _export(module: nn.Module, example: tuple[Tensor, ...], names: list[str], path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"cannot export to {target.name!r}: name a file that ends in .onnx or .pt2 (torch.export)")
    batch = torch.export.Dim("batch")
    shapes = (tuple({0: batch} for _ in example),)
    with torch.no_grad(), _quiet():
        present = [name for name, value in _named_outputs(module, example) if value is not None]
        program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
        if target.suffix == ".pt2":
            return write_whole(target, lambda part: _save_program(program, part))
        graph: Any = torch.onnx.export(program, dynamo=True, input_names=names, output_names=present)
        return write_whole(target, lambda part: _save_graph(graph, part))


def _named_outputs(module: nn.Module, example: tuple[Tensor, ...]) -> list[tuple[str, Tensor | None]]:
    calibrator: Calibrator = module.calibrator if isinstance(module, _Head) else module.classifier.calibrator  # type: ignore[union-attr,assignment]
    shape = Features(torch.zeros(2, calibrator.n_classes_), {k: torch.zeros(2, d) for k, d in calibrator.layer_widths_.items()})
    prediction = calibrator._predict(shape)
    return [(name, getattr(prediction, name)) for name in OUTPUTS]


def _save_graph(graph: Any, part: Path) -> None:
    part.write_bytes(graph.model_proto.SerializeToString())


def _save_program(program: Any, part: Path) -> None:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    part.write_bytes(buffer.getvalue())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress chatter and its notes on optional packages off the user's screen."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
