"""What a tokenizer buys: sentences calibrated on augmented samples of their tokens, and of their words.

BANKING77 with a MiniLM encoder, as in the suite; layer evidence is fitted twice on the same sentences, and
scored on others as they are and with typing errors, words lost and words exchanged. Sentences are scored one
by one, and in a context of 50.

    python benchmarks/text_tokenizer.py --cache CACHE --write benchmarks/results/text-tokenizer.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from history import record_page
from torch.utils.data import TensorDataset

import salgp
from salgp.metrics import ece
from salgp_study.suite.sets.text import banking77, minilm

WINDOW, N_CALIBRATION, N_TEST = 50, 400, 500
SETS = ("test", "typos 12 %", "typos 25 %", "words dropped 40 %", "words swapped", "spaced letters")
Scores = dict[tuple[str, str], list[float]]
"""ECE by set and method, one of every draw."""


def main() -> None:
    """Fit, score and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the trained head")
    parser.add_argument("--data", type=Path, help="folder of banking77.json; by default $SALGP_DATA")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--write", type=Path, help="write the page to this file")
    given = parser.parse_args()
    scores: Scores = {}
    for seed in range(given.draws):
        score(seed, given.data, given.cache, scores)
        text = page(scores)
        print(text, flush=True)
    if given.write:
        given.write.write_text(text, encoding="utf-8")
        record_page("text_tokenizer", text)


def score(seed: int, data: Path | None, cache: Path, scores: Scores) -> None:
    """ECE of one draw of the calibration sentences, added to ``scores``."""
    case = banking77(seed, data, cache)
    calibration = list(case.batches(some(case.calibration, N_CALIBRATION)))
    reference = list(case.batches(case.reference))
    tests = {}
    for test in case.tests:
        if test.name in SETS:
            batches = case.batches(some(test.make(), N_TEST))
            features, labels = salgp.extract(case.network, batches, progress=False)
            mixed = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
            tests[test.name] = features[mixed], labels[mixed]
    temperature = salgp.calibrate(case.network, calibration, method="temperature", progress=False)
    fitted = {"temperature": temperature.calibrator}
    for name, tokenizer in {"tokens": None, "words": minilm()[1]}.items():
        reader = salgp.Reader(tokenizer=tokenizer)
        classifier = salgp.calibrate(
            case.network, calibration, reference=reference, reader=reader, progress=False
        )
        fitted[name] = classifier.calibrator
    for name, (features, labels) in tests.items():
        right, windows = features.correct(labels), torch.arange(len(labels)) // WINDOW
        for how, calibrator in fitted.items():
            alone = calibrator.predict(features).confidence
            scores.setdefault((name, how), []).append(float(ece(alone, right)))
            if how != "temperature":
                together = calibrator.predict(features, context=windows).confidence
                scores.setdefault((name, f"{how}, context"), []).append(float(ece(together, right)))


def some(data: TensorDataset, n: int) -> TensorDataset:
    """So many rows by chance, in their order, which is that of their lengths."""
    rows = np.sort(np.random.default_rng(0).permutation(len(data))[:n])
    return TensorDataset(*(x[torch.from_numpy(rows)] for x in data.tensors))


def page(scores: Scores) -> str:
    """One row for every test set, and the mean over the shifted ones."""
    sets, methods = (list(dict.fromkeys(part)) for part in zip(*scores, strict=True))
    draws = len(next(iter(scores.values())))
    lines = [
        "# Augmented samples of tokens and of words, measured by `python benchmarks/text_tokenizer.py`\n",
        f"BANKING77 with a MiniLM encoder, {N_CALIBRATION} calibration sentences, {N_TEST} for a row, layer",
        f"evidence and temperature; calibration error, draws of the calibration sentences: {draws}.",
        f"*words* is with `reader=salgp.Reader(tokenizer=...)`, *tokens* without; a context has {WINDOW}.\n",
        f"| sentences | {' | '.join(methods)} |",
        f"|---|{'---|' * len(methods)}",
    ]
    shifted = [name for name in sets if name != "test"]
    for title, names in {**{name: [name] for name in sets}, "mean of the shifted": shifted}.items():
        means = [np.mean([scores[name, method] for name in names]) for method in methods]
        lines.append(f"| {title} | {' | '.join(f'{x:.3f}'.lstrip('0') for x in means)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
