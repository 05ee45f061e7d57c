"""Files that are whole or not there: safetensors for arrays, JSON for the rest."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from salgp.storage.errors import FormatError

__all__ = ["read_json", "read_tensors", "write_json", "write_tensors", "write_whole"]


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then rename it: the target is whole or
    untouched.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Path:
    """Write tensors and string metadata as one safetensors file."""
    from safetensors.torch import save_file

    whole = {k: v.detach().contiguous().cpu().clone() for k, v in tensors.items()}
    return write_whole(path, lambda part: save_file(whole, str(part), metadata=dict(metadata)))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            # a copy, because the file's memory is not aligned and BLAS rounds differently on such addresses
            return {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise FormatError(f"{path}: not a whole safetensors file ({error})") from error


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write ``value`` as indented JSON."""
    text = json.dumps(value, indent=1, allow_nan=True)

    def write(part: Path) -> None:
        part.write_text(text + "\n", encoding="utf-8")

    return write_whole(path, write)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file, with a clear error when it is cut short."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
