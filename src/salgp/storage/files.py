"""Files that are whole or not there, and that notice damage: safetensors for arrays, JSON for the rest.

A tensor file carries the SHA-256 of every array and of its own header in its metadata; a JSON header carries
that of its contents. Both are checked when read. The bytes depend on nothing but the contents, so that the
same features saved twice give the same file. A safetensors file that somebody else wrote has no checksums and
is read as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from salgp.marks import is_of_kind
from salgp.storage.errors import ChecksumError, FormatError
from salgp.storage.plain import plain_number

__all__ = [
    "SHORT",
    "check_kind",
    "check_size",
    "digest",
    "make_folder",
    "name_beside",
    "read_header",
    "read_json",
    "read_metadata",
    "read_tensors",
    "refuse_foreign",
    "refuse_link",
    "refuse_special",
    "write_header",
    "write_json",
    "write_tensors",
    "write_whole",
]

CHECK = "sha256"
"""Key of a header's own checksum."""
ARRAYS = "sha256_arrays"
"""Key of the checksums of the arrays."""

SHORT = 40
"""Characters of a target's name that its temporary file bears; names have a largest length."""

LARGE = 256 * 2**20
"""Bytes of memory that any file may ask for."""
RATIO = 200
"""Times its own size that a larger file may ask for."""

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


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then rename it: the target is whole or
    untouched.
    """
    target = Path(path)
    refuse_special(target)
    make_folder(target.parent)
    part = name_beside(target)
    part.touch(exist_ok=False)
    try:
        write(part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return target


def make_folder(path: Path) -> None:
    """Make a folder and those around it where they are missing; refused where something else has the name.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     try:
        ...         make_folder(Path(file.name))
        ...     except FileExistsError as error:
        ...         print(str(error).removeprefix(file.name))
         is no folder, and one is to be written; choose another name
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        wrong = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
        raise FileExistsError(
            f"{wrong} is no folder, and one is to be written; choose another name"
        ) from error


def name_beside(target: Path) -> Path:
    """A new hidden name beside ``target``, for what is to take its place."""
    return target.with_name(f".{target.name[:SHORT]}.{secrets.token_hex(6)}.part")


def refuse_link(path: Path) -> None:
    """Refuse to write through or over a symbolic link: what it points to is somebody else's."""
    if path.is_symlink():
        raise FileExistsError(f"{path} is a symbolic link; salgp writes to no link, name the target itself")


def refuse_special(path: Path) -> None:
    """Refuse links, folders, devices and pipes: a rename would take the place even of ``/dev/null``.

    The file is asked once: another process may remove it between two questions.
    """
    refuse_link(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is a folder, a device or a pipe, not a file; choose another name")


def refuse_foreign(path: str | os.PathLike[str], kind: str) -> None:
    """Refuse to replace a file that salgp did not write, or wrote as something else.

    Args:
        path: of the file that is to be written; missing and empty ones are nobody's.
        kind: what is to be written, one of `salgp.marks.KINDS`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "rule.json")
        ...     _ = path.write_text("mine")
        ...     try:
        ...         refuse_foreign(path, "rule")
        ...     except FileExistsError as error:
        ...         print(str(error).removeprefix(f"{path} "))
        exists and holds no rule that salgp wrote; it is left alone: choose another name
    """
    target = Path(path)
    refuse_special(target)
    if target.is_file() and not is_of_kind(target, kind):
        raise FileExistsError(
            f"{target} exists and holds no {kind} that salgp wrote; it is left alone: choose another name"
        )


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Path:
    """Write tensors and string metadata as one safetensors file with checksums; equal contents give equal
    bytes.
    """
    arrays = {name: x.detach().contiguous().cpu() for name, x in tensors.items()}
    order = sorted(arrays, key=lambda name: (list(_DTYPES).index(arrays[name].dtype), name))
    arrays = {name: arrays[name] for name in order}
    checks = json.dumps({name: _array_digest(x) for name, x in sorted(arrays.items())})
    plain = {**metadata, ARRAYS: checks}
    header = _tensor_header(arrays, {**plain, CHECK: _metadata_digest(plain)})

    def write(part: Path) -> None:
        with part.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for x in arrays.values():
                file.write(_bytes(x))

    return write_whole(path, write)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file; compare its checksums where it has some."""
    from safetensors import SafetensorError, safe_open

    metadata = read_metadata(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            # a copy, because the file's memory is not aligned and BLAS rounds differently on such addresses
            tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise FormatError(f"{path}: not a whole safetensors file ({error})") from error
    if ARRAYS in metadata:
        _check_arrays(Path(path), tensors, metadata.pop(ARRAYS))
    return tensors, metadata


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file, without its arrays; its own checksum is compared and left out."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(sorted((file.metadata() or {}).items()))
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise FormatError(f"{path}: not a whole safetensors file ({error})") from error
    ours = CHECK in metadata or ARRAYS in metadata or metadata.get("format", "").startswith("salgp")
    found = metadata.pop(CHECK, "")
    if ours and found != _metadata_digest(metadata):
        raise ChecksumError(f"{path} is damaged: its header is not the one that was written; write it again")
    return metadata


def write_header(path: str | os.PathLike[str], kind: str, version: int, value: Mapping[str, Any]) -> Path:
    """Write ``value`` as JSON under a header that says what it is, with a checksum.

    Args:
        path: of the file.
        kind: what the file is, such as ``"salgp-feature-store"``.
        version: of the format.
        value: what it says; ``format``, ``format_version`` and ``sha256`` are the header's own.
    """
    own = [key for key in ("format", "format_version", CHECK) if key in value]
    if own:
        raise ValueError(f"{path}: {own[0]!r} is written by the header itself; leave it out of the value")
    stored = json.loads(json.dumps(value, default=plain_number))
    plain = {"format": kind, "format_version": version, **stored}
    return write_json(path, {**plain, CHECK: _json_digest(plain)})


def read_header(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Read what `write_header` wrote; anything else is a `FormatError`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_header(write_header(folder + "/x.json", "example", 1, {"rows": 3}), "example", 1)
        {'rows': 3}
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object of {kind!r}, got a {type(value).__name__}")
    found = value.pop(CHECK, None)
    check_kind(path, value, kind, version)
    if found != _json_digest(value):
        raise ChecksumError(
            f"{path} is damaged or was edited: its SHA-256 is not the one it carries; restore it "
            f"or write it again"
        )
    return {k: v for k, v in value.items() if k not in ("format", "format_version")}


def check_kind(path: str | os.PathLike[str], header: Mapping[str, Any], kind: str, version: int) -> None:
    """Refuse a header of another kind, or from a newer version."""
    if header.get("format") != kind:
        raise FormatError(f"{path}: expected {kind!r}, got {str(header.get('format'))[:80]!r}")
    found = str(header.get("format_version"))
    if not (found.isascii() and found.isdigit() and len(found) < 10):
        raise FormatError(f"{path}: expected a format version, got {found[:80]!r}")
    if int(found) > version:
        raise FormatError(
            f"{path}: written by a newer version of salgp (format {found}); upgrade salgp to read it"
        )


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write ``value`` as indented JSON."""
    text = json.dumps(value, indent=1, allow_nan=True, default=plain_number)

    def write(part: Path) -> None:
        part.write_text(text + "\n", encoding="utf-8")

    return write_whole(path, write)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file, with a clear error when it is cut short."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (ValueError, OSError) as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from error
    except RecursionError as error:
        raise FormatError(f"{path}: not valid JSON (nested too deeply)") from error


def check_size(path: str | os.PathLike[str], announced: int) -> None:
    """Refuse, before any memory is taken, a file that says it becomes far larger than a file of its size can.

    Args:
        path: of the file.
        announced: bytes it says it needs in memory.
    """
    size = os.path.getsize(path)
    if announced > max(LARGE, RATIO * size):
        raise FormatError(
            f"{path}: {size:,} bytes that say they become {announced:,}; that is refused as damaged "
            f"or hostile (limit: {RATIO} times the file)"
        )


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensor_header(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The JSON at the beginning of a safetensors file, filled up to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, x in arrays.items():
        start, end = end, end + x.numel() * x.element_size()
        entries[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _bytes(x: Tensor) -> memoryview:
    flat = x.reshape(-1)
    if flat.stride(0) != 1:  # none or one number, which is contiguous by any stride
        flat = flat.new_empty(flat.numel()).copy_(flat)
    return flat.view(torch.uint8).numpy().data


def _array_digest(x: Tensor) -> str:
    """SHA-256 of type, shape and contents."""
    found = hashlib.sha256(f"{_DTYPES.get(x.dtype, x.dtype)}{list(x.shape)}".encode())
    found.update(_bytes(x.contiguous()))
    return found.hexdigest()


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    return _json_digest(dict(sorted(metadata.items())))


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def _check_arrays(path: Path, tensors: Mapping[str, Tensor], text: str) -> None:
    expected = json.loads(text)  # covered by the header's checksum, so it is what was written
    if sorted(expected) != sorted(tensors):
        differing = sorted(set(expected) ^ set(tensors))
        raise ChecksumError(f"{path} is damaged: array {differing[0]!r} was added or is missing")
    for name, x in tensors.items():
        if _array_digest(x) != expected[name]:
            raise ChecksumError(
                f"{path} is damaged: array {name!r} is not the one that was written; restore the "
                f"file or write it again"
            )
