"""Bootstrap of the calibration error: `salgp.metrics.bootstrap` against a Python loop over torchmetrics.

Both redraw the same number of resamples on one thread and return the 90 % interval; processor time is counted. Two loops are timed: the binary
function on (confidence, correct), the least work torchmetrics can be asked for, and the multi-class one on
probabilities, which is what its documentation suggests. Run: ``python benchmarks/metrics.py``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from salgp.metrics import bootstrap, ece

N_BINS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 50_000])
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs counts, for each contender")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'n':>7}  {'salgp':>9}  {'loop, binary':>13}  {'ratio':>6}  {'loop, multi-class':>18}  {'ratio':>6}   ({arguments.resamples} resamples)")
    for n in arguments.samples:
        report(n, arguments.classes, arguments.resamples, arguments.repeats)


def report(n: int, n_classes: int, n_resamples: int, repeats: int) -> tuple[float, float]:
    """Time the three and print a row; gives the two ratios."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(2 * torch.randn(n, n_classes, generator=generator), dim=1)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    confidence, label = probs.max(dim=1)
    correct = (label == labels).int()
    ours = fastest(lambda: bootstrap(ece, confidence, correct, n_resamples=n_resamples), repeats)
    binary = fastest(lambda: loop(lambda i: binary_calibration_error(confidence[i], correct[i], n_bins=N_BINS), n, n_resamples), repeats)
    multi = fastest(lambda: loop(lambda i: multiclass_calibration_error(probs[i], labels[i], n_classes, N_BINS), n, n_resamples), repeats)
    print(f"{n:>7}  {ours:>8.3f}s  {binary:>12.3f}s  {binary / ours:>5.1f}x  {multi:>17.3f}s  {multi / ours:>5.1f}x")
    return binary / ours, multi / ours


def loop(metric: Callable[[torch.Tensor], torch.Tensor], n: int, n_resamples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.stack([metric(torch.randint(n, (n,), generator=generator)) for _ in range(n_resamples)])
    return values.quantile(torch.tensor([0.05, 0.95]))


def fastest(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
