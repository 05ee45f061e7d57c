"""A stratified subset of a store of any size: the logits are read first, then the chosen rows."""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.calibrators.rows import originals
from salgp.features import Features
from salgp.store.store import FeatureStore

__all__ = ["stratified", "subset_of"]


def stratified(strata: Tensor, size: int, offset: float) -> Tensor:
    """Indices of a proportional stratified sample, ascending.

    All rows, ordered by stratum and then by position, are sampled at equal steps from a random start, so that
    a stratum gets its share up to one row.

    Args:
        strata: ``(n,)`` stratum of each row.
        size: rows wanted; all where there are fewer.
        offset: random start in [0, 1).

    Example:
        >>> stratified(torch.tensor([0, 0, 1, 0, 1, 0]), size=3, offset=0.0)
        tensor([0, 2, 3])
    """
    order = torch.argsort(strata, stable=True)
    position = torch.arange(len(strata)).double()
    step = max(len(strata) / size, 1.0)
    here, previous = (((position + shift) / step - offset).floor() for shift in (0, -1))
    return order[here > previous].sort().values


def subset_of(store: FeatureStore, size: int, seed: int = 0) -> tuple[Features, Tensor]:
    """A sample of about ``size`` rows, stratified by predicted class and by whether it is correct; all where
    there are fewer. A sample comes with all its augmented samples or not at all.

    Example:
        >>> import tempfile
        >>> from salgp.store.store import write_store
        >>> f = Features(torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(subset_of(write_store([(f, torch.arange(100) % 3)], folder, rows=30), 20)[0])
        20
    """
    logits, labels = store.to_features(())
    if labels is None:
        raise ValueError(f"{store.folder} has no labels; a calibrator is fitted on labelled samples only")
    rows, _ = originals(logits)
    strata = 2 * logits.label[rows] + logits.correct(labels)[rows].long()
    offset = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted = max(1, round(size * len(rows) / len(logits)))
    chosen = rows[stratified(strata, wanted, float(offset))]
    if logits.groups is not None:
        chosen = torch.isin(logits.groups, logits.groups[chosen]).nonzero()[:, 0]
    parts, first = [], 0
    for index, n in enumerate(store.rows):
        here = chosen[(chosen >= first) & (chosen < first + n)] - first
        parts.append(store.shard(index, verify=False)[0][here])
        first += n
    return Features.concatenate(parts), labels[chosen]
