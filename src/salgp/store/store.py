"""`FeatureStore`: features of any number of samples on disk, the out-of-core counterpart of `salgp.Features`.

A folder of Parquet shards with the columns ``logits``, ``layers.<name>`` and, where known, ``label``,
``group``, ``family`` and ``strength``, plus a manifest with the SHA-256 of each shard. It is written in a
stream, continued after a kill, and read shard by shard, so that memory does not grow with the samples.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from salgp.features import Features
from salgp.io import FormatError, digest, from_json, reading
from salgp.io.files import AnyPath
from salgp.labels import as_labels
from salgp.logits import check_finite
from salgp.store.columns import Layout, from_table, read_table, to_table
from salgp.store.manifest import Manifest, Shard, content_digest, writing

__all__ = ["FeatureStore"]

KIND = "salgp-feature-store"
Part = tuple[Features, Tensor | None]


class FeatureStore:
    """Read a folder of feature shards.

    Args:
        folder: written by `write_store` or `extract_to_store`.

    Example:
        >>> import tempfile
        >>> f = Features(torch.zeros(5, 2), {"conv": torch.ones(5, 3)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = write_store([(f, torch.arange(5) % 2)], folder, rows=2)
        ...     [len(part) for part, labels in store.batches(2)], store.to_features()[1]
        ([2, 2, 1], tensor([0, 1, 0, 1, 0]))
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(folder, KIND)
        if not self.manifest.shards:
            raise FormatError(f"{folder}: the manifest lists no shards")
        with reading(folder, "a feature store"):
            self.layout = from_json(Layout, self.manifest.header, folder)
        self.n_classes = self.layout.n_classes
        self.widths = dict(self.layout.layers)

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def has_labels(self) -> bool:
        """Are the true classes known?"""
        return "label" in self.layout.numbers

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the forward pass."""
        return tuple(self.widths)

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return len(self.manifest.shards)

    @property
    def rows(self) -> list[int]:
        """Samples in each shard."""
        return [shard.rows for shard in self.manifest.shards]

    def identity(self) -> str:
        """SHA-256 of the manifest: changes with any byte of any shard."""
        return digest(self.folder / "manifest.json")

    def shard(self, index: int, layers: Sequence[str] | None = None) -> Part:
        """Features and labels of one shard.

        Args:
            index: of the shard.
            layers: the ones to read; None for all, empty for the logits only.
        """
        path = self.manifest.file(index)
        names = self.layer_names if layers is None else layers
        for name in names:
            if name not in self.widths:
                known = ", ".join(self.layer_names) or "none"
                raise KeyError(f"no layer named {name!r} in {self.folder}; it has {known}")
        columns = ["logits", *self.layout.numbers, *(f"layers.{name}" for name in names)]
        table = read_table(path, self.rows[index], self.layout.schema, columns)
        features, labels = from_table(table, names)
        return replace(features, network=self.layout.network), labels

    def batches(self, size: int = 8192, layers: Sequence[str] | None = None) -> Iterator[Part]:
        """Features and labels of at most ``size`` samples at a time, in order; none spans two shards."""
        for index in range(self.n_shards):
            part = self.shard(index, layers)
            for i in range(0, len(part[0]), size):
                yield _rows(part, slice(i, i + size))

    def to_features(self, layers: Sequence[str] | None = None) -> Part:
        """Everything in memory."""
        return _join([self.shard(index, layers) for index in range(self.n_shards)])

    def verify(self) -> None:
        """Compare the checksum of every shard; the first damaged one is named in the error."""
        for index in range(self.n_shards):
            self.manifest.file(index)


def write_store(
    parts: Iterable[Part], folder: AnyPath, *, dtype: str = "float32", rows: int | None = None
) -> FeatureStore:
    """Write a stream of features and labels; the same call continues after a kill, at the shard where it
    stopped.

    Args:
        parts: features and labels, in any batch sizes; the same stream again when continuing.
        folder: created where missing.
        dtype: of the layers, ``float32`` or ``float16``; logits are float32.
        rows: samples per shard; by default about 96 MB.

    Returns:
        The finished store.

    Example:
        >>> import tempfile
        >>> parts = [(Features(torch.zeros(n, 2)), torch.zeros(n).long()) for n in (3, 4)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = write_store(parts, folder, rows=5)
        >>> len(store), store.n_shards
        (7, 2)
    """
    with writing(folder) as where:
        manifest, index = Manifest.open(folder, KIND), -1
        for index, (features, labels) in enumerate(_regroup(parts, rows, dtype)):
            manifest.describe(asdict(Layout.of(features, labels, dtype)))
            data = content_digest(features.logits, features.layers, features.origin, labels)
            shard = Shard(0, "", data)
            if manifest.needs(index):
                shard = write_shard(where, index, features, labels, dtype, data, manifest.rows)
            manifest.add(index, shard)
        if index < 0:
            raise ValueError("nothing to store: the stream of features is empty")
        manifest.finish(index + 1)
    return FeatureStore(folder)


def write_shard(
    folder: Path,
    index: int,
    features: Features,
    labels: Tensor | None,
    dtype: str,
    data: str,
    first: int | None,
) -> Shard:
    """Write one shard, for the manifest to list.

    Args:
        folder: of the store.
        index: number of the shard.
        features: refused where they are not finite.
        labels: or None.
        dtype: of the layers.
        data: digest of what it was made from.
        first: rows before it, where they are known.
    """
    part = f"part {index}: " if first is None else ""
    check_finite(features.logits, f"{part}the class scores hold", first or 0)
    for name, x in features.layers.items():
        check_finite(x, f"{part}layer {name!r} holds", first or 0)
    labels = None if labels is None else as_labels(labels, len(features), features.n_classes)
    table = to_table(features, labels, dtype)
    return Shard.write(folder, index, table, data)


def _regroup(parts: Iterable[Part], rows: int | None, dtype: str) -> Iterator[Part]:
    """The same samples in groups of ``rows``."""
    held: list[Part] = []
    for features, labels in parts:
        rows = rows or Layout.of(features, labels, dtype).shard_rows
        held.append((features, labels))
        while sum(len(f) for f, _ in held) >= rows:
            whole = _join(held)
            yield _rows(whole, slice(rows))
            held = [_rows(whole, slice(rows, None))]
    if sum(len(f) for f, _ in held):
        yield _join(held)


def _rows(part: Part, rows: slice) -> Part:
    features, labels = part
    return features[rows], None if labels is None else labels[rows]


def _join(held: Sequence[Part]) -> Part:
    known = [y for _, y in held if y is not None]
    if known and len(known) < len(held):
        raise ValueError(f"only {len(known)} of {len(held)} batches have labels; give all or none")
    features = Features.concatenate([f for f, _ in held])
    return features, torch.cat(known) if known else None
