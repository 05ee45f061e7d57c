"""From a network to a feature store: in a stream that survives a kill, or in parts with a network per worker.

A shard is a fixed number of whole batches and depends on nothing outside them, so a continued run passes over
the batches of finished shards without running the network and goes on with the same numbers. The store knows
what it was made from: the network, the settings, and a digest of every batch; anything else is refused.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from salgp.logits import check_finite
from salgp.network.batches import LabelsAt
from salgp.network.extract import Perturb, perturbed
from salgp.network.fingerprint import fingerprint
from salgp.network.keeping import reader_header
from salgp.network.layers import Layers, Poolings
from salgp.network.reader import Forward, Reader
from salgp.network.reading import Place, Reading, collect, read_batches
from salgp.progress import Advance, progress_bar, steps_in
from salgp.storage import FormatError, locked
from salgp.store.columns import read_table
from salgp.store.manifest import Entry, Manifest, claim, update_digest
from salgp.store.store import KIND, FeatureStore, header_of, open_manifest, shard_rows, write_shard

__all__ = ["extract_parts", "extract_to_store"]


def extract_to_store(
    model: nn.Module,
    loader: Iterable[Any],
    out: str | os.PathLike[str],
    *,
    store_dtype: str = "float32",
    rows: int | None = None,
    layers: Layers = "auto",
    pooling: Poolings = "auto",
    output: str = "logits",
    device: torch.device | str | None = None,
    max_width: int | None = None,
    perturb: Perturb | None = None,
    seed: int = 0,
    progress: bool = False,
    forward: Forward | None = None,
    labels_at: LabelsAt = None,
    taps: Reader | None = None,
) -> FeatureStore:
    """Like `salgp.extract`, into a folder; the same call continues after a kill.

    Args:
        model: any PyTorch classifier; it is the same afterwards.
        loader: see `salgp.extract`; it must give the same batches in the same order when continuing (no
            shuffling).
        out: folder of the store.
        store_dtype: of the stored layers, ``float32`` or ``float16``.
        rows: samples per shard, rounded up to whole batches; by default about 96 MB.
        layers: see `salgp.extract`; likewise the following.
        pooling: of the layers.
        output: what the network returns.
        device: where batches are sent.
        max_width: wider layers are projected to this width.
        perturb: a function applied to the inputs; its random numbers start anew with each shard.
        seed: of ``perturb`` and the projections.
        progress: show rate and progress (needs ``rich``).
        forward: how the network is called.
        labels_at: where a batch has its labels.
        taps: of a `salgp.CalibratedClassifier`, to read what its calibrator was fitted on; they stand for all
            that says what to read.

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
    given = Reader(layers, pooling, output, max_width, seed, forward, labels_at)
    how = _How(_one_reader(given, taps), _function(perturb), device)
    total = steps_in(loader)
    with locked(out), torch.random.fork_rng(devices=[]):
        first, stream = _peeked(loader)
        settled, features, labels = collect(how.read(model, [first]))
        per_shard = max(1, -(-(rows or shard_rows(features, store_dtype)) // max(len(features), 1)))
        source = how.source(model, {"batches": per_shard})
        manifest = open_manifest(out, features, labels, store_dtype, source)
        shard = functools.partial(replace(how, reader=settled).read, model)
        with progress_bar("extracting", total, progress, unit="batches") as advance:
            stream = _told(stream, advance)
            for index in itertools.count():
                if not _next_shard(Path(out), index, stream, per_shard, manifest, shard):
                    break
        manifest.check_end(index)
        manifest.finish()
    return FeatureStore(out)


def extract_parts(
    make_model: Callable[[], nn.Module],
    make_loader: Callable[[int], Iterable[Any]],
    n_parts: int,
    out: str | os.PathLike[str],
    *,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    num_gpus: float | None = None,
    store_dtype: str = "float32",
    progress: bool = False,
    **options: Any,
) -> FeatureStore:
    """Extract part by part, on Ray Data with a network per actor; every part becomes one shard.

    Args:
        make_model: builds the network; called once per actor. It sends it to its device, such as ``cuda``.
        make_loader: the batches of part ``i``.
        n_parts: number of parts.
        out: folder of the store.
        engine: ``local`` (one after the other) or ``ray``.
        workers: actors at most on Ray.
        ray_address: of a running Ray cluster.
        num_gpus: GPUs of each actor; by default one where the cluster has GPUs.
        store_dtype: of the stored layers.
        progress: show rate and time left (needs ``rich``).
        options: what to read, see `extract_to_store`: ``layers``, ``pooling``, ``output``, ``device``,
            ``taps`` and so on.

    Returns:
        The finished store.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = extract_parts(
        ...         lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        ...         lambda i: [(torch.full((2, 4), float(i)), torch.tensor([0, 1]))],
        ...         3,
        ...         folder,
        ...     )
        >>> len(store), store.widths
        (6, {'1': 8})
    """
    how = _how(**options)
    manifest: Manifest | None = (
        FeatureStore(out, incomplete=True).manifest if (Path(out) / "manifest.json").is_file() else None
    )
    done = set() if manifest is None else set(manifest.entries)
    if manifest is not None:
        manifest.check_end(n_parts)
    part = _Part(make_model, make_loader, Path(out), store_dtype, how, frozenset(done))
    pieces = list(range(n_parts))
    results = (
        map(part, pieces) if engine == "local" else _on_ray(part, pieces, workers, ray_address, num_gpus)
    )
    with locked(out), progress_bar("extracting", n_parts, progress, done=len(done)) as advance:
        claim(out, _is_shard)
        for index, entry, header in results:
            manifest = Manifest.open(out, KIND, header) if manifest is None else manifest
            manifest.check_job({**manifest.header, **header})
            if index in done:
                manifest.entries[index].check_data(Path(out), entry[-1])
                continue
            manifest.check_more()
            manifest.add(index, Entry(*entry))
            advance(1)
    assert manifest is not None
    if not manifest.complete:
        manifest.finish()
    return FeatureStore(out)


@dataclass(frozen=True)
class _How:
    """How the samples of a store are read.

    Args:
        reader: what to read.
        perturb: applied to the inputs.
        device: where batches are sent.
    """

    reader: Reader
    perturb: Perturb | None = None
    device: torch.device | str | None = None

    def read(self, model: nn.Module, batches: Iterable[Any], index: int | None = None) -> Iterator[Reading]:
        """Read the batches of shard ``index``, or as they are where it is None."""
        prepare = None if index is None else perturbed(self.perturb, _shard_seed(self.reader.seed, index))
        place = Place(self.device, torch.float32)
        return read_batches(model, batches, self.reader, place, prepare=prepare, progress=False)

    def source(self, model: nn.Module, about: Mapping[str, object]) -> dict[str, object]:
        """What a store is made from; it goes on with nothing else. Functions are known by their names."""
        known = fingerprint(model)
        functions = {
            "forward": _function_names(self.reader.forward),
            "pooling_function": _function_names(self.reader.pooling),
            "perturb": _function_names(self.perturb),
        }
        found = {
            "network": known.structure,
            "weights": known.weights,
            **about,
            **reader_header(self.reader),
            **{key: names for key, names in functions.items() if names},
        }
        plain: dict[str, object] = json.loads(json.dumps(found))
        return plain


def _how(
    perturb: Perturb | None = None,
    device: torch.device | str | None = None,
    taps: Reader | None = None,
    **reader: Any,
) -> _How:
    return _How(_one_reader(Reader(**reader), taps), _function(perturb), device)


def _one_reader(given: Reader, taps: Reader | None) -> Reader:
    if taps is not None and given != Reader():
        raise ValueError("taps say all about what is read: leave out layers, pooling and the like")
    return given if taps is None else taps


def _function(perturb: Any) -> Perturb | None:
    if perturb is not None and not callable(perturb):
        raise TypeError(
            f"perturb must be a function of the inputs here, got {perturb!r}; perturbed copies are made in "
            f"memory: write_store([salgp.extract(..., perturb='auto')], folder)"
        )
    return perturb


def _function_names(value: Any) -> str:
    """Names of the functions in a setting, separated by spaces."""
    parts = value.values() if isinstance(value, Mapping) else [value]
    return " ".join(f"{part.__module__}.{part.__qualname__}" for part in parts if callable(part))


def _is_shard(path: Path) -> bool:
    """Is this what a part leaves that was killed before there was a manifest?"""
    try:
        return "logits" in read_table(path).column_names
    except (OSError, FormatError):
        return False


def _peeked(loader: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """The first batch, and all of them."""
    batches = iter(loader)
    first = next(batches, None)
    if first is None:
        raise ValueError("the loader gave no batch: there is nothing to extract")
    return first, itertools.chain([first], batches)


def _told(batches: Iterable[Any], advance: Advance) -> Iterator[Any]:
    """The same batches; the bar learns of each that is done with."""
    for batch in batches:
        yield batch
        advance()


def _next_shard(
    folder: Path,
    index: int,
    stream: Iterator[Any],
    per_shard: int,
    manifest: Manifest,
    read: Callable[[Iterable[Any], int], Iterator[Reading]],
) -> bool:
    """Write shard ``index``, or pass over its batches where it is finished; False at the end of
    the stream.
    """
    data = hashlib.sha256()
    batches = _hashed(itertools.islice(stream, per_shard), data)
    if index in manifest.entries:
        some = sum(1 for _ in batches) > 0
        if some:
            manifest.entries[index].check_data(folder, data.hexdigest())
        return some
    first = list(itertools.islice(batches, 1))
    if not first:
        return False
    manifest.check_more()
    _, features, labels = collect(read(itertools.chain(first, batches), index))
    check_finite(features.logits, first=sum(manifest.entries[i].rows for i in range(index)))
    entry = write_shard(folder, index, features, labels, manifest.header)
    manifest.add(index, replace(entry, data=data.hexdigest()))
    return True


@dataclass(frozen=True, eq=False)
class _Part:
    """Makes parts, one after the other, in one process.

    Args:
        make_model: builds the network.
        make_loader: the batches of a part.
        out: folder of the store.
        dtype: of the stored layers.
        how: the samples are read.
        done: numbers of the parts that are there already.
    """

    make_model: Callable[[], nn.Module]
    make_loader: Callable[[int], Iterable[Any]]
    out: Path
    dtype: str
    how: _How
    done: frozenset[int]

    @functools.cached_property
    def model(self) -> nn.Module:
        """Built where the first part is made, let go when the parts are done: the next call builds anew."""
        return self.make_model()

    def __call__(self, index: int) -> tuple[int, tuple[str, int, str, str], dict[str, Any]]:
        """Number, entry and header of a part; of one that is done, only what shows that it is the same."""
        data = hashlib.sha256()
        batches = _hashed(self.make_loader(index), data)
        source = self.how.source(self.model, {"parts": True})
        if index in self.done:
            for _ in batches:
                pass
            return index, ("", 0, "", data.hexdigest()), {"source": source}
        _, features, labels = collect(self.how.read(self.model, batches, index))
        check_finite(features.logits, f"part {index}: the class scores hold")
        header = header_of(features, labels, self.dtype, source)
        entry = write_shard(self.out, index, features, labels, header)
        return index, (entry.file, entry.rows, entry.sha256, data.hexdigest()), header


def _on_ray(
    part: Callable[[int], Any],
    pieces: list[int],
    workers: int | None,
    address: str | None,
    num_gpus: float | None,
) -> Iterator[Any]:
    from salgp.store.ray_engine import run_on_actors

    return run_on_actors(part, pieces, workers, address, num_gpus)


def _shard_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}|{index}".encode()).digest()[:7], "big")


def _hashed(batches: Iterable[Any], found: hashlib._Hash) -> Iterator[Any]:
    """The same batches; ``found`` learns the contents of each that has passed."""
    for batch in batches:
        update_digest(found, batch)
        yield batch
