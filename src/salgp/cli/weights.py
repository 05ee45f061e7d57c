"""The user's weights: safetensors, or a checkpoint of tensors that PyTorch reads without running code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["SUFFIXES", "load_weights"]

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
INSIDE = ("state_dict", "model_state_dict", "model", "net", "weights", "params")
"""Where training scripts put the weights inside a checkpoint."""
PREFIXES = ("", "module.", "model.", "net.", "network.", "_orig_mod.", "model._orig_mod.", "module.model.")
"""What wrappers (DataParallel, Lightning, torch.compile) write before each name."""


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into the network; refuses weights of another network."""
    own = {k: x for k, x in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    stored = _read(path)
    tensors = _without_prefix(stored, own)
    missing = [name for name in own if name not in tensors]
    extra = [name for name in tensors if name not in model.state_dict()]
    shapes = [name for name in own if name in tensors and own[name].shape != tensors[name].shape]
    if missing or extra or shapes:
        first = (missing or extra or shapes)[0]
        how = (
            "is missing"
            if missing
            else "is not a parameter of the network"
            if extra
            else f"has shape {tuple(tensors[first].shape)}, the network's has {tuple(own[first].shape)}"
        )
        raise ValueError(
            f"{path} does not fit the network: {first!r} {how}; are these the weights of this network?"
        )
    model.load_state_dict(tensors, strict=False)


def _read(path: Path) -> dict[str, Tensor]:
    from salgp.storage import read_tensors

    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown kind of weights; expected {', '.join(SUFFIXES)}")
    return _tensors(_unpickled(path), path)


def _unpickled(path: Path) -> Any:
    """Tensors, numbers and containers only: anything that could run code is refused by PyTorch."""
    import torch

    from salgp.storage import FormatError

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch raises many classes here
        if not _looks_pickled(path):
            raise FormatError(f"{path}: not a file of PyTorch weights") from error
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise ValueError(
                f"{path} holds more than tensors; opening it could run code, so it is refused. Save the "
                f"weights alone: torch.save(model.state_dict(), 'weights.pt'), and name the network as "
                f"file.py:factory"
            ) from error
        raise FormatError(f"{path}: not a whole PyTorch file ({type(error).__name__})") from error


def _looks_pickled(path: Path) -> bool:
    """Does it begin as torch.save writes, now (a zip archive) or long ago (a pickle)?"""
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    from torch import Tensor

    if isinstance(found, Mapping):
        inside = next((found[key] for key in INSIDE if isinstance(found.get(key), Mapping)), found)
        tensors = {str(k): x for k, x in inside.items() if isinstance(x, Tensor)}
        if tensors:
            return tensors
    raise ValueError(
        f"{path}: no weights found; expected a state dict, or a checkpoint with one of {', '.join(INSIDE)}"
    )


def _without_prefix(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names without what wrappers wrote before them; other parts of a checkpoint are left out."""
    for prefix in PREFIXES[1:]:
        if own and all(prefix + name in stored for name in own) and not all(name in stored for name in own):
            return {k.removeprefix(prefix): x for k, x in stored.items() if k.startswith(prefix)}
    return dict(stored)
