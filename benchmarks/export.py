"""What an exported graph weighs and how long it takes, against the bare network in the same runtime.

Two networks with random weights: ResNet-18 on images of 128 x 128 and a small convolutional network on 32 x
32. Features of the calibration set and of the reference are drawn around a mean for each class, scaled like
those of a few images; augmented samples have more noise. So the layers separate errors from correct answers,
the fitted calibrator uses them, and its graph holds the reference. Contenders take turns, and the median of
``--repeat`` rounds is given, so that other work on the machine affects all of them alike.

    python benchmarks/export.py                                       # prints the tables
    python benchmarks/export.py --threads 2
    python benchmarks/export.py --write benchmarks/results/export.md
    python benchmarks/export.py --head --reference 20000              # layer evidence alone
    python benchmarks/export.py --head --reference 20000 --classes 1000
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
import torch
from history import record_page
from torch import Tensor, nn

import salgp
from salgp.export import export_classifier, export_head
from salgp.network.batches import Batch
from salgp.network.reader import Reader
from salgp_study.backbones import build_backbone

BATCHES = (1, 64)
RUNTIMES = ("eager", "torch.export", "onnxruntime")
Call = Callable[[], Any]
Graphs = Mapping[str, tuple[Callable[..., Call], int]]


@dataclass(frozen=True)
class Case:
    """A network and the size of its images."""

    title: str
    backbone: str
    size: int
    arguments: Mapping[str, int]


CASES = [
    Case("small convolutional network, 32 x 32", "convnet", 32, {"size": 32}),
    Case("ResNet-18, 128 x 128", "resnet18", 128, {}),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--reference",
        type=int,
        default=2000,
        help="samples of the training set that layer evidence compares with",
    )
    parser.add_argument("--calibration", type=int, default=500)
    parser.add_argument("--networks", nargs="+", default=[c.backbone for c in CASES])
    parser.add_argument("--methods", nargs="+", default=["layer evidence", "SAL-GP"])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--repeat", type=int, default=7, help="rounds; the median counts")
    parser.add_argument(
        "--head", action="store_true", help="layer evidence alone: latency and time to export"
    )
    parser.add_argument("--classes", type=int, default=10, help="with --head")
    parser.add_argument("--threads", type=int, default=1, help="of torch and onnxruntime, without --head")
    parser.add_argument(
        "--runtimes",
        nargs="+",
        default=list(RUNTIMES),
        choices=RUNTIMES,
        help="to be timed; several threads of one wait for work at the cost of another",
    )
    parser.add_argument("--write", type=Path, help="file for the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.head else arguments.threads)
    warnings.simplefilter("ignore")
    if arguments.head:
        text = head_table(arguments.classes, arguments.reference, arguments.repeat)
        print(text)
        if arguments.write:
            before = arguments.write.read_text(encoding="utf-8").rstrip()
            arguments.write.write_text(f"{before}\n\n{text}", encoding="utf-8")
        return
    parts = [case_table(case, arguments) for case in CASES if case.backbone in arguments.networks]
    text = "\n".join([heading(arguments), *parts])
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
        record_page("export", text)


def head_table(classes: int, m: int, repeat: int) -> str:
    """Layer evidence alone on made features of five layers, augmented too: eager against onnxruntime."""
    calibrator = salgp.calibrators.get("layer-evidence")
    calibrator.fit(*made(max(500, 2 * classes), classes, 1, augmented=3), reference=made(m, classes, 2))
    features = made(64, classes, 3)[0]
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        path = export_head(calibrator, Path(folder) / "head.onnx")
        to_export, size = time.process_time() - start, path.stat().st_size
        rows = [(threads, head_times(calibrator, features, path, threads, repeat)) for threads in (1, 2)]
    lines = [
        f"## Layer evidence alone: {classes:,} classes, 5 layers x 64, {m:,} made training samples, "
        f"load {os.getloadavg()[0]:.0f}\n",
        f"Exported in {to_export:.1f} s of processor time, {file_size(size)}. Milliseconds, processor time / "
        f"wall clock.\n",
        "| | threads | batch of 1 | batch of 64 |\n|---|---|---|---|",
    ]
    for threads, times in rows:
        for name, by_batch in times.items():
            cells = " | ".join(f"{1e3 * cpu:.2f} / {1e3 * wall:.2f}" for cpu, wall in by_batch)
            lines.append(f"| {name} | {threads} | {cells} |")
    return "\n".join([*lines, ""])


def made(n: int, classes: int, seed: int, augmented: int = 0) -> tuple[salgp.Features, Tensor]:
    """Layers around the mean of their class, less exact logits; augmented samples have more noise."""
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    labels = torch.arange(n) % classes
    means = torch.randn(classes, 64, generator=fixed)
    parts = []
    for family in range(augmented + 1):
        noise = 1 + 0.5 * family
        layers = {f"layer{i}": means[labels] + noise * torch.randn(n, 64, generator=g) for i in range(5)}
        logits = 0.1 * layers["layer4"] @ means.T
        origin = (torch.arange(n), torch.full((n,), family), torch.full((n,), 0.5 * family))
        parts.append(salgp.Features(logits, layers, *(origin if augmented else ())))
    return salgp.Features.concatenate(parts), labels.repeat(augmented + 1)


def head_times(
    calibrator: Any, features: salgp.Features, path: Path, threads: int, repeat: int
) -> dict[str, list[tuple[float, float]]]:
    """Processor and wall-clock seconds of a call by batch size, eager and in onnxruntime."""
    torch.set_num_threads(threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    found: dict[str, list[tuple[float, float]]] = {"eager": [], "onnxruntime": []}
    for b in BATCHES:
        some = features[:b]
        given = dict(zip(names, (x.numpy() for x in (some.logits, *some.layers.values())), strict=True))
        calls = {
            "eager": lambda some=some: calibrator.predict(some),
            "onnxruntime": lambda given=given: session.run(None, given),
        }
        for name, call in calls.items():
            call()
            rounds = [both_times(call, 50) for _ in range(repeat)]
            found[name].append((median(c for c, _ in rounds), median(w for _, w in rounds)))
    torch.set_num_threads(1)
    return found


def both_times(call: Call, often: int) -> tuple[float, float]:
    start = time.perf_counter()
    cpu = seconds(call, often)
    return cpu, (time.perf_counter() - start) / often


def heading(arguments: argparse.Namespace) -> str:
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, onnxruntime "
        f"{onnxruntime.__version__}"
    )
    return (
        "# Exported graphs, measured by `python benchmarks/export.py`\n\n"
        f"Ten classes; layer evidence with {arguments.reference:,} reference samples, SAL-GP "
        f"(`sum`) with 256 inducing rows, both fitted on "
        f"{arguments.calibration}\nsamples and three augmented ones of each. Milliseconds per batch, "
        f"processor time / wall clock, threads: {arguments.threads}, contenders taking turns,\nmedian of "
        f"{arguments.repeat} rounds; in brackets the ratio of wall-clock times to the bare network in the "
        f"same runtime.\nLoad {os.getloadavg()[0]:.1f} at the start. {versions}.\n"
    )


def case_table(case: Case, arguments: argparse.Namespace) -> str:
    torch.manual_seed(0)
    batches = arguments.batches
    network = build_backbone(case.backbone, n_classes=10, **case.arguments).eval()
    images = torch.randn(64, 1, case.size, case.size)
    reader = Reader().resolved(network, Batch((images[:2],)))
    seen = reader.read(network, Batch((images,)))
    rows, notes = {}, []
    with tempfile.TemporaryDirectory() as folder:
        bare = bare_graphs(network, images, Path(folder), arguments.threads)
        for name, calibrator in fitted(seen, arguments).items():
            classifier = salgp.CalibratedClassifier(network, calibrator, reader)
            rows[f"{name}, alone"] = head_graphs(calibrator, seen, Path(folder), arguments.threads)
            start = time.process_time()
            rows[f"network with {name}"] = whole_graphs(classifier, images, Path(folder), arguments.threads)
            notes.append(f"{name} {time.process_time() - start:.1f} s")
        graphs = {
            name: {runtime: graph for runtime, graph in found.items() if runtime in arguments.runtimes}
            for name, found in {"bare network": bare, **rows}.items()
        }
        timed = {b: timings(graphs, b, arguments.repeat) for b in batches}
    lines = [f"## {case.title}, {len(reader.taps)} layers read, threads: {arguments.threads}\n"]
    lines.append(f"Processor time to export the whole to both formats: {', '.join(notes)}.\n")
    lines.append(
        "| | runtime | file | "
        + " | ".join(f"batch of {b}, ms" for b in batches)
        + " |\n|---|---|---|"
        + "---|" * len(batches)
    )
    for name, runtimes in graphs.items():
        for runtime, (_, size) in runtimes.items():
            cells = [cell(timed[b], name, runtime) for b in batches]
            lines.append(f"| {name} | {runtime} | {file_size(size)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def cell(timed: Mapping[tuple[str, str], tuple[float, float]], name: str, runtime: str) -> str:
    own, bare = timed[name, runtime], timed["bare network", runtime]
    ratio = "" if name == "bare network" else f" ({own[1] / bare[1]:.2f})"
    return f"{1e3 * own[0]:.2f} / {1e3 * own[1]:.2f}{ratio}"


def file_size(size: int) -> str:
    return f"{size / 2**20:.2f} MB" if size else "-"


def fitted(seen: salgp.Features, arguments: argparse.Namespace) -> dict[str, Any]:
    """Calibrators on features drawn like those seen; a layer evidence whose graph would hold no reference
    measures nothing, and is refused.
    """
    calibration, labels = drawn(seen, arguments.calibration, 1, augmented=3)
    plain, known = calibration[: arguments.calibration], labels[: arguments.calibration]
    makers = {
        "layer evidence": lambda: salgp.calibrators.get("layer-evidence").fit(
            calibration, labels, drawn(seen, arguments.reference, 2)
        ),
        "SAL-GP": lambda: salgp.SALGP("sum", n_inducing=256, inference="inducing").fit(plain, known),
    }
    found: dict[str, Any] = {name: makers[name]() for name in arguments.methods}
    if "layer evidence" in found:
        model = found["layer evidence"].mixture_
        if model.shift is None or not model.layers_in_domain:
            raise RuntimeError("the layers are not used in domain: draw other features")
    return found


def drawn(seen: salgp.Features, n: int, seed: int, augmented: int = 0) -> tuple[salgp.Features, Tensor]:
    """Layers around a mean for each class, scaled like those seen; logits that know the class less well."""
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    C = seen.n_classes
    labels = torch.arange(n) % C
    means = {k: torch.randn(C, x.shape[1], generator=fixed) for k, x in seen.layers.items()}
    parts = []
    for family in range(augmented + 1):
        noise = 2 + 1.0 * family
        x = {k: m[labels] + noise * torch.randn(n, m.shape[1], generator=g) for k, m in means.items()}
        logits = 2 * torch.eye(C)[labels] + 0.5 * noise * torch.randn(n, C, generator=g)
        layers = {k: s.mean(dim=0) + s.std(dim=0) * x[k] for k, s in seen.layers.items()}
        origin = (torch.arange(n), torch.full((n,), family), torch.full((n,), 0.5 * family))
        parts.append(salgp.Features(logits, layers, *(origin if augmented else ())))
    return salgp.Features.concatenate(parts), labels.repeat(augmented + 1)


def bare_graphs(network: nn.Module, images: Tensor, folder: Path, threads: int) -> Graphs:
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        program = torch.export.export(network, (images[:4],), dynamic_shapes=shapes)
        torch.export.save(program, folder / "bare.pt2")
        torch.onnx.export(program, dynamo=True, verbose=False, external_data=False).save(folder / "bare.onnx")
    return {"eager": (lambda b: lambda: network(images[:b]), 0), **loaded(folder, "bare", [images], threads)}


def whole_graphs(
    classifier: salgp.CalibratedClassifier, images: Tensor, folder: Path, threads: int
) -> Graphs:
    for suffix in ("pt2", "onnx"):
        export_classifier(classifier, images[:4], folder / f"{classifier.calibrator.name}-whole.{suffix}")
    return {
        "eager": (lambda b: lambda: classifier(images[:b]), 0),
        **loaded(folder, f"{classifier.calibrator.name}-whole", [images], threads),
    }


def head_graphs(calibrator: Any, seen: salgp.Features, folder: Path, threads: int) -> Graphs:
    for suffix in ("pt2", "onnx"):
        export_head(calibrator, folder / f"{calibrator.name}-head.{suffix}")
    inputs = [seen.logits, *(seen.layers[k] for k in calibrator.layer_widths_)]
    return {
        "eager": (lambda b: lambda: calibrator.predict(seen[:b]), 0),
        **loaded(folder, f"{calibrator.name}-head", inputs, threads),
    }


def loaded(folder: Path, name: str, inputs: list[Tensor], threads: int) -> Graphs:
    """The two exported files, ready to run."""
    program = torch.export.load(folder / f"{name}.pt2").module()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(
        str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"]
    )
    names = [i.name for i in session.get_inputs()]

    def torch_call(b: int) -> Call:
        given = [x[:b] for x in inputs]
        return lambda: program(*given)

    def onnx_call(b: int) -> Call:
        given = dict(zip(names, (x[:b].numpy() for x in inputs), strict=True))
        return lambda: session.run(None, given)

    sizes = [(folder / f"{name}.{suffix}").stat().st_size for suffix in ("pt2", "onnx")]
    return {"torch.export": (torch_call, sizes[0]), "onnxruntime": (onnx_call, sizes[1])}


@torch.no_grad()
def timings(graphs: Mapping[str, Graphs], b: int, repeat: int) -> dict[tuple[str, str], tuple[float, float]]:
    """Median seconds of one call, processor and wall clock. Every round asks all contenders in turn; a slow
    one is asked once, after a call that does not count, and in ten times as many rounds: the speed of the
    machine changes within a second, and contenders are to meet the same.
    """
    calls = {
        (name, runtime): make(b)
        for name, runtimes in graphs.items()
        for runtime, (make, _) in runtimes.items()
    }
    often = {key: max(1, min(200, int(2e-3 / max(seconds(call, 2), 1e-6)))) for key, call in calls.items()}
    rounds = [{key: _warm_times(call, often[key]) for key, call in calls.items()} for _ in range(10 * repeat)]
    return {key: (median(r[key][0] for r in rounds), median(r[key][1] for r in rounds)) for key in calls}


def _warm_times(call: Call, often: int) -> tuple[float, float]:
    call()
    return both_times(call, often)


def seconds(call: Call, often: int) -> float:
    start = time.process_time()
    for _ in range(often):
        call()
    return (time.process_time() - start) / often


if __name__ == "__main__":
    main()
