"""The study's grid as independent pieces of work: one per study and seed, on Ray or one after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from salgp.scale.engines import run

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
    ray_address: str | None = None,
) -> Path:
    """Run every study with every seed; records and cache are shared, and finished parts are not run again.

    Args:
        studies: names of `salgp.study.list_studies`.
        seeds: each trains its own network on its own split.
        preset: ``smoke``, ``cpu`` or ``paper``.
        out: folder of the records, reachable from all workers.
        data: folder of the real data.
        engine: ``ray``, or ``local`` for one piece after the other.
        workers: pieces at once on Ray.
        ray_address: of a running Ray cluster.

    Returns:
        The output folder.

    Example:
        >>> run_grid([], out="study", engine="local")
        PosixPath('study')
    """
    pieces = [(study, preset, seed, str(out), None if data is None else str(data)) for study in studies for seed in seeds]
    for _ in run(_run_one, pieces, engine=engine, workers=1 if engine == "local" else workers, ray_address=ray_address):
        pass
    return Path(out)


def _run_one(study: str, preset: str, seed: int, out: str, data: str | None) -> None:
    from salgp.study.run import run_study

    run_study(study, preset, (seed,), out, data)
