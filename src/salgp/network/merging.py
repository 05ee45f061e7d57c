"""Batches of a size that suits the machine: small ones joined, the first few of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from salgp.network.batches import Batch

__all__ = ["leading", "merged", "size_of"]

ROWS, BYTES = 256, 16_000_000
"""Batches are joined up to so many samples, unless their inputs are larger than so many bytes."""


def size_of(batch: Batch) -> int:
    return len(batch.labels)


def leading(batches: Sequence[Batch], rows: int) -> Iterator[Batch]:
    """The first batches with so many samples together; the last of them is cut where that is possible."""
    for batch in batches:
        if rows <= 0:
            return
        part = batch.head(rows)
        rows -= size_of(part)
        yield part


def merged(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Neighbouring batches joined into larger ones, where they consist of plain tensors of one shape."""
    waiting: list[Batch] = []
    for batch in batches:
        if waiting and not _fits([*waiting, batch]):
            yield _joined(waiting)
            waiting = []
        waiting.append(batch)
    yield _joined(waiting)


def _tensors(batch: Batch) -> list[Any]:
    return [*batch.inputs, *batch.keywords.values(), *batch.extra, batch.labels]


def _fits(batches: Sequence[Batch]) -> bool:
    columns = list(zip(*(_tensors(batch) for batch in batches), strict=False))
    same_keys = len({(tuple(b.keywords), len(b.inputs), len(b.extra), b.form) for b in batches}) == 1
    n = [size_of(batch) for batch in batches]
    plain = same_keys and all(
        isinstance(x, Tensor) and x.ndim > 0 and len(x) == n[i] and x.shape[1:] == xs[0].shape[1:]
        for xs in columns
        for i, x in enumerate(xs)
    )
    return plain and sum(n) <= ROWS and sum(x.nbytes for xs in columns for x in xs) <= BYTES


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return replace(
        first,
        inputs=tuple(torch.cat(xs) for xs in zip(*(b.inputs for b in batches), strict=True)),
        keywords={key: torch.cat([b.keywords[key] for b in batches]) for key in first.keywords},
        labels=torch.cat([b.labels for b in batches]),
        extra=tuple(torch.cat(xs) for xs in zip(*(b.extra for b in batches), strict=True)),
    )
