"""Many mutants of every reader, in chunks, to be stopped and continued at any time.

``PYTHONPATH=tests:tests/fuzz python tools/fuzz.py --count 100000 --out out/fuzz.jsonl`` appends one line per
chunk: the reader, the first and last seed, the outcomes, and the seeds of what must not be. A second call
goes on where the file ends. ``--table`` prints the figures of such a file for ``docs/robustness.md`` instead.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import importlib.metadata
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import torch
from harness import Mutants, Target
from targets import TARGETS

MEMORY = 6 * 2**30
"""Bytes of address space beyond which a mutant has asked for too much."""
KINDS = {
    "bytes": "damage",
    "json": "edited JSON, new checksums",
    "tensors": "edited arrays, new checksums",
    "value": "edited values, new checksums",
}


def main() -> None:
    """Try mutants, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", help="names; all by default")
    parser.add_argument("--count", type=int, default=100_000, help="mutants per reader")
    parser.add_argument("--chunk", type=int, default=2_000, help="mutants per line of figures")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the figures and stop")
    asked = parser.parse_args()
    chosen = [target for target in TARGETS if not asked.readers or target.name in asked.readers]
    if asked.table:
        print(table(chosen, asked.out))
        return
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)  # a pool of threads costs more than these small files
    pyarrow.set_io_thread_count(1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # slow, and constant
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    bad = sum(fire(target, asked.count, asked.chunk, asked.out) for target in chosen)
    raise SystemExit(1 if bad else 0)


def fire(target: Target, count: int, chunk: int, out: Path) -> int:
    """Bring one reader up to ``count`` mutants; how many of the new ones were bad."""
    start = max([line["to"] for line in lines(out) if line["reader"] == target.name], default=0)
    memory = Path("/dev/shm")
    bad = 0
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        mutants = Mutants(target, Path(folder)) if start < count else None
        gc.freeze()  # what the libraries made is not looked through again
        while mutants is not None and start < count:
            end, before = min(start + chunk, count), time.process_time()
            tried = mutants.try_all(range(start, end))
            line = {
                "reader": target.name,
                "from": start,
                "to": end,
                **tried.counts,
                "distinct": tried.distinct,
                "slowest": round(tried.slowest, 3),
                "seconds": round(time.process_time() - before, 1),
                "bad": tried.bad[:20],
            }
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            bad += len(tried.bad)
            start = end
    return bad


def lines(path: Path) -> list[dict[str, Any]]:
    """Figures of all chunks so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(targets: list[Target], path: Path) -> str:
    """The figures as Markdown."""
    rows = [
        "| reader | mutants | tried | distinct | refused | same | other | raw |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in targets:
        total: collections.Counter[str] = collections.Counter()
        for line in lines(path):
            if line["reader"] == target.name:
                total.update(
                    {k: v for k, v in line.items() if k in ("refused", "same", "other", "raw", "distinct")}
                )
        tried = sum(total[k] for k in ("refused", "same", "other", "raw"))
        kind = (
            KINDS[target.edit]
            if target.checked or target.edit != "bytes"
            else "damage, no checksum in the format"
        )
        cells = [f"{total[k]:,}" for k in ("distinct", "refused", "same", "other", "raw")]
        rows.append(f"| {target.name} | {kind} | {tried:,} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
