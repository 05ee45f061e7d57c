"""Safetensors files with one SHA-256 of everything in them; the same contents give the same bytes.

The checksum stands in the metadata and is that of the whole file with zeros in its place. A safetensors file
that somebody else wrote has none and is read as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, TypeVar

import torch
from torch import Tensor

from salgp.io.errors import ChecksumError, FormatError, reading
from salgp.io.files import open_regular, write_whole
from salgp.io.json_files import CHECK, check_text

__all__ = ["read_metadata", "read_tensors", "tensor_bytes", "tensors_from", "write_tensors"]

T = TypeVar("T")
BLANK = "0" * 64
"""Stands for the checksum while it is computed."""
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
"""Names of the types in safetensors; wide ones come first in the file, so that each array is aligned."""


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Path:
    """Write tensors and string metadata as one safetensors file with a checksum."""
    parts = _parts(tensors, metadata, path)

    def write(part: Path) -> None:
        with part.open("wb") as file:
            file.writelines(parts)

    return write_whole(path, write)


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What `write_tensors` would write."""
    return b"".join(_parts(tensors, metadata, "the bytes"))


def tensors_from(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of what `tensor_bytes` gave; their checksum is compared.

    Example:
        >>> tensors_from(tensor_bytes({"x": torch.ones(2)}, {"a": "b"}))
        ({'x': tensor([1., 1.])}, {'a': 'b'})
    """
    from safetensors.torch import load

    with reading("the bytes", "whole safetensors data"):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return load(data), _checked(BytesIO(data), header["__metadata__"], "the bytes")


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file; compare its checksum where it has one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_tensors(write_tensors(folder + "/x.safetensors", {"x": torch.ones(2)}, {"a": "b"}))
        ({'x': tensor([1., 1.])}, {'a': 'b'})
    """
    from safetensors import safe_open

    def read(file: IO[bytes]) -> tuple[dict[str, Tensor], dict[str, str]]:
        with safe_open(str(path), framework="pt") as arrays:
            metadata = _checked(file, arrays.metadata() or {}, path)
            # a copy, because the file's memory is not aligned and BLAS rounds differently on such addresses
            return {name: arrays.get_tensor(name).clone() for name in sorted(arrays.keys())}, metadata

    return _read_stable(path, read)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file, whose checksum is compared, without its arrays."""
    from safetensors import safe_open

    def read(file: IO[bytes]) -> dict[str, str]:
        with safe_open(str(path), framework="pt") as arrays:
            return _checked(file, arrays.metadata() or {}, path)

    return _read_stable(path, read)


def _read_stable(path: str | os.PathLike[str], read: Callable[[IO[bytes]], T]) -> T:
    """What ``read`` makes of one version of a file; it is read again where it was replaced meanwhile."""
    while True:
        with open_regular(path) as file:
            try:
                with reading(path, "a whole safetensors file"):
                    found = read(file)
            except FormatError:
                if _is_current(file, path):
                    raise
            else:
                if _is_current(file, path):
                    return found


def _is_current(file: IO[bytes], path: str | os.PathLike[str]) -> bool:
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def _checked(file: IO[bytes], metadata: Mapping[str, str], path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata without the checksum, which is compared."""
    plain = dict(sorted(metadata.items()))
    expected = plain.pop(CHECK, None)
    if expected is None and not plain.get("format", "").startswith("salgp"):
        return plain
    start = file.read(8)
    header = file.read(int.from_bytes(start, "little"))
    found = hashlib.sha256(start + header.replace(_stamp(str(expected)), _stamp(BLANK), 1))
    while block := file.read(1 << 20):
        found.update(block)
    if found.hexdigest() != expected:
        raise ChecksumError(
            f"{path} is damaged: its SHA-256 is not the one it carries; restore it or write it again"
        )
    return plain


def _parts(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: str | os.PathLike[str]
) -> list[bytes | memoryview]:
    """The header, written here because safetensors itself gives the metadata in random order; the arrays."""
    order = sorted(tensors, key=lambda name: (list(_DTYPES).index(tensors[name].dtype), name))
    arrays = {name: tensors[name].detach().contiguous().cpu() for name in order}
    header = _header(arrays, {**metadata, CHECK: BLANK}, path)
    data = [_bytes(x) for x in arrays.values()]
    found = hashlib.sha256(header)
    for part in data:
        found.update(part)
    return [header.replace(_stamp(BLANK), _stamp(found.hexdigest()), 1), *data]


def _header(arrays: Mapping[str, Tensor], metadata: Mapping[str, str], path: str | os.PathLike[str]) -> bytes:
    """The beginning of a safetensors file: a length, and JSON filled up to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, x in arrays.items():
        start, end = end, end + x.numel() * x.element_size()
        entries[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = check_text(json.dumps(entries, separators=(",", ":"), ensure_ascii=False), path).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stamp(checksum: str) -> bytes:
    """As it stands in the header; quotes inside of other values are escaped, so it stands there once."""
    return f'"{CHECK}":"{checksum}"'.encode()


def _bytes(x: Tensor) -> memoryview:
    flat = x.reshape(-1)
    if flat.stride(0) != 1:  # none or one number, which is contiguous by any stride
        flat = flat.new_empty(flat.numel()).copy_(flat)
    return flat.view(torch.uint8).numpy().data
