"""Time of one SAL-GP row of the study at full MSTAR size: about 2,000 samples of five layers, 512 inducing
rows.

    python study/benchmarks/row_times.py --features FEATURES.safetensors

Hyperparameters are learned by evidence, as in the study. The features are those of the 1,939 training chips
in the study's ConvNet (the shift benchmark caches them as ``mstar-convnet-s0/train.safetensors``). Every row
is fitted in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

from salgp.calibrators.gp.salgp import SALGP
from salgp.features import load_features

RESULTS = Path(__file__).parents[1] / "results" / "row_times.md"
LIMIT = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--covariance", help="fit this one and print it as JSON (used internally)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.covariance:
        print(json.dumps(measure(options.features, options.covariance)))
        return
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    lines = [
        f"# SAL-GP rows of the study, {threads} threads, 512 inducing rows",
        "",
        "Written by `python study/benchmarks/row_times.py`.",
        "",
    ]
    lines += [
        "| covariance | rows | wall s | processor s | peak MB | under 60 s |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("sum", "ml", "hl", "additive", "nested"):
        command = [sys.executable, __file__, "--features", str(options.features), "--covariance", name]
        found = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
        met = "yes" if found["wall"] < LIMIT else "**no**"
        lines.append(
            f"| {name} | {found['rows']:,} | {found['wall']:.1f} | {found['processor']:.1f} | "
            f"{found['megabytes']:.0f} | {met} |"
        )
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure(path: Path, covariance: str) -> dict[str, float]:
    """Wall and processor time of one fit."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))))
    features, labels = load_features(path)
    assert labels is not None, f"{path} has no labels"
    method = SALGP(covariance, n_inducing=512, objective="evidence")
    wall, processor = time.perf_counter(), time.process_time()
    method.fit(features, labels)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    rows = len(features) * (len(features.layers) if method.structure_.stacked else 1)
    return {
        "wall": wall,
        "processor": processor,
        "rows": rows,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
