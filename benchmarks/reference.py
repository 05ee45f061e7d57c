"""What a reference may forget: forms of the training set that layer evidence keeps, by size, speed and loss.

Every form is made from the same training samples, the calibrator is fitted on the same calibration data, and
all are scored on the same test sets: in domain, and the mean over shifted ones. Features come from the caches
of the shift suite (``python -m salgp_study.suite``); the network has run already.

    python benchmarks/reference.py --cache DIR --write benchmarks/results/reference.md

The form used by default was chosen on the first three sets; CIFAR-10 was looked at afterwards.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from history import record_page
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features, load_features
from salgp.metrics import ece, nll_correct

Labelled = tuple[Features, Tensor]
SETS = ["digits", "tabular-digits", "mstar-convnet", "cifar10-resnet20"]


@dataclass(frozen=True)
class Form:
    """Settings of the reference."""

    reference: str
    size: int | None = None
    precision: str = "half"

    def __str__(self) -> str:
        size = "" if self.size is None else f" {self.size}"
        return f"{self.reference}{size}, {self.precision}"


FORMS = [
    Form("full", precision="single"),
    Form("full"),
    Form("full", precision="8-bit"),
    Form("prototypes"),
    Form("prototypes", 100),
    Form("prototypes", 50),
    Form("prototypes", 20),
    Form("herding", 100),
    Form("sample", 100),
    Form("statistics"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder of the shift suite's features")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=int, default=12, help="shifted sets used, evenly chosen")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts = [HEADING]
    for name in arguments.sets:
        parts.append(table(name, arguments.cache / f"{name}-{arguments.seed}", arguments.tests))
        print(parts[-1], flush=True)
    if arguments.write:
        arguments.write.write_text("\n".join(parts), encoding="utf-8")
        record_page("reference", "\n".join(parts))


HEADING = """# Forms of the reference, measured by `python benchmarks/reference.py`

Size is that of the saved calibrator. Milliseconds are those of `predict`, processor time / wall clock, with
torch set to one and to two threads, median of 9 rounds in which all forms take turns. NLL and ECE are of
correctness; in brackets the ratio of the NLL to that of the full reference in single precision. `prototypes,
half` is the default: up to 200 points per class and layer. It was chosen on the first three sets; CIFAR-10
was looked at afterwards. Under shift every sample is judged by itself, then with the others of its set as
context.
"""


def table(name: str, folder: Path, most: int) -> str:
    reference, calibration = (load(folder / f"{what}.safetensors") for what in ("reference", "calibration"))
    test = load(folder / "test.safetensors")
    shifted = [load(path) for path in evenly(sorted(folder.glob("shift-*.safetensors")), most)]
    fitted = {form: fit(form, calibration, reference) for form in FORMS}
    timed = timings({form: found[0] for form, found in fitted.items()}, test[0])
    widths = "+".join(str(d) for d in reference[0].widths.values())
    lines = [
        f"## {name}: {len(reference[1]):,} training samples, {reference[0].n_classes} classes, "
        f"layers of {widths}",
        "",
        "| form | size | fit, s | batch of 1, ms | 2 threads | batch of 64, ms | 2 threads | NLL in domain "
        "| ECE | NLL under shift | ECE | the same with context | ECE |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    scores = {
        form: (score(c, [test]), score(c, shifted), score(c, shifted, "all"))
        for form, (c, _, _) in fitted.items()
    }
    base = scores[FORMS[0]]
    for form, (_, size, seconds) in fitted.items():
        inside, outside, together = scores[form]
        cells = [
            str(form),
            f"{size / 2**20:.2f} MB",
            f"{seconds:.1f}",
            *timed[form],
            f"{inside[0]:.4f} ({inside[0] / base[0][0]:.3f})",
            f"{inside[1]:.4f}",
            f"{outside[0]:.4f} ({outside[0] / base[1][0]:.3f})",
            f"{outside[1]:.4f}",
            f"{together[0]:.4f} ({together[0] / base[2][0]:.3f})",
            f"{together[1]:.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def load(path: Path) -> Labelled:
    features, labels = load_features(path)
    assert labels is not None
    return features, labels


def evenly(paths: list[Path], most: int) -> list[Path]:
    return paths[:: max(1, -(-len(paths) // most))]


def fit(form: Form, calibration: Labelled, reference: Labelled) -> tuple[Any, int, float]:
    """The calibrator, its bytes on disk and the seconds of its fit."""
    calibrator = LayerEvidence(reference=form.reference, size=form.size, precision=form.precision)
    start = time.process_time()
    calibrator.fit(*calibration, reference=reference)
    seconds = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        calibrator.save(folder)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return calibrator, size, seconds


def score(calibrator: Any, sets: list[Labelled], context: str | None = None) -> tuple[float, float]:
    """Mean NLL and ECE of correctness; with a context the samples of a set are judged together."""
    found = []
    for features, labels in sets:
        confidence, correct = calibrator.predict(features, context).confidence, features.correct(labels)
        found.append((nll_correct(confidence, correct), ece(confidence, correct)))
    return sum(a for a, _ in found) / len(found), sum(b for _, b in found) / len(found)


def timings(fitted: dict[Form, Any], features: Features, rounds: int = 9) -> dict[Form, list[str]]:
    """Milliseconds of one call, processor time / wall clock, by batch size and threads."""
    cases = [(b, often, threads) for b, often in ((1, 20), (64, 3)) for threads in (1, 2)]
    taken: dict[Form, list[list[tuple[float, float]]]] = {form: [[] for _ in cases] for form in fitted}
    for _ in range(rounds):
        for form, calibrator in fitted.items():
            for (b, often, threads), found in zip(cases, taken[form], strict=True):
                torch.set_num_threads(threads)
                found.append(seconds(lambda c=calibrator, x=features[:b]: c.predict(x), often))
    torch.set_num_threads(1)
    return {form: [_cell(found) for found in by] for form, by in taken.items()}


def _cell(found: list[tuple[float, float]]) -> str:
    return " / ".join(f"{1e3 * median(times):.2f}" for times in zip(*found, strict=True))


def seconds(call: Callable[[], Any], often: int) -> tuple[float, float]:
    """Processor time and wall clock of one call."""
    call()
    used, start = time.process_time(), time.perf_counter()
    for _ in range(often):
        call()
    return (time.process_time() - used) / often, (time.perf_counter() - start) / often


if __name__ == "__main__":
    main()
