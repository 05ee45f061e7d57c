"""Features as Arrow tables and Parquet files: one fixed-size list per row for the logits and for
each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.extras import require
from salgp.features import Features
from salgp.storage import FormatError, check_size, reading

__all__ = [
    "DTYPES",
    "WHOLE",
    "check_widths",
    "column_names",
    "from_table",
    "list_column",
    "read_table",
    "to_table",
    "write_table",
]

DTYPES = ("float16", "float32")
"""Types in which layers are stored; logits are always float32, since a confidence is read from their
differences.
"""


WHOLE = ("label", "group", "family", "strength")
"""Columns of one number per sample that a shard may have."""


def column_names(layers: Sequence[str], whole: Sequence[str] = ()) -> list[str]:
    """Columns of a shard, in order; ``whole`` are those of `WHOLE` that it has.

    Example:
        >>> column_names(["conv1"], ["label"])
        ['logits', 'label', 'layers.conv1']
    """
    return ["logits", *whole, *(f"layers.{k}" for k in layers)]


def to_table(features: Features, labels: Tensor | None, dtype: str = "float32") -> Any:
    """Arrow table of the features; refuses values that ``dtype`` cannot hold."""
    require("pyarrow")
    import pyarrow as pa

    columns = {"logits": list_column(features.logits, "float32", "logits")}
    for name, values, kind in (
        ("label", labels, np.int32),
        ("group", features.groups, np.int64),
        ("family", features.families, np.int32),
        ("strength", features.strengths, np.float64),
    ):
        if values is not None:
            columns[name] = pa.array(values.cpu().numpy().astype(kind))
    for name, x in features.layers.items():
        columns[f"layers.{name}"] = list_column(x, dtype, f"layer {name!r}")
    return pa.Table.from_arrays(
        list(columns.values()),
        schema=pa.schema([pa.field(k, v.type, nullable=False) for k, v in columns.items()]),
    )


def list_column(x: Tensor, dtype: str, what: str) -> Any:
    """``(n, d)`` numbers as an Arrow array of ``n`` lists of length ``d``."""
    import pyarrow as pa

    with np.errstate(over="ignore"):
        values = x.detach().cpu().numpy().astype(dtype)
    if not np.isfinite(values).all() and bool(torch.isfinite(x).all()):
        raise ValueError(
            f"{what} has values up to {float(x.abs().max()):.3g}, too large for {dtype}; store as float32"
        )
    item = pa.field("item", pa.from_numpy_dtype(values.dtype), nullable=False)
    return pa.FixedSizeListArray.from_arrays(
        pa.array(values.reshape(-1)), type=pa.list_(item, values.shape[1])
    )


def from_table(table: Any, layers: Sequence[str]) -> tuple[Features, Tensor | None]:
    """Inverse of `to_table`; numbers come back as float32."""
    values = {k: _matrix(table.column(f"layers.{k}")) for k in layers}
    label, group, family, strength = (
        _own(table.column(k).combine_chunks()) if k in table.column_names else None for k in WHOLE
    )
    features = Features(_matrix(table.column("logits")), values, group, family, strength)
    return features, None if label is None else label.long()


def write_table(table: Any, path: Path) -> None:
    """Parquet with Zstandard; one row group, no dictionary and no statistics, which say nothing about
    features.
    """
    import pyarrow.parquet as pq

    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=False,
        row_group_size=1 << 20,
    )


def read_table(path: Path, columns: Sequence[str] | None = None, rows: int | None = None) -> Any:
    """The named columns (None: all) of a memory-mapped Parquet file, on the calling thread.

    Args:
        path: of the file.
        columns: to read.
        rows: that are expected; another number is refused before anything is read.
    """
    require("pyarrow")
    import pyarrow.parquet as pq

    with reading(path, "whole Parquet data"), pq.ParquetFile(path, memory_map=True) as file:
        found = file.metadata.num_rows
        if rows is not None and found != rows:
            raise FormatError(f"{path}: expected {rows} rows, got {found}")
        check_size(path, found * _row_bytes(file.schema_arrow))
        table = file.read(columns=None if columns is None else list(columns), use_threads=False)
        missing = [name for name in columns or () if name not in table.column_names]
        if missing:
            raise FormatError(f"{path}: no column {missing[0]!r}; it has {', '.join(table.column_names)}")
        table.validate(full=True)
        return table


def check_widths(path: Path, table: Any, widths: Mapping[str, int]) -> None:
    """Refuse columns that are not lists of numbers of the expected length, or that have gaps."""
    import pyarrow as pa

    for name, width in widths.items():
        kind = table.schema.field(name).type
        numbers = pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type)
        if not numbers or kind.list_size != width:
            raise FormatError(f"{path}: column {name!r} is {kind}, expected lists of {width} numbers")
    for name in table.column_names:
        kind = table.schema.field(name).type
        right = pa.types.is_floating if name == "strength" else pa.types.is_integer
        if name not in widths and not right(kind):
            raise FormatError(f"{path}: column {name!r} is {kind}, expected one number per sample")
        if table.column(name).null_count:
            raise FormatError(f"{path}: column {name!r} has gaps")


def _row_bytes(schema: Any) -> int:
    """Memory of one row, as far as the types tell."""
    import pyarrow as pa

    total = 0
    for kind in schema.types:
        count, item = (kind.list_size, kind.value_type) if pa.types.is_fixed_size_list(kind) else (1, kind)
        total += count * (item.bit_width // 8 if pa.types.is_primitive(item) else 8)
    return total


def _matrix(column: Any) -> Tensor:
    parts = [_own(chunk.flatten()).float() for chunk in column.chunks]
    return (parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])).reshape(
        -1, column.type.list_size
    )


def _own(array: Any) -> Tensor:
    """A copy in memory that torch has allocated, so that its alignment, and with it every bit of what
    follows, is the same.
    """
    return torch.tensor(array.to_numpy(zero_copy_only=False))
