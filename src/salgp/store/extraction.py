"""From a network to a feature store: in a stream that survives a kill, or in parts with a network per worker.

A shard is a fixed number of whole batches and depends on nothing outside them, so a continued run passes over
the batches of finished shards without running the network and goes on with the same numbers. The store knows
what it was made from: the network, the settings, and a digest of every batch; anything else is refused.
"""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from salgp.io.files import AnyPath
from salgp.network.frozen_copy import fingerprint
from salgp.network.reader import Reader, Reading, collect, read_batches, reader_header
from salgp.progress import Advance, progress_bar, steps_in
from salgp.store.columns import Layout
from salgp.store.engines import run
from salgp.store.manifest import Manifest, Shard, content_digest, writing
from salgp.store.store import KIND, FeatureStore, write_shard

__all__ = ["extract_parts", "extract_to_store"]

MakeModel = Callable[[], nn.Module]
MakeLoader = Callable[[int], Iterable[Any]]


def extract_to_store(
    model: nn.Module,
    loader: Iterable[Any],
    out: AnyPath,
    *,
    store_dtype: str = "float32",
    rows: int | None = None,
    reader: Reader | None = None,
    progress: bool = False,
) -> FeatureStore:
    """Like `salgp.extract`, into a folder; the same call continues after a kill.

    Args:
        model: any PyTorch classifier; it is the same afterwards.
        loader: yields ``(inputs, labels)`` or inputs; the same batches in the same order when continuing (no
            shuffling).
        out: folder of the store.
        store_dtype: of the stored layers, ``float32`` or ``float16``.
        rows: samples per shard, rounded up to whole batches; by default about 96 MB.
        reader: how to read the network; the ``taps`` of a `salgp.CalibratedClassifier` read what its
            calibrator was fitted on.
        progress: show rate and progress (needs ``rich``).

    Returns:
        The finished store.

    Example:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [(torch.zeros(2, 4), torch.tensor([0, 1])), (torch.ones(1, 4), torch.tensor([2]))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = extract_to_store(model, loader, folder)
        >>> len(store), store.widths
        (3, {'1': 8})
    """
    job = _Job(Path(out), store_dtype, reader or Reader())
    batches = iter(loader)
    with writing(out), torch.random.fork_rng(devices=[]):
        first = list(itertools.islice(batches, 1))
        resolved, features, labels = collect(job.read(model, first))
        layout = Layout.of(features, labels, store_dtype)
        wanted = rows or layout.shard_rows
        size = max(1, math.ceil(wanted / max(len(features), 1)))
        source = job.source(model, {"batches": size})
        layout = replace(layout, source=source)
        manifest = Manifest.open(out, KIND, asdict(layout))
        job = replace(job, reader=replace(resolved, output=job.reader.output))  # undeclared: each is checked
        with progress_bar("extracting", steps_in(loader), progress, unit="batches") as advance:
            stream = _counted(itertools.chain(first, batches), advance)
            for index, shard in enumerate(_in_groups(stream, size)):
                missing = manifest.needs(index)
                made = job.make(model, shard, index, source, missing, manifest.rows)
                manifest.add(index, *made)
        manifest.finish(index + 1)
    return FeatureStore(out)


def extract_parts(
    make_model: MakeModel,
    make_loader: MakeLoader,
    n_parts: int,
    out: AnyPath,
    *,
    engine: str = "local",
    workers: int | None = None,
    num_gpus: float = 0,
    store_dtype: str = "float32",
    reader: Reader | None = None,
    progress: bool = False,
) -> FeatureStore:
    """Extract part by part, on this machine or on Ray; every part becomes one shard.

    Args:
        make_model: builds the network, called for each part; sends it to its device, such as ``cuda``.
        make_loader: the batches of part ``i``.
        n_parts: number of parts.
        out: folder of the store.
        engine: ``local`` (one after the other), ``ray`` (started here), or the address of a running Ray
            cluster.
        workers: at most so many on Ray.
        num_gpus: GPUs of each part on Ray.
        store_dtype: of the stored layers.
        reader: how to read the network.
        progress: show rate and time left (needs ``rich``).

    Returns:
        The finished store.

    Example:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = extract_parts(
        ...         lambda: model, lambda i: [(torch.full((2, 4), float(i)), torch.tensor([0, 1]))], 3, folder
        ...     )
        >>> len(store), store.widths
        (6, {'1': 8})
    """
    job = _Job(Path(out), store_dtype, reader or Reader())
    with writing(out), progress_bar("extracting", n_parts, progress) as advance:
        manifest = Manifest.open(out, KIND)
        pieces = [(job, make_model, make_loader, i, manifest.needs(i)) for i in range(n_parts)]
        if engine == "local":  # one after the other, each on all cores
            made: Iterable[Any] = itertools.starmap(_extract_part, pieces)
        else:
            made = run(_extract_part, pieces, engine=engine, workers=workers, num_gpus=num_gpus)
        for index, (shard, header) in enumerate(made):
            manifest.add(index, shard, header)
            advance(1)
        manifest.finish(n_parts)
    return FeatureStore(out)


@dataclass(frozen=True)
class _Job:
    """Settings of an extraction: all that a shard depends on besides the network and its batches.

    Args:
        out: folder of the store.
        dtype: of the stored layers.
        reader: what to read.
    """

    out: Path
    dtype: str
    reader: Reader

    def read(self, model: nn.Module, batches: Iterable[Any]) -> Iterator[Reading]:
        """Read batches as a store keeps them."""
        reader = replace(self.reader, dtype=torch.float32)
        return read_batches(model, batches, reader, progress=False)

    def source(self, model: nn.Module, about: Mapping[str, object]) -> dict[str, object]:
        """What a store is made from; it goes on with nothing else. Functions are known by their names."""
        known = fingerprint(model)
        source = {"network": known.structure, "weights": known.weights, **about}
        source |= reader_header(self.reader)
        functions = {"forward": self.reader.forward, "pooling_function": self.reader.pooling}
        names = {key: _function_names(value) for key, value in functions.items()}
        return source | {key: own for key, own in names.items() if own}

    def make(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        index: int,
        source: Mapping[str, object],
        missing: bool,
        first: int | None = None,
    ) -> tuple[Shard, dict[str, Any]]:
        """Shard ``index`` and its header; of one that is there, only what shows that it is the same."""
        digests: list[str] = []
        hashed = _hashed(batches, digests)
        if not missing:
            collections.deque(hashed, maxlen=0)
            return Shard(0, "", content_digest(digests)), {"source": source}
        _, features, labels = collect(self.read(model, hashed))
        data = content_digest(digests)
        shard = write_shard(self.out, index, features, labels, self.dtype, data, first)
        return shard, asdict(Layout.of(features, labels, self.dtype, source))


def _extract_part(
    job: _Job, make_model: MakeModel, make_loader: MakeLoader, index: int, missing: bool
) -> tuple[Shard, dict[str, Any]]:
    """Part ``index``, by a network of its own; see `_Job.make`."""
    model = make_model()
    source = job.source(model, {"parts": True})
    return job.make(model, make_loader(index), index, source, missing)


def _function_names(value: Any) -> str:
    """Names of the functions in a setting, separated by spaces."""
    parts = value.values() if isinstance(value, Mapping) else [value]
    return " ".join(f"{part.__module__}.{part.__qualname__}" for part in parts if callable(part))


def _in_groups(batches: Iterator[Any], size: int) -> Iterator[Iterable[Any]]:
    """So many batches at a time; each group is to be used up before the next."""
    for first in batches:
        yield itertools.chain([first], itertools.islice(batches, size - 1))


def _counted(batches: Iterable[Any], advance: Advance) -> Iterator[Any]:
    """The same batches; each that is done with advances the bar."""
    for batch in batches:
        yield batch
        advance()


def _hashed(batches: Iterable[Any], digests: list[str]) -> Iterator[Any]:
    """The same batches; the digest of each that has passed is added to ``digests``."""
    for batch in batches:
        digests.append(content_digest(batch))
        yield batch
