"""An ONNX classifier as a PyTorch module whose hidden tensors can be read.

Networks of other frameworks often come as one ``.onnx`` file. `OnnxNetwork` runs it with onnxruntime, asks it
for hidden tensors besides the class scores, and passes each through a small module of its own. So `extract`,
`calibrate` and the command line read them like any other layers, without being told which.

The class scores are computed inside the graph; augmentation perturbs the inputs, not these layers.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from salgp.extras import require
from salgp.io import FormatError, open_regular, reading
from salgp.io.files import AnyPath
from salgp.network.layers import thinned

__all__ = ["OnnxNetwork"]

WEIGHTY = ("Conv", "Gemm", "MatMul")
"""Operators whose inputs are worth reading: what one layer of weights hands to the next."""
MAX_LAYERS = 8
"""Most hidden tensors that are read unless they are named: fewer than of a network in PyTorch, whose layers
are pooled where they arise. Here all of them leave the runtime whole, before they are pooled.
"""


Names = Sequence[str]
Values = dict[str, Any]


class OnnxNetwork(nn.Module):
    """Runs an ONNX file; its hidden tensors are the outputs of its child modules.

    Args:
        path: the ``.onnx`` file.
        layers: names of hidden tensors; by default what flows between the layers with weights.
        output: name of the output with the class scores; by default the first.

    Attributes:
        tensor_names: child module -> name of the tensor in the graph.
        salgp_layers: what ``layers="auto"`` means for this network.

    Example:
        >>> import onnx, tempfile
        >>> text = '''<ir_version: 8, opset_import: ["" : 17]> net (float[N,2] x) => (float[N,2] z)
        ... <float[2,2] w = {1,0,0,1}> { a = MatMul(x, w) h = Relu(a) z = MatMul(h, w) }'''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     onnx.save(onnx.parser.parse_model(text), folder + "/net.onnx")
        ...     network = OnnxNetwork(folder + "/net.onnx")
        >>> network.tensor_names, network(torch.ones(3, 2)).shape
        ({'h': 'h'}, torch.Size([3, 2]))
    """

    def __init__(self, path: AnyPath, layers: Names | None = None, output: str | None = None) -> None:
        super().__init__()
        self._path = os.fspath(path)
        graph = _read(path)
        given = [x.name for x in graph.graph.output]
        if output is not None and output not in given:
            raise ValueError(f"{path}: no output called {output!r}; it has {', '.join(given)}")
        names = _between_weights(graph) if layers is None else _named(graph, layers, path)
        self.tensor_names = _by_module(names)
        self.salgp_layers = [f"hidden.{name}" for name in self.tensor_names]
        with reading(path, "a graph that onnxruntime can run"):
            self._session = _session(graph, [output or given[0], *names])
        self.hidden = nn.ModuleDict({key: _Passes() for key in self.tensor_names})
        self.scores = _Passes()
        digest = hashlib.sha256(graph.SerializeToString(deterministic=True)).digest()
        self.register_buffer("digest", torch.ByteTensor(list(digest)))

    def forward(self, *inputs: Any, **keywords: Any) -> Tensor:
        """Class scores of one batch."""
        tensors = (x for x in (*inputs, *keywords.values()) if isinstance(x, Tensor))
        device = next((x.device for x in tensors), None)
        try:
            values = _by_name(self._session.get_inputs(), inputs, keywords)
            made = _run(self._session, values)
        except Exception as error:  # onnxruntime raises classes of its own
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"{self._path}: {error}") from error
        scores, *hidden = (torch.from_numpy(x).to(device) for x in made)
        for key, x in zip(self.tensor_names, hidden, strict=True):
            self.hidden[key](x)
        return self.scores(scores)


class _Passes(nn.Module):
    """Hands a tensor on."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _read(path: AnyPath) -> Any:
    require("onnx", "onnxruntime")
    import onnx

    with open_regular(path), reading(path, "a whole ONNX file"):
        graph = onnx.load(os.fspath(path))
        if not graph.graph.output:
            raise FormatError("the graph has no output")
        return graph


def _between_weights(graph: Any) -> tuple[str, ...]:
    """Tensors that one layer with weights hands to the next, in order; thinned out evenly."""
    nodes = graph.graph.node
    stored = {x.name for x in (*graph.graph.initializer, *graph.graph.input)}
    produced = {name for node in nodes for name in node.output if node.op_type != "Constant"}
    read = [node.input[0] for node in nodes if node.op_type in WEIGHTY]
    hidden = [name for name in dict.fromkeys(read) if name in produced - stored]
    return thinned(hidden, MAX_LAYERS)


def _named(graph: Any, layers: Names, path: Any) -> Names:
    produced = [name for node in graph.graph.node for name in node.output]
    for name in layers:
        if name not in produced:
            raise ValueError(f"{path}: no tensor called {name!r}; it has {', '.join(produced[:60])}")
    return tuple(dict.fromkeys(layers))


def _session(graph: Any, names: Names) -> Any:
    import onnx
    import onnxruntime

    asked = onnx.ModelProto()
    asked.CopyFrom(graph)
    del asked.graph.output[:]
    asked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(asked.SerializeToString(), options, providers)


def _by_module(tensors: Names) -> dict[str, str]:
    """Tensors by the name of their module, which no other has.

    Example:
        >>> _by_module(["/fc/Relu", "x.1", "x_1", "keys"])
        {'fc_Relu': '/fc/Relu', 'x_1': 'x.1', 'x_1_2': 'x_1', 'tensor_keys': 'keys'}
    """
    found: dict[str, str] = {}
    for tensor in tensors:
        name = plain = _module_name(tensor)
        number = itertools.count(2)
        while name in found:
            name = f"{plain}_{next(number)}"
        found[name] = tensor
    return found


def _module_name(tensor: str) -> str:
    """Modules have no dots or slashes in their names, nor one that a dictionary of modules has itself."""
    name = re.sub(r"[^0-9A-Za-z_]+", "_", tensor).strip("_") or "tensor"
    return f"tensor_{name}" if name in dir(nn.ModuleDict()) else name


def _by_name(wanted: Sequence[Any], inputs: Sequence[Any], keywords: Any) -> Values:
    names = [x.name for x in wanted]
    given = dict(zip(names, inputs, strict=False)) | keywords
    if len(inputs) > len(names) or not set(names) <= set(given):
        also = f" and {', '.join(keywords)}" if keywords else ""
        raise ValueError(f"the ONNX network takes {', '.join(names)}; got {len(inputs)} inputs{also}")
    return {x.name: _array(given[x.name], x.type) for x in wanted}


def _array(x: Any, kind: str) -> Any:
    if isinstance(x, Tensor):
        x = x.detach().cpu().numpy()
    return x.astype(_NUMPY[kind], copy=False) if kind in _NUMPY else x


_NUMPY = {f"tensor({name})": name for name in ("float16", "int64", "int32", "bool")}
_NUMPY |= {"tensor(float)": "float32", "tensor(double)": "float64"}


def _run(session: Any, values: Values) -> list[Any]:
    """All outputs; a graph of fixed batch size runs several times."""
    parts = [session.run(None, piece) for piece in _pieces(session, values)]
    return parts[0] if len(parts) == 1 else list(map(np.concatenate, zip(*parts, strict=True)))


def _pieces(session: Any, values: Values) -> Iterator[Values]:
    fixed = session.get_inputs()[0].shape[0]
    n = len(next(iter(values.values())))
    if not isinstance(fixed, int) or fixed == n:
        yield values
        return
    if n % fixed:
        raise ValueError(
            f"the ONNX network takes batches of exactly {fixed} samples, got {n}; use a batch size that "
            f"{fixed} divides, or export it with an open batch axis"
        )
    for i in range(0, n, fixed):
        yield {name: x[i : i + fixed] for name, x in values.items()}
