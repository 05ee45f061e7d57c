"""Fit a calibrator to a store of any size, with memory that does not grow.

How a method is fitted out of core is its own affair (`Calibrator.fit_stream`); here it gets the store as a
source of rows. Methods without such a way that read the logits only are fitted on all rows in memory, others
on a stratified sample of the store that keeps the augmented samples of a sample together.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning, Calibrator
from salgp.features import Features
from salgp.io.files import AnyPath
from salgp.progress import progress_bar
from salgp.store.engines import run
from salgp.store.store import FeatureStore

__all__ = ["fit_store"]


def fit_store(
    calibrator: Calibrator,
    store: AnyPath | FeatureStore,
    *,
    reference: AnyPath | FeatureStore | None = None,
    subset: int = 4000,
    engine: str = "local",
    workers: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Calibrator:
    """Fit a calibrator to a store.

    `LayerEvidence` with a ``reference`` is fitted to every row, out of core. Calibrators that read the logits
    only are fitted on all rows in memory (a million rows of ten logits are 40 MB). Others that read layers,
    such as `SALGP`, are fitted on a stratified subset in which no sample is parted from its augmented ones; a
    warning says so.

    Args:
        calibrator: to be fitted.
        store: labelled features.
        reference: labelled features of the network's training set, for methods that compare against it.
        subset: rows of the subset.
        engine: ``local``, ``ray`` (started here), or the address of a running Ray cluster.
        workers: pieces of work at once; by default one per core.
        seed: of the subset.
        progress: show rate and time left (needs ``rich``).

    Returns:
        The fitted calibrator itself.

    Example:
        >>> import tempfile, torch
        >>> from salgp.calibrators import get
        >>> from salgp.store.store import write_store
        >>> g = torch.Generator().manual_seed(0)
        >>> f = Features(torch.randn(300, 3, generator=g), {"a": torch.randn(300, 4, generator=g)})
        >>> labels = (f.label + (torch.arange(300) % 4 == 0)) % 3  # three of four are right
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = write_store([(f, labels)], folder, rows=100)
        ...     fit_store(get("temperature"), store).temperature_ > 0
        True
    """
    rows = _labelled(store)
    known = None if reference is None else _labelled(reference)
    if known is not None and known.widths != rows.widths:
        raise ValueError(f"reference layers {known.widths} differ from the calibration layers {rows.widths}")
    how = {"engine": engine, "workers": workers}
    source = StoreSource(rows, known, how, subset, seed, progress)
    fitted = calibrator.fit_stream(source)
    return _fit_in_memory(calibrator, source) if fitted is None else fitted


@dataclass(frozen=True)
class StoreSource:
    """The rows of a store, as `salgp.calibrators.base.Source` asks for them.

    Args:
        store: calibration data.
        reference: training data, or None.
        how: options of `salgp.store.engines.run`.
        subset_rows: rows of a subset in memory.
        seed: of the subset.
        progress: show rate and time left.
    """

    store: FeatureStore
    reference: FeatureStore | None
    how: Mapping[str, Any]
    subset_rows: int
    seed: int
    progress: bool

    @property
    def rows(self) -> int:
        """Number of calibration rows."""
        return len(self.store)

    @property
    def has_reference(self) -> bool:
        """Is there a store of the training set?"""
        return self.reference is not None

    def subset(self) -> tuple[Features, Tensor]:
        """A stratified sample with whole groups."""
        return subset_of(self.store, self.subset_rows, self.seed)

    def over_rows(
        self, name: str, function: Callable[..., Any], state: Any, *, reference: bool = False
    ) -> Any:
        """Add up ``function`` over all shards, in their order, which fixes every bit of the result."""
        store = self.reference if reference else self.store
        if store is None:
            raise ValueError("this source has no reference: give a store of the network's training set")
        pieces = [(function, state, str(store.folder), i) for i in range(store.n_shards)]
        total = None
        with progress_bar(name, len(store), self.progress, unit="rows") as advance:
            parts = run(sum_shard, pieces, **self.how)
            for rows, part in zip(store.rows, parts, strict=True):
                total = part if total is None else total + part
                advance(rows)
        return total


def sum_shard(function: Callable[..., Any], state: Any, store: str, index: int) -> Any:
    """Contribution of one shard to a pass."""
    return function(state, *FeatureStore(store).shard(index), index)


def _labelled(store: AnyPath | FeatureStore) -> FeatureStore:
    found = store if isinstance(store, FeatureStore) else FeatureStore(store)
    if not found.has_labels:
        raise ValueError(f"{found.folder} has no labels; a calibrator is fitted on labelled samples only")
    return found


def _fit_in_memory(calibrator: Calibrator, source: StoreSource) -> Calibrator:
    if not calibrator.needs_layers:
        return calibrator.fit(*source.store.to_features(layers=()))
    reference = source.reference if calibrator.uses_reference else None
    known = None if reference is None else reference.to_features()
    features, labels = source.subset()
    if len(features) < source.rows:
        warnings.warn(
            f"{calibrator.display_name} is fitted on {len(features):,} of {source.rows:,} rows, a stratified "
            f"subset; subset= sets their number",
            CalibrationWarning,
            stacklevel=3,
        )
    return calibrator.fit(features, labels, reference=known)


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
    position = torch.arange(-1, len(strata)).double()
    step = max(len(strata) / size, 1.0)
    reached = (position / step - offset).floor()
    return order[reached.diff() > 0].sort().values


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
    logits, labels = _labelled(store).to_features(())
    assert labels is not None
    rows, _ = logits.originals
    strata = (2 * logits.label + logits.correct(labels))[rows]
    generator = torch.Generator().manual_seed(seed)
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    wanted = max(1, round(size * len(rows) / len(logits)))
    chosen = torch.zeros(len(store), dtype=torch.bool)
    chosen[rows[stratified(strata, wanted, offset.item())]] = True
    if (groups := logits.groups) is not None:
        chosen = torch.isin(groups, groups[chosen])
    each = enumerate(chosen.split(store.rows))
    parts = [store.shard(index)[0][here] for index, here in each]
    return Features.concatenate(parts), labels[chosen]
