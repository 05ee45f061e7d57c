"""Named arrays from the files people have: ``.npz``, ``.safetensors``, Parquet and ``.csv``."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["matching", "pop_labels", "read_arrays", "stacked"]

WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
"""Bytes of one value of a Parquet column; text has at least the 8 of its place."""


def read_arrays(path: Path) -> dict[str, Any]:
    """The named arrays (or columns) of a file, as NumPy arrays."""
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if path.suffix == ".npz":
        from salgp.storage import read_npz

        return read_npz(path)
    if path.suffix == ".safetensors":
        from salgp.storage import read_tensors

        return {name: x.numpy() for name, x in read_tensors(path)[0].items()}
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix == ".parquet" or path.is_dir():
        return _read_parquet(path)
    raise ValueError(
        f"{path}: unknown kind of data; expected .npz, .safetensors, .parquet, .csv, or a folder of "
        f"images or Parquet shards"
    )


def pop_labels(arrays: dict[str, Any]) -> Any:
    """Take the labels out of the arrays; None where there are none."""
    from salgp.network.batches import LABEL_KEYS

    key = next((name for name in LABEL_KEYS if name in arrays), None)
    return None if key is None else arrays.pop(key)


def matching(arrays: Mapping[str, Any], pattern: str) -> list[str]:
    """Names that match ``pattern``, in the order of the file."""
    return [name for name in arrays if fnmatch.fnmatchcase(name, pattern)]


def stacked(arrays: Mapping[str, Any], pattern: str) -> Any:
    """The columns whose names match ``pattern``, side by side, in the order of the file.

    Example:
        >>> import numpy as np
        >>> stacked({"f0": np.array([1.0, 2.0]), "f1": np.array([3.0, 4.0]), "id": np.array([7, 8])}, "f*")
        array([[1., 3.],
               [2., 4.]], dtype=float32)
    """
    import numpy as np

    names = matching(arrays, pattern)
    if not names:
        raise KeyError(f"no column matches {pattern!r}; there are {', '.join(arrays)}")
    wrong = [name for name in names if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "fiub"]
    if wrong:
        raise TypeError(
            f"column {wrong[0]!r} matches {pattern!r} but holds {arrays[wrong[0]].dtype}, not one number per "
            f"row; leave it out of the pattern, or turn it into numbers with --prepare"
        )
    return np.stack([arrays[name].astype(np.float32) for name in names], axis=1)


def _read_parquet(path: Path) -> dict[str, Any]:
    """Columns of a file or folder; lists of equal length become matrices."""
    import pyarrow.dataset as ds

    from salgp.storage import check_size, reading

    with reading(path, "whole Parquet data"):
        data = ds.dataset(str(path), format="parquet", exclude_invalid_files=False)
        for fragment in data.get_fragments():
            check_size(fragment.path, _decoded_size(fragment.metadata))
        table = data.to_table()
        table.validate(full=True)
        return {name: _matrix(table[name].combine_chunks(), name, path) for name in table.column_names}


def _decoded_size(metadata: Any) -> int:
    """Bytes that the columns of a Parquet file become: the same number a million times takes none in it."""
    parts = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [part.column(j) for part in parts for j in range(part.num_columns)]
    return sum(column.num_values * WIDTHS.get(column.physical_type, 8) for column in columns)


def _matrix(column: Any, name: str, path: Path) -> Any:
    """Values of a column without a Python object for each; lists become the rows of a matrix."""
    import numpy as np
    import pyarrow as pa

    if not _holds_lists(column):
        return column.to_numpy(zero_copy_only=False)
    integer = pa.types.is_integer(column.type.value_type)
    values, shape = column, [len(column)]
    while _holds_lists(values) and len(values):
        _check_present(values, name, path, len(column))
        shape.append(_length(values, name, path))
        values = values.flatten()
    if integer:
        _check_present(values, name, path, len(column))
    flat = values.to_numpy(zero_copy_only=False)  # may be a view that cannot be written to
    return flat.astype(np.int64 if integer else np.float32).reshape(shape)


def _holds_lists(column: Any) -> bool:
    import pyarrow as pa

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(column.type) for is_kind in kinds)


def _check_present(values: Any, name: str, path: Path, rows: int) -> None:
    """Refuse what is missing, with its row among so many."""
    from salgp.storage import FormatError

    if values.null_count:
        first = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        row = first * rows // len(values)
        raise FormatError(
            f"{path}: column {name!r} has nothing in row {row}; fill it in, or leave the row out"
        )


def _length(lists: Any, name: str, path: Path) -> int:
    """That all lists have."""
    import pyarrow.compute as pc

    from salgp.storage import FormatError

    found = pc.min_max(pc.list_value_length(lists))
    shortest, longest = found["min"].as_py(), found["max"].as_py()
    if shortest != longest:
        raise FormatError(
            f"{path}: the lists in column {name!r} have different lengths ({shortest} to {longest})"
        )
    return int(longest)


def _read_csv(path: Path) -> dict[str, Any]:
    import csv

    from salgp.storage import FormatError, reading

    with reading(path, "a table of text"), path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        lines = list(rows)
    if len(set(names)) != len(names) or not names:
        raise FormatError(f"{path}: the first line must name every column once, got {', '.join(names)}")
    short = next((i for i, line in enumerate(lines) if len(line) != len(names)), None)
    if short is not None:
        raise FormatError(
            f"{path}: line {short + 2} has {len(lines[short])} values, the first line names {len(names)}"
        )
    return {name: _column([line[j] for line in lines]) for j, name in enumerate(names)}


def _column(texts: Sequence[str]) -> Any:
    """Whole numbers, numbers or text, whatever all values are; an empty cell among numbers is NaN."""
    import numpy as np

    for kind in (np.int64, np.float64):
        try:
            return np.array([text or "nan" for text in texts], dtype=str).astype(kind)
        except (ValueError, OverflowError):
            continue
    return np.array(texts, dtype=str)
