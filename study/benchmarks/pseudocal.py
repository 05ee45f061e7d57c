"""PseudoCal and LaSCal on development sets of the shift suite, beside temperature scaling and layer evidence.

    python study/benchmarks/pseudocal.py --cache CACHE --out study/results/pseudocal.md

PseudoCal mixes inputs and asks the network, so the case of each data set is built again from its trained
network (below ``CACHE/networks``); everything else comes from cached features (``python -m salgp_study.suite
features``). Both methods take the whole test set, unlabelled, and find one temperature for it. Resumable:
what was scored stands in JSON lines beside the features.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import best_temperature, tempered_softmax
from salgp.prediction import Prediction
from salgp_study.lascal import label_shift_temperature
from salgp_study.pseudocal import pseudo_temperature
from salgp_study.suite.cache import CachedTest, case_folder, read_case
from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.running import read_records, run_methods
from salgp_study.suite.scoring import Record, scores
from salgp_study.suite.sets import SETS
from salgp_study.suite.summary import BASE, CONTEXT, PER_SAMPLE, Results, Way, table

CHOSEN = (
    "tabular-wine",
    "tabular-breast-cancer",
    "tabular-digits",
    "digits",
    "digits-weak",
    "mstar-convnet",
    "cifar10-resnet32",
)
"""Development sets whose inputs are one tensor of numbers, so that two of them can be mixed."""
SEVERITY = {"cifar10-resnet32": 2}
"""Of which severity shifted sets are read, where the network takes long for all of them."""
LASCAL = "LaSCal, whole test set"
KNOWN = "LaSCal, class mix known"
PSEUDOCAL = "PseudoCal, whole test set"
BEST = "best temperature, labels known"
WAYS = (BASE, *map(Way, (PSEUDOCAL, LASCAL, KNOWN)), PER_SAMPLE, CONTEXT, Way(BEST))
SCORES = ("ece", "nll", "auroc")
BATCH = 250
INTRO = """# PseudoCal and LaSCal under shift

Made by `python study/benchmarks/pseudocal.py --seed {seed}`: draw {seed} of development sets of the shift
suite, of `cifar10-resnet32` the shifted sets of severity 2. ECE / NLL of correctness / AUROC of spotting
errors, means over the test sets.

- *PseudoCal* (Hu et al., ICML 2024): one temperature for each test set, from mixed pairs of its inputs.
- *LaSCal* (Popordanoska et al., NeurIPS 2024): one temperature for each test set, from its estimated class
  mix and the calibration samples. The mix is found by expectation maximisation, where the authors use RLLS;
  *class mix known* counts it on the labels.
- *best temperature, labels known*: that of the largest likelihood on the test set, which takes its labels.

Each of these sees the whole test set. Layer evidence sees single samples, or 50 unlabelled ones; it is fitted
on augmented calibration samples and compares with training samples, which the others do without.
"""


def main() -> None:
    """Score what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache/shift"))
    parser.add_argument("--data", type=Path, help="folder of the real data; default: SALGP_DATA")
    parser.add_argument("--sets", nargs="+", default=list(CHOSEN))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("study/results/pseudocal.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [options.seed]
    run_methods(options.cache, options.sets, seeds, [BASE.method, PER_SAMPLE.method, LASCAL])
    scored = read_records(options.cache, options.sets, seeds)
    records = [one for one in scored if is_read(one["set"], one["kind"], one["severity"])]
    for name in options.sets:
        records += temperatures_of(name, options.seed, options.data, options.cache)
    results = Results(records)
    options.out.write_text("\n".join(page(results, options.seed)) + "\n", encoding="utf-8")


def temperatures_of(name: str, seed: int, data: Path | None, cache: Path) -> list[Record]:
    """Records of the methods that set one temperature for each test set, kept in a file of the case."""
    path = cache / "pseudocal" / f"{name}-{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [json.loads(line) for line in lines]
    cached, done = read_case(case_folder(cache, name, seed)), {one["test"] for one in found}
    missing = [t for t in cached.tests if is_read(name, t.kind, t.severity) and t.name not in done]
    if not missing:
        return found
    case, (features, labels) = SETS[name](seed, data, cache), cached.calibration
    check_network(case, cached.tests[0])
    recipes = {recipe.name: recipe for recipe in case.tests}
    originals = (labels >= 0) & (features.families == 0 if features.families is not None else True)
    source, y = features.logits[originals], labels[originals]
    for test in missing:
        temperatures = {
            PSEUDOCAL: pseudo_temperature(batched(case.network), inputs(recipes[test.name])),
            KNOWN: label_shift_temperature(source, y, test.features.logits, known_weights(y, test)),
            BEST: best_temperature(test.features.logits, test.labels)[0],
        }
        new = [record(cached.name, seed, method, test, t) for method, t in temperatures.items()]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in new)
        print(name, test.name, {method: round(t, 3) for method, t in temperatures.items()}, flush=True)
        found += new
    return found


def is_read(name: str, kind: str, severity: int) -> bool:
    """Is this test set part of the page?"""
    return kind == "in" or (kind == "shift" and severity == SEVERITY.get(name, severity))


def check_network(case: Case, inside: CachedTest) -> None:
    """The network is the one whose features were cached, which are in another order."""
    recipe = next(recipe for recipe in case.tests if recipe.name == inside.name)
    with torch.no_grad():
        here = batched(case.network)(inputs(recipe))
    torch.testing.assert_close(
        here.sort(dim=0).values, inside.features.logits.sort(dim=0).values, atol=1e-3, rtol=1e-3
    )


def inputs(recipe: TestSet) -> Tensor:
    """Inputs ``(n, ...)`` of a test set."""
    x, _ = recipe.make().tensors
    return x


def batched(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The network on any number of inputs, a batch at a time."""
    return lambda x: torch.cat([network(rows) for rows in x.split(BATCH)])


def known_weights(labels: Tensor, test: CachedTest) -> np.ndarray:
    """``(c,)`` share of each class in the test set, by its labels, over that of the calibration samples."""
    c = test.features.logits.shape[1]
    there = labels.bincount(minlength=c).clamp_min(1).double()
    here = test.labels.bincount(minlength=c).double()
    return np.asarray(here / here.sum() / (there / there.sum()))


def record(name: str, seed: int, method: str, test: CachedTest, temperature: float) -> Record:
    """What the test set scores at one temperature."""
    features = Features(test.features.logits)
    prediction = Prediction.from_probs(features, tempered_softmax(features.logits, temperature))
    about = {"set": name, "seed": seed, "method": method, "window": 0, "test": test.name, "kind": test.kind}
    found = scores(prediction, features, test.labels)
    return {**about, "log_temperature": math.log(temperature), **found}


def page(results: Results, seed: int) -> Iterator[str]:
    """The page, line by line."""
    yield INTRO.format(seed=seed)
    for kind, title in (("in", "In domain"), ("shift", "Under shift")):
        yield f"## {title}\n"
        rows = [[str(way), *(cell(part, way, kind) for part in parts(results).values())] for way in WAYS]
        yield from table(["method", *parts(results)], rows)
        yield ""
    yield "## Temperatures\n"
    yield "Geometric means over the test sets, in domain / under shift.\n"
    ways = [Way(method) for method in (PSEUDOCAL, KNOWN, BEST)]
    rows = [[str(way), *(temperature(part, way) for part in parts(results).values())] for way in ways]
    yield from table(["method", *parts(results)], rows)


def parts(results: Results) -> dict[str, Results]:
    """All data sets, and each by itself."""
    return {"mean": results, **{name: results.of_sets([name]) for name in results.sets}}


def cell(part: Results, way: Way, kind: str) -> str:
    """The three scores."""
    return " / ".join(f"{part.mean(way, kind, key):.3f}" for key in SCORES)


def temperature(part: Results, way: Way) -> str:
    """Mean temperature in domain and under shift."""
    return " / ".join(f"{math.exp(part.mean(way, kind, 'log_temperature')):.2f}" for kind in ("in", "shift"))


if __name__ == "__main__":
    main()
