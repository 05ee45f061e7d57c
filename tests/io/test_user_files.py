"""Readers of the files people have: arrays, class scores, images and weights, hostile ones among them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import salgp
from salgp.io.arrays import read_arrays
from salgp.io.class_scores import read_scores
from salgp.io.images import ImageOptions, read_image
from salgp.io.loader import open_data
from salgp.io.weights import load_weights


def csv_with_a_long_cell(folder: Path) -> Path:
    path = folder / "x.csv"
    path.write_text("name,label\n" + "a" * 130_000 + ",0\n" + "b,1\n" * 60_000)
    return path


def text_of_a_dictionary(folder: Path) -> Path:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), ["a" * 100_000])
    pq.write_table(pa.table({"text": column}), folder / "x.parquet", compression="zstd")
    return folder / "x.parquet"


def binary_of_fixed_size(folder: Path) -> Path:
    column = pa.array([b"\0" * 100_000] * 100, pa.binary(100_000))
    table = pa.concat_tables([pa.table({"x": column})] * 100)
    pq.write_table(table, folder / "x.parquet", compression="zstd")
    return folder / "x.parquet"


def column_of(values: pa.Array, folder: Path) -> Path:
    pq.write_table(pa.table({"x": values}), folder / "x.parquet", compression="zstd")
    return folder / "x.parquet"


def decimals(folder: Path) -> Path:
    return column_of(pa.array(np.zeros(5_000_000, np.int32)).cast(pa.decimal128(12, 0)), folder)


def short_binary(folder: Path) -> Path:
    zeros = pa.py_buffer(bytes(10_000_000))
    return column_of(pa.FixedSizeBinaryArray.from_buffers(pa.binary(2), 5_000_000, [None, zeros]), folder)


def lists_of_bits(folder: Path) -> Path:
    bits = pa.array(np.zeros(80_000_000, bool))
    return column_of(pa.FixedSizeListArray.from_arrays(bits, 1000), folder)


def structs(folder: Path) -> Path:
    return column_of(pa.StructArray.from_arrays([pa.array(np.zeros(5_000_000, np.int32))], ["a"]), folder)


def deflated_weights(folder: Path) -> Path:
    torch.save({"weight": torch.zeros(50_000_000)}, folder / "plain.pt")
    with zipfile.ZipFile(folder / "plain.pt") as plain, zipfile.ZipFile(folder / "w.pt", "w") as packed:
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member), zipfile.ZIP_DEFLATED)
    (folder / "plain.pt").unlink()
    return folder / "w.pt"


def one_bit_image(folder: Path, size: int = 13_000) -> Path:
    image = pytest.importorskip("PIL.Image")
    image.new("1", (size, size)).save(folder / "x.png")
    return folder / "x.png"


def smaller_image(folder: Path) -> Path:
    return one_bit_image(folder, 4_600)


BOMBS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "csv": (csv_with_a_long_cell, "salgp.io.arrays.read_arrays(path)"),
    "dictionary": (text_of_a_dictionary, "salgp.io.arrays.read_arrays(path)"),
    "binary": (binary_of_fixed_size, "salgp.io.arrays.read_arrays(path)"),
    "decimals": (decimals, "salgp.io.arrays.read_arrays(path)"),
    "short binary": (short_binary, "salgp.io.arrays.read_arrays(path)"),
    "lists of bits": (lists_of_bits, "salgp.io.arrays.read_arrays(path)"),
    "structs": (structs, "salgp.io.arrays.read_arrays(path)"),
    "weights": (deflated_weights, "salgp.io.weights.load_weights(torch.nn.Linear(1, 1), path)"),
    "image": (one_bit_image, "salgp.io.images.read_image(path, salgp.io.images.ImageOptions())"),
    "smaller image": (smaller_image, "salgp.io.images.read_image(path, salgp.io.images.ImageOptions())"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_do_not_become_large(name: str, tmp_path: Path) -> None:
    """Refused, or read within 250 MB beyond what the libraries take."""
    make, read = BOMBS[name]
    path = make(tmp_path)
    assert path.stat().st_size < 1_000_000
    code = f"""
import pathlib, resource, torch, PIL.Image, pyarrow.dataset, salgp.io
import salgp.io.arrays, salgp.io.weights, salgp.io.images
path = pathlib.Path({str(path)!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    {read}
except salgp.FormatError as error:
    assert path.name in str(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    limit = 4 * 2**30  # a bomb that goes off takes no more than this
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr[-400:]
    assert int(done.stdout) < 250_000


READERS: dict[str, Callable[[Path], Any]] = {
    ".csv": read_arrays,
    ".npz": read_arrays,
    ".parquet": read_arrays,
    ".safetensors": read_arrays,
    ".png": lambda path: read_image(path, ImageOptions()),
    ".pt": lambda path: load_weights(nn.Linear(1, 1), path),
}


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_read(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((salgp.FormatError, FileNotFoundError), match=path.name):
        READERS[suffix](path)


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize(
    "content", [b"", b"\xe9t\xe9,label\n1,2\n", b"PK\x03\x04,PK\x03\x04,\n", b"\x89PNG\r\n\x1a\ncut"]
)
def test_damaged_files_are_named(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises((salgp.FormatError, ValueError), match=path.name):
        READERS[suffix](path)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.effect_noise((64, 64), 50).save(tmp_path / "x.png")
    whole = (tmp_path / "x.png").read_bytes()
    for end in (60, 200, len(whole) // 2):
        (tmp_path / "x.png").write_bytes(whole[:end])
        with pytest.raises(salgp.FormatError, match=r"x\.png"):
            read_image(tmp_path / "x.png", ImageOptions())


def test_text_columns_of_a_table_are_objects(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b,c\n1,1.5,red\n2,,blue\n")
    pq.write_table(pa.table({"a": [1, 2], "b": [1.5, None], "c": ["red", "blue"]}), tmp_path / "x.parquet")
    for name in ("x.csv", "x.parquet"):
        found = read_arrays(tmp_path / name)
        assert found["a"].tolist() == [1, 2]
        np.testing.assert_array_equal(found["b"], [1.5, np.nan])
        assert found["c"].tolist() == ["red", "blue"]
        assert found["c"].dtype == object


def test_columns_by_name_are_the_probabilities(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,ant,bee,label\n7,0.9,0.1,ant\n8,0.2,0.8,bee\n")
    scores = read_scores(tmp_path / "x.csv", probs=["bee", "ant"])
    assert (scores.output, scores.classes, scores.unused) == ("probabilities", ["bee", "ant"], ["id"])
    np.testing.assert_allclose(scores.values, [[0.1, 0.9], [0.8, 0.2]])
    assert scores.labels.tolist() == [1, 0]
    with pytest.raises(KeyError, match="wasp"):
        read_scores(tmp_path / "x.csv", probs=["wasp", "ant"])


def test_the_user_s_data_in_python(tmp_path: Path) -> None:
    """The same reader as that of the command line gives batches for `salgp.calibrate`."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(90, 3, generator=g)
    y = (x + torch.randn(90, 3, generator=g)).argmax(1)
    np.savez(tmp_path / "cal.npz", x=x.numpy(), labels=y.numpy())
    classifier = salgp.calibrate(nn.Flatten(), open_data(tmp_path / "cal.npz"), method="temperature")
    expected = salgp.calibrate(nn.Flatten(), [(x, y)], method="temperature")
    torch.testing.assert_close(classifier(x).confidence, expected(x).confidence)


def test_reading_a_table_takes_memory_in_proportion(tmp_path: Path) -> None:
    path = csv_with_a_long_cell(tmp_path)
    tracemalloc.start()
    read_arrays(path)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 100 * path.stat().st_size
