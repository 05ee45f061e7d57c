"""A device in disguise: tensors that say they are elsewhere, though their numbers are on the processor.

An accelerator refuses an operation on tensors of two devices, and hands no numbers over to NumPy. So do
these, which lets tests look for such mistakes on any machine. Inside `Elsewhere`, whatever is sent to the
device ``meta`` becomes an `Away` tensor, which computes as ever but meets no tensor of the processor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Away", "Elsewhere"]


INDEXING = ("aten::index", "aten::index_put_", "aten::index_put")
"""Here the rows of a tensor elsewhere may be named by numbers of the processor."""


class Away(Tensor):
    """A tensor whose numbers are in ``here``, on the processor; it claims to be on ``meta``."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Away:
        away = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), dtype=here.dtype, device="meta"
        )
        away.here = here
        return away

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """Sends to ``meta`` what is made for it or moved there, and lets no two devices meet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result on the processor, and then where it belongs."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    away = [isinstance(x, Away) for x in given]
    name = func._schema.name
    whole = args[:1] if name in INDEXING and isinstance(args[0], Away) else given
    mixed = any(away) and any(x.ndim for x in whole if not isinstance(x, Away))
    assert not mixed or name == "aten::copy_", f"{name} mixes tensors of two devices"
    place = kwargs.get("device")
    there = any(away) if place is None else torch.device(place).type == "meta"
    plain_kwargs = {k: torch.device("cpu") if k == "device" else x for k, x in kwargs.items()}
    plain_args, plain_kwargs = tree_map(_here, (args, plain_kwargs))
    out = func(*plain_args, **plain_kwargs)
    wrapped = tree_map(lambda x: Away(x) if isinstance(x, Tensor) and there else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if any(away) and there else wrapped


def _here(x: Any) -> Any:
    return x.here if isinstance(x, Away) else x
