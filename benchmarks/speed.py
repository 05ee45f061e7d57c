"""Ours, the bare forward passes and the alternatives in one table, all measured in one run.

CIFAR-10 with the public ResNet-20: 1,000 calibration and 10,000 reference images. Each number of threads has
a process of its own, in which ``OMP_NUM_THREADS`` is set. Fits are medians of three; predictions take turns,
medians are given.

    SALGP_DATA=folder python benchmarks/speed.py                    # prints the page
    SALGP_DATA=folder python benchmarks/speed.py --write benchmarks/results/speed.md
    python benchmarks/speed.py --quick                              # made images, small sizes, no data

It needs the libraries it compares with: ``pip install -c constraints.txt -e ".[bench]" -e study``.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import baselines
import core
import numpy as np
import torch
from calibrate import Clock, bare_time, cifar_case, in_turns, median_clock, spent_on_calibrate
from history import record_page
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import salgp
from salgp import Features
from salgp_study.suite.case import Case
from salgp_study.suite.sets.cifar import CifarResNet

LIBRARIES = {"faiss": "faiss-cpu", "gpytorch": "gpytorch", "netcal": "netcal"}
"""What is compared with: name of the module and of the distribution."""
BATCH = 128
WIDTH = 128
"""Numbers in each of the five made layers of the GP rows."""
NEIGHBOUR = 50
"""Density-aware calibration takes the distance to this neighbour."""
Call = Callable[[Any], Any]


@dataclass(frozen=True)
class Sizes:
    """Numbers of samples, and how often things are measured.

    Args:
        calibration: images.
        reference: images.
        gp: made samples that the GP rows fit.
        repeats: of a fit.
        turns: of a prediction, by the number of images in a call.
    """

    calibration: int = 1000
    reference: int = 10_000
    gp: int = 300
    repeats: int = 3
    turns: Mapping[int, int] = field(default_factory=lambda: {1: 200, 32: 30, 250: 9})


FULL = Sizes()
QUICK = Sizes(calibration=40, reference=60, gp=20, repeats=1, turns={1: 2, 32: 1, 250: 1})


@dataclass
class Row:
    """One row of the table.

    Args:
        name: of the row.
        fit: time of the fit.
        call: the prediction of a batch, or None.
        images: that pass through the network before the fit.
        calls: time of a prediction by the number of images, once it is measured.
    """

    name: str
    fit: Clock
    call: Call | None = None
    images: int | None = None
    calls: dict[int, Clock] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Its values, without the prediction itself."""
        calls = [asdict(clock) for clock in self.calls.values()]
        return {"name": self.name, "images": self.images, "fit": asdict(self.fit), "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="made images and small sizes, in seconds")
    parser.add_argument("--write", type=Path, help="write the page to this file, and record its figures")
    parser.add_argument(
        "--provisional",
        action="store_true",
        help="for a busy machine: the page says so, and its figures are not recorded",
    )
    parser.add_argument("--job", type=int, metavar="N", help="measure on N threads (used internally)")
    arguments = parser.parse_args()
    check_libraries()
    if arguments.job:
        print(json.dumps(measured(arguments.job, arguments.quick)))
        return
    load = os.getloadavg()[0]
    found = {n: measured_apart(n, arguments.quick) for n in arguments.threads}
    text = page(found, QUICK if arguments.quick else FULL, load, arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
        if not (arguments.quick or arguments.provisional):
            record_page("speed", text)


def check_libraries() -> None:
    """End with one line if a library to compare with is missing."""
    missing = [name for module, name in LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; pip install -c constraints.txt {' '.join(missing)}")


def measured_apart(threads: int, quick: bool) -> list[dict[str, Any]]:
    """`measured` in a process of its own."""
    command = [sys.executable, __file__, "--job", str(threads), *(["--quick"] if quick else [])]
    given = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the measurement on {threads} thread(s) failed; its error is above")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(threads: int, quick: bool) -> list[dict[str, Any]]:
    """All rows, as plain values."""
    import faiss

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    sizes = QUICK if quick else FULL
    case = made_case(sizes) if quick else cifar_case(sizes.reference)
    with baselines.quiet():
        rows = [*network_rows(case, sizes), *gp_rows(sizes)]
    return [row.plain() for row in rows]


def made_case(sizes: Sizes) -> Case:
    """Random images and weights; every fourth label is not the network's."""
    torch.manual_seed(0)
    network = CifarResNet(20).eval()

    def samples(n: int) -> TensorDataset:
        x = torch.randn(n, 3, 32, 32)
        with torch.no_grad():
            label = network(x).argmax(dim=1)
        return TensorDataset(x, (label + (torch.arange(n) % 4 == 0)) % 10)

    return Case("made", 0, network, samples(sizes.reference), samples(sizes.calibration), ())


# --- the network and its calibrators
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What all calibrators are fitted on: the same features of the same images."""

    network: nn.Module
    features: Features
    labels: Tensor
    reference: tuple[Features, Tensor]
    repeats: int

    @property
    def images(self) -> int:
        """Images of the calibration set."""
        return len(self.features)


def network_rows(case: Case, sizes: Sizes) -> list[Row]:
    """The bare network, ours, and the alternatives that start from the same images."""
    loaders = [DataLoader(data, BATCH) for data in (case.calibration, case.reference)]
    data = read(case.network, *loaders, sizes.repeats)
    rows = [
        *default_rows(case, loaders, sizes.repeats),
        netcal_temperature(data),
        our_temperature(data),
        faiss_density(data),
        our_density(data),
    ]
    taken = [i % sizes.calibration for i in range(max(sizes.turns))]
    images = torch.stack([case.calibration[i][0] for i in taken])
    predict(rows, {n: images[:n] for n in sizes.turns}, sizes.turns)
    return rows


def read(network: nn.Module, calibration: DataLoader[Any], known: DataLoader[Any], repeats: int) -> Data:
    """Features of the calibration and of the reference images."""
    features, labels = salgp.extract(network, calibration, progress=False)
    reference, classes = salgp.extract(network, known, progress=False)
    assert labels is not None
    assert classes is not None
    return Data(network, features, labels, (reference, classes), repeats)


def predict(rows: Sequence[Row], inputs: Mapping[int, Any], turns: Mapping[int, int]) -> None:
    """Measure the predictions of all rows in turns."""
    able = [row for row in rows if row.call is not None]
    calls = [torch.no_grad()(row.call) for row in able]
    for n, x in inputs.items():
        in_turns(calls, x, 1)  # the first call of a size allocates memory
        for row, clock in zip(able, in_turns(calls, x, turns[n]), strict=True):
            row.calls[n] = clock


def default_rows(case: Case, loaders: Sequence[DataLoader[Any]], repeats: int) -> list[Row]:
    """As many images through the bare network as `calibrate` reads, `calibrate`, and its fit alone."""
    spent = [spent_on_calibrate(case.network, *loaders) for _ in range(repeats)]
    images, classifier = spent[-1].images, spent[-1].classifier
    each = bare_time(case.network, case.calibration, BATCH)
    passes = Clock(each.cpu * images, each.wall * images)
    return [
        Row("bare network", passes, case.network, images),
        Row("`salgp.calibrate`, whole call", median_clock([s.whole for s in spent]), classifier, images),
        Row("`salgp.calibrate`, its fit alone", median_clock([s.fit for s in spent])),
    ]


def netcal_temperature(data: Data) -> Row:
    """Temperature scaling of netcal: network, softmax, temperature."""
    method = next(r for r in baselines.references() if (r.method, r.library) == ("temperature", "netcal"))
    logits, labels = data.features.logits.numpy(), data.labels.numpy()
    clock, scaled = timed_fit(lambda: method.fit(logits, labels), data.repeats)
    return Row("temperature, netcal", clock, lambda x: scaled(data.network(x).numpy()), data.images)


def our_temperature(data: Data) -> Row:
    method = salgp.calibrators.get("temperature")
    logits = Features(data.features.logits)
    clock, fitted = timed_fit(lambda: method.fit(logits, data.labels), data.repeats)
    return Row("temperature, salgp", clock, salgp.CalibratedClassifier(data.network, fitted), data.images)


def faiss_density(data: Data) -> Row:
    """Density-aware calibration with FAISS: network with hooks, neighbours, temperature."""
    reference, _ = data.reference
    clock, fitted = timed_fit(
        lambda: FaissDensityAware(NEIGHBOUR).fit(data.features, data.labels, reference), data.repeats
    )
    network = HookedNetwork(data.network, data.features.layer_names)
    images = data.images + len(reference)
    return Row("density-aware, FAISS and SciPy", clock, lambda x: fitted.predict(network(x)), images)


def our_density(data: Data) -> Row:
    method = salgp.calibrators.get("density-aware", k=NEIGHBOUR)
    clock, fitted = timed_fit(lambda: method.fit(data.features, data.labels, data.reference), data.repeats)
    images = data.images + len(data.reference[0])
    return Row("density-aware, salgp", clock, salgp.CalibratedClassifier(data.network, fitted), images)


def timed_fit(fit: Callable[[], Any], repeats: int) -> tuple[Clock, Any]:
    """Median time of a fit, and what it returned; one more fit before imports what it needs."""
    fit()
    clocks = [Clock() for _ in range(repeats)]
    found = [clock.of(fit)() for clock in clocks]
    return median_clock(clocks), found[-1]


# --- density-aware calibration with FAISS
# -----------------------------------------------------------------------------


class FaissDensityAware:
    """Density-aware calibration (Tomani et al., ICML 2023), from the description of the method.

    ``s_l(x)`` is the distance of a sample to its ``k``-th neighbour among the reference samples at layer
    ``l``, between pooled features of unit length. The temperature is ``T(x) = w_0 + sum_l w_l s_l(x)`` with
    ``w >= 0`` of the smallest squared error of ``softmax(z / T(x))`` on the calibration set.
    """

    LEAST = 1e-3
    """Lower bound of the temperature."""

    def __init__(self, k: int) -> None:
        self.k = k

    def fit(self, features: Features, labels: Tensor, reference: Features) -> FaissDensityAware:
        """Index the reference, and find the weights from derivatives by differences."""
        from scipy.optimize import minimize

        self.indexes = {name: flat_index(x) for name, x in reference.layers.items()}
        S = self.distances(features)  # (n, L)
        z = features.logits.numpy().astype(np.float64)
        target = np.eye(z.shape[1])[labels.numpy()]

        def squared_error(w: np.ndarray) -> float:
            return float(np.square(self.softmax(z, S, w) - target).sum(axis=1).mean())

        start = np.r_[1.0, np.zeros(S.shape[1])]
        self.weights = minimize(squared_error, start, bounds=[(0, None)] * len(start)).x
        return self

    def predict(self, features: Features) -> np.ndarray:
        """Calibrated probabilities ``(n, c)``."""
        return self.softmax(features.logits.numpy(), self.distances(features), self.weights)

    def distances(self, features: Features) -> np.ndarray:
        """Distance to the k-th neighbour at each layer, ``(n, L)``; FAISS gives squared distances."""
        squares = [
            self.indexes[name].search(unit(x), self.k)[0][:, -1] for name, x in features.layers.items()
        ]
        return np.sqrt(np.maximum(np.stack(squares, axis=1), 0.0))

    def softmax(self, z: np.ndarray, S: np.ndarray, w: np.ndarray) -> np.ndarray:
        """``softmax(z / T)`` with ``T = w_0 + S w``."""
        T = np.maximum(w[0] + S @ w[1:], self.LEAST)
        a = z / T[:, None]
        e = np.exp(a - a.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)


def flat_index(x: Tensor) -> Any:
    """Exact search among the rows of a layer."""
    import faiss

    index = faiss.IndexFlatL2(x.shape[1])
    index.add(unit(x))
    return index


def unit(x: Tensor) -> np.ndarray:
    """Rows of unit length, as FAISS takes them."""
    return nn.functional.normalize(x.float(), dim=1).contiguous().numpy()


class HookedNetwork:
    """Logits and layers of a network by forward hooks on a copy of it, layers pooled over positions."""

    def __init__(self, network: nn.Module, layers: Sequence[str]) -> None:
        self.network, self.found = copy.deepcopy(network), dict[str, Tensor]()
        for name in layers:
            self.network.get_submodule(name).register_forward_hook(self.keep(name))

    def keep(self, name: str) -> Callable[..., None]:
        """Hook that keeps the pooled output of a layer."""

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.found[name] = output.flatten(2).mean(dim=2)

        return hook

    def __call__(self, x: Tensor) -> Features:
        return Features(self.network(x), dict(self.found))


# --- the GP of all layers
# -----------------------------------------------------------------------------


def gp_rows(sizes: Sizes) -> list[Row]:
    """SAL-GP ML and the paper's recipe in GPyTorch on made features, as in ``core.py``."""
    names = {"gpytorch": "SAL-GP ML, GPyTorch", "ml": "SAL-GP ML, salgp"}
    with mock.patch.object(core, "WIDTH", WIDTH):
        times = {what: core.clocks(what, sizes.gp) for what in names}
        calls = {"gpytorch": gpytorch_call(sizes.gp), "ml": our_gp_call(sizes.gp)}
        rows = [Row(name, Clock(**times[what]), calls[what]) for what, name in names.items()]
        samples = core.sample(max(sizes.turns), 1)[0]
        predict(rows, {n: samples[:n] for n in sizes.turns}, sizes.turns)
    return rows


def our_gp_call(n: int) -> Call:
    fitted = salgp.SALGP("ml").fit(*core.sample(n, 0))
    return lambda features: fitted.predict(features)


def gpytorch_call(n: int) -> Call:
    """Mean and variance of every layer's row, by the model as the recipe starts it, its caches warm."""
    model, likelihood, *_ = core.recipe(n)
    import gpytorch

    model.eval(), likelihood.eval()

    def call(features: Features) -> tuple[Tensor, Tensor]:
        with gpytorch.settings.max_cholesky_size(10**6):
            found = model(core.stacked(features))
            return found.mean, found.variance

    return call


# --- the page
# -----------------------------------------------------------------------------


def page(found: Mapping[int, Any], sizes: Sizes, load: float, arguments: argparse.Namespace) -> str:
    """The table of all rows and what its words mean."""
    columns = [f"{n} at once, {clock} ms" for n in sizes.turns for clock in ("processor", "wall")]
    head = ["", "images read", "fit, processor s", "fit, wall s", *columns]
    rows = [cells(threads, row) for threads, rows in found.items() for row in rows]
    table = ["|".join(["", *(f" {cell} " for cell in line), ""]) for line in (head, *rows)]
    table.insert(1, "|---" * len(head) + "|")
    libraries = ["torch", "numpy", "scipy", *LIBRARIES.values()]
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    where = [
        f"Python {platform.python_version()}, {versions}; {os.cpu_count()} cores,",
        f"load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.",
    ]
    parts = [*warning(arguments), *where, "", *table, "", *notes(sizes)]
    return "\n".join(["# Speed beside the alternatives", "", *parts, ""])


def warning(arguments: argparse.Namespace) -> list[str]:
    """What a reader has to know before the figures."""
    made = "**Made images, a random network and small sizes (`--quick`): a test, not a measurement.**"
    busy = "**Provisional: other programs ran beside it, so times are too long. To be measured again.**"
    lines = [made] * arguments.quick + [busy] * arguments.provisional
    return [part for line in lines for part in (line, "")]


def cells(threads: int, row: Mapping[str, Any]) -> list[str]:
    """A row of the table; values a row has not are left out."""
    name = f"{threads} thread{'s' * (threads > 1)}: {row['name']}"
    images = "" if row["images"] is None else f"{row['images']:,}"
    fit = [seconds(row["fit"][clock]) for clock in ("cpu", "wall")]
    calls = [f"{1000 * spent[clock]:.2f}" for spent in row["calls"] for clock in ("cpu", "wall")]
    return [name, images, *fit, *(calls or [""] * 6)]


def seconds(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def notes(sizes: Sizes) -> list[str]:
    """What the rows and columns are."""
    return [
        "Written by `SALGP_DATA=folder python benchmarks/speed.py --write benchmarks/results/speed.md`:",
        f"CIFAR-10, ResNet-20, {sizes.calibration:,} calibration and {sizes.reference:,} reference images.",
        "",
        f"- *Fit*: median of {sizes.repeats}. Only the bare network and the whole call include passes;",
        "  the other fits start from features in memory. To read its images, a row needs the bare network's",
        "  time in proportion. `salgp.calibrate` also reads augmented samples.",
        "- *At once*: one call with so many images, network included, eager; median, the rows take turns.",
        "- *Processor* time is summed over threads; *wall* is what one waits.",
        '- *Temperature, netcal*: `TemperatureScaling(method="mle")` on the same logits in double precision.',
        "- *Density-aware, FAISS and SciPy*: Tomani et al. 2023, written in `speed.py` from the description",
        f"  of the method, not its authors' code: `IndexFlatL2`, neighbour {NEIGHBOUR}, pooled features of",
        "  unit length; weights by L-BFGS-B with derivatives by differences; layers read by forward hooks.",
        "  Both density-aware rows read the same layers.",
        f"- *SAL-GP ML*: {sizes.gp} made samples, {core.L} layers of {WIDTH} numbers; no network is run.",
        f"  A GPyTorch fit is {core.STEPS:,} times its median Adam step, the faster of Cholesky (3 steps)",
        "  and conjugate gradients (6 steps); it was not run to the end. Its prediction uses the",
        "  hyperparameters that the recipe starts from. Quality of both, at other sizes: `core.md`.",
    ]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
