"""Safetensors files with one SHA-256 of everything in them; the same contents give the same bytes.

The checksum stands in the metadata and is that of the whole file with zeros in its place. A safetensors file
that somebody else wrote has none and is read as it is. A file is opened once and read whole, so that header
and arrays are of one version, whoever replaces it meanwhile.
"""

import json
from collections.abc import Mapping
from hashlib import file_digest, sha256
from io import BytesIO
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor

from salgp.io.files import AnyPath, ChecksumError, open_regular, reading, write_whole
from salgp.io.json_files import CHECK, check_text

__all__ = []

Contents = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors by name, and metadata."""
Tensors = Mapping[str, Tensor]
Texts = Mapping[str, str]
BLANK = "0" * 64
"""Stands for the checksum while it is computed."""


def write_tensors(path: AnyPath, tensors: Tensors, metadata: Texts) -> Path:
    """Write tensors and string metadata as one safetensors file with a checksum."""
    plain = _plain(tensors)
    described = _described(tensors, metadata, path)
    return write_whole(path, lambda part: _save(part, plain, described))


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from error
    with path.open("rb+") as file:
        _seal(file)


def tensor_bytes(tensors: Tensors, metadata: Texts) -> bytes:
    """The bytes that `write_tensors` writes."""
    described = _described(tensors, metadata, "the bytes")
    file = BytesIO(save(_plain(tensors), described))
    _seal(file)
    return file.getvalue()


def tensors_from(data: bytes, path: AnyPath = "the bytes") -> Contents:
    """Tensors and metadata of a safetensors file; its checksum is compared where it has one.

    Args:
        data: the bytes of the file.
        path: its name, for the sentence.

    Example:
        >>> tensors_from(tensor_bytes({"x": torch.ones(2)}, {"a": "b"}))
        ({'x': tensor([1., 1.])}, {'a': 'b'})
    """
    with reading(path, "a whole safetensors file"):
        loaded, metadata = load(data), _checked(data, path)
    # copies, because BLAS rounds differently where memory is not aligned as PyTorch's own
    return {name: loaded[name].clone() for name in sorted(loaded)}, metadata


def read_tensors(path: AnyPath) -> Contents:
    """Read all tensors and the metadata of a safetensors file; compare its checksum where it has one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_tensors(write_tensors(folder + "/x.safetensors", {"x": torch.ones(2)}, {"a": "b"}))
        ({'x': tensor([1., 1.])}, {'a': 'b'})
    """
    with open_regular(path) as file:
        return tensors_from(file.read(), path)


def _plain(tensors: Tensors) -> dict[str, Tensor]:
    """Copies that share no memory: safetensors refuses views of each other."""
    plain = torch.contiguous_format
    return {k: x.detach().cpu().clone(memory_format=plain) for k, x in tensors.items()}


def _described(tensors: Tensors, metadata: Texts, path: AnyPath) -> dict[str, str]:
    check_text(json.dumps([*tensors, metadata], ensure_ascii=False), path)
    return {**metadata, CHECK: BLANK}


def _seal(file: IO[bytes]) -> None:
    """Put the header in order and write the checksum into it."""
    text = _ordered_header(file)
    file.seek(8)
    file.write(text)
    file.seek(0)
    found = file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(8)
    file.write(text.replace(_stamp(BLANK), _stamp(found), 1))


def _ordered_header(file: IO[bytes]) -> bytes:
    """The header with its metadata, whose order safetensors draws at random, by name."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)


def _checked(data: bytes, path: AnyPath) -> dict[str, str]:
    """The metadata without the checksum, which is compared."""
    end = 8 + int.from_bytes(data[:8], "little")
    stored = json.loads(data[8:end]).get("__metadata__", {})
    metadata = dict(sorted(stored.items()))
    expected = metadata.pop(CHECK, None)
    if expected is None and not metadata.get("format", "").startswith("salgp"):
        return metadata
    if _digest(data, end, str(expected)) != expected:
        why = "its SHA-256 is not the one it carries; restore it or write it again"
        raise ChecksumError(f"{path} is damaged: {why}")
    return metadata


def _digest(data: bytes, end: int, checksum: str) -> str:
    """SHA-256 of a file with this header, the checksum in it blanked."""
    found = sha256(data[:end].replace(_stamp(checksum), _stamp(BLANK)))
    found.update(memoryview(data)[end:])
    return found.hexdigest()


def _stamp(checksum: str) -> bytes:
    """As it stands in the header; quotes inside of other values are escaped, so it stands there once."""
    return f'"{CHECK}":"{checksum}"'.encode()
