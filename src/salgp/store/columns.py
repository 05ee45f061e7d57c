"""Features as Arrow tables and Parquet files: one fixed-size list per row for the logits and each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.extras import require
from salgp.features import Features
from salgp.io import FormatError, check_size, reading, write_whole

__all__ = []

DTYPES = ("float16", "float32")
"""Types in which layers are stored; logits are float32, since a confidence is read from their differences."""
NUMBERS = {"label": "int32", "group": "int64", "family": "int32", "strength": "float64"}
"""Columns of one number per sample that a shard may have."""
SHARD_BYTES = 96 * 2**20
"""Uncompressed size of a shard; what one worker holds in memory."""


@dataclass(frozen=True)
class Layout:
    """Layout of the shards of a store: its header in the manifest.

    Args:
        n_classes: width of the logits.
        layers: name and width of each layer.
        numbers: those of `NUMBERS` that there are.
        dtype: of the layers, one of `DTYPES`.
        source: where the features come from.

    Example:
        >>> Layout(3, (("conv1", 8),), ("label",), "float16").schema.names
        ['logits', 'label', 'layers.conv1']
    """

    n_classes: int
    layers: tuple[tuple[str, int], ...]
    numbers: tuple[str, ...]
    dtype: str
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not set(self.numbers) <= set(NUMBERS):
            raise ValueError(f"numbers must be some of {', '.join(NUMBERS)}, got {', '.join(self.numbers)}")
        widths = [self.n_classes, *(width for _, width in self.layers)]
        if min(widths) <= 0 or max(widths) >= 2**31:
            raise ValueError(f"widths must be from 1 to 2^31, got {widths[:20]}")

    @staticmethod
    def of(
        features: Features, labels: Tensor | None, dtype: str, source: Mapping[str, Any] | None = None
    ) -> Layout:
        """That of a store of features like these."""
        if features.network is not None:
            source = source or {"weights": features.network}
        layers, numbers = tuple(features.widths.items()), tuple(_numbers(features, labels))
        return Layout(features.n_classes, layers, numbers, dtype, source or {})

    @property
    def network(self) -> str | None:
        """Fingerprint of the network that the features were read from, where it is known."""
        weights = self.source.get("weights")
        return weights if isinstance(weights, str) else None

    @property
    def schema(self) -> Any:
        """Columns of a shard."""
        require("pyarrow")
        import pyarrow as pa

        numbers = [_column(name, NUMBERS[name]) for name in self.numbers]
        layers = [_column(f"layers.{name}", self.dtype, width) for name, width in self.layers]
        logits = _column("logits", "float32", self.n_classes)
        return pa.schema([logits, *numbers, *layers])

    @property
    def shard_rows(self) -> int:
        """Samples in a shard of about `SHARD_BYTES`, a power of two."""
        width = sum(width for _, width in self.layers)
        size = 4 * self.n_classes + np.dtype(self.dtype).itemsize * width
        return 1 << max(SHARD_BYTES // size, 1).bit_length() - 1


def to_table(features: Features, labels: Tensor | None, dtype: str) -> Any:
    """Arrow table of the features; refuses values that ``dtype`` cannot hold."""
    require("pyarrow")
    import pyarrow as pa

    columns = {"logits": features.logits, **_numbers(features, labels)}
    columns |= {f"layers.{name}": x for name, x in features.layers.items()}
    schema = Layout.of(features, labels, dtype).schema
    arrays = [_array(columns[field.name], field) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def from_table(table: Any, layers: Sequence[str]) -> tuple[Features, Tensor | None]:
    """Inverse of `to_table`; numbers come back as float32."""
    values = {name: _matrix(table.column(f"layers.{name}")) for name in layers}
    known = [name for name in NUMBERS if name in table.column_names]
    numbers = {name: _own(table.column(name).combine_chunks()) for name in known}
    label, groups, families, strengths = map(numbers.get, NUMBERS)
    features = Features(_matrix(table.column("logits")), values, groups, families, strengths)
    return features, None if label is None else label.long()


def write_table(table: Any, path: Path) -> Path:
    """Parquet with Zstandard; without a dictionary and statistics, which say nothing about features."""
    import pyarrow.parquet as pq

    options = {"compression": "zstd", "compression_level": 1, "row_group_size": 1 << 20}
    options |= {"use_dictionary": False, "write_statistics": False}
    return write_whole(path, lambda part: pq.write_table(table, part, **options))


def read_table(path: Path, rows: int, schema: Any = None, columns: list[str] | None = None) -> Any:
    """Columns of a Parquet file, on the calling thread.

    Args:
        path: of the file.
        rows: that are expected; another number is refused before anything is read.
        schema: that is expected; another one is refused. None accepts columns of numbers.
        columns: to read; None for all.
    """
    require("pyarrow")
    import pyarrow as pa
    import pyarrow.dataset as ds

    with reading(path, "whole Parquet data"):
        files = pa.fs.LocalFileSystem(use_mmap=True)
        shard = ds.dataset(path, format="parquet", filesystem=files)
        numbers = schema is None and all(map(pa.types.is_primitive, shard.schema.types))
        if not numbers and not shard.schema.equals(schema):
            raise FormatError(f"{path}: other columns than expected: {str(shard.schema)[:200]}")
        found = shard.count_rows()
        if found != rows:
            raise FormatError(f"{path}: expected {rows} rows, got {found}")
        check_size(path, found * sum(map(_bytes_of, shard.schema.types)))
        table = shard.to_table(columns=columns, use_threads=False)
        table.validate(full=True)
        return table


def _column(name: str, kind: str, width: int | None = None) -> Any:
    """A column of numbers, or of lists of so many numbers."""
    import pyarrow as pa

    number = pa.from_numpy_dtype(np.dtype(kind))
    if width is not None:
        number = pa.list_(pa.field("item", number, nullable=False), width)
    return pa.field(name, number, nullable=False)


def _bytes_of(kind: Any) -> int:
    """Memory of one value of a column."""
    width = getattr(kind, "list_size", 1)
    return width * getattr(kind, "value_type", kind).bit_width // 8


def _numbers(features: Features, labels: Tensor | None) -> dict[str, Tensor]:
    """Those of `NUMBERS` that are known, by the name of their column."""
    given = (labels, features.groups, features.families, features.strengths)
    pairs = zip(NUMBERS, given, strict=True)
    return {name: x for name, x in pairs if x is not None}


def _array(x: Tensor, field: Any) -> Any:
    """Numbers, or rows of ``(n, d)`` numbers as lists of length ``d``."""
    import pyarrow as pa

    if not pa.types.is_fixed_size_list(field.type):
        return pa.array(x.cpu().numpy(), field.type)
    dtype = field.type.value_type.to_pandas_dtype()
    with np.errstate(over="ignore"):
        values = x.detach().cpu().numpy().astype(dtype)
    if not np.isfinite(values).all() and bool(torch.isfinite(x).all()):
        largest = float(x.abs().max())
        raise ValueError(
            f"{field.name} has values up to {largest:.3g}, too large for {np.dtype(dtype)}; store as float32"
        )
    numbers = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(numbers, type=field.type)


def _matrix(column: Any) -> Tensor:
    values = _own(column.combine_chunks().flatten())
    return values.float().reshape(-1, column.type.list_size)


def _own(array: Any) -> Tensor:
    """A copy in memory of torch, whose alignment, and with it every bit of what follows, is the same."""
    return torch.tensor(array.to_numpy(zero_copy_only=False))
