"""Taps on a network: hooks that read a layer's output and pool it at once.

A `Tap` says where features are taken and how. A `Probe` hangs the hooks of several taps on a frozen copy of
the network (`salgp.network.frozen_copy`); each pass then fills a mapping with pooled features only, so no
activation outlives its layer. A module that runs several times in one pass gives ``name``, ``name@2``, ... .
A recurrent module ``gru`` gives its output sequence as ``gru`` and the final hidden state of each depth (both
directions side by side) as ``gru.0``, ``gru.1``, ... .

Pooling makes one vector per sample out of an output of any shape. More than two axes are read as ``P``
positions (pixels, tokens, time steps) of ``D`` channels. The paper reduces the channels at each position
(``channel-*``, one number per pixel); the others reduce the positions (one number per channel). An output
``(N, D)`` is used as it is.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

__all__ = ["Change", "Pooling", "Tap", "activation", "pool", "raw_logits"]

POOLINGS = (
    "auto",
    "channel-max",
    "channel-avg",
    "spatial-avg",
    "spatial-max",
    "tokens-avg",
    "first-token",
    "time-max",
    "time-last",
    "flatten",
    "none",
)
"""Names of the poolings."""

Pooling = str | Callable[..., Tensor]
"""A name out of `POOLINGS`, or a function from the batch-first output to ``(N, d)``. A function with a
parameter ``mask`` also gets the mask ``(N, P)``, true where a position is real; None where there is none.
"""
Change = Callable[[int, Tensor], Tensor]
"""``change(j, x) -> x``: the batch-first output ``x`` of tap number ``j``, perturbed."""
Put = Callable[[Tensor], Any]
"""Puts another tensor in the place of the one that was read, and returns the whole output."""


class TapError(ValueError):
    """What a layer returned cannot be read as features; the network itself works."""


@dataclass(frozen=True)
class Layout:
    """How the axes of a layer's output are to be read.

    Args:
        channels: ``"first"`` (convolutions, ``(N, C, ...)``) or ``"last"`` (tokens and sequences, ``(N, T,
            D)``).
        width: number of channels where known; decides which axis holds them when the output was permuted.
        recurrent: does it come from a recurrent layer?
        batch_axis: 0, or 1 where the layer works time first, ``(T, N, D)``.

    Example:
        >>> Layout("first", 16).channel_axis(torch.zeros(2, 16, 8, 8))
        1
        >>> Layout("last", 16).channel_axis(torch.zeros(2, 8, 8, 16))
        3
    """

    channels: str = "last"
    width: int | None = None
    recurrent: bool = False
    batch_axis: int = 0

    def channel_axis(self, x: Tensor) -> int:
        """Axis of the batch-first output ``x`` that holds its channels."""
        last = x.ndim - 1
        default = last if x.ndim == 3 and self.channels == "last" else 1
        elsewhere = 1 if default == last else last
        permuted = self.width == x.shape[elsewhere] != x.shape[default]
        return elsewhere if permuted and (x.ndim > 3 or self.channels == "first") else default


@dataclass(frozen=True)
class Tap:
    """One place in a network where features are taken.

    Args:
        name: of the features.
        module: name of the module, as in ``named_modules``.
        call: which of the module's calls within one forward pass, from 1.
        depth: of a recurrent module: the layer whose final hidden state is taken; None for its output
            sequence.
        pooling: how the output becomes a vector.
        layout: how its axes are read.
        leads: do the logits depend on it? Augmentation perturbs only layers that lead to the logits.
    """

    name: str
    module: str
    call: int = 1
    depth: int | None = None
    pooling: Pooling = "auto"
    layout: Layout = field(default_factory=Layout)
    leads: bool = True

    def read(self, output: Any, module: nn.Module, mask: Tensor | None = None) -> Tensor:
        """Pooled features ``(N, d)`` out of what the module returned."""
        if self.depth is not None:
            return pool(hidden_state(output, module, self.depth)[0]).clone()
        x, own_mask, _ = activation(output)
        if x is None:
            raise TapError(
                f"layer {self.name!r} returned {type(output).__name__} without any "
                f"floating-point tensor; leave it out"
            )
        if self.layout.batch_axis == 1 and own_mask is None and x.ndim > 2:
            x = x.transpose(0, 1)
        try:
            pooled = pool(x, self.pooling, self.layout, mask if own_mask is None else own_mask)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, IndexError, RuntimeError) as error:  # also of the user's own pooling
            raise TapError(f"layer {self.name!r}: {error}") from error
        return pooled.clone()  # the network may yet overwrite its output in place

    def replaced(self, output: Any, module: nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
        """What the module returned, with that part changed which `read` reads; ``change`` is batch first."""
        if self.depth is not None:
            state, put = hidden_state(output, module, self.depth)
            return put(change(state))
        x, mask, put = activation(output)
        axis = self.layout.batch_axis if mask is None else 0  # padded sequences are batch first
        if x is None or x.ndim <= axis:
            return output
        return put(change(x.transpose(0, axis)).transpose(0, axis))


class Probe:
    """The hooks of some taps on one network, for one caller at a time.

    Args:
        network: a private copy of the user's network; the hooks stay on it.
        taps: where to take features.
        pooled: take features, or only pass outputs through the change of `reading`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        >>> probe = Probe(model, [Tap("relu", "1", layout=Layout("first"))])
        >>> with torch.no_grad(), probe.reading() as found:
        ...     _ = model(torch.zeros(2, 1, 8, 8))
        >>> found["relu"].shape
        torch.Size([2, 4])
    """

    def __init__(self, network: nn.Module, taps: Sequence[Tap], pooled: bool = True) -> None:
        self._taps = tuple(taps)
        self._pooled = pooled
        self._found: dict[str, Tensor] | None = None
        self._calls: dict[str, int] = {}
        self._mask: Tensor | None = None
        self._change: Change | None = None
        for name in dict.fromkeys(tap.module for tap in taps):
            network.get_submodule(name).register_forward_hook(self._hook(name))

    @contextmanager
    def reading(
        self, mask: Tensor | None = None, change: Change | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """While open, a forward pass fills the yielded mapping from tap name to pooled features.

        Args:
            mask: ``(N, T)`` true at real positions, for the poolings over tokens.
            change: perturbs tapped outputs before they are read and passed on.
        """
        self._found, self._mask, self._change = {}, mask, change
        self._calls.clear()
        try:
            yield self._found
        finally:
            self._found = self._mask = self._change = None

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        """Reads what a module returned, and gives it back, perhaps changed."""
        own = [(j, tap) for j, tap in enumerate(self._taps) if tap.module == name]

        def hook(module: nn.Module, _: Any, output: Any) -> Any:
            if self._found is None:
                return output
            call = self._calls[name] = self._calls.get(name, 0) + 1
            now = [(j, tap) for j, tap in own if tap.call == call]
            if self._change is not None:
                for j, tap in now:
                    change = functools.partial(self._change, j)
                    output = tap.replaced(output, module, change)
            if self._pooled:
                for _, tap in now:
                    self._found[tap.name] = tap.read(output, module, self._mask)
            return output

        return hook


def activation(output: Any) -> tuple[Tensor | None, Tensor | None, Put]:
    """The tensor a module returned, its mask ``(N, T)`` where it carries lengths, and how to replace it.

    Of a tuple, the first floating-point tensor; of a mapping or dataclass, ``last_hidden_state`` or else the
    first; packed and nested sequences are padded.

    Example:
        >>> x, mask, put = activation((torch.zeros(2), None))
        >>> put(x + 1)
        (tensor([1., 1.]), None)
    """
    if isinstance(output, PackedSequence):
        padded, lengths = pad_packed_sequence(output, batch_first=True)
        options: dict[str, Any] = {"lengths": lengths, "batch_first": True, "enforce_sorted": False}
        pack = functools.partial(pack_padded_sequence, **options)
        return padded, _mask(lengths, padded), pack
    if isinstance(output, Tensor):
        if not output.is_floating_point():
            return None, None, lambda new: output
        if not output.is_nested:
            return output, None, lambda new: new
        padded = output.to_padded_tensor(0.0)
        lengths = torch.tensor(list(map(len, output.unbind())))
        return padded, _mask(lengths, padded), functools.partial(_nested, lengths)
    parts: dict[Any, Any] = dict(named_fields(output))
    if not parts and isinstance(output, tuple | list):
        parts = dict(enumerate(output))
    for where in sorted(parts, key=lambda key: key != "last_hidden_state"):
        if isinstance(parts[where], Tensor | PackedSequence | tuple | list | Mapping):
            x, mask, put = activation(parts[where])
            if x is not None:
                return x, mask, functools.partial(_with_part, output, where, put)
    return None, None, lambda new: output


def hidden_state(output: Any, module: nn.Module, depth: int) -> tuple[Tensor, Put]:
    """Final hidden state of one depth of a recurrent module, ``(N, directions * hidden)``, and how to replace
    it.

    Example:
        >>> gru = nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        >>> hidden_state(gru(torch.zeros(5, 7, 3)), gru, 1)[0].shape
        torch.Size([5, 8])
    """
    if not isinstance(module, nn.RNNBase):
        raise TypeError(f"only recurrent layers have hidden states per depth, got {type(module).__name__}")
    lstm = isinstance(output[1], tuple)
    state = output[1][0] if lstm else output[1]  # (depth * directions, N, hidden)
    directions = 2 if module.bidirectional else 1
    own = slice(depth * directions, (depth + 1) * directions)
    rows = state[own].transpose(0, 1)  # (N, directions, hidden)

    def put(new: Tensor) -> Any:
        changed = state.clone()
        changed[own] = new.reshape(rows.shape).transpose(0, 1)
        return output[0], (changed, *output[1][1:]) if lstm else changed

    return rows.flatten(1), put


def pool(
    x: Tensor, how: Pooling = "auto", layout: Layout | None = None, mask: Tensor | None = None
) -> Tensor:
    """Reduce a batch-first layer output to ``(N, d)``.

    ``auto`` takes the maximum over time for recurrent layers and the mean over positions for all others.
    Half precision is accumulated in, and returned as, single precision.

    Args:
        x: ``(N, ...)`` output of a layer.
        how: one of `POOLINGS`, or a function that gives ``(N, d)``.
        layout: how to read the axes; by default ``(N, T, D)`` for three axes, ``(N, C, ...)`` for more.
        mask: ``(N, P)`` true where a position is real and not padding. It concerns sequences, ``(N, P, D)``;
            one of another shape is refused.

    Example:
        >>> image = torch.arange(16.0).reshape(1, 2, 2, 4)  # (N, C, H, W)
        >>> pool(image, "channel-max")
        tensor([[ 8.,  9., 10., 11., 12., 13., 14., 15.]])
        >>> pool(image, "spatial-avg")
        tensor([[ 3.5000, 11.5000]])
        >>> pool(torch.ones(2, 5), "channel-max").shape
        torch.Size([2, 5])
    """
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    if not isinstance(how, str):
        return _by_function(how, x, mask).to(dtype)
    if how not in POOLINGS:
        raise ValueError(f"unknown pooling {how!r}; choose one of {', '.join(POOLINGS)}, or pass a function")
    if x.ndim == 2:
        return x.to(dtype)
    if x.ndim == 1 or how == "flatten":
        return x.reshape(x.shape[0], -1).to(dtype)
    if how == "none":
        raise ValueError(
            f"pooling 'none' needs an output of shape (n, d), got {tuple(x.shape)}; choose one "
            f"of {', '.join(POOLINGS)}"
        )
    layout = layout or Layout()
    axis = layout.channel_axis(x)
    if how == "auto":
        how = "time-max" if layout.recurrent else "spatial-avg"
    if mask is not None and x.ndim == 3 and not how.startswith("channel-"):
        return _masked(x if axis == 2 else x.transpose(1, 2), how, mask, dtype)
    axes = [axis]
    if not how.startswith("channel-"):
        axes = [i for i in range(1, x.ndim) if i != axis]
    if how.endswith("avg"):
        return x.mean(dim=axes, dtype=dtype).flatten(1)
    if how.endswith("max"):
        return x.amax(dim=axes).flatten(1).to(dtype)
    positions = x.movedim(axis, -1).flatten(1, -2)  # (N, P, D)
    return positions[:, 0 if how == "first-token" else -1].to(dtype)


def _masked(x: Tensor, how: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens ``(N, P, D)`` pooled over those that are real."""
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"the attention mask has shape {tuple(mask.shape)}, but the layer gives {x.shape[1]} "
            f"positions for {x.shape[0]} samples, so nothing tells padding from tokens; leave the "
            f"layer out, or pool it by a function: pooling={{layer: lambda x, mask: ...}}"
        )
    mask = mask.bool()
    if how.endswith("avg"):
        real = x.masked_fill(~mask[:, :, None], 0)
        total = real.sum(dim=1, dtype=dtype)
        return total / mask.sum(dim=1, keepdim=True).clamp_min(1)
    if how.endswith("max"):
        real = x.masked_fill(~mask[:, :, None], -torch.inf)
        top = real.amax(dim=1)
        return top.masked_fill(~mask.any(dim=1, keepdim=True), 0).to(dtype)
    place = mask.int().argmax(dim=1)
    if how != "first-token":
        place = x.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    return x[torch.arange(len(x), device=x.device), place].to(dtype)


def _by_function(how: Callable[..., Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
    """Pooled by a function of the user, whose result is checked."""
    try:
        takes_mask = "mask" in inspect.signature(how).parameters
    except (TypeError, ValueError):  # functions written in C do not say what they take
        takes_mask = False
    pooled: object = how(x, mask=mask) if takes_mask else how(x)
    got = type(pooled).__name__
    if isinstance(pooled, Tensor):
        if pooled.is_floating_point() and pooled.ndim == 2 and len(pooled) == len(x):
            return pooled
        got = f"{pooled.dtype} {tuple(pooled.shape)}"
    raise ValueError(
        f"the pooling function must return a floating-point tensor of shape ({len(x)}, d), got {got}"
    )


def _with_part(output: Any, where: Any, put: Put, new: Tensor) -> Any:
    """A container with one member replaced."""
    part = put(new)
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed[where] = part
        return changed
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return dataclasses.replace(output, **{where: part})
    if isinstance(where, str):  # a named tuple
        return output._replace(**{where: part})  # type: ignore[attr-defined]
    return type(output)([*output[:where], part, *output[where + 1 :]])


def _nested(lengths: Tensor, padded: Tensor) -> Tensor:
    rows = zip(padded, lengths.tolist(), strict=True)
    return torch.nested.as_nested_tensor([row[:n] for row, n in rows])


def _mask(lengths: Tensor, padded: Tensor) -> Tensor:
    positions = torch.arange(padded.shape[1], device=padded.device)
    return positions < lengths.to(padded.device)[:, None]


FORWARD = "pass reader=salgp.Reader(forward=lambda model, batch: ...) to return the logits yourself"
"""What to do where an output holds no class scores."""


def raw_logits(output: Any) -> Tensor:
    """Find the class scores in whatever a network returned.

    A tensor is taken as it is; a mapping, dataclass or named tuple must have ``logits``. A plain tuple or
    list must hold one floating-point tensor ``(n, c)`` or ``(n,)``. Where it holds several, as ``(features,
    logits)`` does, nothing tells which are the scores: it is refused.

    Example:
        >>> raw_logits({"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3)}).shape
        torch.Size([2, 3])
        >>> raw_logits((torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(2, 7, 5))).shape
        torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    fields = dict(named_fields(output))
    if isinstance(fields.get("logits"), Tensor):
        return fields["logits"]
    if fields:
        raise ValueError(
            f"the network returned {type(output).__name__} without 'logits' (it has "
            f"{', '.join(map(str, fields))}); {FORWARD}"
        )
    parts = output if isinstance(output, tuple | list) else ()
    tensors = [(i, x) for i, x in enumerate(parts) if isinstance(x, Tensor)]
    found = [i for i, x in tensors if x.is_floating_point() and x.ndim in (1, 2)]
    if not found:
        raise ValueError(f"found no logits in the {type(output).__name__} the network returned; {FORWARD}")
    if len(found) > 1:
        listed = " and ".join(f"[{i}] {shape_of(parts[i])}" for i in found)
        raise ValueError(
            f"the network returned a {type(output).__name__} in which {len(found)} tensors could be the "
            f"class scores, {listed}; say which, for batches (x, y): reader=salgp.Reader(forward=lambda "
            f"model, batch: model(batch[0])[{found[-1]}])"
        )
    scores: Tensor = parts[found[0]]
    return scores


def named_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a mapping, dataclass or named tuple; nothing for any other value."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, tuple):
        yield from zip(getattr(value, "_fields", ()), value, strict=False)


def shape_of(x: Any) -> str:
    """Shape and type in words; the samples are ``n``, since a few of them may have been taken.

    Example:
        >>> shape_of(torch.zeros(5, 3))
        '(n, 3) of torch.float32'
    """
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    axes = ["n", *map(str, x.shape[1:])] if x.ndim else []
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''}) of {x.dtype}"
