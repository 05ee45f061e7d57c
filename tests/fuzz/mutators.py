"""Seeded mutators: damage as disks, kills and editors do it, and edits as an attacker would make them.

A mutator turns bytes (or a JSON value) into others and depends on nothing but the random numbers it is given:
a mutant is repeated by its seed.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["mutate_bytes", "mutate_json", "mutate_tensors"]

INTERESTING: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**12, -(10**12), 2**63, 10**400, 0.0, -1.0, 0.5, 1e308, float("nan"),
    float("inf"), "", "a", "..", "../../x", "/etc/passwd", "$tensor", "\x00", "\x1b[31m", [], {}, [[]],
    {"$tensor": "x"}, {"$class": "Rows"}, {"$dict": [[1]]}, {"$tuple": 3}, {"a": {"b": {}}},
)  # fmt: skip
TOKENS = (
    b"0",
    b"-1",
    b"999999999999",
    b"NaN",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b"\n",
    b"\x00",
    b"\xff",
    b"=",
)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to three random damages."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(_DAMAGES)(changed, rng)
    return bytes(changed)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One to three random edits of a JSON value; where it can, in place."""
    changed = value
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = _edit(changed, rng)
    return changed


def mutate_tensors(
    tensors: dict[str, Tensor], metadata: dict[str, str], rng: random.Random
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One tensor, one number of it, or one entry of the metadata changed or gone."""
    if metadata and rng.random() < 0.2:
        return tensors, _edit_metadata(metadata, rng)
    name = rng.choice(sorted(tensors))
    x = tensors[name]
    if rng.random() < 0.1:
        return {k: v for k, v in tensors.items() if k != name}, metadata
    changed = _one_number(x, rng) if x.numel() and rng.random() < 0.6 else rng.choice(_RESHAPED)(x, rng)
    return {**tensors, name: changed}, metadata


def _one_number(x: Tensor, rng: random.Random) -> Tensor:
    changed = x.clone().reshape(-1)
    index = rng.randrange(len(changed))
    if x.dtype is torch.bool:
        changed[index] = not changed[index]
    elif rng.random() < 0.5:  # a bit
        raw = changed.view(torch.uint8)
        raw[index * x.element_size() + rng.randrange(x.element_size())] ^= 1 << rng.randrange(8)
    elif x.is_floating_point():
        values = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-30, torch.finfo(x.dtype).max)
        changed[index] = rng.choice(values)
    else:
        changed[index] = rng.choice((-1, 0, 1, 2, torch.iinfo(x.dtype).max, torch.iinfo(x.dtype).min))
    return changed.reshape(x.shape)


def _edit_metadata(metadata: dict[str, str], rng: random.Random) -> dict[str, str]:
    key = rng.choice(sorted(metadata))
    if rng.random() < 0.2:
        return {k: v for k, v in metadata.items() if k != key}
    if rng.random() < 0.6 and metadata[key][:1] in ("{", "["):
        return {**metadata, key: json.dumps(mutate_json(json.loads(metadata[key]), rng))}
    return {**metadata, key: rng.choice(("", "[", "99", "-1", "[1]", "null", '["x"]', "[" * 5000, "{}"))}


_RESHAPED: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda x, rng: x[:0] if x.ndim else x.reshape(1),
    lambda x, rng: x.reshape(-1),
    lambda x, rng: x[None],
    lambda x, rng: x.to(rng.choice([torch.float16, torch.int64, torch.bool])),
    lambda x, rng: torch.full_like(x, float(rng.choice([0, -1, 1]))) if x.dtype != torch.uint8 else x[:0],
    lambda x, rng: torch.full(x.shape, rng.choice([float("nan"), float("inf"), -1e38])),
    lambda x, rng: torch.cat([x.reshape(-1), x.reshape(-1)]),
)


def _at(x: bytearray, rng: random.Random) -> int:
    return rng.randrange(len(x) + 1)


def _flip(x: bytearray, rng: random.Random) -> None:
    if x:
        x[rng.randrange(len(x))] ^= 1 << rng.randrange(8)


def _set(x: bytearray, rng: random.Random) -> None:
    if x:
        x[rng.randrange(len(x))] = rng.choice((0, 255, 48, 57, 32, rng.randrange(256)))


def _cut(x: bytearray, rng: random.Random) -> None:
    del x[_at(x, rng) :]


def _remove(x: bytearray, rng: random.Random) -> None:
    start = _at(x, rng)
    del x[start : start + rng.choice((1, 2, 4, 8, 100, 4096))]


def _insert(x: bytearray, rng: random.Random) -> None:
    start = _at(x, rng)
    x[start:start] = rng.choice((rng.choice(TOKENS), rng.randbytes(rng.choice((1, 4, 64)))))


def _double(x: bytearray, rng: random.Random) -> None:
    start = _at(x, rng)
    x[start:start] = x[start : start + rng.choice((1, 8, 64, 1024))]


def _exchange(x: bytearray, rng: random.Random) -> None:
    size, a, b = rng.choice((1, 4, 8, 64)), _at(x, rng), _at(x, rng)
    x[a : a + size], x[b : b + size] = x[b : b + size], x[a : a + size]


def _blank(x: bytearray, rng: random.Random) -> None:
    start, size = _at(x, rng), rng.choice((1, 8, 64, 512))
    x[start : start + size] = bytes(len(x[start : start + size]))


def _number(x: bytearray, rng: random.Random) -> None:
    found = np.frombuffer(bytes(x), dtype=np.uint8)
    digits = np.flatnonzero((found >= 48) & (found <= 57)).tolist()
    if digits:
        start = rng.choice(digits)
        x[start : start + 1] = rng.choice((b"0", b"9", b"-1", b"1e9", b"99999999", b".5", b"1e400"))


_DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip, _flip, _flip, _set, _cut, _remove, _insert, _double, _exchange, _blank, _number,
)  # fmt: skip


def _edit(value: Any, rng: random.Random) -> Any:
    """Change one node, chosen by walking down at random."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        deed = rng.random()
        if deed < 0.1:
            del value[key]
        elif deed < 0.15:
            value[rng.choice(("x", "file", key + "_", "$class"))] = value.pop(key)
        else:
            value[key] = _edit(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        deed = rng.random()
        if deed < 0.1:
            del value[index]
        elif deed < 0.2:
            value.insert(index, copy.deepcopy(rng.choice(value)))
        else:
            value[index] = _edit(value[index], rng)
        return value
    if rng.random() < 0.02:
        return _nested(rng.choice((50, 300)))
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice((-value, value + 1, value * 10**6, value // 3, str(value)))
    return copy.deepcopy(rng.choice(INTERESTING))


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value
