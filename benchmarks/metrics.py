"""Bootstrap of the calibration error: `salgp.metrics.bootstrap` against a Python loop over torchmetrics.

Both redraw the same number of resamples and return the 90 % interval. Two loops are timed: the binary
function on (confidence, correct), the least work torchmetrics can be asked for, and the multi-class one on
probabilities, which is what its documentation suggests. All run on one thread; processor time is counted, the
three take turns, and the median of ``--repeat`` rounds is given, so that other work on the machine meets all
of them alike.

    python benchmarks/metrics.py                                       # prints the table
    python benchmarks/metrics.py --write benchmarks/results/metrics.md
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torchmetrics
from history import record_page
from threadpoolctl import threadpool_limits
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from salgp.metrics import bootstrap, ece

N_BINS = 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 50_000])
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--write", type=Path, help="file for the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        rows = [row(n, arguments.classes, arguments.resamples, arguments.repeat) for n in arguments.samples]
    text = table(rows, arguments.resamples, arguments.classes, arguments.repeat)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
        record_page("metrics", text)


def table(rows: list[str], n_resamples: int, n_classes: int, repeat: int) -> str:
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}, "
        f"torchmetrics {torchmetrics.__version__}"
    )
    return "\n".join(
        [
            f"# Bootstrap interval of the ECE, {n_resamples:,} resamples, measured by `python "
            f"benchmarks/metrics.py`\n",
            f"{N_BINS} bins, {n_classes} classes; processor seconds on one thread, the "
            f"contenders taking turns, median of {repeat} rounds.",
            f"{versions}.\n",
            "| samples | `salgp.metrics.bootstrap` s | loop, binary s | ratio | multi-class s | ratio |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def row(n: int, n_classes: int, n_resamples: int, repeat: int) -> str:
    """Time the three in turns."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(2 * torch.randn(n, n_classes, generator=generator), dim=1)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    confidence, label = probs.max(dim=1)
    correct = (label == labels).int()
    contenders: list[Callable[[], object]] = [
        lambda: bootstrap(ece, confidence, correct, n_resamples=n_resamples),
        lambda: loop(
            lambda i: binary_calibration_error(confidence[i], correct[i], n_bins=N_BINS), n, n_resamples
        ),
        lambda: loop(
            lambda i: multiclass_calibration_error(probs[i], labels[i], n_classes, N_BINS), n, n_resamples
        ),
    ]
    rounds = [[seconds(call) for call in contenders] for _ in range(repeat)]
    ours, binary, multi = (median(column) for column in zip(*rounds, strict=True))
    return f"| {n:,} | {ours:.4f} | {binary:.3f} | {binary / ours:.1f} | {multi:.3f} | {multi / ours:.1f} |"


def loop(metric: Callable[[torch.Tensor], torch.Tensor], n: int, n_resamples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.stack([metric(torch.randint(n, (n,), generator=generator)) for _ in range(n_resamples)])
    return values.quantile(torch.tensor([0.05, 0.95]))


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
