"""What a confidence is good for: rules, sets, estimates and alarms, each against its baselines.

Every part writes its own section of the result file; the others stay as they are.

    python benchmarks/act.py guarantee sets estimate alarms delay speed labels --data DATA --cache CACHE

``DATA`` holds ``published_calibration.npz``; ``CACHE`` is that of ``python -m salgp_study.suite``.
``--quick`` runs everything small.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
from pathlib import Path

import act_estimate
import act_guarantee
import act_labels
import act_monitor
import act_sets
import numpy as np
import torch

RESULT = Path(__file__).parent / "results" / "act.md"
PARTS = {
    "guarantee": ("1. Rules keep their promise", act_guarantee.section),
    "sets": ("2. Prediction sets", act_sets.section),
    "estimate": ("3. Accuracy without labels", act_estimate.section),
    "alarms": ("4. False alarms", act_monitor.alarms),
    "delay": ("5. Batches until the alarm", act_monitor.delay),
    "speed": ("6. Speed of the monitor", act_monitor.speed),
    "labels": ("7. A few labels", act_labels.section),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for part in arguments.parts:
        title, make = PARTS[part]
        body = make(arguments.data, arguments.cache, arguments.quick)
        foot = f"\n\n*`python benchmarks/act.py {part}`; {versions()}*"
        replace_section(arguments.write, title, body + foot)
        print(f"## {title}\n\n{body}\n")


def replace_section(path: Path, title: str, body: str) -> None:
    """Put a section into its place, sorted by title."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# What a confidence is good for\n"
    head, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    sections = dict(part.split("\n", 1) for part in rest)
    sections[title] = f"\n{body}\n\n"
    parts = [f"## {name}\n{sections[name]}" for name in sorted(sections)]
    path.write_text(head + "".join(parts).rstrip() + "\n", encoding="utf-8")


def versions() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return (
        f"commit {found.stdout.strip() or 'unknown'}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, NumPy {np.__version__}"
    )


if __name__ == "__main__":
    main()
