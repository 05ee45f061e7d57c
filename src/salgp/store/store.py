"""`FeatureStore`: features of any number of samples on disk, the out-of-core sibling of `salgp.Features`.

A folder of Parquet shards with the columns ``logits``, optional ``label`` and ``group``, and
``layers.<name>``, plus a manifest with the SHA-256 of each. It is written in a stream, continued after a kill
where it stopped, and read shard by shard, so that memory depends on the size of a shard and not on the number
of samples.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from salgp.features import Features
from salgp.labels import as_labels
from salgp.storage import FormatError, digest, locked
from salgp.store.columns import (
    DTYPES,
    WHOLE,
    check_widths,
    column_names,
    from_table,
    read_table,
    to_table,
    write_table,
)
from salgp.store.manifest import Entry, Manifest, claim, update_digest, write_durably

__all__ = ["FeatureStore", "KIND", "header_of", "open_manifest", "shard_rows", "write_shard", "write_store"]

KIND = "salgp-feature-store"
SHARD_BYTES = 96 * 2**20
"""Uncompressed size of a shard; what one worker holds in memory."""


class FeatureStore:
    """Read a folder of feature shards.

    Args:
        folder: written by `write_store` or `extract_to_store`.
        incomplete: accept a store whose writer has not finished.

    Example:
        >>> import tempfile
        >>> f = Features(torch.zeros(5, 2), {"conv": torch.ones(5, 3)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = write_store([(f, torch.arange(5) % 2)], folder, rows=2)
        ...     [len(part) for part, labels in store.batches(2)], store.to_features()[1]
        ([2, 2, 1], tensor([0, 1, 0, 1, 0]))
    """

    def __init__(self, folder: str | os.PathLike[str], incomplete: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(folder, KIND)
        if not (self.manifest.complete or incomplete):
            raise ValueError(
                f"{folder} is not finished ({self.manifest.rows} rows so far); run the command "
                f"that writes it again, it continues"
            )
        if not (self.manifest.entries or incomplete):
            raise FormatError(f"{self.folder / 'manifest.json'}: a finished store lists at least one shard")
        header = self.manifest.header
        _check_header(self.folder, header)
        self.n_classes: int = header["n_classes"]
        self.widths: dict[str, int] = dict(header["layers"])
        self.has_labels: bool = header["labels"]
        self.has_groups: bool = header["groups"]
        self.has_families: bool = header.get("families", False)
        self.has_strengths: bool = header.get("strengths", False)

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the forward pass."""
        return tuple(self.widths)

    @property
    def n_shards(self) -> int:
        """Number of finished shards."""
        return len(self.manifest.entries)

    @property
    def rows(self) -> list[int]:
        """Samples in each shard."""
        return [self.manifest.entries[i].rows for i in range(self.n_shards)]

    def identity(self) -> str:
        """SHA-256 of the manifest: changes with any byte of any shard."""
        return digest(self.folder / "manifest.json")

    def shard(
        self, index: int, layers: Sequence[str] | None = None, verify: bool = True
    ) -> tuple[Features, Tensor | None]:
        """Features and labels of one shard.

        Args:
            index: of the shard.
            layers: the ones to read; None for all, empty for the logits only.
            verify: compare the shard's checksum first.
        """
        entry = self.manifest.entries[index]
        if verify:
            entry.check(self.folder)
        names = self.layer_names if layers is None else tuple(layers)
        unknown = [name for name in names if name not in self.widths]
        if unknown:
            raise KeyError(
                f"no layer named {unknown[0]!r} in {self.folder}; it has "
                f"{', '.join(self.layer_names) or 'none'}"
            )
        there = (self.has_labels, self.has_groups, self.has_families, self.has_strengths)
        columns = column_names(names, [name for name, has in zip(WHOLE, there, strict=True) if has])
        table = read_table(self.folder / entry.file, columns, entry.rows)
        widths = {"logits": self.n_classes, **{f"layers.{name}": self.widths[name] for name in names}}
        check_widths(self.folder / entry.file, table, widths)
        return from_table(table, names)

    def batches(
        self, size: int = 8192, layers: Sequence[str] | None = None, verify: bool = True
    ) -> Iterator[tuple[Features, Tensor | None]]:
        """Features and labels of at most ``size`` samples at a time, in order; a batch never spans two
        shards.
        """
        for index in range(self.n_shards):
            features, labels = self.shard(index, layers, verify)
            for i in range(0, len(features), size):
                yield features[i : i + size], None if labels is None else labels[i : i + size]

    def to_features(self, layers: Sequence[str] | None = None) -> tuple[Features, Tensor | None]:
        """Everything in memory."""
        parts = list(self.batches(1 << 30, layers))
        labels = [y for _, y in parts if y is not None]
        return Features.concatenate([f for f, _ in parts]), torch.cat(labels) if labels else None

    def verify(self) -> None:
        """Compare the checksum of every shard; the first damaged one is named in the error."""
        for index in range(self.n_shards):
            self.manifest.entries[index].check(self.folder)


def write_store(
    parts: Iterable[tuple[Features, Tensor | None]],
    folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    rows: int | None = None,
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
    with locked(folder):
        manifest, count = None, 0
        for count, (features, labels) in enumerate(_regroup(parts, rows, dtype), 1):
            if manifest is None:
                manifest = open_manifest(folder, features, labels, dtype, {})
            _keep_shard(manifest, count - 1, features, labels)
        if manifest is None:
            raise ValueError("nothing to store: the stream of features is empty")
        manifest.check_end(count)
        manifest.finish()
    return FeatureStore(folder)


def open_manifest(
    folder: str | os.PathLike[str],
    features: Features,
    labels: Tensor | None,
    dtype: str,
    source: dict[str, object],
) -> Manifest:
    """Begin or continue a store of such features in a locked folder; ``source`` says where they come from."""
    claim(folder)
    return Manifest.open(folder, KIND, header_of(features, labels, dtype, source))


def header_of(
    features: Features, labels: Tensor | None, dtype: str, source: dict[str, object]
) -> dict[str, object]:
    """What a store of features like these says about itself."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return {
        "n_classes": features.n_classes,
        "layers": [[k, d] for k, d in features.widths.items()],
        "labels": labels is not None,
        "groups": features.groups is not None,
        **{what: True for what in ("families", "strengths") if what in features.origin},
        "dtype": dtype,
        "source": source,
    }


def write_shard(
    folder: Path, index: int, features: Features, labels: Tensor | None, header: dict[str, object]
) -> Entry:
    """Write one shard; its bytes depend on nothing but the arguments."""
    found = [[k, d] for k, d in features.widths.items()]
    if (
        found != header["layers"]
        or features.n_classes != header["n_classes"]
        or (labels is not None) != header["labels"]
    ):
        raise ValueError(
            f"shard {index} differs from the first one: expected {header}, got layers {found}, "
            f"{features.n_classes} classes, {labels=}"
        )
    labels = None if labels is None else as_labels(labels, len(features), features.n_classes)
    table = to_table(features, labels, str(header["dtype"]))
    name = f"part-{index:06d}.parquet"
    return Entry(name, len(features), write_durably(folder / name, lambda part: write_table(table, part)))


def shard_rows(features: Features, dtype: str) -> int:
    """Samples of this width in a shard of about `SHARD_BYTES`, a power of two."""
    size = 4 * features.n_classes + (2 if dtype == "float16" else 4) * sum(features.widths.values())
    return 1 << max(SHARD_BYTES // size, 1).bit_length() - 1


def _check_header(folder: Path, header: dict[str, Any]) -> None:
    """Refuse a manifest that does not describe features."""
    flags = [header.get("labels"), header.get("groups")]
    flags += [header.get(key, False) for key in ("families", "strengths")]
    layers = header.get("layers")
    fine = type(header.get("n_classes")) is int and all(isinstance(flag, bool) for flag in flags)
    if not fine or not isinstance(layers, list) or not all(_is_layer(layer) for layer in layers):
        raise FormatError(f"{folder}: the manifest describes no features, but {str(header)[:120]}")


def _is_layer(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [str, int]


def _keep_shard(manifest: Manifest, index: int, features: Features, labels: Tensor | None) -> None:
    """Write one shard, or make sure that the finished one was made from the same samples."""
    data = hashlib.sha256()
    update_digest(data, [features.logits, features.layers, features.origin, labels])
    if index in manifest.entries:
        manifest.entries[index].check_data(manifest.folder, data.hexdigest())
        return
    manifest.check_more()
    entry = write_shard(manifest.folder, index, features, labels, manifest.header)
    manifest.add(index, replace(entry, data=data.hexdigest()))


def _regroup(
    parts: Iterable[tuple[Features, Tensor | None]], rows: int | None, dtype: str
) -> Iterator[tuple[Features, Tensor | None]]:
    """The same samples in groups of ``rows``."""
    held: list[tuple[Features, Tensor | None]] = []
    for features, labels in parts:
        rows = rows or shard_rows(features, dtype)
        held.append((features, labels))
        while sum(len(f) for f, _ in held) >= rows:
            whole, y = _join(held)
            yield whole[:rows], None if y is None else y[:rows]
            held = [(whole[rows:], None if y is None else y[rows:])]
    if held and (len(held) > 1 or len(held[0][0])):
        rest = _join(held)
        if len(rest[0]):
            yield rest


def _join(held: Sequence[tuple[Features, Tensor | None]]) -> tuple[Features, Tensor | None]:
    known = [y for _, y in held if y is not None]
    if known and len(known) < len(held):
        raise ValueError(f"only {len(known)} of {len(held)} batches have labels; give all or none")
    return Features.concatenate([f for f, _ in held]), torch.cat(known) if known else None
