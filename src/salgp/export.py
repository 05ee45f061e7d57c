"""Deploy anywhere: a fitted calibrator, or network and calibrator together, as `torch.export` or ONNX.

The graph takes logits and layer features (head), or the network's own inputs (whole classifier), and gives
``label, confidence, std, lower, upper, probs`` with a dynamic batch dimension; outputs the method does not
have are left out. With a rule (`salgp.decide`) it also gives ``act``. With a context it takes the sums
over a window of samples, ``context``, and gives each sample's own part in them, ``sample_context``. Nothing
of salgp is needed to run it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from salgp.calibrators import Calibrator
from salgp.classifier import CalibratedClassifier
from salgp.decide import Rule
from salgp.extras import require
from salgp.features import Features
from salgp.file_signatures import KINDS
from salgp.io import refuse_foreign, write_whole

__all__ = ["TARGETS", "Example", "export_classifier", "export_head"]

Example = Tensor | np.ndarray | Sequence[Any] | Mapping[str, Any]
"""One batch as a network takes it, its only input, its inputs in order or by name; or as loaders make it."""
MADE_BY = KINDS["exported graph"][0].decode()
"""Metadata of an exported file."""
OUTPUTS = ("label", "confidence", "std", "lower", "upper", "probs")
LOWEST_TORCH = "2.13"
"""Earlier ones fix the size of the batch in the graph, or lack operations."""


def export_head(
    calibrator: Calibrator, path: str | os.PathLike[str], rule: Rule | None = None, context: bool = False
) -> Path:
    """Export a fitted calibrator: logits and layer features in, calibrated confidence out.

    Args:
        calibrator: fitted.
        path: target; ``.onnx`` for ONNX, ``.pt2`` for `torch.export`. An earlier export is replaced, any
            other file left alone with a `FileExistsError`.
        rule: when to act; adds the output ``act``.
        context: should the graph know the window of its samples? Adds the input ``context (2 + c,)``, sums
            over the window of two numbers and of how often each class was predicted (zeros: nothing is
            known), and the output ``sample_context (n, 2 + c)``, what each sample adds to them.

    Returns:
        The path written.

    Example:
        >>> import tempfile
        >>> g = torch.Generator().manual_seed(0)
        >>> features = Features(torch.randn(50, 3, generator=g))
        >>> from salgp.calibrators import get
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_head(
        ...         get("temperature").fit(features, torch.arange(50) % 3), folder + "/head.pt2"
        ...     ).suffix
        '.pt2'
    """
    calibrator._check_fitted()
    head = _Head(calibrator, rule, context)
    g = torch.Generator().manual_seed(0)
    widths = {f"layers.{name}": d for name, d in calibrator.layer_widths_.items()}
    shapes = {"logits": calibrator.n_classes_} | widths
    example = tuple(torch.randn(3, d, generator=g) for d in shapes.values())
    return _export(head, example, list(shapes), path)


def export_classifier(
    classifier: CalibratedClassifier,
    example: Example,
    path: str | os.PathLike[str],
    rule: Rule | None = None,
    context: bool = False,
) -> Path:
    """Export network and calibrator as one graph (feed-forward networks).

    Args:
        classifier: calibrated classifier.
        example: one batch of inputs, as the network takes it: an array, several in order, or a mapping by
            name; or a batch of the loader, whose labels are left out: what stands behind as many inputs as
            calibration had. At least two samples. Only the first axis is dynamic, the others stay as they are
            here.
        path: target; ``.onnx`` or ``.pt2``; see `export_head`.
        rule: when to act; adds the output ``act``.
        context: should the graph know the window of its samples? See `export_head`.

    Returns:
        The path written.

    Example:
        >>> import salgp, tempfile
        >>> model, x = nn.Linear(4, 3), torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> classifier = salgp.calibrate(model, [(x, torch.arange(60) % 3)], method="uncalibrated")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_classifier(classifier, x[:4], folder + "/whole.pt2").suffix
        '.pt2'
    """
    batch = classifier.batch_of(example)
    keywords = list(batch.keywords) or None
    values = (*batch.inputs, *batch.keywords.values())
    names = keywords or [f"input{i}" if i else "input" for i in range(len(values))]
    _check_arrays(names, values)
    inputs = tuple(_as_network(x, classifier.model) for x in values)
    whole = _Whole(classifier, keywords, rule, context)
    with torch.no_grad():  # resolves the taps, and fails with a clear error where the example does not fit
        whole.features(inputs)
    return _export(whole, inputs, names, path)


def _check_arrays(names: Sequence[str], values: Sequence[Any]) -> None:
    for name, x in zip(names, values, strict=True):
        if not isinstance(x, Tensor) or x.ndim == 0:
            what = "a single number" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise TypeError(
                f"every input of the example must be an array with one row for each sample, got {what} as "
                f"{name!r}; give the arrays the network takes, in order or by name"
            )
    if min(map(len, values), default=0) < 2:
        raise ValueError(
            "the example must have at least two samples: with one, the size of the batch "
            "could not be told from a constant"
        )


class _Calibrated(nn.Module):
    """A calibrator as a module of plain tensors; what its features are made of is up to the leaf."""

    def __init__(self, calibrator: Calibrator, rule: Rule | None, context: bool) -> None:
        super().__init__()
        self.calibrator = calibrator
        self.rule = None if rule is None else rule.module(calibrator.n_classes_)
        self.context = context

    @abstractmethod
    def features(self, inputs: Sequence[Tensor]) -> Features:
        """Features for the calibrator, from the inputs of the graph."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        more = []
        if self.context:
            *arrays, window = inputs
            prediction, own = self.calibrator.predict_in_window(self.features(arrays), window)
            more = [own]
        else:
            prediction = self.calibrator._predict(self.features(inputs))
        if self.rule is not None:
            more = [self.rule(prediction.label, prediction.confidence), *more]
        values = [getattr(prediction, name) for name in OUTPUTS]
        return (*(value for value in values if value is not None), *more)

    def output_names(self) -> list[str]:
        """Names of the outputs of the graph, found by one prediction; what it caches is worked out before the
        graph is taken.
        """
        layers = {name: torch.ones(2, d) for name, d in self.calibrator.layer_widths_.items()}
        logits = torch.zeros(2, self.calibrator.n_classes_)
        prediction = self.calibrator._predict(Features(logits, layers))
        names = [name for name in OUTPUTS if getattr(prediction, name) is not None]
        act = [] if self.rule is None else ["act"]
        return [*names, *act, *["sample_context"] * self.context]


class _Head(_Calibrated):
    """A calibrator alone."""

    def features(self, inputs: Sequence[Tensor]) -> Features:
        """Logits and layers, as they are given; a probability of 0 as the calibrator has learned it."""
        logits, *layers = inputs
        found = Features(logits, dict(zip(self.calibrator.layer_widths_, layers, strict=True)))
        return found if self.calibrator.zero_logits_ is None else self.calibrator.floor_zeros(found)


class _Whole(_Calibrated):
    """Network, taps and calibrator."""

    def __init__(
        self,
        classifier: CalibratedClassifier,
        keywords: Sequence[str] | None = None,
        rule: Rule | None = None,
        context: bool = False,
    ) -> None:
        super().__init__(classifier.calibrator, rule, context)
        self.classifier = classifier
        self.keywords = keywords

    def features(self, inputs: Sequence[Tensor]) -> Features:
        """Features that the taps read from the network."""
        given = inputs if self.keywords is None else [dict(zip(self.keywords, inputs, strict=True))]
        found = self.classifier.features(*given)
        calibrator = self.calibrator
        if self.classifier.taps.output != "logits":
            found = calibrator.floor_zeros(found)
        return found.select(list(calibrator.layer_widths_)) if calibrator.needs_layers else found


def _export(
    module: _Calibrated, example: tuple[Tensor, ...], names: list[str], path: str | os.PathLike[str]
) -> Path:
    target = Path(path)
    if target.suffix not in TARGETS:
        known = " or ".join(f"{suffix} ({kind.title})" for suffix, kind in TARGETS.items())
        raise ValueError(f"cannot export to {target.name!r}: name a file that ends in {known}")
    if torch.__version__ < LOWEST_TORCH:
        raise ImportError(f"export needs torch {LOWEST_TORCH} or newer; this is torch {torch.__version__}")
    refuse_foreign(target, "exported graph")
    kind = TARGETS[target.suffix]
    require(*kind.needs)
    batch = torch.export.Dim("batch")
    shapes: list[dict[int, Any]] = [{0: batch} for _ in example]  # the first axis of every input is the batch
    if module.context:
        window = torch.zeros(2 + module.calibrator.n_classes_)
        example, names, shapes = (*example, window), [*names, "context"], [*shapes, {}]
        module(*example)  # refuses where the method takes none
    present = module.output_names()
    _check_names(names, present)
    _check_types(kind, [*module.parameters(), *example])
    with torch.no_grad(), _quiet(), _explained(module):
        program = torch.export.export(module, example, dynamic_shapes=(tuple(shapes),), strict=False)
        contents = kind.encode(program, names, present)

    return write_whole(target, lambda part: part.write_bytes(contents))


def _check_names(inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """A graph knows its inputs and outputs by name."""
    every = [*inputs, *outputs]
    for name in inputs:
        if every.count(name) > 1:
            raise ValueError(
                f"the input {name!r} has the name of another input or output of the graph; give the example "
                f"in order, [x, ...], so that its inputs are called 'input', 'input1', ..."
            )


def _check_types(kind: Target, tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        if x.dtype in kind.lacks:
            name = str(x.dtype).removeprefix("torch.")
            raise ValueError(
                f"{kind.title} runtimes do not compute in {name} on a processor: calibrate and export a copy "
                f"of the network in single precision, copy.deepcopy(model).float(), or write a .pt2 file for "
                f"torch"
            )


@dataclass(frozen=True)
class Target:
    """A format to export to.

    Args:
        title: for people.
        encode: ``encode(program, input_names, output_names) -> bytes`` of a `torch.export` program.
        needs: libraries it takes.
        lacks: types of numbers in which its runtimes do not compute.
    """

    title: str
    encode: Callable[[Any, Sequence[str], Sequence[str]], bytes]
    needs: tuple[str, ...] = ()
    lacks: tuple[torch.dtype, ...] = ()


def _as_network(x: Tensor, model: nn.Module) -> Tensor:
    """Floating-point inputs in the type of the network's parameters and where it is, as
    `CalibratedClassifier` would send them.
    """
    for p in model.parameters():
        if p.is_floating_point():
            return x.to(p) if x.is_floating_point() else x.to(p.device)
    return x


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """``log(1 + exp x)``: onnxruntime has none in double precision."""
    if x.dtype == torch.float32 and beta == 1:
        return NotImplemented
    z = beta * x
    return (z.clamp_min(0) + torch.log1p(torch.exp(-z.abs()))) / beta


def _searchsorted(
    edges: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Any = None,
    sorter: Any = None,
) -> Tensor:
    """How many edges lie below: ONNX has no binary search."""
    x = x[..., None]
    below = edges <= x if right or side == "right" else edges < x
    return below.sum(dim=-1, dtype=torch.int32 if out_int32 else torch.int64)


def _clamp_min(x: Tensor, least: float) -> Tensor:
    """ONNX clips at the largest number as well, which makes infinite distances finite."""
    return torch.maximum(x, torch.full((), least, dtype=x.dtype, device=x.device))


_WITHOUT_ONNX: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.softplus.default: _softplus,
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
    torch.ops.aten.clamp_min.default: _clamp_min,
}
"""Operations that ONNX or onnxruntime lack or compute otherwise, in terms of others."""


@contextlib.contextmanager
def _explained(module: _Calibrated) -> Iterator[None]:
    """The exporter's pages of reasons as one sentence that says what to do."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        first, *_ = str(error).split(".  ")
        reason = " ".join(first.split())[:160] or type(error).__name__
        name = module.calibrator.name
        advice = f"{name} cannot be exported; choose another method, such as layer-evidence or temperature"
        if isinstance(module, _Whole):
            advice = f"this network with {name} does not make one graph; export the calibrator alone"
        raise RuntimeError(f"{advice} (the exporter said: {reason})") from error


def _as_onnx(program: Any, names: Sequence[str], outputs: Sequence[str]) -> bytes:
    import onnxscript

    def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
        return onnxscript.opset18.Softplus(x)  # without the exporter's threshold: it never overflows

    graph: Any = torch.onnx.export(
        program.run_decompositions(_WITHOUT_ONNX),
        dynamo=True,
        input_names=names,
        output_names=outputs,
        custom_translation_table={torch.ops.aten.softplus.default: softplus},
    )
    model = graph.model_proto
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in values:
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == batch:
                axis.dim_param = "batch"  # and not the tracer's own name for it
    model.graph.doc_string = MADE_BY
    contents: bytes = model.SerializeToString()
    return contents


def _as_program(program: Any, names: Sequence[str], outputs: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"made_by": MADE_BY})
    return buffer.getvalue()


TARGETS = {
    ".onnx": Target("ONNX", _as_onnx, ("onnx", "onnxscript"), (torch.bfloat16,)),
    ".pt2": Target("torch.export", _as_program),
}
"""Export targets by the suffix of the file; a new target is a line here."""


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
