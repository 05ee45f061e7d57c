"""Files of the user as named arrays: lists of a Parquet file are matrices, or are refused with their row."""

from __future__ import annotations

import re
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import salgp
from salgp.io.arrays import read_arrays

LISTS = {
    "lists": ([[1.5, 2], [3, 4]], pa.list_(pa.float64()), np.float32),
    "lists as they are stored": ([[1.5, 2], [3, 4]], pa.list_(pa.float32()), np.float32),
    "long lists": ([[1, 2], [3, 4]], pa.large_list(pa.uint8()), np.int64),
    "lists of fixed length": ([[1.5, None], [3, 4]], pa.list_(pa.float32(), 2), np.float32),
    "empty lists": ([[], []], pa.list_(pa.float32()), np.float32),
    "truth values": ([[True], [False]], pa.list_(pa.bool_()), np.float32),
}


@pytest.mark.parametrize("case", LISTS)
def test_lists_of_a_parquet_file_become_matrices(tmp_path: Path, case: str) -> None:
    rows, kind, dtype = LISTS[case]
    pq.write_table(pa.table({"x": pa.array(rows, kind)}), tmp_path / "x.parquet")
    found = read_arrays(tmp_path / "x.parquet")["x"]
    expected = np.array(rows, dtype=dtype)
    assert found.flags.writeable
    np.testing.assert_array_equal(found, expected, strict=True)


def test_lists_are_read_without_an_object_for_every_number(tmp_path: Path) -> None:
    flat = pa.array(np.zeros(2_000_000, np.float32))
    column = pa.ListArray.from_arrays(pa.array(range(0, 2_000_001, 1000), pa.int32()), flat)
    pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet")
    read_arrays(tmp_path / "x.parquet")  # what is imported does not count
    tracemalloc.start()
    read_arrays(tmp_path / "x.parquet")
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 3 * flat.nbytes


@pytest.mark.parametrize(
    ("rows", "kind", "why"),
    [
        ([[1.0], None], pa.list_(pa.float32()), "column 'x' has nothing in row 1"),
        ([None, [1.0]], pa.list_(pa.float32(), 1), "column 'x' has nothing in row 0"),
        ([[1, 2], [3, None]], pa.list_(pa.int64()), "column 'x' has nothing in row 1"),
        ([[[1.0]], [[2.0]]], pa.list_(pa.list_(pa.float32())), "column 'x' holds lists of list<"),
        ([[Decimal("1.5")]], pa.list_(pa.decimal128(5, 2)), "column 'x' holds lists of decimal128(5, 2)"),
        ([[b"ab"]], pa.list_(pa.binary(2)), "column 'x' holds lists of fixed_size_binary[2]"),
        ([[1.0], [1.0, 2.0]], pa.list_(pa.float32()), "column 'x' have different lengths (1 to 2)"),
    ],
)
def test_lists_that_make_no_matrix_are_refused(tmp_path: Path, rows: Any, kind: Any, why: str) -> None:
    pq.write_table(pa.table({"x": pa.array(rows, kind)}), tmp_path / "x.parquet")
    older_pyarrow = "Expected all lists to be of size"  # it cannot read such a file at all
    with pytest.raises(salgp.FormatError, match=f"{re.escape(why)}|{older_pyarrow}") as refused:
        read_arrays(tmp_path / "x.parquet")
    assert str(refused.value).count("x.parquet") == 1


@pytest.mark.parametrize("kind", [pa.decimal128(18, 2), pa.decimal256(50, 2), pa.time64("us")])
def test_decimals_and_times_are_refused_before_they_are_objects(tmp_path: Path, kind: Any) -> None:
    """400,000 objects of Python would take more than 40 MB; a file of a few bytes may hold millions."""
    path = tmp_path / "x.parquet"
    column = pa.array(np.arange(400_000, dtype=np.int64))
    if pa.types.is_decimal(kind):
        column = column.cast(pa.decimal128(30, 2))
    pq.write_table(pa.table({"x": column.cast(kind)}), path)
    with pytest.raises(salgp.FormatError, match=r"column 'x' holds (decimal|time).*store it as numbers"):
        read_arrays(path)


def test_a_column_of_lists_without_rows_is_an_empty_matrix(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.list_(pa.float32()))}), tmp_path / "x.parquet")
    assert read_arrays(tmp_path / "x.parquet")["x"].shape == (0, 0)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(8)])
def test_texts_that_are_all_different_are_counted_as_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """A column of a few different texts is a list of places; one of many is refused where it is too large."""
    monkeypatch.setattr(salgp.io.files, "RATIO", 1)
    monkeypatch.setattr(salgp.io.files, "LARGE", 40 * 2**20)
    for different, large in ((10, False), (500_000, True)):
        names = [f"{k % different:08d}" for k in range(500_000)]
        values = pa.array(names if kind == pa.string() else [name.encode() for name in names], kind)
        pq.write_table(pa.table({"x": values}), tmp_path / "x.parquet", compression="zstd")
        if large:
            with pytest.raises(salgp.FormatError, match=r"x\.parquet"):
                read_arrays(tmp_path / "x.parquet")
        else:
            assert len(read_arrays(tmp_path / "x.parquet")["x"]) == 500_000
