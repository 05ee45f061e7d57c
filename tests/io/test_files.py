"""Storage: packing is lossless and builds nothing unregistered; files are whole or untouched."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from salgp.gp.covariance import Index, Stationary
from salgp.gp.kernels import Rows
from salgp.io import (
    ChecksumError,
    FormatError,
    append_line,
    digest,
    locked,
    pack,
    read_header,
    read_json,
    read_lines,
    read_tensors,
    read_value,
    storable,
    unpack,
    write_header,
    write_json,
    write_tensors,
    write_value,
    write_whole,
)
from salgp.io import tensors as tensor_files
from salgp.io.arrays import write_table
from salgp.io.files import refuse_special


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(value, tensors))
    return unpack(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        "x",
        [1, [2, "y"]],
        (1, (2,)),
        {},
        {"a": 1, "b": {"c": (1, 2)}},
        [],
        (),
        float("inf"),
        {"$tensor": 1, "$class": "Rows"},
    ],
)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert there_and_back(value) == value
    assert type(there_and_back(value)) is type(value)


def test_nan_comes_back() -> None:
    assert there_and_back([float("nan")])[0] != there_and_back([float("nan")])[0]


def test_keys_keep_order_and_type() -> None:
    assert list(there_and_back({"b": 1, "a": 2, 3: 4}).items()) == [("b", 1), ("a", 2), (3, 4)]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.arange(6).reshape(2, 3).to(dtype)
    back = there_and_back({"x": x.T, "scalar": x[0, 1], "empty": x[:0]})
    assert torch.equal(back["x"], x.T)
    assert back["x"].dtype == dtype
    assert back["scalar"].shape == ()
    assert back["empty"].shape == (0, 3)


def test_paths_that_look_alike_stay_apart() -> None:
    value = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "a.b'": torch.full((1,), 2.0)}
    back = there_and_back(value)
    assert [float(back["a"]["b"]), float(back["a.b"]), float(back["a.b'"])] == [0.0, 1.0, 2.0]


def test_storables_are_rebuilt() -> None:
    covariance = Stationary("x", "rbf", per="layer", n_groups=2) + Index("layer", 2, 1)
    assert there_and_back(covariance) == covariance
    rows = there_and_back(Rows({"x": torch.ones(2, 3)}, {"layer": torch.tensor([0, 1])}))
    assert isinstance(rows, Rows)
    assert torch.equal(rows.groups["layer"], torch.tensor([0, 1]))


@dataclass(frozen=True)
class Unregistered:
    x: int = 1


@pytest.mark.parametrize("value", [Unregistered(), {1, 2}, object(), print, 1j, b"bytes"])
def test_what_cannot_be_stored_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"is not storable|cannot store"):
        pack({"here": value}, {})


def test_storable_names_are_unique() -> None:
    with pytest.raises(TypeError, match="two storable classes called Rows"):
        storable(type("Rows", (), {}))


def test_unpack_builds_nothing_unknown() -> None:
    with pytest.raises(FormatError, match="unknown kind of value 'Popen'"):
        unpack({"$class": "Popen", "fields": {"args": "true"}}, {})
    with pytest.raises(FormatError, match="tensor 'x' is missing"):
        unpack({"$tensor": "x"}, {})


def test_loaded_tensors_are_aligned_and_own_their_memory(tmp_path: Path) -> None:
    odd = {f"{i}": torch.randn(i + 1, dtype=torch.float64) for i in range(9)} | {
        "byte": torch.zeros(3, dtype=torch.uint8)
    }
    loaded, metadata = read_tensors(write_tensors(tmp_path / "t.safetensors", odd, {"k": "v"}))
    assert metadata == {"k": "v"}
    assert all(x.data_ptr() % 16 == 0 for x in loaded.values())
    (tmp_path / "t.safetensors").unlink()
    assert all(torch.equal(loaded[k], x) for k, x in odd.items())


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    loaded, _ = read_tensors(
        write_tensors(tmp_path / "t.safetensors", {"x": x, "row": x[0], "turned": x.T}, {})
    )
    assert torch.equal(loaded["turned"], x.T)
    assert torch.equal(loaded["row"], x[0])


def test_json_round_trip_and_refusal(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "ü": "ä"}
    assert read_json(write_json(tmp_path / "x.json", value)) == value
    (tmp_path / "x.json").write_text('{"a": [1,')
    with pytest.raises(FormatError, match="not valid JSON"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not valid JSON"):
        read_json(tmp_path / "x.json")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.json", {"old": True})

    def fail(part: Path) -> None:
        part.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_whole(path, fail)
    assert read_json(path) == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("name", ["file", "file/deep/er", "link"])
def test_what_stands_where_a_folder_is_to_be_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    wrong = tmp_path / name.split("/")[0]
    with pytest.raises(OSError, match=str(wrong)):
        write_json(tmp_path / name / "x.json", {})
    with pytest.raises(OSError, match=str(wrong)), locked(tmp_path / name):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert (tmp_path / "file").read_text() == "mine"


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert write_json(tmp_path / "x.json", 1).stat().st_mode & 0o777 == 0o666 & ~mask


def test_truncated_and_missing_tensor_files(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "t.safetensors", {"x": torch.ones(100)}, {})
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(FormatError, match="not a whole safetensors file"):
        read_tensors(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="not a whole safetensors file"):
        read_tensors(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_tensors(tmp_path / "none")


def many_types() -> dict[str, torch.Tensor]:
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    kinds += [torch.int16, torch.int8, torch.uint8, torch.bool]
    return {str(kind): torch.arange(5).to(kind) for kind in kinds} | {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }


def test_equal_contents_give_equal_bytes_that_safetensors_reads(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors, metadata = many_types(), {"b": "1", "a": "ü"}
    one = write_tensors(tmp_path / "1.safetensors", tensors, metadata)
    turned = dict(reversed(list(tensors.items())))
    two = write_tensors(tmp_path / "2.safetensors", turned, dict(reversed(list(metadata.items()))))
    assert one.read_bytes() == two.read_bytes()
    with safe_open(str(one), framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), x) for name, x in tensors.items())
    loaded, found = read_tensors(one)
    assert found == metadata
    assert all(torch.equal(loaded[name], x) and loaded[name].dtype == x.dtype for name, x in tensors.items())


def test_every_flipped_bit_of_a_tensor_file_is_noticed(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "t.safetensors", many_types(), {"format": "salgp-test"})
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            tensors, metadata = read_tensors(path)
        except FormatError:
            continue
        assert metadata == {"format": "salgp-test"}
        assert all(torch.equal(tensors[name], x) for name, x in many_types().items()), "a blank in the header"


def test_foreign_tensor_files_are_read_as_they_are(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(3)}, str(tmp_path / "t.safetensors"), metadata={"format": "pt"})
    assert torch.equal(read_tensors(tmp_path / "t.safetensors")[0]["x"], torch.ones(3))
    save_file({"x": torch.ones(3)}, str(tmp_path / "u.safetensors"), metadata={"format": "salgp-features"})
    with pytest.raises(ChecksumError, match="damaged"):
        read_tensors(tmp_path / "u.safetensors")


def test_headers_know_what_they_are(tmp_path: Path) -> None:
    path = write_header(tmp_path / "x.json", "salgp-test", 2, {"a": (1, 2), "nan": float("nan")})
    assert read_header(path, "salgp-test", 2)["a"] == [1, 2]
    with pytest.raises(FormatError, match="expected 'other', got 'salgp-test'"):
        read_header(path, "other", 2)
    with pytest.raises(FormatError, match="newer version"):
        read_header(path, "salgp-test", 1)
    path.write_text(path.read_text().replace("1", "3", 1))
    with pytest.raises(ChecksumError, match="damaged or was edited"):
        read_header(path, "salgp-test", 2)
    for rubbish in ("[]", "3", "null", "{}", "[" * 100_000, "1" * 5000):
        path.write_text(rubbish)
        with pytest.raises(FormatError, match=r"x\.json"):
            read_header(path, "salgp-test", 2)


def test_links_are_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("mine")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(FileExistsError, match="symbolic link"):
        write_json(tmp_path / "link.json", 1)
    assert (tmp_path / "real.json").read_text() == "mine"


@pytest.mark.parametrize(
    "value",
    [
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": 3},
        {"$tuple": None},
        {"$tensor": []},
        {"$class": ["Rows"]},
        {"$class": "Rows"},
        {"$class": "Rows", "fields": []},
        {"$class": "Rows", "fields": {"nonsense": 1}},
        {"a": 1},
    ],
)
def test_unpack_refuses_what_pack_does_not_make(value: Any) -> None:
    with pytest.raises(FormatError):
        unpack(value, {})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize(
    "write", [lambda path: write_json(path, 1), lambda path: append_line(path, {"a": 1})]
)
def test_devices_pipes_and_folders_are_not_replaced(tmp_path: Path, write: Callable[[Path], object]) -> None:
    """A rename would put a file in their place, also in that of ``/dev/null`` for a user with all rights."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(FileExistsError, match="a device or a pipe, not a file"):
            write(path)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["x" * 250, "ü" * 120])
def test_names_as_long_as_the_system_allows(tmp_path: Path, name: str) -> None:
    assert read_json(write_json(tmp_path / name, [1])) == [1]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_comes_and_goes_is_never_taken_for_a_device(tmp_path: Path) -> None:
    """Another process may remove its lock file between two questions about it."""
    path, done = tmp_path / "file", threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            path.touch()
            path.unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(3000):
            refuse_special(path)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("kind", [torch.float64, torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("n", [0, 1])
def test_tensors_without_a_stride_are_written(tmp_path: Path, kind: torch.dtype, n: int) -> None:
    """An empty array of NumPy's, and one number, may say that they have a stride of 0."""
    x = torch.as_strided(torch.ones(1, dtype=kind), (n,), (0,))
    found, _ = read_tensors(write_tensors(tmp_path / "t.safetensors", {"x": x}, {}))
    assert found["x"].dtype == kind
    assert torch.equal(found["x"], torch.ones(n, dtype=kind))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("read", [read_json, read_tensors, read_lines, digest])
def test_what_may_never_end_is_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(FormatError, match="regular file"):
            read(path)


LARGE: dict[str, Callable[[Path], object]] = {
    "x.json": lambda path: write_json(path, "x" * 100_000),
    "x.safetensors": lambda path: write_tensors(path, {"x": torch.zeros(100_000)}, {}),
    "x.jsonl": lambda path: append_line(path, {"x": "x" * 100_000}),
    "x.csv": lambda path: write_table(path, {"x": np.random.default_rng(0).random(100_000)}),
    "x.parquet": lambda path: write_table(path, {"x": np.random.default_rng(0).random(100_000)}),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path: Path, name: str) -> None:
    """A limit on the size of files stands for the disk; what was there before is still there."""
    if name == "x.jsonl":
        append_line(tmp_path / name, {"x": 1})
    before = {path.name for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            LARGE[name](tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / name) in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == before
    if name == "x.jsonl":
        assert read_lines(tmp_path / name) == [{"x": 1}]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_json(path, {"classes": ["cat", "d\ud83d"]}),
        lambda path: write_tensors(path, {}, {"classes": "d\ud83d"}),
        lambda path: write_tensors(path, {"d\ud83d": torch.ones(1)}, {}),
    ],
)
def test_half_characters_are_refused_before_anything_is_written(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        write(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_replaced_while_it_is_read_is_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Header and arrays come from the file that was opened, whatever has its name meanwhile."""
    path = write_tensors(tmp_path / "t.safetensors", {"x": torch.zeros(3)}, {"version": "0"})
    load = tensor_files.load

    def late(data: bytes) -> Any:
        write_tensors(path, {"x": torch.ones(3)}, {"version": "1"})
        return load(data)

    monkeypatch.setattr(tensor_files, "load", late)
    tensors, metadata = read_tensors(path)
    assert metadata == {"version": "0"}
    assert torch.equal(tensors["x"], torch.zeros(3))


def test_a_nested_value_is_one_file(tmp_path: Path) -> None:
    value = {"rows": Rows({"x": torch.ones(2, 3)}, {"layer": torch.tensor([0, 1])}), "n": (1, None)}
    back = read_value(write_value(tmp_path / "v.safetensors", "salgp-test", 2, value), "salgp-test", 2)
    assert back["n"] == (1, None)
    assert torch.equal(back["rows"].groups["layer"], torch.tensor([0, 1]))
    with pytest.raises(FormatError, match="newer"):
        read_value(tmp_path / "v.safetensors", "salgp-test", 1)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"$class": "Popen", "fields": {}}', "1" * 5000])
def test_a_value_of_rubbish_is_a_format_error(tmp_path: Path, text: str) -> None:
    header = {"format": "salgp-test", "format_version": "1", "value": text}
    path = write_tensors(tmp_path / "v.safetensors", {}, header)
    with pytest.raises(FormatError, match=r"v\.safetensors"):
        read_value(path, "salgp-test", 1)


def test_too_little_memory_is_not_taken_for_a_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(3)}, {"a": "b"})

    def full(x: torch.Tensor) -> torch.Tensor:
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(torch.Tensor, "clone", full)
    with pytest.raises(MemoryError, match="cannot allocate"):
        read_tensors(path)
