"""A stratified subset of a store of any size, in two passes and little memory."""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.calibrators.copies import originals
from salgp.features import Features
from salgp.store.store import FeatureStore

__all__ = ["stratified", "subset_of"]


def stratified(strata: Tensor, before: Tensor, totals: Tensor, size: int, offset: float) -> Tensor:
    """Which rows of one shard belong to a proportional stratified sample of the whole store.

    All rows, ordered by stratum and then by position, are sampled at equal steps from a random start; a
    stratum so gets its share up to one row. A shard needs only the counts of the others.

    Args:
        strata: ``(n,)`` stratum of each row of this shard.
        before: ``(S,)`` rows of each stratum in earlier shards.
        totals: ``(S,)`` rows of each stratum in all shards.
        size: rows wanted in all.
        offset: random start in [0, 1).

    Returns:
        Indices of the chosen rows, ascending.

    Example:
        >>> strata = torch.tensor([0, 0, 1, 0, 1, 0])
        >>> stratified(strata, torch.zeros(2).long(), torch.tensor([4, 2]), size=3, offset=0.0)
        tensor([0, 2, 3])
    """
    order = torch.argsort(strata, stable=True)
    counts = torch.bincount(strata, minlength=len(totals))
    starts = totals.cumsum(0) - totals + before - (counts.cumsum(0) - counts)
    position = torch.arange(len(strata)) + starts[strata[order]]
    step = max(int(totals.sum()) / size, 1.0)
    here, previous = (((position + shift).double() / step - offset).floor() for shift in (0, -1))
    return order[here > previous].sort().values


def subset_of(
    store: FeatureStore, size: int, seed: int = 0, layers: tuple[str, ...] | None = None
) -> tuple[Features, Tensor]:
    """A sample of about ``size`` rows, stratified by predicted class and by whether it is correct; all where
    there are fewer. A sample comes with all its perturbed copies or not at all.

    Example:
        >>> import tempfile
        >>> from salgp.store.store import write_store
        >>> f = Features(torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(subset_of(write_store([(f, torch.arange(100) % 3)], folder, rows=30), 20)[0])
        20
    """
    if not store.has_labels:
        raise ValueError(f"{store.folder} has no labels; a calibrator is fitted on labelled samples only")
    if store.has_groups:
        return _whole_groups(store, size, seed, layers)
    counts = torch.stack(
        [
            torch.bincount(_strata(*store.shard(i, ())), minlength=2 * store.n_classes)
            for i in range(store.n_shards)
        ]
    )
    offset = _offset(seed)
    before, parts = counts.cumsum(0) - counts, []
    for i in range(store.n_shards):
        features, labels = store.shard(i, layers, verify=False)
        assert labels is not None
        chosen = stratified(_strata(features, labels), before[i], counts.sum(0), size, offset)
        parts.append((features[chosen], labels[chosen]))
    return Features.concatenate([f for f, _ in parts]), torch.cat([y for _, y in parts])


def _whole_groups(
    store: FeatureStore, size: int, seed: int, layers: tuple[str, ...] | None
) -> tuple[Features, Tensor]:
    """All rows of some groups: stratified by their originals, about ``size`` rows in all."""
    logits, labels = store.to_features(())
    assert labels is not None
    assert logits.groups is not None
    first, _ = originals(logits)
    strata = _strata(logits[first], labels[first])
    totals = torch.bincount(strata, minlength=2 * store.n_classes)
    wanted = max(1, round(size * len(first) / len(logits)))
    chosen = stratified(strata, torch.zeros_like(totals), totals, wanted, _offset(seed))
    groups, parts = logits.groups[first[chosen]], []
    for i in range(store.n_shards):
        features, y = store.shard(i, layers, verify=False)
        assert y is not None
        assert features.groups is not None
        rows = torch.isin(features.groups, groups).nonzero()[:, 0]
        parts.append((features[rows], y[rows]))
    return Features.concatenate([f for f, _ in parts]), torch.cat([y for _, y in parts])


def _offset(seed: int) -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def _strata(features: Features, labels: Tensor | None) -> Tensor:
    assert labels is not None
    return 2 * features.label + features.correct(labels).long()
