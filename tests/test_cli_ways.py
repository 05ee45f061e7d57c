"""Ways into the command line: class scores of any framework, checkpoints, ONNX networks, tables."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from samples import sample
from torch import nn

import salgp
from salgp.calibrators import get
from salgp.calibrators.loading import read_parts
from salgp.cli import main
from salgp.cli.fit import notes_on
from salgp.files import FeatureFile, read_features
from salgp.io.weights import load_weights

Run = Callable[[str], tuple[int, str, str]]
NETWORK = """
from torch import nn


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def prepare(columns):
    import numpy as np
    colour = (columns["colour"] == "red").astype(np.float32)
    return np.stack([columns["f0"], columns["f1"], columns["f2"], colour], 1).astype(np.float32)
"""


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)

    def call(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(line.split())
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def write_csv(path: Path, columns: dict[str, Any]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))


def write_scores(folder: Path, n: int = 200) -> tuple[salgp.Features, torch.Tensor]:
    """The same scores as .npz, .csv (named classes) and .parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    features, labels = sample(n)
    names = ["ant", "bee", "cow"]
    probs = features.probs.numpy()
    np.savez(folder / "s.npz", probs=probs, y=labels.numpy())
    columns = {f"probs.{name}": probs[:, k] for k, name in enumerate(names)}
    write_csv(folder / "s.csv", {"id": range(n), **columns, "label": [names[k] for k in labels]})
    pq.write_table(pa.table({"probs": probs.tolist(), "labels": labels.numpy()}), folder / "s.parquet")
    return features, labels


def test_class_scores_of_any_file_give_the_library_s_own_fit(run: Run, tmp_path: Path) -> None:
    features, labels = write_scores(tmp_path)
    expected = salgp.calibrate_outputs(labels=labels, probs=features.probs).calibrator
    for suffix in ("npz", "csv", "parquet"):
        code, out, err = run(f"fit s.{suffix} -m auto -o {suffix}")
        assert code == 0, err
        assert "fitted stacked on 200 samples" in out
        found = salgp.load(tmp_path / suffix)
        torch.testing.assert_close(found.weights_, expected.weights_, atol=1e-3, rtol=0)
        assert run(f"apply {suffix} s.{suffix} -o {suffix}.csv")[0] == 0
        assert run(f"evaluate {suffix} s.{suffix}")[0] == 0
    assert "columns not used: id" in run("fit s.csv -o again")[2]
    assert read_parts(tmp_path / "csv")["origin"]["classes"] == ["ant", "bee", "cow"]


def test_classes_called_by_digits_that_are_no_numbers(run: Run, tmp_path: Path) -> None:
    features, labels = sample(50)
    probs, names = features.probs.numpy(), ["\u00b2", "1", "\u00b9"]
    columns = {f"probs.{name}": probs[:, k] for k, name in enumerate(names)}
    write_csv(tmp_path / "s.csv", {**columns, "label": [names[k] for k in labels]})
    code, _, err = run("fit s.csv -o cal")
    assert code == 0, err
    assert read_parts(tmp_path / "cal")["origin"]["classes"] == names


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize(
    "names",
    [("1", "2", "3"), ("-1", "0", "1"), ("1.0", "2.0", "0.0"), ("2", "0", "1"), ("7.", "+3", "10")],
)
def test_numbers_as_labels_are_those_that_columns_are_called_by(
    names: tuple[str, ...], kind: type, run: Run, tmp_path: Path
) -> None:
    features, labels = sample(60)
    probs = features.probs.numpy()
    columns = {f"probs.{name}": probs[:, k] for k, name in enumerate(names)}
    write_csv(tmp_path / "s.csv", {**columns, "label": [kind(float(names[k])) for k in labels]})
    code, out, err = run("compare s.csv --test s.csv --method uncalibrated --json")
    assert code == 0, err
    accuracy = json.loads(out)["scores"]["uncalibrated"]["accuracy"]
    assert accuracy == pytest.approx(float(features.correct(labels).double().mean()))


@pytest.mark.parametrize("names", [("1", "2", "other"), ("1", "1.0", "2"), ("0", "1", "half")])
def test_numbers_as_labels_of_columns_only_some_of_which_are_numbers_are_refused(
    names: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    features, _ = sample(60)
    columns = {f"probs.{name}": features.probs.numpy()[:, k] for k, name in enumerate(names)}
    write_csv(tmp_path / "s.csv", {**columns, "label": [k % 2 + 1 for k in range(60)]})
    code, _, err = run("fit s.csv -o cal")
    assert code == 1
    assert f"of the class columns {', '.join(names)} only some are called by a number of their own" in err


@pytest.mark.parametrize(
    ("value", "said"), [(0.5, "no whole numbers"), (9, "label 9 is none of the classes"), ("", "no whole")]
)
def test_labels_that_no_numbered_column_has(value: Any, said: str, run: Run, tmp_path: Path) -> None:
    features, _ = sample(60)
    columns = {f"probs.{k + 1}": features.probs.numpy()[:, k] for k in range(3)}
    write_csv(tmp_path / "s.csv", {**columns, "label": [value, *([1] * 59)]})
    code, _, err = run("fit s.csv -o cal")
    assert code == 1
    assert said in err


def test_probabilities_called_logits_are_noted_in_words_of_the_command_line(run: Run, tmp_path: Path) -> None:
    features, labels = sample(60)
    np.savez(tmp_path / "s.npz", logits=features.probs.numpy(), labels=labels.numpy())
    code, _, err = run("fit s.npz -o cal")
    assert code == 0
    assert "the logits look like probabilities" in err
    assert "call them probs instead of logits, as an argument or in a file" in err
    assert "Features." not in err


def test_a_report_slices_by_the_columns_of_a_table(run: Run, tmp_path: Path) -> None:
    write_scores(tmp_path)
    cameras = ["north" if i % 3 else "south" for i in range(200)]
    write_csv(tmp_path / "where.csv", {"camera": cameras, "second": [0.1 * i for i in range(200)]})
    assert run("fit s.npz -o cal")[0] == 0
    code, _, err = run("report cal s.npz -o r.html --slices where.csv")
    assert code == 0, err
    assert "not used for slices: second" in err
    page = (tmp_path / "r.html").read_text()
    assert "camera" in page
    assert "north" in page
    write_csv(tmp_path / "short.csv", {"camera": cameras[:50]})
    assert "50 values for 200 samples" in run("report cal s.npz -o q.html --slices short.csv")[2]


def test_embeddings_beside_logits_are_layers(run: Run, tmp_path: Path) -> None:
    features, labels = sample(200, widths=(4,))
    np.savez(
        tmp_path / "s.npz",
        logits=features.logits.numpy(),
        labels=labels.numpy(),
        **{"layers.embedding": features.layers["layer0"].numpy()},
    )
    columns = {f"logits.{k}": features.logits[:, k].numpy() for k in range(3)}
    columns |= {f"layers.embedding.{k}": features.layers["layer0"][:, k].numpy() for k in range(4)}
    write_csv(tmp_path / "s.csv", {**columns, "label": labels.numpy()})
    for suffix in ("npz", "csv"):
        code, out, err = run(f"fit s.{suffix} -o {suffix} --json")
        assert code == 0, err
        assert json.loads(out)["method"] == "layer-evidence"
        assert json.loads(out)["layers"] == ["embedding"]
    notes = run("fit s.npz -o again")[2]
    assert "no augmented samples" in notes
    assert "no --reference given" in notes
    assert run("fit s.npz -o none -m temprature")[2].count("did you mean 'temperature'?") == 1


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((3, 2))}, "no class scores here (it has x)"),
        ({"logits": np.zeros((3, 2)), "probs": np.ones((3, 2)) / 2}, "both logits and probs"),
        ({"probs": np.zeros((3, 2)), "y": np.zeros(3, int)}, "are they logits?"),
        ({"logits": np.zeros((3, 2)), "y": np.array(["a", "b", "a"])}, "the labels are names"),
        ({"logits": np.full((3, 2), np.nan), "y": np.zeros(3, int)}, "NaN or infinity in row 0"),
        ({"logits": np.zeros((3, 2))}, "has no labels"),
        (
            {"probs": np.full((3, 2), np.nan), "y": [0, 1, 0]},
            "probabilities hold NaN or infinity in row 0 (3 rows",
        ),
        ({"probs": np.zeros((3, 2, 2)), "y": [0, 1, 0]}, "expected probabilities of shape (n, c)"),
        ({"probs": np.eye(3, dtype=int), "y": [0, 1, 0]}, "got torch.int64 (3, 3)"),
        (
            {"probs": np.eye(3), "y": [0, 1, 0], "layers.a": np.zeros((2, 4))},
            "layer 'a' has 2 rows, the class scores have 3",
        ),
    ],
)
def test_wrong_class_scores(run: Run, tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    code, _, err = run("fit s.npz -o cal")
    assert (code, says in err) == (1, True), err
    assert "forward=" not in err, "there is no network"
    if "probs" in arrays and "logits" not in arrays:
        assert "logits" not in err.replace("are they logits?", "")


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod."])
@pytest.mark.parametrize("inside", [None, "state_dict", "model_state_dict"])
def test_checkpoints_of_all_habits(tmp_path: Path, prefix: str, inside: str | None) -> None:
    trained, fresh = network(1), network(2)
    state = {prefix + k: x for k, x in trained.state_dict().items()}
    if prefix == "model.":
        state["criterion.weight"] = torch.ones(3)  # as in a Lightning checkpoint
    torch.save(state if inside is None else {inside: state, "epoch": 3}, tmp_path / "w.ckpt")
    load_weights(fresh, tmp_path / "w.ckpt")
    for name, x in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], x)


def test_a_checkpoint_that_could_run_code_is_refused(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"could run code.*state_dict"):
        load_weights(network(), tmp_path / "whole.pt")
    torch.save(network().state_dict(), tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:300])
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(salgp.FormatError, match=r"text\.pt: not a file of PyTorch weights"):
        load_weights(nn.Linear(2, 2), tmp_path / "text.pt")
    with pytest.raises(salgp.FormatError, match="not a whole PyTorch file"):
        load_weights(network(), tmp_path / "cut.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(ValueError, match="no weights found"):
        load_weights(network(), tmp_path / "empty.pt")
    torch.save(nn.Linear(4, 8).state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="does not fit the network"):
        load_weights(network(), tmp_path / "other.pt")


def test_weights_by_any_suffix_give_the_same_features(run: Run, tmp_path: Path) -> None:
    trained = network(3)
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    for suffix in ("pth", "safetensors"):
        code = run(f"extract net.py:make d.npz --weights w.{suffix} -o {suffix}.safetensors")[0]
        assert code == 0
    one, two = (salgp.Features.load(tmp_path / f"{s}.safetensors") for s in ("pth", "safetensors"))
    assert torch.equal(one.logits, two.logits)


def onnx_network(path: Path, model: nn.Sequential, batch: str = "N", end: str = "Identity") -> None:
    """``Linear, ReLU, Linear`` written by hand: the export of PyTorch takes long."""
    import onnx
    from onnx import numpy_helper

    text = f"""<ir_version: 8, opset_import: ["" : 17]> net (float[{batch},4] x) => (float[{batch},3] z)
    {{ a = Gemm<transB=1>(x, w0, b0)  h = Relu(a)  y = Gemm<transB=1>(h, w1, b1)  z = {end}(y) }}"""
    graph = onnx.parser.parse_model(text)
    values = {"w0": model[0].weight, "b0": model[0].bias, "w1": model[2].weight, "b1": model[2].bias}
    for name, x in values.items():
        graph.graph.initializer.append(numpy_helper.from_array(x.detach().numpy(), name))
    onnx.save(graph, str(path))


@pytest.mark.parametrize(
    ("end", "kind"), [("Softmax", "probabilities"), ("Sigmoid", "sigmoids"), ("Identity", "logits")]
)
@pytest.mark.parametrize("out", ["f.safetensors", "store"])
def test_extract_says_what_undeclared_outputs_look_like(
    run: Run, tmp_path: Path, end: str, kind: str, out: str
) -> None:
    """Into one file and into shards, also where the first batch is too small to tell."""
    model = network()
    onnx_network(tmp_path / "net.onnx", model, end=end)
    np.savez(tmp_path / "d.npz", x=torch.randn(60, 4, generator=torch.Generator().manual_seed(0)).numpy())
    line = "extract net.onnx d.npz --batch-size 1 -o"
    code, _, err = run(f"{line} undeclared-{out}")
    assert code == (kind != "logits")
    assert f"look like {kind}: say output='{kind}'" in err or code == 0
    assert run(f"{line} {out} --output {kind}")[0] == 0
    read = read_features(tmp_path / out)
    assert read.metadata["output"] == kind
    expected = model(torch.from_numpy(np.load(tmp_path / "d.npz")["x"])).detach()
    torch.testing.assert_close(read.features.probs, expected.softmax(1), atol=1e-5, rtol=0)


def test_an_onnx_network_is_read_like_its_original(run: Run, tmp_path: Path) -> None:
    model = network(4)
    onnx_network(tmp_path / "net.onnx", model)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=np.arange(40) % 3)
    code, _, err = run("extract net.onnx d.npz -o f.safetensors")
    assert code == 0, err
    features, labels = salgp.load_features(tmp_path / "f.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(features.logits, model(x))
        torch.testing.assert_close(features.layers["hidden.h"], model[1](model[0](x)))
    assert run("fit f.safetensors -o cal -m layer-evidence")[0] == 0
    assert "as the factory made it" not in run("export cal net.onnx d.npz -o whole.onnx")[2]
    assert run("extract net.onnx d.npz --weights d.npz -o g.safetensors")[2].count("which has its own") == 1
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 9), np.float32))
    code, _, err = run("extract net.onnx wide.npz -o g.safetensors")
    assert code == 1
    assert "the network does not accept inputs of shape (n, 9) of torch.float32; its own error: " in err
    assert labels is not None


def test_onnx_networks_are_told_apart_and_run_in_fixed_batches(tmp_path: Path) -> None:
    from salgp.network.frozen_copy import fingerprint
    from salgp.onnx import OnnxNetwork

    onnx_network(tmp_path / "a.onnx", network(1))
    onnx_network(tmp_path / "b.onnx", network(2))
    onnx_network(tmp_path / "two.onnx", network(1), batch="2")
    a, b, two = (OnnxNetwork(tmp_path / f"{name}.onnx") for name in ("a", "b", "two"))
    assert fingerprint(a).weights != fingerprint(b).weights
    x = torch.randn(6, 4)
    torch.testing.assert_close(two(x), a(x))
    with pytest.raises(ValueError, match="batches of exactly 2"):
        two(x[:5])
    with pytest.raises(ValueError, match="no tensor called 'nose'"):
        OnnxNetwork(tmp_path / "a.onnx", layers=["nose"])
    with pytest.raises(ValueError, match="the ONNX network takes x"):
        a(x, x)
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "a.onnx").read_bytes()[:50])
    with pytest.raises(ValueError, match="not a whole ONNX file"):
        OnnxNetwork(tmp_path / "cut.onnx")


def test_an_onnx_network_is_calibrated_in_one_call(tmp_path: Path) -> None:
    from salgp.onnx import OnnxNetwork

    model = network(4)
    onnx_network(tmp_path / "net.onnx", model)
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = (model(x) + 0.3 * torch.randn(200, 3, generator=torch.Generator().manual_seed(1))).argmax(1)
    classifier = salgp.calibrate(OnnxNetwork(tmp_path / "net.onnx"), [(x, y)])
    assert list(classifier.calibrator.layer_widths_) == ["hidden.h"]
    assert torch.equal(classifier(x).label, model(x).argmax(1))


def test_columns_of_a_table_are_stacked(run: Run, tmp_path: Path) -> None:
    model = network(5)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    columns: dict[str, Any] = {f"f{j}": x[:, j] for j in range(4)}
    write_csv(tmp_path / "t.csv", {"id": range(30), **columns, "label": np.arange(30) % 3})
    line = "extract net.py:make t.csv --weights w.safetensors -o f.safetensors"
    assert "--inputs" in run(line)[2]
    assert run(f"{line} --inputs f*")[0] == 0
    with torch.no_grad():
        expected = model(torch.as_tensor(x))
    torch.testing.assert_close(salgp.Features.load(tmp_path / "f.safetensors").logits, expected)
    assert "no column matches 'g*'" in run(f"{line} --inputs g* --force")[2]
    reordered(tmp_path / "t.csv", tmp_path / "other.csv", lambda names: names[::-1])
    both = (
        "calibrate net.py:make --weights w.safetensors --calibration t.csv --test other.csv -o c --inputs f*"
    )
    assert "--test: the columns of --inputs (f3, f2, f1, ...)" in run(both)[2]
    assert not (tmp_path / "c").exists()


def test_a_factory_that_fails_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("NUMBER = 3\n\ndef make():\n    raise RuntimeError('no')\n")
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 4), np.float32), labels=np.arange(4) % 3)
    assert "bad.py:make() failed: RuntimeError: no" in run("extract bad.py:make d.npz -o f.safetensors")[2]
    assert "bad.py:NUMBER gives a int" in run("extract bad.py:NUMBER d.npz -o f.safetensors")[2]


def test_categories_go_through_the_user_s_own_function(run: Run, tmp_path: Path) -> None:
    columns = {f"f{j}": np.zeros(4) for j in range(3)}
    write_csv(tmp_path / "t.csv", {**columns, "colour": ["red", "blue", "red", "red"], "label": [0, 1, 2, 0]})
    line = "extract net.py:make t.csv -o f.safetensors"
    assert "turn it into numbers with --prepare" in run(f"{line} --inputs *")[2]
    assert run(f"{line} --prepare net.py:prepare")[0] == 0
    assert len(salgp.Features.load(tmp_path / "f.safetensors")) == 4
    assert "has no 'prepar'" in run(f"{line} --prepare net.py:prepar --force")[2]
    with (tmp_path / "net.py").open("a") as file:
        file.write("\n\ndef by_name(f0, f1, colour):\n    return f0\n")
    said = run(f"{line} --prepare net.py:by_name --force")[2]
    assert "takes f0, f1, colour; it must take one argument, the dictionary of columns by name" in said
    assert "into numbers with a function of yours: --prepare" in run(f"{line} --force")[2]


def test_a_table_with_holes_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("logits.0,logits.1,label\n1,2,0\n1,2\n")
    assert "line 3 has 2 values, the first line names 3" in run("fit t.csv -o cal")[2]
    (tmp_path / "t.csv").write_text("logits.0,logits.1,label\n1,2,0\n1,,1\n")
    assert "NaN or infinity in row 1" in run("fit t.csv -o cal")[2]


def write_sets(folder: Path) -> None:
    """Training, calibration and test data that a network of three classes can learn, and its weights."""
    g = torch.Generator().manual_seed(0)
    model = network(1)
    for name, n in (("train", 200), ("cal", 150), ("test", 200)):
        x = torch.randn(n, 4, generator=g)
        y = (x[:, :3] + 0.6 * torch.randn(n, 3, generator=g)).argmax(1)
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=y.numpy())
        if name == "train":
            optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
            for _ in range(60):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimiser.step()
    torch.save({"state_dict": model.state_dict()}, folder / "w.ckpt")


def test_everything_in_one_command(run: Run, tmp_path: Path) -> None:
    write_sets(tmp_path)
    sets = "--train train.npz --calibration cal.npz --test test.npz"
    line = f"calibrate net.py:make --weights w.ckpt {sets} -o all"
    code, out, err = run(f"{line} --classes low,mid,high")
    assert code == 0, err
    assert "layer evidence" in out
    assert "augmented samples" in out
    assert "no more than a guess" not in err
    assert "next: salgp explain all all/test.safetensors" in out
    assert {p.name for p in (tmp_path / "all").glob("[!.]*")} == {
        "calibrator.safetensors",
        "test.safetensors",
        "report.html",
    }
    assert "high" in (tmp_path / "all" / "report.html").read_text()
    for name, more in (("cal", "--perturb "), ("train", "")):
        assert run(f"extract net.py:make {name}.npz --weights w.ckpt {more}-o {name}.safetensors")[0] == 0
    assert run("fit cal.safetensors --reference train.safetensors -o same")[0] == 0
    for cal in ("all", "same"):
        assert run(f"apply {cal} all/test.safetensors -o {cal}.csv")[0] == 0
    one, two = (np.genfromtxt(tmp_path / f"{cal}.csv", delimiter=",", names=True) for cal in ("all", "same"))
    np.testing.assert_allclose(one["confidence"], two["confidence"], rtol=1e-6)
    evaluated = json.loads(run("evaluate all all/test.safetensors --json")[1])
    code, out, _ = run(f"{line} --force --json")
    scores = json.loads(out)["scores"]
    assert scores["layer evidence"] == evaluated["layer-evidence"]
    assert list(scores) == ["uncalibrated", "temperature", "layer evidence"]
    assert "pass --force" in run(line)[2]
    model = network(1)
    load_weights(model, tmp_path / "w.ckpt")
    again = salgp.load(tmp_path / "all", model)
    expected = salgp.calibrate(
        model,
        [tuple(map(torch.as_tensor, np.load(tmp_path / "cal.npz").values()))],
        reference=[tuple(map(torch.as_tensor, np.load(tmp_path / "train.npz").values()))],
    )
    x = torch.as_tensor(np.load(tmp_path / "test.npz")["x"])
    torch.testing.assert_close(again(x).confidence, expected(x).confidence)


def test_one_command_without_test_or_training_data(run: Run, tmp_path: Path) -> None:
    write_sets(tmp_path)
    code, _, err = run("calibrate net.py:make --weights w.ckpt --calibration cal.npz -o all -m temperature")
    assert code == 0
    assert "no --train given" not in err  # temperature scaling compares with nothing
    code, out, err = run("calibrate net.py:make --weights w.ckpt --calibration cal.npz -o evidence")
    assert "no --train given" in err
    assert "not checked: no --test given. In domain" in out
    stored = np.load(tmp_path / "cal.npz")
    np.savez(tmp_path / "mixed.npz", x=stored["x"], y=np.roll(stored["y"], 7))
    line = "--weights w.ckpt --calibration mixed.npz -o mixed -m temperature"
    assert "no more than a guess among 3 classes" in run(f"calibrate net.py:make {line}")[2]
    assert not (tmp_path / "all" / "report.html").exists()
    np.savez(tmp_path / "no.npz", x=np.zeros((5, 4), np.float32))
    assert "--test: no labels" in run("calibrate net.py:make --calibration cal.npz --test no.npz -o b")[2]


def test_a_network_without_layers_in_one_command(run: Run, tmp_path: Path) -> None:
    write_sets(tmp_path)
    (tmp_path / "probe.py").write_text(
        "import torch\n"
        "def make():\n"
        "    probe = torch.nn.Linear(4, 3)\n"
        "    torch.nn.init.eye_(probe.weight)\n"
        "    return probe\n"
    )
    line = "calibrate probe.py:make --calibration cal.npz --test test.npz -o"
    code, _, err = run(f"{line} all")
    assert code == 0, err
    assert "note: no hidden layer" in err
    assert "temperature scaling is used instead" in err
    out = run(f"{line} all --json --force")[1]
    assert json.loads(out)["method"] == "temperature"
    assert list(json.loads(out)["scores"]) == ["uncalibrated", "temperature scaling"]
    code, _, err = run(f"{line} other -m layer-evidence")
    assert code != 0
    assert 'use method="temperature"' in err
    assert not (tmp_path / "other").exists()


def test_info_reads_calibrators_and_features(run: Run, tmp_path: Path) -> None:
    write_sets(tmp_path)
    made = {
        "calibrator": ("all", "calibrate net.py:make --weights w.ckpt --calibration cal.npz -o all"),
        "features": ("store", "extract net.py:make test.npz --weights w.ckpt -o store"),
    }
    for kind, (path, line) in made.items():
        code, _, err = run(line)
        assert code == 0, err
        code, out, err = run(f"info {path} --json")
        assert code == 0, err
        assert json.loads(out)["kind"] == kind


def test_info_names_a_list_of_shards_that_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("[]")
    code, _, err = run("info other")
    assert code == 1
    assert "manifest.json" in err


def test_info_speaks_plainly(run: Run, tmp_path: Path) -> None:
    write_scores(tmp_path)
    assert run("fit s.npz -m temperature -o cal")[0] == 0
    out = run("info cal")[1]
    assert "temperature" in out
    assert "{" not in out
    assert "None" not in out
    listed = run("info")[1]
    assert "`" not in listed
    for sentence in json.loads(run("info --json")[1])["methods"].values():
        assert sentence.endswith(".")


def test_class_names_are_in_what_is_written(run: Run, tmp_path: Path) -> None:
    features, _ = write_scores(tmp_path)
    assert "next: salgp evaluate cal TEST.csv" in run("fit s.csv -o cal")[1]
    assert run("apply cal s.csv -o p.csv")[0] == 0
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ["ant", "bee", "cow"]
    assert [row["class"] for row in rows] == [names[k] for k in features.label]
    assert {"probs.ant", "probs.bee", "probs.cow", "label"} <= set(rows[0])


def test_labels_may_be_called_target(run: Run, tmp_path: Path) -> None:
    features, labels = sample(60)
    np.savez(tmp_path / "s.npz", logits=features.logits.numpy(), target=labels.numpy())
    assert run("fit s.npz -o cal")[0] == 0


def test_comparing_says_which_method_a_note_is_about_and_fits_80_columns(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write_scores(tmp_path)
    code, out, err = run("compare s.npz --method perturbed-temperature,temperature,platt")
    assert code == 0, err
    assert "note: perturbed-temperature: features have no groups" in err
    assert "…" not in out
    assert "accuracy 0.590 for every method" in out


def test_a_monitor_begins_with_words_and_tells_of_repeated_batches(run: Run, tmp_path: Path) -> None:
    write_scores(tmp_path)
    assert run("fit s.npz -o cal")[0] == 0
    out = run("monitor cal --state watch --reference s.npz")[1]
    assert out.startswith("Ready: no new data yet")
    assert "nan" not in out
    assert "counted before" not in run("monitor cal s.npz --state watch")[2]
    assert "s.npz was counted before" in run("monitor cal s.npz --state watch")[2]


def reordered(path: Path, into: Path, order: Callable[[list[str]], list[str]]) -> None:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    write_csv(into, {name: [row[name] for row in rows] for name in order(list(rows[0]))})


def test_named_classes_in_another_order_are_refused(run: Run, tmp_path: Path) -> None:
    write_scores(tmp_path)
    reordered(tmp_path / "s.csv", tmp_path / "other.csv", lambda names: names[::-1])
    assert run("fit s.csv -m vector -o cal")[0] == 0
    for command in (
        "apply cal other.csv -o p.csv",
        "evaluate cal other.csv",
        "compare s.csv --test other.csv",
    ):
        code, _, err = run(command)
        assert code != 0
        assert "other.csv is of other classes than" in err
    assert not (tmp_path / "p.csv").exists()
    text = (tmp_path / "s.csv").read_text().replace("cow", "dog")
    (tmp_path / "dogs.csv").write_text(text)
    assert "(ant, bee, dog, not ant, bee, cow)" in run("evaluate cal dogs.csv")[2]


def test_a_label_out_of_range_names_the_range(run: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", logits=np.zeros((4, 3)), labels=np.array([0, 1, 2, -5]))
    assert "expected 0..2" in run("fit bad.npz -o cal")[2]


def test_methods_say_whether_they_compare_with_training_data() -> None:
    """What is noted where no reference is given follows from what a fit makes of one."""
    features, labels = sample(120, widths=(4,))
    loaded = FeatureFile(Path("f.safetensors"), features, labels, {})
    reference = (features[:60], labels[:60])
    for name in (
        "temperature",
        "platt",
        "sal-gp",
        "trust-score",
        "deep-knn",
        "density-aware",
        "layer-evidence",
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = [get(name).fit(features[60:], labels[60:], known) for known in (None, reference)]
        alone, compared = (fitted.predict(features).confidence for fitted in made)
        assert torch.equal(alone, compared) != get(name).uses_reference, name
        noted = any("no --reference given" in note for note in notes_on(get(name), loaded, features, False))
        assert noted == get(name).uses_reference, name
