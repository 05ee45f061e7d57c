"""Batch scoring: a feature store in, a folder of Parquet files with calibrated confidences out.

Each shard of the store becomes one file of the same name, written whole; the manifest lists it with its
checksum. A killed run continued with the same call makes the missing files only and leaves the same bytes as
a run that was never interrupted, on threads or on Ray, whatever the number of workers.

A calibrator may have a way to predict many samples faster than its `predict` (`Calibrator.predictor`); it is
taken in single precision where a probe of the data shows that it agrees with double precision.
"""

from __future__ import annotations

import functools
import operator
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from salgp.calibrators import Calibrator, load_calibrator
from salgp.calibrators.evidence.environment import Context
from salgp.features import Features
from salgp.logits import check_finite
from salgp.prediction import Prediction
from salgp.progress import progress_bar
from salgp.storage import digest, locked
from salgp.store.columns import read_table, write_table
from salgp.store.engines import run
from salgp.store.manifest import Entry, Manifest, claim, sweep, write_durably
from salgp.store.store import FeatureStore

__all__ = ["PRECISIONS", "Scoring", "predictor", "read_scores", "score", "score_shard", "shard_context"]

KIND = "salgp-scores"
PRECISIONS = ("auto", "double", "single")
TOLERANCE = 1e-5
"""Largest difference of confidence or its standard deviation for which single precision is taken."""
PROBE = 1024
"""Samples on which the precisions are compared."""
BATCH = 8192
"""Samples whose confidences are computed together."""


@dataclass(frozen=True)
class Scoring:
    """What a run of `score` did.

    Args:
        folder: where the scores are.
        rows: samples scored in all.
        new_rows: samples scored by this run; the others were there already.
        seconds: wall-clock time of this run.
        precision: ``double`` or ``single``.
    """

    folder: Path
    rows: int
    new_rows: int
    seconds: float
    precision: str

    @property
    def rate(self) -> float:
        """Samples per second of this run."""
        return self.new_rows / max(self.seconds, 1e-9)


def score(
    store: str | os.PathLike[str],
    calibrator: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    layers: bool = False,
    context: int | str | None = None,
    precision: str = "auto",
    verify: bool = True,
    progress: bool = False,
) -> Scoring:
    """Score every sample of a store; the same call continues a killed run.

    The files hold, per sample and in the order of the store: ``label`` (the network's own), ``confidence``
    and, where the calibrator has them, ``std``, ``lower``, ``upper``, ``novelty``; with ``layers`` also
    ``layer_mean.<name>`` and ``layer_std.<name>``.

    Args:
        store: folder of a `FeatureStore`.
        calibrator: folder written by `Calibrator.save`.
        out: folder for the scores.
        engine: ``local`` or ``ray``.
        workers: pieces of work at once; by default one per core.
        ray_address: of a running Ray cluster; by default Ray is started on this machine.
        layers: also write each layer's part of the correction.
        context: samples that were met together, for calibrators that take it: ``"all"`` of the store, in one
            pass more, or windows of so many consecutive ones; a window ends with its shard. None judges each
            sample by itself.
        precision: of the fast path: ``double``, ``single``, or ``auto`` by comparing both on the first
            samples.
        verify: compare the checksum of every shard that is read.
        progress: show rate and time left (needs ``rich``).

    Returns:
        Rows, time and rate.

    Example:
        >>> import tempfile, torch
        >>> from salgp import calibrators
        >>> from salgp.store.store import write_store
        >>> f = Features(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
        >>> with tempfile.TemporaryDirectory() as t:
        ...     store = write_store([(f, torch.arange(50) % 3)], f"{t}/store", rows=20)
        ...     saved = calibrators.get("temperature").fit(*store.to_features()).save(f"{t}/cal")
        ...     score(store.folder, saved, f"{t}/out").rows, sorted(read_scores(f"{t}/out"))
        (50, ['confidence', 'label'])
    """
    start = time.perf_counter()
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    source, folder = FeatureStore(store), Path(out)
    _check_context(context, Path(calibrator))
    place: Any = {"engine": engine, "workers": workers, "ray_address": ray_address}
    with locked(folder):
        claim(folder)
        manifest = _open(folder, source, Path(calibrator), layers, precision, verify, context)
        chosen, before = str(manifest.header["precision"]), manifest.rows
        left = [i for i in range(source.n_shards) if i not in manifest.entries]
        known: Any = context
        if context == "all" and left:
            known = _whole_context(source, str(calibrator), verify, place)
        pieces = [(str(store), str(calibrator), str(out), i, layers, chosen, verify, known) for i in left]
        with progress_bar("scoring", len(source), progress, done=before, unit="rows") as advance:
            for index, entry in run(score_shard, pieces, **place):
                manifest.add(index, Entry(*entry))
                advance(entry[1])
        sweep(folder)
        if not manifest.complete:
            manifest.finish()
    return Scoring(folder, manifest.rows, manifest.rows - before, time.perf_counter() - start, chosen)


def score_shard(
    store: str,
    calibrator: str,
    out: str,
    index: int,
    layers: bool,
    precision: str,
    verify: bool,
    context: int | dict[str, Any] | None = None,
) -> tuple[int, tuple[str, int, str]]:
    """Score one shard and write its file; returns its index and the fields of its manifest entry."""
    predict = _predictor_of(calibrator, layers, precision)
    source = FeatureStore(store)
    features, _ = source.shard(index, source.layer_names if predict.needs_layers else (), verify)
    size = BATCH
    function = predict.function
    if isinstance(context, int):
        size = context * max(1, BATCH // context)  # no window is cut in two
        function = functools.partial(predict.calibrator.predict, context=context)
    elif context is not None:
        function = functools.partial(predict.calibrator.predict, context=Context.from_dict(context))
    with _naming_rows(source, index, features):
        parts = [_table(function(features[i : i + size]), layers) for i in range(0, len(features), size)]
    import pyarrow as pa

    table = pa.concat_tables(parts).combine_chunks()
    name = f"part-{index:06d}.parquet"
    checksum = write_durably(Path(out) / name, lambda part: write_table(table, part))
    return index, (name, len(features), checksum)


@contextmanager
def _naming_rows(source: FeatureStore, index: int, features: Features) -> Iterator[None]:
    """What is refused in a batch of a shard is said with the row of the store."""
    try:
        yield
    except ValueError:
        first = sum(source.rows[:index])
        check_finite(features.logits, f"{source.folder}: the class scores hold", first)
        for name, x in features.layers.items():
            check_finite(x, f"{source.folder}: layer {name!r} holds", first)
        raise


def read_scores(folder: str | os.PathLike[str], verify: bool = True) -> dict[str, np.ndarray]:
    """All columns of a finished scoring, in the order of the store.

    Example:
        >>> import tempfile, torch
        >>> from salgp import calibrators
        >>> from salgp.store.store import write_store
        >>> f = Features(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
        >>> with tempfile.TemporaryDirectory() as t:
        ...     store = write_store([(f, torch.arange(50) % 3)], f"{t}/store", rows=20)
        ...     saved = calibrators.get("temperature").fit(*store.to_features()).save(f"{t}/cal")
        ...     _ = score(store.folder, saved, f"{t}/out")
        ...     columns = read_scores(f"{t}/out")
        >>> columns["label"].tolist() == f.label.tolist(), columns["confidence"].shape
        (True, (50,))
    """
    manifest = Manifest.read(folder, KIND)
    if not manifest.complete:
        raise ValueError(
            f"{folder} is not finished ({manifest.rows} rows so far); run score again with the "
            f"same arguments, it continues"
        )
    tables = []
    for index in sorted(manifest.entries):
        if verify:
            manifest.entries[index].check(Path(folder))
        tables.append(read_table(Path(folder) / manifest.entries[index].file, None))
    return {
        name: np.concatenate([t.column(name).to_numpy() for t in tables]) for name in tables[0].column_names
    }


def predictor(
    calibrator: Calibrator, layers: bool = False, precision: str = "double"
) -> Callable[[Features], Prediction]:
    """The fastest function that predicts like ``calibrator``.

    Args:
        calibrator: fitted.
        layers: give layer terms too.
        precision: ``double`` or ``single``, where the calibrator has a fast path.
    """
    return calibrator.predictor(layers, precision) or calibrator.predict


@dataclass(frozen=True)
class _Predictor:
    function: Callable[[Features], Prediction]
    needs_layers: bool
    calibrator: Calibrator


def _predictor_of(calibrator: str, layers: bool, precision: str) -> _Predictor:
    contents = tuple(_checksums(Path(calibrator)).values())
    return _cached_predictor(calibrator, contents, layers, precision)


def _checksums(calibrator: Path) -> dict[str, str]:
    """Of both files: what a method learned may be in either."""
    return {name: digest(calibrator / f"calibrator.{name}") for name in ("json", "safetensors")}


@functools.lru_cache(maxsize=2)
def _cached_predictor(calibrator: str, contents: tuple[str, ...], layers: bool, precision: str) -> _Predictor:
    """Loaded once per process; other contents make a changed calibrator another one."""
    loaded = load_calibrator(calibrator)
    return _Predictor(predictor(loaded, layers, precision), loaded.needs_layers, loaded)


def _check_context(context: int | str | None, calibrator: Path) -> None:
    if context is None:
        return
    if context != "all" and (not isinstance(context, int) or isinstance(context, bool) or context < 1):
        raise ValueError(
            f"context must be None, 'all', or the number of samples in a window; got {context!r}"
        )
    loaded = load_calibrator(calibrator)
    if not loaded.takes_context:
        raise ValueError(f"{loaded.display_name} judges each sample by itself: it takes no context")


def _whole_context(
    source: FeatureStore, calibrator: str, verify: bool, place: dict[str, Any]
) -> dict[str, Any]:
    """What all samples of a store tell together; shards are added in their order, whoever read them."""
    pieces = [(str(source.folder), calibrator, i, verify) for i in range(source.n_shards)]
    found = dict(run(shard_context, pieces, **place))
    parts = [Context.from_dict(found[i]) for i in sorted(found)]
    return functools.reduce(operator.add, parts).as_dict()


def shard_context(store: str, calibrator: str, index: int, verify: bool) -> tuple[int, dict[str, Any]]:
    """What one shard tells of the environment, and its index."""
    predict = _predictor_of(calibrator, False, "double")
    source = FeatureStore(store)
    features, _ = source.shard(index, verify=verify)
    whole: Any = predict.calibrator
    with _naming_rows(source, index, features):
        parts = [whole.context(features[i : i + BATCH]) for i in range(0, len(features), BATCH)]
    return index, functools.reduce(operator.add, parts).as_dict()


def _open(
    folder: Path,
    source: FeatureStore,
    calibrator: Path,
    layers: bool,
    precision: str,
    verify: bool,
    context: int | str | None,
) -> Manifest:
    """Begin or continue the job; the precision chosen once stays."""
    header = {
        "store": source.identity(),
        "calibrator": _checksums(calibrator),
        "layers": layers,
        "asked_precision": precision,
    } | ({} if context is None else {"context": context})
    if (folder / "manifest.json").is_file():
        header["precision"] = Manifest.read(folder, KIND).header.get("precision")
    else:
        header["precision"] = (
            _choose(source, load_calibrator(calibrator), verify) if precision == "auto" else precision
        )
    return Manifest.open(folder, KIND, header)


def _choose(source: FeatureStore, calibrator: Calibrator, verify: bool) -> str:
    """Is single precision within `TOLERANCE` of double on the first samples?"""
    if calibrator.predictor(False, "single") is None or source.n_shards == 0:
        return "double"
    probe = source.shard(0, verify=verify)[0][:PROBE]
    single, double = (predictor(calibrator, False, p)(probe) for p in ("single", "double"))
    pairs = [(single.confidence, double.confidence), (single.std, double.std)]
    worst = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    return "single" if worst <= TOLERANCE else "double"


def _table(prediction: Prediction, layers: bool) -> Any:
    import pyarrow as pa

    columns: dict[str, Tensor | None] = {
        k: getattr(prediction, k) for k in ("confidence", "std", "lower", "upper", "novelty")
    }
    if layers and prediction.layers is not None:
        terms = prediction.layers
        columns |= {f"layer_mean.{name}": terms.mean[:, i] for i, name in enumerate(terms.names)}
        columns |= {
            f"layer_std.{name}": terms.std[:, i]
            for i, name in enumerate(terms.names)
            if terms.std is not None
        }
    arrays = {"label": pa.array(prediction.label.cpu().numpy().astype(np.int32))}
    arrays |= {
        k: pa.array(x.detach().cpu().numpy().astype(np.float32)) for k, x in columns.items() if x is not None
    }
    return pa.Table.from_arrays(
        list(arrays.values()),
        schema=pa.schema([pa.field(k, v.type, nullable=False) for k, v in arrays.items()]),
    )
