"""Batch scoring: a feature store in, a folder of Parquet files with calibrated confidences out.

Each shard of the store becomes one file of the same name; the manifest lists it with its checksum. A killed
run continued with the same call makes the missing files only, on threads or on Ray.
"""

import operator
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from salgp.calibrators import Calibrator, load_calibrator
from salgp.calibrators.base import FILE
from salgp.calibrators.evidence.windows import Context
from salgp.features import Features
from salgp.io import digest
from salgp.io.files import AnyPath
from salgp.prediction import LayerTerms, Prediction
from salgp.progress import progress_bar
from salgp.store.columns import read_table
from salgp.store.engines import run
from salgp.store.manifest import Manifest, Shard, writing
from salgp.store.store import FeatureStore

__all__ = ["score"]

KIND = "salgp-scores"
BATCH = 8192
"""Samples whose confidences are computed together."""
SCORED = ("label", "confidence", "std", "lower", "upper", "novelty")
"""Columns that are written, those that the calibrator has."""


@dataclass(frozen=True)
class Scoring:
    """Summary of a run of `score`.

    Args:
        folder: where the scores are.
        rows: samples scored in all.
        new_rows: samples scored by this run; the others were there already.
        seconds: wall-clock time of this run.
    """

    folder: Path
    rows: int
    new_rows: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples per second of this run."""
        return self.new_rows / max(self.seconds, 1e-9)


def score(
    store: AnyPath,
    calibrator: AnyPath,
    out: AnyPath,
    *,
    engine: str = "local",
    workers: int | None = None,
    layers: bool = False,
    context: int | str | None = None,
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
        engine: ``local``, ``ray`` (started here), or the address of a running Ray cluster.
        workers: pieces of work at once; by default one per core.
        layers: also write each layer's part of the correction.
        context: samples that were met together, for calibrators that take it: ``"all"`` of the store, in one
            pass more, or windows of so many consecutive ones; a window ends with its shard. None: every
            sample by itself.
        progress: show rate and time left (needs ``rich``).

    Returns:
        Rows, time and rate.

    Example:
        >>> import tempfile, torch
        >>> from salgp import Features, calibrators
        >>> from salgp.store.store import write_store
        >>> f = Features(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
        >>> with tempfile.TemporaryDirectory() as t:
        ...     store = write_store([(f, torch.arange(50) % 3)], f"{t}/store", rows=20)
        ...     saved = calibrators.get("temperature").fit(*store.to_features()).save(f"{t}/cal")
        ...     score(store.folder, saved, f"{t}/out").rows, sorted(read_scores(f"{t}/out"))
        (50, ['confidence', 'label'])
    """
    start = time.perf_counter()
    source, folder = FeatureStore(store), Path(out)
    _check_context(context, Path(calibrator))
    inputs = {"store": source.identity(), "calibrator": digest(Path(calibrator) / FILE)}
    header = {**inputs, "layers": layers, "context": context}
    in_parallel = partial(run, engine=engine, workers=workers)
    both = str(store), str(calibrator)
    with writing(folder):
        manifest = Manifest.open(folder, KIND, header)
        before = manifest.rows
        left = range(len(manifest.shards), source.n_shards)
        known: Any = context
        if context == "all" and left:
            all_shards = [(*both, i) for i in range(source.n_shards)]
            known = reduce(operator.add, in_parallel(shard_context, all_shards))
        pieces = [(*both, str(out), i, layers, known) for i in left]
        shards = in_parallel(score_shard, pieces)
        with progress_bar("scoring", len(source), progress, done=before, unit="rows") as advance:
            for index, shard in zip(left, shards, strict=True):
                manifest.add(index, shard)
                advance(shard.rows)
        manifest.finish(source.n_shards)
    seconds = time.perf_counter() - start
    return Scoring(folder, manifest.rows, manifest.rows - before, seconds)


def score_shard(
    store: str, calibrator: str, out: str, index: int, layers: bool, context: int | Context | None = None
) -> Shard:
    """Score one shard and write its file; returns its entry in the manifest."""
    import pyarrow as pa

    loaded, source = _loaded(calibrator), FeatureStore(store)
    features, _ = source.shard(index, None if loaded.needs_layers else ())
    window = context if isinstance(context, int) else 1
    size = window * max(1, BATCH // window)  # no window of consecutive samples is cut in two
    tables = [_table(loaded.predict(part, context), layers) for part in _batches(features, size)]
    table = pa.concat_tables(tables).combine_chunks()
    return Shard.write(Path(out), index, table)


def _batches(features: Features, size: int = BATCH) -> Iterator[Features]:
    return (features[i : i + size] for i in range(0, len(features), size))


def read_scores(folder: AnyPath) -> dict[str, np.ndarray]:
    """All columns of a finished scoring, in the order of the store.

    Example:
        >>> import tempfile, torch
        >>> from salgp import Features, calibrators
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
    tables = [read_table(manifest.file(i), shard.rows) for i, shard in enumerate(manifest.shards)]
    columns = {name: [table.column(name) for table in tables] for name in tables[0].column_names}
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _loaded(calibrator: str) -> Calibrator:
    return _cached(calibrator, digest(Path(calibrator) / FILE))


@lru_cache(maxsize=2)
def _cached(calibrator: str, contents: str) -> Calibrator:
    """Loaded once per process; other contents make a changed calibrator another one."""
    return load_calibrator(calibrator)


def _check_context(context: int | str | None, calibrator: Path) -> None:
    if context is None:
        return
    count = isinstance(context, int) and not isinstance(context, bool) and context >= 1
    if context != "all" and not count:
        raise ValueError(
            f"context must be None, 'all', or the number of samples in a window; got {context!r}"
        )
    loaded = load_calibrator(calibrator)
    if not loaded.takes_context:
        raise ValueError(f"{loaded.display_name} predicts each sample by itself: it takes no context")


def shard_context(store: str, calibrator: str, index: int) -> Context:
    """Window statistics of one shard."""
    loaded = _loaded(calibrator)
    features, _ = FeatureStore(store).shard(index)
    return reduce(operator.add, map(loaded.context, _batches(features)))


def _table(prediction: Prediction, layers: bool) -> Any:
    import pyarrow as pa

    arrays = {name: x for name, x in prediction.numpy().items() if name in SCORED}
    if layers and prediction.layers is not None:
        arrays |= _layer_columns(prediction.layers)
    kinds = {name: pa.int32() if name == "label" else pa.float32() for name in arrays}
    columns = [pa.field(name, kind, nullable=False) for name, kind in kinds.items()]
    return pa.table(arrays, schema=pa.schema(columns))


def _layer_columns(terms: LayerTerms) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for what, values in (("mean", terms.mean), ("std", terms.std)):
        if values is not None:
            names = [f"layer_{what}.{name}" for name in terms.names]
            found |= dict(zip(names, values.T.cpu().numpy(), strict=True))
    return found
