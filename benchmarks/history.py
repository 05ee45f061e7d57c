"""The memory of the benchmarks: one JSON line per figure and run, and a page of the last runs.

Every benchmark that writes its page also records the numbers in its tables by `record_page`. A line holds the
commit, the kind of machine (no names), the benchmark, the figure and its value. The page shows the last runs
of each figure side by side, so that a step back is seen.

    python benchmarks/history.py                                # the page on the screen
    python benchmarks/history.py --write benchmarks/results/history.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["FILE", "figures_of", "page", "record", "record_page"]

FILE = Path(__file__).with_name("history.jsonl")
RUNS = 5
"""Runs of a figure that the page shows."""


def record(benchmark: str, figures: Mapping[str, float], file: Path = FILE) -> None:
    """Append one line for each figure.

    Args:
        benchmark: name of the file in ``benchmarks/``, without its ending.
        figures: value by name; the name says the unit.
        file: to append to.
    """
    common = {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "benchmark": benchmark,
    }
    lines = [json.dumps({**common, "figure": name, "value": float(x)}) for name, x in figures.items()]
    with file.open("a", encoding="utf-8") as out:
        out.write("".join(f"{line}\n" for line in lines))


def record_page(benchmark: str, text: str, file: Path = FILE) -> None:
    """Append one line for each number in the Markdown tables of a benchmark's page."""
    record(benchmark, figures_of(text), file)


def figures_of(text: str) -> dict[str, float]:
    """Numbers in the Markdown tables of a page, by row and column; the first number of a cell counts.

    Example:
        >>> figures_of("| method | time |\\n|---|---|\\n| ours | 1,200 ms |")
        {'ours: time': 1200.0}
    """
    found: dict[str, float] = {}
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif not set(line) <= set("|-: "):
            for column, cell in zip(head[1:], cells[1:], strict=False):
                number = re.search(r"-?(\d[\d,]*)?\.?\d+", cell)
                if number:
                    found[f"{cells[0]}: {column}"] = float(number.group().replace(",", ""))
    return found


def commit() -> str:
    """Short commit of the working tree, with a plus where it has changes; empty outside of a repository."""
    here = Path(__file__).parent
    ask: Any = {"cwd": here, "capture_output": True, "text": True, "check": False}
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **ask).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "--", "../src"], **ask).stdout.strip()
    return f"{name}+" if changed else name


def machine() -> str:
    """Kind of machine: processor, number of cores, Python; nothing that tells whose it is."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def page(lines: list[dict[str, Any]]) -> str:
    """A table of the last runs of each figure on each kind of machine, the newest last."""
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["benchmark"], line["figure"], line["machine"]), []).append(line)
    rows = [
        f"| {benchmark} | {figure} | {kind} | "
        + ", ".join(f"{run['value']:.4g} ({run['commit']})" for run in found[-RUNS:])
        + " |"
        for (benchmark, figure, kind), found in sorted(runs.items())
    ]
    head = [
        "# Figures of the last runs, written by `python benchmarks/history.py`\n",
        f"The last {RUNS} of each figure, the newest last, with its commit; `+` is a tree with changes.\n",
        "| benchmark | figure | machine | runs |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    arguments = parser.parse_args()
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.is_file() else []
    text = page([json.loads(line) for line in lines])
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
