"""Fit a calibrator to a store of any size, with memory that does not grow.

Gaussian process calibrators:

1. hyperparameters on a stratified subset, in memory;
2. inducing rows: chosen greedily from the subset, then one pass in which every shard proposes the rows they
  explain least,
   and the greedy choice repeated over both;
3. exact conditioning on **all** rows by one pass of summed statistics. With a Bernoulli likelihood the pass
  is repeated,
   each time with the sites around the last posterior, until the bound stops rising.

Every step leaves its result in the working folder, each piece of a pass in a file of its own, so that a
killed fit continued with the same call repeats at most the pieces that were under way and gives the same
calibrator bit for bit.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.base import clone
from torch import Tensor

from salgp.calibrators.base import Calibrator, load_calibrator
from salgp.calibrators.layerwise.residual import ResidualGP
from salgp.calibrators.layerwise.salgp import SALGP
from salgp.features import Features, load_features
from salgp.gp.covariance import Rows, gaps
from salgp.gp.fitting import Fitted
from salgp.gp.linalg import cholesky, lower_inverse
from salgp.gp.regression import (
    INDUCING_JITTER,
    Posterior,
    condition_inducing,
    inducing_log_evidence,
    inducing_rows,
)
from salgp.store.engines import run, shown
from salgp.store.manifest import Manifest, sweep
from salgp.store.sampling import subset_of
from salgp.store.store import FeatureStore
from salgp.store.sums import PassSums, add_up, propose, read_value, sum_features, sum_shards, weight_of

__all__ = ["INDUCING", "fit_store"]

INDUCING = ("stream", "subset")
MAX_PIECES = 1024
"""Most pieces of a pass; beyond that a piece has several shards."""
POOL = 16
"""Candidates for inducing rows that are kept, as a multiple of their number."""


def fit_store(
    calibrator: Calibrator,
    store: str | os.PathLike[str] | FeatureStore,
    *,
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

    `SALGP` and `ResidualGP` are fitted out of core as described above. Calibrators that read the logits only
    are fitted on all rows in memory (a million rows of ten logits are 40 MB). Others that read layers are
    fitted on the stratified subset.

    Args:
        calibrator: to be fitted; its ``n_inducing`` is the number of inducing rows.
        store: labelled features.
        work: folder for intermediate results, reachable from all workers; by default a temporary one, and
            then a killed fit begins anew.
        subset: rows on which hyperparameters are learned.
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
        >>> from salgp.store.store import write_store
        >>> g = torch.Generator().manual_seed(0)
        >>> f = Features(torch.randn(300, 3, generator=g), {"a": torch.randn(300, 4, generator=g)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = write_store([(f, torch.arange(300) % 3)], folder, rows=100)
        ...     fitted = fit_store(SALGP(n_inducing=10), store, subset=100).fitted_
        >>> fitted.inference, fitted.sums.n
        ('inducing', 300)
    """
    source = store if isinstance(store, FeatureStore) else FeatureStore(store)
    if inducing not in INDUCING:
        raise ValueError(f"inducing must be one of {', '.join(INDUCING)}, got {inducing!r}")
    if not isinstance(calibrator, SALGP | ResidualGP) or calibrator.get_params().get("inputs") == "evidence":
        return _fit_in_memory(calibrator, source, subset, seed)
    if calibrator.inference == "exact":
        raise ValueError(
            "a store is fitted with inducing rows: set inference='auto' or 'inducing', or fit "
            "store.to_features() in memory"
        )
    options = _Options(subset, inducing, rounds, seed, verify)
    how = {"engine": engine, "workers": workers, "ray_address": ray_address}
    with tempfile.TemporaryDirectory() as temporary:
        fit = _Fit(calibrator, source, Path(temporary if work is None else work), options, how, progress)
        final = fit.run()
    for name, value in vars(final).items():
        if name.endswith("_"):
            setattr(calibrator, name, value)
    return calibrator


@dataclass(frozen=True)
class _Options:
    subset: int
    inducing: str
    rounds: int
    seed: int
    verify: bool


@dataclass(frozen=True)
class _Fit:
    """The steps of one fit, each kept in the working folder."""

    calibrator: Any
    store: FeatureStore
    work: Path
    options: _Options
    how: dict[str, Any]
    progress: bool

    def run(self) -> Any:
        self.work.mkdir(parents=True, exist_ok=True)
        self._claim()
        learned = self._stage("hyperparameters", self._learn)
        rows = learned.fitted_.posterior.rows
        if self.options.inducing == "stream":
            rows = self._stage("inducing", lambda: self._choose_inducing(learned)).fitted_.posterior.rows
        self._stage("start", lambda: self._start(learned, rows))
        return self._stage("final", self._condition)

    def _claim(self) -> None:
        """Refuse a folder that holds another fit."""
        header = {
            "store": self.store.identity(),
            "calibrator": self.calibrator.name,
            "config": {k: repr(v) for k, v in self.calibrator.get_params().items()},
            "subset": self.options.subset,
            "inducing": self.options.inducing,
            "rounds": self.options.rounds,
            "seed": self.options.seed,
        }
        sweep(self.work)
        Manifest.open(self.work, "salgp-fit", header)

    def _stage(self, name: str, compute: Callable[[], Any]) -> Any:
        """The calibrator saved as ``name``, computed and saved now if it is not there yet; whole
        or absent.
        """
        folder, part = self.work / name, self.work / f"{name}.unfinished"
        if not folder.is_dir():
            shutil.rmtree(part, ignore_errors=True)
            compute().save(part)
            os.replace(part, folder)
        return self._load(name)

    def _subset(self) -> tuple[Features, Tensor]:
        path = self.work / "subset.safetensors"
        if not path.is_file():
            features, labels = subset_of(self.store, self.options.subset, self.options.seed)
            features.save(path, labels)
        found, known = load_features(path)
        assert known is not None
        return found, known

    def _learn(self) -> Any:
        features, labels = self._subset()
        return clone(self.calibrator).set_params(inference="inducing").fit(features, labels)

    def _choose_inducing(self, learned: Any) -> Any:
        """Greedy choice over the subset's inducing rows and what a pass over all rows proposed."""
        posterior = learned.fitted_.posterior
        Luu = cholesky(
            posterior.covariance(posterior.theta, gaps(posterior.rows, posterior.rows, posterior.covariance)),
            start=INDUCING_JITTER,
        )
        explained = replace(
            posterior, alpha=torch.zeros_like(posterior.alpha), root=lower_inverse(Luu).T.contiguous()
        )
        self._stage("explained", lambda: _with(learned, explained))
        pool = self._pass("proposals", propose, "explained", self.options.verify)
        best = pool[0]
        for more in pool[1:]:
            best = replace(
                best,
                rows=Rows.concatenate([best.rows, more.rows]),
                variance=torch.cat([best.variance, more.variance]),
            )
            best = best.best(POOL * len(posterior.alpha))
        rows = Rows.concatenate([posterior.rows, best.rows])
        chosen = rows[inducing_rows(posterior.covariance, posterior.theta, rows, self.calibrator.n_inducing)]
        return _with(learned, _prior(posterior, chosen))

    def _start(self, learned: Any, inducing: Rows) -> Any:
        """The state before the first pass: the prior, or for Bernoulli sites the posterior of the subset."""
        prior = _prior(learned.fitted_.posterior, inducing)
        fitted = replace(learned.fitted_, posterior=prior)
        if len(fitted.mean_weights):
            features, labels = self._subset()
            for _ in range(3):
                fitted = _updated(
                    fitted, sum_features(learned.structure_, fitted, features, labels, weight_of(learned))
                )
        return _with(learned, fitted.posterior)

    def _condition(self) -> Any:
        """Passes over all rows until the posterior is settled: one for Gaussian, a few for
        Bernoulli sites.
        """
        state, before = "start", self._load("start")
        rounds = self.options.rounds if len(before.fitted_.mean_weights) else 1
        for index in range(rounds):
            total = add_up(
                self._pass(
                    f"sums-{index}",
                    sum_shards,
                    state,
                    self.options.verify and index == 0 and self.options.inducing == "subset",
                )
            )
            fitted = _updated(before.fitted_, total)
            settled = rounds == 1 or (
                index > 0
                and fitted.log_evidence - before.fitted_.log_evidence < 1e-4 * len(self.store) ** 0.5
            )
            state = f"state-{index}"
            before = self._stage(state, functools.partial(_with, before, fitted))
            if settled:
                return before
        return _with(
            before,
            replace(
                before.fitted_, converged=False, reason=f"the bound was still rising after {rounds} passes"
            ),
        )

    def _pass(self, name: str, work: Callable[..., str], state: str, verify: bool) -> list[Any]:
        """Run one pass over all shards from the saved ``state``; finished pieces are taken from
        their files.
        """
        folder, ranges = self.work / name, _ranges(self.store.n_shards)
        folder.mkdir(exist_ok=True)
        sweep(folder)
        files = {str(folder / f"piece-{first:06d}.json"): (first, last) for first, last in ranges}
        todo = [
            (str(self.work / state), str(self.store.folder), *files[file], file, verify)
            for file in files
            if not Path(file).is_file()
        ]
        rows, done = self.store.rows, set(files) - {piece[4] for piece in todo}
        with shown(
            name, len(self.store), sum(sum(rows[slice(*files[file])]) for file in done), self.progress
        ) as advance:
            for file in run(work, todo, **self.how):
                advance(sum(rows[slice(*files[file])]))
        return [read_value(Path(file)) for file in files]

    def _load(self, name: str) -> Any:
        return load_calibrator(self.work / name)


def _fit_in_memory(calibrator: Calibrator, store: FeatureStore, subset: int, seed: int) -> Calibrator:
    if calibrator.needs_layers:
        return calibrator.fit(*subset_of(store, subset, seed))
    if not store.has_labels:
        raise ValueError(f"{store.folder} has no labels; a calibrator is fitted on labelled samples only")
    return calibrator.fit(*store.to_features(layers=()))


def _updated(fitted: Fitted, total: PassSums) -> Fitted:
    """The posterior on the same inducing rows, given the sums of a pass."""
    posterior = fitted.posterior
    Kuu = posterior.covariance(posterior.theta, gaps(posterior.rows, posterior.rows, posterior.covariance))
    evidence = float(inducing_log_evidence(Kuu, total.sums) + total.constant)
    new = condition_inducing(posterior.covariance, posterior.theta, posterior.rows, total.sums)
    return replace(
        fitted,
        posterior=new,
        log_evidence=evidence,
        inference="inducing",
        y=None,
        noise=None,
        sums=total.sums,
    )


def _prior(posterior: Posterior, rows: Rows) -> Posterior:
    """The same GP on other rows, not yet conditioned on anything."""
    alpha = posterior.alpha.new_zeros(len(rows))
    return replace(posterior, rows=rows, alpha=alpha, root=alpha[:, None])


def _with(calibrator: Any, found: Posterior | Fitted) -> Any:
    """A copy of a fitted calibrator with another posterior."""
    copy = clone(calibrator)
    for name, value in vars(calibrator).items():
        if name.endswith("_"):
            setattr(copy, name, value)
    copy.fitted_ = found if isinstance(found, Fitted) else replace(calibrator.fitted_, posterior=found)
    return copy


def _ranges(n_shards: int) -> list[tuple[int, int]]:
    size = -(-n_shards // MAX_PIECES)
    return [(first, min(first + size, n_shards)) for first in range(0, n_shards, size)]
