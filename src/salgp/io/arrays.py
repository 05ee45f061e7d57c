"""Named arrays from the files people have, ``.npz``, ``.safetensors``, Parquet and ``.csv``; tables written.

Memory is bounded before it is taken: a small file that would become far larger than its size is refused.
Tables that are written have no cells that a spreadsheet would run.
"""

import csv
import fnmatch
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.extras import require
from salgp.io.files import AnyPath, FormatError, check_size, open_regular, reading, write_whole
from salgp.io.tensors import read_tensors

__all__ = ["read_arrays", "read_npz", "write_table"]

Array = NDArray[Any]
Arrays = dict[str, Array]
NUMBERS = "fiub"
"""Kinds of NumPy types that are numbers."""
WIDTH, OBJECT = 16, 80
"""Bytes that one value of a Parquet column may become; text is a place in a list of its different values,
each of which is an object.
"""
FORMULAS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""What a spreadsheet takes for the beginning of a formula, wide signs of Asian scripts among them."""


def read_arrays(path: AnyPath) -> Arrays:
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
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix == ".safetensors":
        return {name: x.numpy() for name, x in read_tensors(path)[0].items()}
    if path.suffix == ".csv":
        return _read_csv(path)
    known = ".npz, .safetensors, .parquet, .csv, or a folder of images or Parquet shards"
    raise ValueError(f"{path}: unknown kind of data; expected {known}")


def matching(arrays: Mapping[str, Any], pattern: str) -> list[str]:
    """Names that match ``pattern``, in the order of the file."""
    return [name for name in arrays if fnmatch.fnmatchcase(name, pattern)]


def stacked(arrays: Mapping[str, Array], pattern: str) -> NDArray[np.float32]:
    """The columns whose names match ``pattern``, side by side, in the order of the file.

    Example:
        >>> stacked({"f0": np.array([1.0, 2.0]), "f1": np.array([3.0, 4.0]), "id": np.array([7, 8])}, "f*")
        array([[1., 3.],
               [2., 4.]], dtype=float32)
    """
    names = matching(arrays, pattern)
    if not names:
        raise KeyError(f"no column matches {pattern!r}; there are {', '.join(arrays)}")
    for name in names:
        if not is_numeric_column(arrays[name]):
            advice = "leave it out of the pattern, or turn it into numbers with --prepare"
            holds = f"holds {arrays[name].dtype}, not one number per row"
            raise TypeError(f"column {name!r} matches {pattern!r} but {holds}; {advice}")
    return np.stack([arrays[name].astype(np.float32) for name in names], axis=1)


def is_numeric_column(x: Array) -> bool:
    """Does an array hold one number per row?"""
    return x.ndim == 1 and x.dtype.kind in NUMBERS


def read_npz(path: AnyPath) -> Arrays:
    """All arrays of an ``.npz`` archive of any origin, by name; no pickles.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(folder + "/a.npz", x=np.arange(3))
        ...     read_npz(folder + "/a.npz")["x"]
        array([0, 1, 2])
    """
    with open_regular(path) as file, reading(path, "a whole .npz file of plain arrays"):
        with zipfile.ZipFile(file) as archive:
            check_size(path, sum(member.file_size for member in archive.infolist()))
        file.seek(0)
        with np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}


def write_table(path: AnyPath, columns: Mapping[str, Array], signature: bytes | None = None) -> Path:
    """Write columns of equal length as Parquet, signed in its metadata, or as CSV, by the suffix."""
    path = Path(path)
    if path.suffix == ".csv":
        return write_whole(path, lambda part: _write_csv(part, columns))
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: expected a name that ends in .csv or .parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns, metadata=signature and {b"format": signature})
    return write_whole(path, lambda part: pq.write_table(table, str(part)))


def harmless(cell: Any) -> Any:
    """The cell, with a quotation mark before text that a spreadsheet would take for a formula.

    Example:
        >>> harmless("=1+1"), harmless("cat"), harmless(-0.5)
        ("'=1+1", 'cat', -0.5)
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell


def _read_csv(path: Path) -> Arrays:
    with reading(path, "a table of text in UTF-8"), open_regular(path) as file:
        rows = csv.reader(TextIOWrapper(file, encoding="utf-8-sig", newline=""))
        names = next(rows, [])
        _check_names(names)
        columns = _cells(rows, len(names))
    return dict(zip(names, map(_column, columns), strict=True))


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names) or not names:
        raise FormatError(f"the first line must name every column once, got {', '.join(names)}")


def _cells(rows: Iterable[list[str]], width: int) -> list[list[str]]:
    """The cells of each column, from rows that begin in the second line."""
    columns = [list[str]() for _ in range(width)]
    for number, row in enumerate(rows, start=2):
        if len(row) != width:
            raise FormatError(f"line {number} has {len(row)} values, the first line names {width}")
        for column, cell in zip(columns, row, strict=True):
            column.append(cell)
    return columns


def _column(cells: Sequence[str]) -> Array:
    """Whole numbers, numbers or text, whatever all cells are; an empty cell among numbers is NaN."""
    for convert, kind in ((int, np.int64), (float, np.float64)):
        try:
            return np.array([convert(cell or "nan") for cell in cells], kind)
        except (ValueError, OverflowError):
            continue
    return np.array(cells, dtype=object)  # a fixed width would be that of the longest cell in every row


def _write_csv(part: Path, columns: Mapping[str, Array]) -> None:
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(harmless, columns))
        rows = zip(*(x.tolist() for x in columns.values()), strict=True)
        writer.writerows([harmless(cell) for cell in row] for row in rows)


def _read_parquet(path: Path) -> Arrays:
    """Columns of a file or folder; lists of equal length become matrices."""
    require("pyarrow")
    import pyarrow.dataset as ds

    with reading(path, "whole Parquet data"):
        parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        texts = set().union(*map(_text_columns, parts))
        read_options = ds.ParquetReadOptions(dictionary_columns=texts)
        files = ds.ParquetFileFormat(read_options=read_options)
        table = ds.dataset(list(map(str, parts)), format=files).to_table()
        table.validate(full=True)
        return {name: _array(table[name], name) for name in table.column_names}


def _text_columns(path: Path) -> set[str]:
    """Names of the columns of text in a file, which must not become far larger than it is."""
    import pyarrow.parquet as pq

    with open_regular(path) as file:
        metadata = pq.read_metadata(file)
    check_size(path, sum(_decoded_size(metadata, j) for j in range(metadata.num_columns)))
    columns = map(metadata.schema.column, range(metadata.num_columns))
    return {column.path for column in columns if column.physical_type == "BYTE_ARRAY"}


def _decoded_size(metadata: Any, j: int) -> int:
    """Bytes that a column of a Parquet file becomes: the same number a million times takes none in it."""
    declared = metadata.schema.column(j)
    if declared.physical_type == "BYTE_ARRAY" and declared.max_repetition_level:
        raise FormatError(f"column {declared.path!r} holds lists of text, which are not read; leave it out")
    width = WIDTH + max(declared.length, 0)
    text = declared.physical_type.endswith("BYTE_ARRAY")
    total = 0
    for part in (metadata.row_group(i).column(j) for i in range(metadata.num_row_groups)):
        size = part.total_uncompressed_size
        total += part.num_values * width + size + text * min(part.num_values, size) * OBJECT
    return total


def _array(column: Any, name: str) -> Array:
    """Values of a column without a Python object for each: texts are shared, lists are rows of a matrix."""
    import pyarrow as pa

    kind = column.type
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return _matrix(column.combine_chunks(), name)
    if pa.types.is_decimal(kind) or pa.types.is_time(kind):
        raise FormatError(f"column {name!r} holds {kind}, which is not read; store it as numbers")
    if pa.types.is_primitive(kind):
        return np.asarray(column.to_numpy())
    return _texts(column)


def _texts(column: Any) -> Array:
    """Equal values of a column are one object; None where a value is missing."""
    whole = column.dictionary_encode().unify_dictionaries().combine_chunks()
    different = np.array([*whole.dictionary.to_pylist(), None], dtype=object)
    return different[np.asarray(whole.indices.fill_null(-1))]


def _matrix(lists: Any, name: str) -> Array:
    """Rows of numbers, from lists of one length."""
    import pyarrow as pa

    _check_present(lists, name, len(lists))
    width = _length(lists, name) if len(lists) else 0
    values = lists.flatten()
    if not pa.types.is_primitive(values.type):
        raise FormatError(f"column {name!r} holds lists of {values.type}, which are not read; leave it out")
    whole = pa.types.is_integer(values.type)
    if whole:
        _check_present(values, name, len(lists))
    numbers = values.to_numpy(zero_copy_only=False).astype(np.int64 if whole else np.float32)
    return np.asarray(numbers.reshape(len(lists), width))


def _check_present(values: Any, name: str, rows: int) -> None:
    """Refuse what is missing, with its row among so many."""
    if values.null_count:
        row = values.is_null().index(True).as_py() * rows // len(values)
        raise FormatError(f"column {name!r} has nothing in row {row}; fill it in, or leave the row out")


def _length(lists: Any, name: str) -> int:
    """That all lists have."""
    import pyarrow.compute as pc

    shortest, longest = pc.min_max(pc.list_value_length(lists)).values()
    if shortest != longest:
        raise FormatError(f"the lists in column {name!r} have different lengths ({shortest} to {longest})")
    return int(longest.as_py())
