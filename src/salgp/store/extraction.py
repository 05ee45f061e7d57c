"""From a network to a feature store: in a stream that survives a kill, or in parts with a network per worker.

A shard is a fixed number of whole batches and depends on nothing outside them, so a continued run passes over
the batches of finished shards without running the network and goes on with the same numbers. The store knows
what it was made from: the network, the settings, and a digest of every batch; anything else is refused.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from salgp.network.batches import LabelsAt
from salgp.network.extract import Perturb, extract, perturbed
from salgp.network.fingerprint import fingerprint
from salgp.network.layers import Layers, Poolings
from salgp.network.reader import Forward, Reader
from salgp.network.reading import Place, Reading, collect, read_batches
from salgp.storage import locked
from salgp.store.engines import shown
from salgp.store.manifest import Entry, Manifest, update_digest
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
        perturb: applied to the inputs; its random numbers start anew with each shard.
        seed: of ``perturb`` and the projections.
        progress: show rate and progress (needs ``rich``).
        forward: how the network is called.
        labels_at: where a batch has its labels.

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
    choice = Reader(layers, pooling, output, max_width, seed, forward, labels_at)
    read = functools.partial(read_batches, model, place=Place(device, torch.float32), progress=False)
    total = len(loader) if isinstance(loader, Sized) else 0
    with locked(out), torch.random.fork_rng(devices=[]):
        first, stream = _peeked(loader)
        reader, features, labels = collect(read([first], choice))
        per_shard = max(1, -(-(rows or shard_rows(features, store_dtype)) // max(len(features), 1)))
        source = _source(model, choice, per_shard, perturb is not None)
        manifest = open_manifest(out, features, labels, store_dtype, source)

        def read_shard(batches: Iterable[Any], index: int) -> Iterator[Reading]:
            return read(batches, reader, prepare=perturbed(perturb, _shard_seed(seed, index)))

        with shown("extracting", total, 0, progress and total > 0) as advance:
            for index in itertools.count():
                if not _next_shard(Path(out), index, stream, per_shard, manifest, read_shard):
                    break
                advance(per_shard)
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
        options: of `salgp.extract`: ``layers``, ``pooling``, ``output``, ``max_width``, ``forward``, ...

    Returns:
        The finished store.
    """
    manifest: Manifest | None = (
        FeatureStore(out, incomplete=True).manifest if (Path(out) / "manifest.json").is_file() else None
    )
    done = set() if manifest is None else set(manifest.entries)
    pieces = [i for i in range(n_parts) if i not in done]
    part = functools.partial(_extract_part, make_model, make_loader, str(out), store_dtype, options)
    results = (
        map(part, pieces) if engine == "local" else _on_ray(part, pieces, workers, ray_address, num_gpus)
    )
    with locked(out), shown("extracting", n_parts, len(done), progress) as advance:
        for index, entry, header in results:
            manifest = Manifest.open(out, KIND, header) if manifest is None else manifest
            if manifest.header != header:
                raise ValueError(
                    f"part {index} differs from the others: expected {manifest.header}, got {header}"
                )
            manifest.add(index, Entry(*entry))
            advance(1)
    assert manifest is not None
    if not manifest.complete:
        manifest.finish()
    return FeatureStore(out)


def _peeked(loader: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """The first batch, and all of them."""
    batches = iter(loader)
    first = next(batches, None)
    if first is None:
        raise ValueError("the loader gave no batch: there is nothing to extract")
    return first, itertools.chain([first], batches)


def _source(model: nn.Module, reader: Reader, per_shard: int, perturbed: bool) -> dict[str, object]:
    """What a store is made from; it goes on with nothing else."""
    known = fingerprint(model)
    return {
        "network": known.structure,
        "weights": known.weights,
        "batches": per_shard,
        "perturbed": perturbed,
        "layers": repr(reader.layers),
        "pooling": reader.pooling if isinstance(reader.pooling, str) else "custom",
        "output": reader.output,
        "max_width": reader.max_width,
        "seed": reader.seed,
        "forward": "the network's own" if reader.forward is None else "custom",
    }


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
    entry = write_shard(folder, index, features, labels, manifest.header)
    manifest.add(index, replace(entry, data=data.hexdigest()))
    return True


def _extract_part(
    make_model: Callable[[], nn.Module],
    make_loader: Callable[[int], Iterable[Any]],
    out: str,
    dtype: str,
    options: dict[str, Any],
    index: int,
) -> tuple[int, tuple[str, int, str], dict[str, Any]]:
    features, labels = extract(_model(make_model), make_loader(index), **options)
    header = header_of(features, labels, dtype, {"parts": True})
    entry = write_shard(Path(out), index, features, labels, header)
    return index, (entry.file, entry.rows, entry.sha256), header


@functools.lru_cache(maxsize=1)
def _model(make: Callable[[], nn.Module]) -> nn.Module:
    return make()


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
