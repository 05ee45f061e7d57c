"""Whole files for every reader, and the readers themselves.

``make_*`` writes files into a folder and returns what the reader is given; ``read_*`` returns a value that
can be compared.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Make = Callable[[Path], Path]


@functools.cache
def some_features() -> Any:
    """Forty samples of three classes with two layers, and their labels."""
    import salgp

    g = torch.Generator().manual_seed(0)
    layers = {"a": torch.randn(40, 3, generator=g), "b": torch.randn(40, 2, generator=g)}
    return salgp.Features(2 * torch.randn(40, 3, generator=g), layers), torch.arange(40) % 3


def calibrator(method: str) -> Make:
    def make(folder: Path) -> Path:
        from salgp.calibrators import get

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get(method).fit(*some_features()).save(folder / "cal")

    return make


def predicted(folder: Path) -> Any:
    from salgp.calibrators import load_calibrator

    return load_calibrator(folder).predict(some_features()[0]).probs


@functools.cache
def network() -> torch.nn.Module:
    """The same small network every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))


def make_module(folder: Path) -> Path:
    from salgp.classifier import calibrate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = [(some_features()[0].layers["a"], some_features()[1])]
        return calibrate(network(), data, method="density-aware", perturb=None).save(folder / "cal")


def read_module(folder: Path) -> Any:
    from salgp.classifier import load

    return load(folder, network())(some_features()[0].layers["a"]).probs  # type: ignore[operator]


def make_features(folder: Path) -> Path:
    features, labels = some_features()
    return features.save(folder / "f.safetensors", labels, {"classes": '["x", "y", "z"]'})


def read_features(path: Path) -> Any:
    from salgp import files

    loaded = files.read_features(path)
    return [loaded.features, loaded.labels, loaded.classes]


def make_store(folder: Path) -> Path:
    from salgp.store import write_store

    return write_store([some_features()], folder / "store", rows=15).folder


def read_store(path: Path) -> Any:
    from salgp.store import FeatureStore

    return FeatureStore(path).to_features()


def make_parquet(folder: Path) -> Path:
    return make_store(folder) / "part-000000.parquet"


def read_any(path: Path) -> Any:
    from salgp.io.arrays import read_arrays

    return read_arrays(path)


def read_table(path: Path) -> Any:
    from salgp.store.columns import Layout, from_table, read_table

    schema = Layout(3, (("a", 3), ("b", 2)), ("label",), "float32").schema
    return from_table(read_table(path, 15, schema), ["a", "b"])


def make_records(folder: Path) -> Path:
    from salgp_study.store import append_record

    for i in range(5):
        append_record(folder, {"key": f"k{i}", "ece": 0.01 * i, "sizes": {"a": i}})
    return folder


def read_records(folder: Path) -> Any:
    from salgp_study import store

    return store.read_records(folder)


def make_npz(folder: Path) -> Path:
    features, labels = some_features()
    np.savez_compressed(
        folder / "d.npz", logits=features.logits.numpy(), labels=labels.numpy(), names=np.array(["a", "b"])
    )
    return folder / "d.npz"


def make_csv(folder: Path) -> Path:
    features, labels = some_features()
    rows = [f"{a},{b},{c},{y}" for (a, b, c), y in zip(features.probs.tolist(), labels.tolist(), strict=True)]
    (folder / "d.csv").write_text("\n".join(["probs.0,probs.1,probs.2,label", *rows]) + "\n")
    return folder / "d.csv"


def read_scores(path: Path) -> Any:
    from salgp.io.class_scores import read_scores as read

    found = read(path)
    return [found.output, found.values, found.labels, found.layers, found.classes]


def make_phoenix(folder: Path) -> Path:
    head = "[PhoenixHeaderVer01.04]\nPhoenixHeaderLength= 00300\nNumberOfRows= 8\nNumberOfColumns= 6\n"
    head += "DesiredDepression= 17\nTargetType= t72_tank\n[EndofPhoenixHeader]\n"
    chip = np.random.default_rng(0).random((8, 6)).astype(">f4")
    (folder / "chip.017").write_bytes(head.encode().ljust(300, b" ") + chip.tobytes())
    return folder


def read_chips(path: Path) -> Any:
    from salgp_study.mstar import load_mstar

    return load_mstar(path)


def make_chips(folder: Path) -> Path:
    x = np.random.default_rng(0).integers(0, 255, (5, 8, 8)).astype(np.uint8)
    np.savez(
        folder / "c.npz", x=x, label=np.arange(5) % 2, depression=[15, 17, 30, 15, 17], class_names=["A", "B"]
    )
    return folder / "c.npz"


def make_curves(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    points = [
        f"{i},{50000 + 3 * t},{b},{rng.normal():.3f},{rng.random():.3f}"
        for i in range(4)
        for b in range(4)
        for t in range(3)
    ]
    (folder / "spcc_lightcurves.csv").write_text(
        "\n".join(["object_id,mjd,passband,flux,flux_err", *points]) + "\n"
    )
    head = "object_id,true_type,spectro,ra,decl,mwebv,hostgal_photoz,hostgal_photoz_err"
    meta = [f"{i},Ia,{i % 2 == 0},1.5,2.5,0.1,0.3,0.05" for i in range(4)]
    (folder / "spcc_metadata.csv").write_text("\n".join([head, *meta]) + "\n")
    return folder


def read_curves(folder: Path) -> Any:
    from salgp_study.lightcurves import load_spcc

    return load_spcc(folder)


def make_rule(folder: Path) -> Path:
    from salgp.decide import Rule

    Rule((0.9, 0.8), error=0.05, n=1000, kept=700, wrong=20).save(folder / "rule.json")
    return folder / "rule.json"


def read_rule(path: Path) -> Any:
    from salgp.decide import Rule

    return Rule.load(path)


def _confident() -> Any:
    """A prediction of the sixty samples that a monitor needs at least."""
    import salgp

    logits = 2 * torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    features = salgp.Features(logits)
    return salgp.Prediction.from_confidence(features, features.confidence)


def make_sets(folder: Path) -> Path:
    from salgp.sets import fit_sets

    fit_sets(_confident(), torch.arange(60) % 3, by="confidence").save(folder / "sets.safetensors")
    return folder / "sets.safetensors"


def read_sets(path: Path) -> Any:
    from salgp.sets import PredictionSets

    sets = PredictionSets.load(path)
    return [vars(sets), sets(_confident())]


def make_monitor(folder: Path) -> Path:
    from salgp import Monitor

    monitor = Monitor.start(_confident(), folder / "watch", window=3)
    for day in range(3):
        monitor.feed(_confident(), torch.arange(60) % 3, key=f"day {day}", time="2026-01-01T00:00:00")
    return folder / "watch"


def read_monitor(folder: Path) -> Any:
    """What it says, before and after another batch that is not kept."""
    from salgp import Monitor

    found = Monitor.open(folder)
    watching = Monitor(found.settings, found._state, found.log, None)
    before = watching.status()
    after = watching.feed(_confident(), time="2026-01-02T00:00:00")
    return [vars(found.settings), [vars(record) for record in found.log], str(before), str(after)]


def make_weights(folder: Path) -> Path:
    torch.save(network().state_dict(), folder / "w.pt")
    return folder / "w.pt"


def read_weights(path: Path) -> Any:
    from salgp.io.weights import load_weights

    fresh = copy.deepcopy(network())
    load_weights(fresh, path)
    return fresh.state_dict()
