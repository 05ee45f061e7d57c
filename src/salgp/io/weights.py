"""The user's weights: safetensors, or a checkpoint of tensors that PyTorch reads without running code."""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from salgp.io.files import AnyPath, FormatError, check_size, open_regular, reading
from salgp.io.tensors import read_tensors

__all__ = ["load_weights"]

Tensors = Mapping[str, Tensor]

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
INSIDE = ("state_dict", "model_state_dict", "model", "net", "weights", "params")
"""Where training scripts put the weights inside a checkpoint."""
PREFIXES = ("module.", "model.", "net.", "network.", "_orig_mod.", "model._orig_mod.", "module.model.")
"""What wrappers (DataParallel, Lightning, torch.compile) write before each name."""
PICKLED = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How a file of torch.save begins, now (a zip archive) or long ago (a pickle)."""


def load_weights(model: nn.Module, path: AnyPath) -> None:
    """Put the weights of a file into the network; refuses weights of another network.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"module.weight": torch.ones(1, 1)}, folder + "/w.safetensors")
        ...     layer = nn.Linear(1, 1, bias=False)
        ...     load_weights(layer, folder + "/w.safetensors")
        >>> layer.weight.item()
        1.0
    """
    path = Path(path)
    state = model.state_dict()
    own = {k: x for k, x in state.items() if not k.endswith("num_batches_tracked")}
    tensors = _without_prefix(_read(path), own)
    for wrong in _misfits(tensors, state, own):
        raise ValueError(f"{path} does not fit the network: {wrong}; are these the weights of this network?")
    model.load_state_dict(tensors, strict=False)


def _misfits(tensors: Tensors, state: Tensors, own: Tensors) -> Iterator[str]:
    """Names that are missing or unknown, then shapes that differ."""
    yield from (f"{name!r} is missing" for name in own if name not in tensors)
    yield from (f"{name!r} is not a parameter of the network" for name in tensors if name not in state)
    for name in own:
        found, expected = tuple(tensors[name].shape), tuple(own[name].shape)
        if found != expected:
            yield f"{name!r} has shape {found}, the network's has {expected}"


def _read(path: Path) -> dict[str, Tensor]:
    with open_regular(path) as file:
        start = file.read(2)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown kind of weights; expected {', '.join(SUFFIXES)}")
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    if start not in PICKLED:
        raise FormatError(f"{path}: not a file of PyTorch weights")
    if start == b"PK":
        _check_archive(path)
    return _tensors(_unpickled(path), path)


def _check_archive(path: Path) -> None:
    """Refuse a compressed archive, which torch.save never writes and which may become any size."""
    with reading(path, "a whole PyTorch file"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise FormatError(f"{path}: a compressed archive; save the weights with torch.save")
        check_size(path, sum(member.file_size for member in members))


def _unpickled(path: Path) -> Any:
    """Tensors, numbers and containers only: anything that could run code is refused by PyTorch."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch raises many classes here
        if "weights_only" in str(error) or "Unsupported" in str(error):
            refused = f"{path} holds more than tensors; opening it could run code, so it is refused"
            advice = "Save the weights alone: torch.save(model.state_dict(), 'weights.pt')"
            raise ValueError(f"{refused}. {advice}, and name the network as file.py:factory") from error
        raise FormatError(f"{path}: not a whole PyTorch file ({type(error).__name__})") from error


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(found, Mapping):
        inside = next((found[key] for key in INSIDE if isinstance(found.get(key), Mapping)), found)
        tensors = {str(k): x for k, x in inside.items() if isinstance(x, Tensor)}
        if tensors:
            return tensors
    expected = f"a state dict, or a checkpoint with one of {', '.join(INSIDE)}"
    raise ValueError(f"{path}: no weights found; expected {expected}")


def _without_prefix(stored: Tensors, own: Tensors) -> dict[str, Tensor]:
    """The names without what wrappers wrote before them; other parts of a checkpoint are left out."""
    for prefix in ("", *PREFIXES):
        if all(prefix + name in stored for name in own):
            return _part(stored, prefix)
    return dict(stored)


def _part(stored: Tensors, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): x for k, x in stored.items() if k.startswith(prefix)}
