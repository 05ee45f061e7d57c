"""Networks that come as an ONNX file; how the command line reads them is tested with its other ways in."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
import torch

import salgp
from salgp.onnx import OnnxNetwork


def test_tensors_of_an_onnx_network_may_have_any_names(tmp_path: Path) -> None:
    """Names that are one after cleaning, and names that a dictionary of modules has itself."""
    made = ["x.1", "x_1", "x_1_2", "keys", "training", "9/[]", "__"]
    steps = "  ".join(f"t{i + 1} = Add(t{i}, one)" for i in range(len(made)))
    text = f"""<ir_version: 8, opset_import: ["" : 17]> net (float[N,2] t0) => (float[N,2] z)
    <float[1] one = {{1}}> {{ {steps}  z = Identity(t{len(made)}) }}"""
    graph = onnx.parser.parse_model(text)
    names = {f"t{i + 1}": name for i, name in enumerate(made)}
    for node in graph.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    onnx.save(graph, str(tmp_path / "net.onnx"))
    model = OnnxNetwork(tmp_path / "net.onnx", layers=[*made, "keys"])
    assert list(model.tensor_names.values()) == made
    features, _ = salgp.extract(model, [(torch.zeros(4, 2), torch.arange(4) % 2)])
    by_tensor = {made: f"hidden.{module}" for module, made in model.tensor_names.items()}
    assert [float(features.layers[by_tensor[name]][0, 0]) for name in made] == [1, 2, 3, 4, 5, 6, 7]


def test_damaged_graphs_are_named(tmp_path: Path) -> None:
    """Whatever parser or runtime complains: it is a format error with the name of the file."""
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[N,2] x) => (float[N,2] z)
    <float[2,2] w = {1,0,0,1}> { a = MatMul(x, w) h = Relu(a) z = MatMul(h, w) }"""
    whole = onnx.parser.parse_model(text).SerializeToString()
    path, numbers, said = tmp_path / "net.onnx", random.Random(0), []
    for _ in range(300):
        changed = bytearray(whole[: numbers.choice([len(whole), numbers.randrange(1, len(whole))])])
        for _ in range(numbers.randrange(3)):
            changed[numbers.randrange(len(changed))] = numbers.randrange(256)
        path.write_bytes(changed)
        try:
            OnnxNetwork(path)
        except salgp.FormatError as error:
            said.append(str(error))
    assert len(said) > 100
    assert all("net.onnx" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((torch.zeros(3, 5),), "index: 1 Got: 5 Expected: 2"),
        ((torch.zeros(3, 2), torch.zeros(3, 2)), "takes x; got 2 inputs"),
        ((torch.full((3, 2), 2.0),), "out of data bounds"),
    ],
)
def test_errors_of_the_runtime_name_the_file(
    tmp_path: Path, inputs: tuple[torch.Tensor, ...], said: str
) -> None:
    """Inputs that do not fit, and a graph that fails only when it runs."""
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[N,2] x) => (float[N,2] z)
    <float[1,2] w = {1,0}> { i = Cast<to = 7>(x) row = ReduceMax<keepdims = 0, axes = [1]>(i)
    rows = Gather(w, row) z = Add(x, rows) }"""
    onnx.save(onnx.parser.parse_model(text), str(tmp_path / "net.onnx"))
    model = OnnxNetwork(tmp_path / "net.onnx", layers=())
    assert model(torch.zeros(3, 2)).tolist() == [[1, 0]] * 3
    with pytest.raises((RuntimeError, ValueError), match=rf"(?s)net\.onnx: .*({said})"):
        model(*inputs)
    with pytest.raises(RuntimeError, match=r"net\.onnx"):
        salgp.extract(model, [{"x": inputs[0]} if len(inputs) == 1 else {"y": inputs[0]}])
