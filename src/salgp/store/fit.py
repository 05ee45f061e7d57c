"""Fit a calibrator to a store of any size, with memory that does not grow.

How a method is fitted out of core is its own affair (`Calibrator.fit_stream`); here it gets the store as a
source of rows. Methods without such a way that read the logits only are fitted on all rows in memory, others
on a stratified sample of the store that keeps the copies of a sample together.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.features import Features
from salgp.storage import locked
from salgp.store.store import FeatureStore
from salgp.store.stream import StoreSource

__all__ = ["INDUCING", "fit_store"]

INDUCING = ("stream", "subset")


def fit_store(
    calibrator: Calibrator,
    store: str | os.PathLike[str] | FeatureStore,
    *,
    reference: str | os.PathLike[str] | FeatureStore | None = None,
    work: str | os.PathLike[str] | None = None,
    subset: int = 4000,
    inducing: str = "stream",
    rounds: int = 20,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    seed: int = 0,
    verify: bool = True,
    progress: bool = False,
) -> Calibrator:
    """Fit a calibrator to every row of a store; the same call continues a killed fit.

    `LayerEvidence` with a ``reference``, `SALGP` and `ResidualGP` are fitted out of core. Calibrators that
    read the logits only are fitted on all rows in memory (a million rows of ten logits are 40 MB). Others
    that read layers are fitted on a stratified subset in which no sample is parted from its copies.

    Args:
        calibrator: to be fitted; the ``n_inducing`` of a Gaussian process is its number of inducing rows.
        store: labelled features.
        reference: labelled features of the network's training set, for methods that compare against it.
        work: folder for intermediate results, reachable from all workers; by default a temporary one, and
            then a killed fit begins anew.
        subset: rows of the subset.
        inducing: where inducing rows are chosen: over the ``stream`` of all rows, or from the ``subset``.
        rounds: most passes of a Bernoulli likelihood.
        engine: ``local`` or ``ray``.
        workers: pieces of work at once; by default one per core.
        ray_address: of a running Ray cluster; by default Ray is started on this machine.
        seed: of the subset.
        verify: compare the checksum of every shard in the first pass.
        progress: show rate and time left (needs ``rich``).

    Returns:
        The fitted calibrator itself.

    Example:
        >>> import torch
        >>> from salgp import SALGP
        >>> from salgp.store.store import write_store
        >>> g = torch.Generator().manual_seed(0)
        >>> f = Features(torch.randn(300, 3, generator=g), {"a": torch.randn(300, 4, generator=g)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = write_store([(f, torch.arange(300) % 3)], folder, rows=100)
        ...     fitted = fit_store(SALGP(n_inducing=10), store, subset=100).fitted_
        >>> fitted.inference, fitted.summary.n
        ('inducing', 300)
    """
    if inducing not in INDUCING:
        raise ValueError(f"inducing must be one of {', '.join(INDUCING)}, got {inducing!r}")
    rows = _labelled(store)
    known = None if reference is None else _labelled(reference)
    if known is not None and known.widths != rows.widths:
        raise ValueError(f"reference layers {known.widths} differ from the calibration layers {rows.widths}")
    how = {"engine": engine, "workers": workers, "ray_address": ray_address}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if work is None else work)
        source = StoreSource(rows, known, folder, how, subset, inducing, rounds, seed, verify, progress)
        config = {name: repr(value) for name, value in calibrator.get_params().items()}
        with locked(folder):
            source.claim({"calibrator": calibrator.name, "config": config})
            fitted = calibrator.fit_stream(source)
            return fitted if fitted is not None else _fit_in_memory(calibrator, source)


def _labelled(store: str | os.PathLike[str] | FeatureStore) -> FeatureStore:
    found = store if isinstance(store, FeatureStore) else FeatureStore(store)
    if not found.has_labels:
        raise ValueError(f"{found.folder} has no labels; a calibrator is fitted on labelled samples only")
    return found


def _fit_in_memory(calibrator: Calibrator, source: StoreSource) -> Calibrator:
    if not calibrator.needs_layers:
        return calibrator.fit(*_whole(source.store.to_features(layers=())))
    known = None if source.reference is None else _whole(source.reference.to_features())
    return calibrator.fit(*source.subset(), reference=known)


def _whole(found: tuple[Features, Tensor | None]) -> tuple[Features, Tensor]:
    features, labels = found
    assert labels is not None
    return features, labels
