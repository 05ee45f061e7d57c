"""Named arrays from the files people have: ``.npz``, ``.safetensors``, Parquet and ``.csv``.

Memory is bounded before it is taken: a small file that would become far larger than its size is refused.
"""

from __future__ import annotations

import csv
import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.io.errors import FormatError, reading
from salgp.io.files import check_size, open_regular

__all__ = ["NUMBERS", "Arrays", "matching", "read_arrays", "stacked"]

Arrays = dict[str, NDArray[Any]]
NUMBERS = "fiub"
"""Kinds of NumPy types that are numbers."""
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 8}
"""Bytes of one value of a Parquet column; text is read as places in a list of its different values."""


def read_arrays(path: str | os.PathLike[str]) -> Arrays:
    """The named arrays (or columns) of a file; text is of type ``object``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "x.csv").write_text("height,kind\\n1.5,cat\\n2.5,dog\\n")
        ...     arrays = read_arrays(folder + "/x.csv")
        >>> arrays["height"], arrays["kind"]
        (array([1.5, 2.5]), array(['cat', 'dog'], dtype=object))
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if path.suffix == ".parquet" or path.is_dir():
        return _read_parquet(path)
    with open_regular(path):
        pass
    if path.suffix == ".npz":
        from salgp.io.npz import read_npz

        return read_npz(path)
    if path.suffix == ".safetensors":
        from salgp.io import read_tensors

        return {name: x.numpy() for name, x in read_tensors(path)[0].items()}
    if path.suffix == ".csv":
        return _read_csv(path)
    raise ValueError(
        f"{path}: unknown kind of data; expected .npz, .safetensors, .parquet, .csv, or a folder of "
        f"images or Parquet shards"
    )


def matching(arrays: Mapping[str, Any], pattern: str) -> list[str]:
    """Names that match ``pattern``, in the order of the file."""
    return [name for name in arrays if fnmatch.fnmatchcase(name, pattern)]


def stacked(arrays: Mapping[str, NDArray[Any]], pattern: str) -> NDArray[np.float32]:
    """The columns whose names match ``pattern``, side by side, in the order of the file.

    Example:
        >>> stacked({"f0": np.array([1.0, 2.0]), "f1": np.array([3.0, 4.0]), "id": np.array([7, 8])}, "f*")
        array([[1., 3.],
               [2., 4.]], dtype=float32)
    """
    names = matching(arrays, pattern)
    if not names:
        raise KeyError(f"no column matches {pattern!r}; there are {', '.join(arrays)}")
    wrong = [name for name in names if arrays[name].ndim != 1 or arrays[name].dtype.kind not in NUMBERS]
    if wrong:
        raise TypeError(
            f"column {wrong[0]!r} matches {pattern!r} but holds {arrays[wrong[0]].dtype}, not one number per "
            f"row; leave it out of the pattern, or turn it into numbers with --prepare"
        )
    return np.stack([arrays[name].astype(np.float32) for name in names], axis=1)


def _read_csv(path: Path) -> Arrays:
    with reading(path, "a table of text in UTF-8"), open_regular(path) as file:
        rows = csv.reader(_lines(file))
        names = next(rows, [])
        if len(set(names)) != len(names) or not names:
            raise FormatError(f"{path}: the first line must name every column once, got {', '.join(names)}")
        columns: list[list[str]] = [[] for _ in names]
        for number, row in enumerate(rows, start=2):
            if len(row) != len(names):
                raise FormatError(
                    f"{path}: line {number} has {len(row)} values, the first line names {len(names)}"
                )
            for column, cell in zip(columns, row, strict=True):
                column.append(cell)
    return {name: _column(cells) for name, cells in zip(names, columns, strict=True)}


def _lines(file: Any) -> Any:
    import io

    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def _column(cells: Sequence[str]) -> NDArray[Any]:
    """Whole numbers, numbers or text, whatever all cells are; an empty cell among numbers is NaN."""
    for convert, kind in ((int, np.int64), (float, np.float64)):
        try:
            values = [convert(cell or "nan") for cell in cells]
            return np.array(values, dtype=kind)
        except (ValueError, OverflowError):
            continue
    return np.array(cells, dtype=object)  # a fixed width would be that of the longest cell in every row


def _read_parquet(path: Path) -> Arrays:
    """Columns of a file or folder; lists of equal length become matrices."""
    import pyarrow.dataset as ds

    with reading(path, "whole Parquet data"):
        parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        for part in parts:
            open_regular(part).close()
        first = ds.dataset(str(path), format="parquet", exclude_invalid_files=False)
        texts: set[str] = set()
        for fragment in first.get_fragments():
            check_size(fragment.path, _decoded_size(fragment.metadata))
            texts |= _flat_texts(fragment.metadata)
        options = ds.ParquetReadOptions(dictionary_columns=texts)
        table = ds.dataset(str(path), format=ds.ParquetFileFormat(read_options=options)).to_table()
        table.validate(full=True)
        return {name: _array(table[name], name, path) for name in table.column_names}


def _decoded_size(metadata: Any) -> int:
    """Bytes that the columns of a Parquet file become: the same number a million times takes none in it."""
    total = 0
    for part in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for j in range(part.num_columns):
            column, declared = part.column(j), metadata.schema.column(j)
            width = WIDTHS.get(column.physical_type, declared.length)
            if column.physical_type == "BYTE_ARRAY" and declared.max_repetition_level:
                width = column.total_uncompressed_size  # lists of text: each may be the longest one
            total += column.num_values * width + column.total_uncompressed_size
    return total


def _flat_texts(metadata: Any) -> set[str]:
    """Columns of one text per row."""
    columns = [metadata.schema.column(j) for j in range(metadata.num_columns)]
    return {x.path for x in columns if x.physical_type == "BYTE_ARRAY" and not x.max_repetition_level}


def _array(column: Any, name: str, path: Path) -> NDArray[Any]:
    """Values of a column; those of a dictionary share its Python objects, lists become rows of a matrix."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return _matrix(column.combine_chunks(), name, path)
    parts = [np.zeros(0, dtype=object)]
    for chunk in column.chunks:
        different = np.array([*chunk.dictionary.to_pylist(), None], dtype=object)
        places = chunk.indices.fill_null(len(different) - 1).to_numpy(zero_copy_only=False)
        parts.append(different[places])
    return np.concatenate(parts)


def _matrix(column: Any, name: str, path: Path) -> NDArray[Any]:
    """Values of a column without a Python object for each; lists become the rows of a matrix."""
    import pyarrow as pa

    if not _holds_lists(column):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    integer = pa.types.is_integer(column.type.value_type)
    values, shape = column, [len(column)]
    while _holds_lists(values) and len(values):
        _check_present(values, name, path, len(column))
        shape.append(_length(values, name, path))
        values = values.flatten()
    if integer:
        _check_present(values, name, path, len(column))
    flat = values.to_numpy(zero_copy_only=False)  # may be a view that cannot be written to
    return np.asarray(flat.astype(np.int64 if integer else np.float32).reshape(shape))


def _holds_lists(column: Any) -> bool:
    import pyarrow as pa

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(column.type) for is_kind in kinds)


def _check_present(values: Any, name: str, path: Path, rows: int) -> None:
    """Refuse what is missing, with its row among so many."""
    if values.null_count:
        first = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        row = first * rows // len(values)
        raise FormatError(
            f"{path}: column {name!r} has nothing in row {row}; fill it in, or leave the row out"
        )


def _length(lists: Any, name: str, path: Path) -> int:
    """That all lists have."""
    import pyarrow.compute as pc

    found = pc.min_max(pc.list_value_length(lists))
    shortest, longest = found["min"].as_py(), found["max"].as_py()
    if shortest != longest:
        raise FormatError(
            f"{path}: the lists in column {name!r} have different lengths ({shortest} to {longest})"
        )
    return int(longest)
