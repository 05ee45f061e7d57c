"""Score methods on cached cases, and keep the records.

A file ``records/<set>-<seed>/<method>.jsonl`` is written whole when a method is done, so that a run that was
stopped continues with the next method, and a method that changed can be scored again for itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from salgp.io import write_whole
from salgp_study.suite.cache import CachedCase, case_folder, is_complete, read_case
from salgp_study.suite.methods import GROUPS, METHODS
from salgp_study.suite.scoring import Record, score_method

__all__ = ["method_names", "read_records", "run_methods"]

Say = Callable[[str], None]


def method_names(wanted: Sequence[str]) -> list[str]:
    """Names and groups of methods as names.

    Example:
        >>> method_names(["temperature", "ours"])
        ['temperature', 'layer evidence']
    """
    unknown = [name for name in wanted if name not in METHODS and name not in GROUPS]
    if unknown:
        raise KeyError(
            f"no method called {unknown[0]!r}; known: {', '.join(METHODS)}; groups: {', '.join(GROUPS)}"
        )
    names = (name for one in wanted for name in GROUPS.get(one, (one,)))
    return list(dict.fromkeys(names))


def run_methods(
    cache: Path,
    sets: Sequence[str],
    seeds: Sequence[int],
    methods: Sequence[str],
    *,
    fresh: bool = False,
    say: Say = print,
) -> None:
    """Score what has features and no records yet.

    Args:
        cache: folder of features and records.
        sets: data sets.
        seeds: draws.
        methods: names, see `method_names`.
        fresh: score again what has records.
        say: called with a line per method.
    """
    for name in sets:
        for seed in seeds:
            case: CachedCase | None = None
            if not is_complete(case_folder(cache, name, seed)):
                say(f"{name} {seed}: left out, its features are not complete; write them with `features`")
                continue
            for method in methods:
                path = _record_file(cache, name, seed, method)
                if path.is_file() and not fresh:
                    continue
                case = case or read_case(case_folder(cache, name, seed))
                records = list(score_method(case, method, METHODS[method]))
                _write(path, records)
                say(f"{name} {seed} {method}: fitted in {records[0]['fit_seconds']:.1f} s")


def read_records(cache: Path, sets: Sequence[str], seeds: Sequence[int]) -> list[Record]:
    """Every record there is of some sets."""
    return list(_records(cache, sets, seeds))


def _records(cache: Path, sets: Sequence[str], seeds: Sequence[int]) -> Iterator[Record]:
    for name in sets:
        for seed in seeds:
            for method in METHODS:
                path = _record_file(cache, name, seed, method)
                lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
                yield from map(json.loads, lines)


def _record_file(cache: Path, name: str, seed: int, method: str) -> Path:
    stem = re.sub(r"\W+", "-", method).strip("-").lower()
    return cache / "records" / f"{name}-{seed}" / f"{stem}.jsonl"


def _write(path: Path, records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)

    def fill(part: Path) -> None:
        part.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    write_whole(path, fill)
