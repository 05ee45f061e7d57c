"""Scale: fitting out of core and batch scoring, with time, processor time and peak memory of a process of
their own.

``python benchmarks/scale.py all --out benchmarks/results/scale.md`` runs everything; the parts are
``evidence`` (the default method out of core), ``search`` (nearest neighbours against others), ``classes`` (a
thousand of them), ``fit``, ``score``, ``gpytorch``, ``memory`` (Gaussian processes) and ``ray``, each with
its sizes as arguments. Stores are made once under ``--work`` and reused. Every measurement runs in a fresh
process, so that its peak memory is its own. Wall-clock time depends on what else the machine
does; processor seconds say what the work itself costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.reference import layer_evidence, make_reference
from salgp.calibrators.layerwise.salgp import SALGP
from salgp.features import Features
from salgp.store import FeatureStore, fit_store, score, write_store

LAYERS, WIDTH, CLASSES, LATENT = 5, 64, 10, 8
CHUNK = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "part",
        choices=["all", *PARTS, "task"],
    )
    parser.add_argument("--fit-sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--reference-sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--calibration-size", type=int, default=100_000, help="rows with their copies")
    parser.add_argument("--score-size", type=int, default=3_500_000)
    parser.add_argument("--ray-size", type=int, default=3_500_000)
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--subset", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "salgp-scale")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task")
    parser.add_argument("--arguments", type=json.loads, default={})
    a = parser.parse_args()
    if a.part == "task":
        return report_task(a.task, a.arguments)
    a.work.mkdir(parents=True, exist_ok=True)
    parts = list(PARTS) if a.part == "all" else [a.part]
    lines = [line for part in parts for line in PARTS[part](a)]
    text = "\n".join(lines) + "\n"
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text((a.out.read_text() + "\n" if a.out.exists() and a.part != "all" else "") + text)
    return None


def evidence_part(a: argparse.Namespace) -> Iterator[str]:
    """Layer evidence out of core against the size of its reference, and the rate of its scoring."""
    yield from said(
        f"\n## Layer evidence out of core: {a.calibration_size:,} calibration rows with copies, {LAYERS} "
        f"layers x {WIDTH}, {machine()}"
    )
    yield from said(
        "\n| reference | workers and threads | seconds | processor s | peak RSS MB | calibrator MB |\n"
        "|---|---|---|---|---|---|"
    )
    calibration = copies_of(a.work, a.calibration_size)
    for m in a.reference_sizes:
        save = a.work / f"evidence-{m}"
        given = {"store": str(calibration), "reference": str(store_of(a.work, m)), "save": str(save)}
        for workers in (a.workers, 1):
            r = measure("evidence", {**given, "workers": workers}, threads=workers)
            size = sum(path.stat().st_size for path in save.iterdir()) / 2**20
            yield from said(
                f"| {m:,} | {workers} | {r['seconds']:.1f} | {r['cpu']:.1f} | {r['rss']:.0f} | {size:.1f} |"
            )
    n = a.score_size
    yield from said(f"\n### Scoring {n:,} samples with it, {machine()}")
    yield from said(
        "\n| what | seconds | samples/s | processor us/sample | peak RSS MB |\n|---|---|---|---|---|"
    )
    for precision, workers in (("single", a.workers), ("double", a.workers), ("single", 1)):
        given = {"store": str(store_of(a.work, n)), "calibrator": str(save), "workers": workers}
        r = measure("score", {**given, "options": {"precision": precision}}, threads=workers)
        yield from said(
            f"| score, {precision} precision, {workers} worker(s) | {r['seconds']:.1f} | "
            f"{n / r['seconds']:,.0f} | "
            f"{1e6 * r['cpu'] / n:.1f} | {r['rss']:.0f} |"
        )


def search_part(a: argparse.Namespace) -> Iterator[str]:
    """Three nearest neighbours of 1,000 samples: ours against scikit-learn and FAISS."""
    yield from said(f"\n## Three nearest neighbours of 1,000 samples, {WIDTH} numbers each, {machine()}")
    yield from said(
        "\nSeconds, processor time / wall clock, the median of three rounds in which all take turns; in "
        "brackets the share of neighbours found.\n"
    )
    yield from said("| points | threads | " + " | ".join(SEARCHES) + " |\n|---|---|" + "---|" * len(SEARCHES))
    for m in (2_000, 10_000, 100_000):
        for threads in (1, 2):
            r = measure("search", {"points": m, "threads": threads})
            cells = [f"{r[name][0]:.3f} / {r[name][1]:.3f} ({r[name][2]:.3f})" for name in SEARCHES]
            yield from said(f"| {m:,} | {threads} | " + " | ".join(cells) + " |")


def rivals_part(a: argparse.Namespace) -> Iterator[str]:
    """All layers of 1,000 samples compared with a training set: ours, and what a user would do instead."""
    yield from said(
        f"\n## {LAYERS} layers of 1,000 samples compared with a training set of 10 classes, {WIDTH} numbers "
        f"each, {machine()}"
    )
    yield from said(
        "\nOurs and the three below it give agreement and novelty of every layer (three nearest of the "
        "predicted class, of the others, of all). Deep k-NN counts the classes of 75 neighbours per layer "
        "found by scikit-learn (cosine), density-aware takes the distance to the 50th neighbour per layer of "
        "a FAISS flat index (unit length): as in their published code. Milliseconds per sample, processor "
        "time / wall clock; in brackets the ratio of wall clocks to ours by default. Mean change: of "
        "agreement and novelty, to our search of the full reference.\n"
    )
    yield from said(
        "| training samples | threads | what | ms per sample | mean change |\n|---|---|---|---|---|"
    )
    for m in (10_000, 100_000):
        for threads in (1, 2):
            r = measure("rivals", {"points": m, "threads": threads})
            base = r["ours, default: 200 prototypes per class"][1]
            for name in RIVALS:
                cpu, wall, change = r[name]
                cell = "" if change is None else f"{change:.4f}"
                yield from said(
                    f"| {m:,} | {threads} | {name} | {cpu:.3f} / {wall:.3f} ({wall / base:.1f}x) | {cell} |"
                )


def classes_part(a: argparse.Namespace) -> Iterator[str]:
    """Many classes: fit, size and latency."""
    yield from said(
        f"\n## Many classes, {LAYERS} layers x {WIDTH}, made features, 2,000 calibration rows, {machine()}"
    )
    yield from said(
        "\n| classes x references each | threads | fit, s | peak RSS MB | calibrator MB | predict one, ms | "
        "predict 64, ms |\n|---|---|---|---|---|---|---|"
    )
    for classes, each in ((10, 1280), (100, 1280), (1000, 128), (1000, 1280)):
        if classes * each > max(a.reference_sizes) * 1.3:
            continue
        for threads in (1, 2):
            r = measure("classes", {"classes": classes, "each": each, "threads": threads})
            fit, one, many = (
                " / ".join(f"{x:.{digits}f}" for x in r[k])
                for k, digits in (("fit", 1), ("one", 2), ("many", 2))
            )
            yield from said(
                f"| {classes:,} x {each:,} | {threads} | {fit} | {r['rss']:.0f} | {r['megabytes']:.1f} | "
                f"{one} | {many} |"
            )


def fit_part(a: argparse.Namespace) -> Iterator[str]:
    """Time and memory of an out-of-core fit against the number of samples."""
    yield from said(
        f"## Fit, {LAYERS} layers x {WIDTH}, {a.inducing} inducing rows, hyperparameters on "
        f"{a.subset} rows, {machine()}"
    )
    yield from said(
        "\n| samples | seconds | processor s | of which passes over all rows | peak RSS MB "
        "|\n|---|---|---|---|---|"
    )
    for n in a.fit_sizes:
        store = store_of(a.work, n)
        r = measure(
            "fit",
            {
                "store": str(store),
                "inducing": a.inducing,
                "subset": a.subset,
                "workers": a.workers,
                "save": str(a.work / f"cal-{n}"),
            },
        )
        yield from said(
            f"| {n:,} | {r['seconds']:.1f} | {r['cpu']:.1f} | {r['passes']:.1f} s | {r['rss']:.0f} |"
        )
    n = min(max(a.fit_sizes), 100_000)
    r = measure("equal", {"store": str(store_of(a.work, n)), "calibrator": str(a.work / f"cal-{n}")})
    yield from said(
        f"\nAgainst conditioning in memory on the same inducing rows at {n:,} samples: largest "
        f"difference of confidence {r['confidence']:.1e},"
    )
    yield from said(f"of its standard deviation {r['std']:.1e} (in memory: {r['rss']:.0f} MB).")


def score_part(a: argparse.Namespace) -> Iterator[str]:
    """Rate of scoring, against reading the same bytes."""
    n, store = a.score_size, store_of(a.work, a.score_size)
    calibrator = calibrator_of(a)
    yield from said(f"\n## Scoring {n:,} samples with variance, {a.inducing} inducing rows, {machine()}")
    yield from said(
        "\n| what | seconds | samples/s | processor us/sample | peak RSS MB |\n|---|---|---|---|---|"
    )
    jobs = {
        "score": {},
        "score, single precision": {"precision": "single"},
        "score, double precision": {"precision": "double"},
        "score with layer terms": {"layers": True},
    }
    for name, options in jobs.items():
        r = measure(
            "score",
            {"store": str(store), "calibrator": str(calibrator), "workers": a.workers, "options": options},
        )
        yield from said(
            f"| {name} ({r['precision']}) | {r['seconds']:.1f} | {n / r['seconds']:,.0f} | "
            f"{1e6 * r['cpu'] / n:.1f} | {r['rss']:.0f} |"
        )
    for name, task in (
        ("reading and decoding the shards only", "read"),
        ("summing the same floats from memory (NumPy)", "bandwidth"),
    ):
        r = measure(task, {"store": str(store), "workers": a.workers})
        yield from said(
            f"| {name} | {r['seconds']:.1f} | {n / r['seconds']:,.0f} | "
            f"{1e6 * r['cpu'] / n:.2f} | {r['rss']:.0f} |"
        )


def gpytorch_part(a: argparse.Namespace) -> Iterator[str]:
    """Rate of GPyTorch: the paper's model, and our kernel with the same inducing rows."""
    yield from said(f"\n## GPyTorch prediction with variance, single precision, {machine()}")
    yield from said("\n| model | batch | samples/s | processor us/sample |\n|---|---|---|---|")
    what = {
        "paper": "the paper's ML: exact, 500 samples in 2,500 stacked rows, as by default",
        "exact": "our kernel, exact on 2,000 samples, `fast_pred_var`",
        "svgp": f"our kernel, variational, {a.inducing} inducing rows",
        "sgpr": f"our kernel, SGPR, the same {a.inducing} inducing rows, `fast_pred_var`",
    }
    for model, said_of in what.items():
        for batch in (1000, 4000):
            r = measure(
                "gpytorch", {"model": model, "inducing": a.inducing, "batch": batch, "threads": a.workers}
            )
            yield from said(f"| {said_of} | {batch} | {r['rate']:,.0f} | {1e6 * r['cpu_per_sample']:.0f} |")


def memory_part(a: argparse.Namespace) -> Iterator[str]:
    """Our prediction against GPyTorch's variational model, like for like: both in memory, in turns."""
    yield from said(
        f"\n## Prediction with variance in memory, one kernel, {a.inducing} inducing rows, batches of 4,000, "
        f"{machine()}"
    )
    yield from said(
        "\n| precision | threads | ours, samples/s | GPyTorch, samples/s | ratio | processor us/sample, both "
        "| ratio |\n|---|---|---|---|---|---|---|"
    )
    for double in (False, True):
        for threads in (1, 2):
            given = {"inducing": a.inducing, "batch": 4000, "threads": threads, "double": double}
            theirs = measure("gpytorch", {"model": "svgp", **given})
            ours = measure("memory", given)
            cpu = [1e6 * r["cpu_per_sample"] for r in (ours, theirs)]
            yield from said(
                f"| {'double' if double else 'single'} | {threads} | {ours['rate']:,.0f} | "
                f"{theirs['rate']:,.0f} | {ours['rate'] / theirs['rate']:.1f}x | "
                f"{cpu[0]:.1f} / {cpu[1]:.1f} | {cpu[1] / cpu[0]:.1f}x |"
            )


def ray_part(a: argparse.Namespace) -> Iterator[str]:
    """The same scoring on threads and on Ray."""
    n, store, calibrator = a.ray_size, store_of(a.work, a.ray_size), calibrator_of(a)
    yield from said(
        f"\n## Local against Ray, {n:,} samples with layer terms in double precision, "
        f"{a.workers} workers, {machine()}"
    )
    yield from said("\n| engine | seconds | bytes of output |\n|---|---|---|")
    found = {}
    for name, options in (
        ("local", {}),
        ("ray", {"engine": "ray"}),
        ("ray, one worker SIGKILLed", {"engine": "ray", "kill": True}),
    ):
        r = measure(
            "score",
            {
                "store": str(store),
                "calibrator": str(calibrator),
                "workers": a.workers,
                "options": {"layers": True, "precision": "double", **options},
            },
        )
        found[name] = r
        yield from said(f"| {name} | {r['seconds']:.1f} | {r['digest'][:16]} |")
    same = len({r["digest"] for r in found.values()}) == 1
    overhead = found["ray"]["seconds"] / found["local"]["seconds"] - 1
    yield from said(f"\nOutput identical: {same}. Overhead of Ray, start included: {100 * overhead:.0f} %.")


SEARCHES = ("ours", "scikit-learn brute", "scikit-learn tree", "FAISS flat", "FAISS IVF")

PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "evidence": evidence_part,
    "search": search_part,
    "rivals": rivals_part,
    "classes": classes_part,
    "fit": fit_part,
    "score": score_part,
    "gpytorch": gpytorch_part,
    "memory": memory_part,
    "ray": ray_part,
}


def fit_task(store: str, inducing: int, subset: int, workers: int, save: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as work:
        fitted = fit_store(
            SALGP(n_inducing=inducing, inference="inducing"), store, subset=subset, workers=workers, work=work
        )
        learned, final = (Path(work) / f"{name}.json" for name in ("learned", "final"))
        passes = final.stat().st_mtime - learned.stat().st_mtime
    fitted.save(save)
    return {"passes": passes}


def evidence_task(store: str, reference: str, workers: int, save: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    fit_store(LayerEvidence(), store, reference=reference, workers=workers).save(save)
    return {}


def search_task(points: int, threads: int) -> dict[str, Any]:
    """Seconds and recall of every way to find neighbours."""
    import faiss
    from sklearn.neighbors import NearestNeighbors

    from salgp.neighbours import nearest

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    x, query = (made(n, seed)[0].layers["layer2"].contiguous() for n, seed in ((points, 0), (1000, 1)))
    X, Q = x.numpy(), query.numpy()
    flat, coarse = faiss.IndexFlatL2(WIDTH), faiss.IndexFlatL2(WIDTH)
    flat.add(X)
    lists = int(4 * points**0.5)
    ivf = faiss.IndexIVFFlat(coarse, WIDTH, lists)
    ivf.train(X)
    ivf.add(X)
    ivf.nprobe = max(1, lists // 16)
    brute, tree = (NearestNeighbors(n_neighbors=3, algorithm=how).fit(X) for how in ("brute", "kd_tree"))
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: nearest(query, x, 3)[1].numpy(),
        "scikit-learn brute": lambda: brute.kneighbors(Q)[1],
        "scikit-learn tree": lambda: tree.kneighbors(Q)[1],
        "FAISS flat": lambda: flat.search(Q, 3)[1],
        "FAISS IVF": lambda: ivf.search(Q, 3)[1],
    }
    true = [set(row) for row in calls["scikit-learn tree"]().tolist()]
    recall = {}
    for name, call in calls.items():
        found = call().tolist()
        recall[name] = sum(len(a & set(b)) for a, b in zip(true, found, strict=True)) / 3000
    return {name: [*times, recall[name]] for name, times in _in_turns(calls, 3).items()}


def _in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each call, processor time and wall clock, all taking turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            used, start = time.process_time(), time.perf_counter()
            call()
            taken[name].append((time.process_time() - used, time.perf_counter() - start))
    middle = rounds // 2
    return {k: (sorted(c for c, _ in x)[middle], sorted(w for _, w in x)[middle]) for k, x in taken.items()}


RIVALS = (
    "ours, default: 200 prototypes per class",
    "ours, full reference",
    "scikit-learn brute",
    "FAISS flat",
    "FAISS IVF",
    "Deep k-NN",
    "density-aware",
)


def rivals_task(points: int, threads: int) -> dict[str, Any]:
    """Milliseconds per sample and mean change of the evidence."""
    import faiss
    from sklearn.neighbors import NearestNeighbors

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    (known, labels), (new, _) = made(points, 0), made(1000, 1)
    known = Features(known.logits, {k: x.contiguous() for k, x in known.layers.items()})
    by_form = {form: make_reference(known, labels, form=form) for form in ("prototypes", "full")}
    spaces = by_form["full"].layers
    white = {k: space.project(known.layers[k]).float().numpy() for k, space in spaces.items()}
    asked = {k: space.project(new.layers[k]).float().numpy() for k, space in spaces.items()}
    y, label = labels.numpy(), new.label.numpy()

    def sides(search: Callable[[str, int], Callable[[np.ndarray, int], np.ndarray]]) -> Callable[[], Any]:
        """Evidence by a search of each class: own, others and all."""
        ready = {(k, c): search(k, c) for k in spaces for c in range(CLASSES)}

        def call() -> np.ndarray:
            found = []
            for k in spaces:
                nearest = np.stack([ready[k, c](asked[k], 3) for c in range(CLASSES)], axis=1)  # (n, C, 3)
                own = nearest[np.arange(len(label)), label]
                rest = nearest.copy()
                rest[np.arange(len(label)), label] = np.inf
                other = np.sort(rest.reshape(len(label), -1), axis=1)[:, :3]
                anyone = np.sort(np.concatenate([own, other], axis=1), axis=1)[:, :3]
                found.append([np.log(x.mean(axis=1)) for x in (own, other, anyone)])
            return np.array(found)

        return call

    def brute(k: str, c: int) -> Callable[[np.ndarray, int], np.ndarray]:
        index = NearestNeighbors(algorithm="brute").fit(white[k][y == c])
        return lambda q, n: index.kneighbors(q, n)[0]

    def flat(k: str, c: int) -> Callable[[np.ndarray, int], np.ndarray]:
        index = faiss.IndexFlatL2(white[k].shape[1])
        index.add(np.ascontiguousarray(white[k][y == c]))
        return lambda q, n: np.sqrt(index.search(q, n)[0])

    coarse: list[Any] = []

    def ivf(k: str, c: int) -> Callable[[np.ndarray, int], np.ndarray]:
        x = np.ascontiguousarray(white[k][y == c])
        lists = int(4 * len(x) ** 0.5)
        coarse.append(faiss.IndexFlatL2(x.shape[1]))  # FAISS does not keep it alive
        index = faiss.IndexIVFFlat(coarse[-1], x.shape[1], lists)
        index.train(x)
        index.add(x)
        index.nprobe = max(1, lists // 16)
        return lambda q, n: np.sqrt(index.search(q, n)[0])

    calls = {
        RIVALS[0]: lambda: _log_sides(layer_evidence(by_form["prototypes"], new)),
        RIVALS[1]: lambda: _log_sides(layer_evidence(by_form["full"], new)),
        RIVALS[2]: sides(brute),
        RIVALS[3]: sides(flat),
        RIVALS[4]: sides(ivf),
        RIVALS[5]: _deep_k_nearest(known, labels, new),
        RIVALS[6]: _density_aware(known, new),
    }
    found = {name: calls[name]() for name in RIVALS[:5]}
    exact = found[RIVALS[1]]
    change = {name: float(np.abs(_evidence_of(x) - _evidence_of(exact)).mean()) for name, x in found.items()}
    times = _in_turns(calls, 3)
    return {name: [c, w, change.get(name)] for name, (c, w) in times.items()}  # 1,000 samples: s are ms


def _log_sides(evidence: Any) -> np.ndarray:
    """Agreement and novelty of each layer ``(L, 2, n)``."""
    return np.stack([evidence.agreement.T.numpy(), evidence.novelty.T.numpy()], axis=1)


def _evidence_of(found: np.ndarray) -> np.ndarray:
    """The same, from the logarithms of the distances where these were found."""
    if found.shape[1] == 2:
        return found
    own, other, anyone = found.transpose(1, 0, 2)
    return np.stack([(other - own).clip(-6, 6), anyone], axis=1)


def _deep_k_nearest(known: Features, labels: Tensor, new: Features) -> Callable[[], Any]:
    """Classes of the 75 nearest of every layer by cosine, counted."""
    from sklearn.neighbors import NearestNeighbors

    y = labels.numpy()
    index = {
        k: NearestNeighbors(n_neighbors=75, metric="cosine", algorithm="brute").fit(x.numpy())
        for k, x in known.layers.items()
    }

    def call() -> np.ndarray:
        votes = np.zeros((len(new), CLASSES))
        for k, x in new.layers.items():
            near = y[index[k].kneighbors(x.numpy(), return_distance=False)]
            votes += np.stack([(near == c).sum(axis=1) for c in range(CLASSES)], axis=1)
        return votes

    return call


def _density_aware(known: Features, new: Features) -> Callable[[], Any]:
    """Distance to the 50th nearest of every layer at unit length."""
    import faiss

    def unit(x: Tensor) -> np.ndarray:
        return np.ascontiguousarray(torch.nn.functional.normalize(x, dim=1).numpy())

    index = {k: faiss.IndexFlatL2(x.shape[1]) for k, x in known.layers.items()}
    for k, x in known.layers.items():
        index[k].add(unit(x))
    return lambda: [index[k].search(unit(x), 50)[0][:, -1] for k, x in new.layers.items()]


def classes_task(classes: int, each: int, threads: int) -> dict[str, Any]:
    """Fit, size and latency with features drawn around a centre for every class."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    centres = torch.randn(classes, WIDTH, generator=torch.Generator().manual_seed(5))

    def drawn(n: int, seed: int) -> tuple[Features, Tensor]:
        g = torch.Generator().manual_seed(seed)
        labels = torch.arange(n) % classes
        layers = {f"layer{i}": centres[labels] + torch.randn(n, WIDTH, generator=g) for i in range(LAYERS)}
        logits = 0.25 * layers["layer4"] @ centres.T
        return Features(logits, layers), labels

    features, labels = drawn(max(2000, classes), 1)
    reference = drawn(classes * each, 2)
    used, start = time.process_time(), time.perf_counter()
    calibrator = LayerEvidence().fit(features, labels, reference=reference)
    fit = time.process_time() - used, time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        calibrator.save(folder)
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20
    one, many = (_milliseconds(lambda b=b: calibrator.predict(features[:b])) for b in (1, 64))
    return {"fit": fit, "megabytes": size, "one": one, "many": many}


def _milliseconds(call: Callable[[], Any], rounds: int = 15) -> list[float]:
    """Processor time and wall clock."""
    call()
    return [1e3 * x for x in _in_turns({"": call}, rounds)[""]]


def equal_task(store: str, calibrator: str) -> dict[str, Any]:
    from dataclasses import replace

    from salgp.calibrators.base import load_calibrator
    from salgp.calibrators.layerwise.structures import rows_of
    from salgp.gp.covariance import gaps, self_gaps
    from salgp.gp.regression import condition_inducing, statistics

    fitted: Any = load_calibrator(calibrator)
    features, labels = FeatureStore(store).to_features()
    assert labels is not None
    p, rows = fitted.fitted_.posterior, rows_of(fitted.structure_, features)
    y = features.residual(labels).double()
    noise = torch.full_like(y, fitted.fitted_.log_noise).exp()
    with torch.no_grad():
        sums = statistics(
            p.covariance(p.theta, gaps(p.rows, rows, p.covariance)),
            p.covariance(p.theta, self_gaps(rows, p.covariance)),
            y,
            noise,
        )
        found = fitted.predict(features[:5000])
        fitted.fitted_ = replace(
            fitted.fitted_, posterior=condition_inducing(p.covariance, p.theta, p.rows, sums)
        )
        whole = fitted.predict(features[:5000])
    return {k: float((getattr(found, k) - getattr(whole, k)).abs().max()) for k in ("confidence", "std")}


def score_task(store: str, calibrator: str, workers: int, options: dict[str, Any]) -> dict[str, Any]:
    import hashlib
    import threading

    killer = threading.Thread(target=_kill_a_worker, daemon=True)
    kill = options.pop("kill", False)
    if kill:
        killer.start()
    with tempfile.TemporaryDirectory(dir=Path(store).parent) as out:
        done = score(store, calibrator, out, workers=workers, **options)
        digest = hashlib.sha256((Path(out) / "manifest.json").read_bytes()).hexdigest()
    if kill and killer.is_alive():
        raise RuntimeError("no Ray worker was found to be killed")
    return {"seconds": done.seconds, "precision": done.precision, "digest": digest}


def read_task(store: str, workers: int) -> dict[str, Any]:
    from salgp.store.engines import run_local

    source = FeatureStore(store)
    start = time.perf_counter()
    for _ in run_local(lambda i: len(source.shard(i)[0]), ((i,) for i in range(source.n_shards)), workers):
        pass
    return {"seconds": time.perf_counter() - start}


def bandwidth_task(store: str, workers: int) -> dict[str, Any]:
    """Sum the numbers of one shard, held in memory, as often as there are shards."""
    source = FeatureStore(store)
    arrays = [x.numpy() for x in source.shard(0)[0].layers.values()]
    start = time.perf_counter()
    for _ in range(round(len(source) / source.rows[0])):
        for x in arrays:
            x.sum()
    return {"seconds": time.perf_counter() - start}


def memory_task(inducing: int, batch: int, threads: int, double: bool) -> dict[str, Any]:
    """Our prediction of a batch in memory; threads share it, as workers share the shards of a store."""
    from concurrent.futures import ThreadPoolExecutor

    from salgp.gp.covariance import Rows, Stationary, Sum
    from salgp.gp.fast import plan_of
    from salgp.gp.regression import Posterior

    g = torch.Generator().manual_seed(0)
    widths = {**{f"layer{i}": WIDTH for i in range(LAYERS)}, "confidence": 1}
    dtype = torch.float64 if double else torch.float32

    def rows(n: int) -> Rows:
        return Rows({k: torch.randn(n, d, generator=g, dtype=dtype) for k, d in widths.items()})

    theta = {f"{k}.log_variance": torch.zeros((), dtype=torch.float64) for k in widths}
    theta |= {f"{k}.log_lengthscale": torch.tensor(8.0, dtype=torch.float64).log() for k in widths}
    alpha = torch.randn(inducing, generator=g, dtype=torch.float64)
    root = torch.randn(inducing, inducing, generator=g, dtype=torch.float64) / inducing
    covariance = Sum(tuple(Stationary(k) for k in widths))
    plan = plan_of(Posterior(covariance, theta, rows(inducing), alpha, root), dtype)
    assert plan is not None
    whole = rows(batch)
    parts = [whole[slice(i, i + batch // threads)] for i in range(0, batch, batch // threads)]
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return _rate(lambda: list(pool.map(plan.moments, parts)), batch)


def _rate(call: Callable[[], Any], batch: int) -> dict[str, Any]:
    """Best rate and processor time per sample of many calls, without the first."""
    count, best, cpu = 0, 0.0, float("inf")
    with torch.no_grad():
        until = time.perf_counter() + 20
        while count < 3 or time.perf_counter() < until:
            start, used = time.perf_counter(), time.process_time()
            call()
            if count:
                best = max(best, batch / (time.perf_counter() - start))
                cpu = min(cpu, (time.process_time() - used) / batch)
            count += 1
    return {"rate": best, "cpu_per_sample": cpu}


def gpytorch_task(
    model: str, inducing: int, batch: int, threads: int, double: bool = False
) -> dict[str, Any]:
    import gpytorch

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(0)
    width, repeats = (WIDTH + 2, LAYERS) if model == "paper" else (LAYERS * WIDTH + 1, 1)
    n = 500 * repeats if model == "paper" else 2000
    z, x, y = (
        torch.randn(inducing, width, generator=g),
        torch.randn(n, width, generator=g),
        torch.randn(n, generator=g),
    )
    queries = torch.randn(batch * repeats, width, generator=g)
    if model == "paper":
        x[:, -1], queries[:, -1] = (torch.arange(len(rows)) % LAYERS for rows in (x, queries))
    network = _gpytorch_model(model, z, x, y).eval()
    if double:
        network, queries = network.double(), queries.double()

    def predict() -> None:
        for part in queries.split(4000):
            found = network(part)
            _ = found.mean, found.variance

    with gpytorch.settings.fast_pred_var(model != "paper"):
        return _rate(predict, batch)


TASKS = {
    "evidence": evidence_task,
    "search": search_task,
    "rivals": rivals_task,
    "classes": classes_task,
    "fit": fit_task,
    "equal": equal_task,
    "score": score_task,
    "read": read_task,
    "bandwidth": bandwidth_task,
    "gpytorch": gpytorch_task,
    "memory": memory_task,
}


def measure(task: str, arguments: dict[str, Any], threads: int | None = None) -> dict[str, Any]:
    """Run one task in a process of its own; adds its time, processor time and peak memory to what
    it found.
    """
    command = [sys.executable, __file__, "task", "--task", task, "--arguments", json.dumps(arguments)]
    given = {**os.environ, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    if done.returncode:
        raise RuntimeError(f"{task} {arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def report_task(task: str, arguments: dict[str, Any]) -> None:
    start, used = time.perf_counter(), _processor_seconds()
    found = TASKS[task](**arguments)
    cpu, peak = _processor_seconds() - used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu": cpu, "rss": peak, **found}))


def made(n: int, seed: int) -> tuple[Features, Tensor]:
    """Layers that see a latent variable through noise, over-confident logits, labels from flatter ones."""
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10**6)
    h = torch.randn(n, LATENT, generator=g)
    layers = {}
    for i in range(LAYERS):
        layers[f"layer{i}"] = torch.relu(
            h @ torch.randn(LATENT, WIDTH, generator=fixed) + 0.5 * torch.randn(n, WIDTH, generator=g)
        )
    logits = 1.5 * h @ torch.randn(LATENT, CLASSES, generator=fixed)
    return Features(logits, layers), torch.multinomial((0.6 * logits).softmax(1), 1, generator=g)[:, 0]


def store_of(work: Path, n: int) -> Path:
    folder = work / f"store-{n}"
    write_store(
        (made(min(CHUNK, n - i), i) for i in range(0, n, CHUNK)), folder, dtype="float16", rows=65_536
    )
    return folder


def copies_of(work: Path, n: int) -> Path:
    """A store of about ``n`` rows: originals, and two copies of each with noise on layers and logits."""
    folder = work / f"copies-{n}"

    def parts() -> Iterator[tuple[Features, Tensor]]:
        for start in range(0, n // 3, CHUNK // 3):
            count = min(CHUNK // 3, n // 3 - start)
            clean, labels = made(count, 10**5 + start)
            for family in range(3):
                g = torch.Generator().manual_seed(family)
                layers = {
                    k: x + 0.4 * family * torch.randn(x.shape, generator=g) for k, x in clean.layers.items()
                }
                logits = clean.logits + 0.4 * family * torch.randn(clean.logits.shape, generator=g)
                groups = start + torch.arange(count)
                origin = (groups, torch.full((count,), family), torch.full((count,), 0.5 * family))
                yield Features(logits, layers, *origin), labels

    write_store(parts(), folder, dtype="float16", rows=65_536)
    return folder


def calibrator_of(a: argparse.Namespace) -> Path:
    saved = [a.work / f"cal-{n}" for n in sorted(a.fit_sizes, reverse=True) if (a.work / f"cal-{n}").is_dir()]
    if not saved:
        n = min(a.fit_sizes)
        measure(
            "fit",
            {
                "store": str(store_of(a.work, n)),
                "inducing": a.inducing,
                "subset": a.subset,
                "workers": a.workers,
                "save": str(a.work / f"cal-{n}"),
            },
        )
        saved = [a.work / f"cal-{n}"]
    return saved[0]


def machine() -> str:
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"


def said(line: str) -> Iterator[str]:
    print(line, flush=True)
    yield line


def _gpytorch_model(name: str, z: Tensor, x: Tensor, y: Tensor) -> Any:
    import gpytorch
    from gpytorch.distributions import MultivariateNormal
    from gpytorch.kernels import InducingPointKernel, MaternKernel, ScaleKernel
    from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

    if name == "paper":
        return _paper_model(x, y)
    parts = [list(range(i * WIDTH, (i + 1) * WIDTH)) for i in range(LAYERS)] + [[LAYERS * WIDTH]]
    kernel: Any = sum(
        (ScaleKernel(MaternKernel(2.5, active_dims=dims)) for dims in parts[1:]),
        ScaleKernel(MaternKernel(2.5, active_dims=parts[0])),
    )
    for part in kernel.modules():
        if isinstance(part, MaternKernel):
            part.lengthscale = 8.0
    likelihood = gpytorch.likelihoods.GaussianLikelihood().eval()

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.covariance = (
                kernel if name == "exact" else InducingPointKernel(kernel, z.clone(), likelihood)
            )

        def forward(self, rows: Tensor) -> MultivariateNormal:
            return MultivariateNormal(rows.new_zeros(rows.shape[:-1]), self.covariance(rows))

    class Variational(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(VariationalStrategy(self, z, CholeskyVariationalDistribution(len(z))))
            self.covariance = kernel

        def forward(self, rows: Tensor) -> MultivariateNormal:
            return MultivariateNormal(rows.new_zeros(rows.shape[:-1]), self.covariance(rows))

    return Variational() if name == "svgp" else Exact()


def _paper_model(x: Tensor, y: Tensor) -> Any:
    """ML on stacked rows: features, confidence, layer."""
    import gpytorch
    from gpytorch.kernels import IndexKernel, MaternKernel, ScaleKernel

    likelihood = gpytorch.likelihoods.GaussianLikelihood().eval()
    features = ScaleKernel(MaternKernel(2.5, active_dims=list(range(WIDTH))))
    confidence = ScaleKernel(MaternKernel(2.5, active_dims=[WIDTH]))
    kernel = features + confidence + IndexKernel(num_tasks=LAYERS, rank=1, active_dims=[WIDTH + 1])

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.covariance = kernel

        def forward(self, rows: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(
                rows.new_zeros(rows.shape[:-1]), self.covariance(rows)
            )

    return Model()


def _processor_seconds() -> float:
    return sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _kill_a_worker() -> None:
    """SIGKILL the first busy Ray worker of this process, a few seconds into its work."""
    import signal

    while True:
        time.sleep(0.5)
        listed = subprocess.run(
            ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[1:]
        parents = {int(line.split()[0]): int(line.split()[1]) for line in listed}
        for pid in [int(line.split()[0]) for line in listed if "ray::_one_thread" in line]:
            if os.getpid() in _ancestors(pid, parents):
                time.sleep(3)
                os.kill(pid, signal.SIGKILL)
                print(f"killed worker {pid}", file=sys.stderr)
                return


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


if __name__ == "__main__":
    main()
