"""The study's grid as independent pieces of work: one per study and seed, on Ray or one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from salgp.store.engines import run
from salgp_study.presets import list_studies

__all__ = ["run_grid"]


def run_grid(
    studies: Sequence[str],
    seeds: Sequence[int] = (0,),
    preset: str = "cpu",
    out: str | os.PathLike[str] = "study",
    data: str | os.PathLike[str] | None = None,
    *,
    engine: str = "ray",
    workers: int | None = None,
    fit_on: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Run every study with every seed; records and cache are shared, and finished parts are not run again.

    Args:
        studies: names of `salgp_study.list_studies`; ``all`` stands for every one whose data are at hand.
        seeds: each trains its own network on its own split.
        preset: ``smoke``, ``cpu`` or ``paper``.
        out: folder of the records, reachable from all workers.
        data: folder of the real data.
        engine: ``ray``, the address of a running Ray cluster, or ``local`` for one piece after the other.
        workers: pieces at once on Ray.
        fit_on: see `salgp_study.run_study`.
        progress: called with a line whenever a piece is done.

    Returns:
        The output folder.

    Example:
        >>> run_grid([], out="study", engine="local")
        PosixPath('study')
    """
    where = None if data is None else str(Path(data).absolute())
    names = [name for study in studies for name in (list_studies() if study == "all" else [study])]
    pieces = [
        (name, preset, seed, str(Path(out).absolute()), where, fit_on, "all" in studies)
        for name in dict.fromkeys(names)
        for seed in seeds
    ]
    for done in run(_run_one, pieces, engine=engine, workers=1 if engine == "local" else workers):
        if progress is not None:
            progress(done)
    return Path(out)


def _run_one(
    study: str,
    preset: str,
    seed: int,
    out: str,
    data: str | None,
    fit_on: Sequence[str] | None,
    leave_out: bool,
) -> str:
    """Run one piece; a study without data is left out where all were asked for."""
    from salgp_study.run import run_study

    try:
        run_study(study, preset, (seed,), out, data, fit_on=fit_on)
    except FileNotFoundError:
        if not leave_out:
            raise
        return f"{study}: no data"
    return f"{study}, seed {seed}"
