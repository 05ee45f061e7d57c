"""The page of results, and the first table of the README, from records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from salgp.io import write_whole
from salgp_study.suite.methods import ABLATIONS, BASELINES, METHODS, OURS, WINDOWS
from salgp_study.suite.protocol import count_looks, read_protocol
from salgp_study.suite.scoring import Record
from salgp_study.suite.summary import BASE, CONTEXT, PER_SAMPLE, SOFTMAX, Results, Way, table
from salgp_study.suite.verdicts import in_domain, probabilities, under_shift, verdict_table

__all__ = ["front_table", "lost", "page", "write_report"]

COMMAND = "python -m salgp_study.suite tables"
SCORES = ("ece", "nll", "auroc")
ALSO = "Methods that are not among the means above were scored on fewer draws; nan: not scored."
NOVELTIES = ("novelty", "softmax", "energy", "layer")
HEAD = ("in: ECE", "NLL", "AUROC", "shift: ECE", "NLL", "AUROC")


def write_report(records: Sequence[Record], out: Path | None = None) -> str:
    """The README's table; the whole page goes to ``out``, if given, unless that holds a page of more."""
    results = Results(records)
    if out is not None:
        _write(page(results), out)
    return "\n".join(front_table(results))


def lost(before: str, after: str) -> list[str]:
    """Data sets and methods of one page that another lacks, or has of fewer seeds.

    Example:
        >>> lost("Data sets and seeds: a (3), b (3).", "Data sets and seeds: a (3), b (1).")
        ['b (3)']
    """
    old, new = _seeds(before), _seeds(after)
    sets = [f"{name} ({n})" for name, n in old.items() if n > new.get(name, 0)]
    shown, left = ({name for name in METHODS if f"\n| {name} |" in text} for text in (before, after))
    return [*sets, *sorted(shown - left)]


def _seeds(text: str) -> dict[str, int]:
    said = re.search(r"^Data sets and seeds: (.*)\.$", text, re.MULTILINE)
    found = re.findall(r"([^\s,]+) \((\d+)\)", said.group(1)) if said else []
    return {name: int(n) for name, n in found}


def _write(text: str, out: Path) -> None:
    gone = lost(out.read_text(encoding="utf-8"), text) if out.is_file() else []
    if gone:
        raise ValueError(
            f"{out} holds results that are not among the records: {', '.join(gone)}; score them first "
            f"(`score`, for report sets `look`), or write to another file"
        )
    out.parent.mkdir(parents=True, exist_ok=True)

    def fill(part: Path) -> None:
        part.write_text(text, encoding="utf-8")

    write_whole(out, fill)


def front_table(results: Results) -> list[str]:
    """Strong and weak networks apart: ours, temperature, the three best baselines."""
    strong = set(read_protocol().strong)
    baselines = results.best_baselines(3)
    rows: list[list[object]] = []
    for kind, names in (("strong", strong), ("weak", set(results.sets) - strong)):
        part = results.of_sets(names)
        for way in (BASE, *baselines, *results.ours):
            if part.has(way):
                rows.append([kind, str(way), *_both(part, way)])
    return table(["networks", "method", *HEAD], rows)


def page(results: Results) -> str:
    """Everything as Markdown."""
    sections = [
        _intro(results),
        ["## Strong and weak networks", "", *front_table(results)],
        ["## What it must show", "", "Broken promises first.", "", *_verdicts(results)],
        ["## Means over the data sets", "", *_means(results)],
        ["## What is left to gain", "", *_limits(results)],
        ["## By data set: ECE in domain / under shift", "", ALSO, "", *_by_set(results)],
        ["## Like a family of augmentations, or not", "", *_likeness(results)],
        ["## Windows", "", *_windows(results)],
        ["## Each ingredient", "", *_ablations(results)],
        ["## Accuracy without labels", "", *_estimates(results)],
        ["## Unknown classes and shifted samples, AUROC", "", *_novelty(results)],
        ["## 90 % interval of ours, and time to fit", "", *_intervals(results)],
        ["## Every test set", "", *_every_set(results)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _intro(results: Results) -> list[str]:
    protocol, looks, own = read_protocol(), count_looks(), count_looks(method=OURS)
    seeds = {name: len({r["seed"] for r in results.records if r["set"] == name}) for name in results.sets}
    said = ", ".join(f"{name} ({n})" for name, n in seeds.items())
    rows = [
        [name, str(looks.get(name, 0)), str(own.get(name, 0)), protocol.in_sight.get(name, "")]
        for name in results.sets
        if name in protocol.report
    ]
    return [
        "# Shift suite: results",
        "",
        f"Written by `{COMMAND}`. Means are over data sets, each the mean of its test sets and seeds.",
        f"Data sets and seeds: {said}.",
        "",
        "Choices are made on the development sets only. Report sets, named beforehand in `protocol.json`:",
        "",
        *table(["report set", "looks so far", "at our method", "what was known of it before"], rows),
    ]


def _verdicts(results: Results) -> list[str]:
    verdicts = [*in_domain(results), *under_shift(results), *probabilities(results)]
    return verdict_table(verdicts)


def _both(results: Results, way: Way) -> list[float]:
    return [results.mean(way, kind, key) for kind in ("in", "shift") for key in SCORES]


def _means(results: Results) -> list[str]:
    ways = [*results.ours, *(Way(m) for m in BASELINES if results.has(Way(m)))]
    everywhere = results.draws_of(BASE)
    ways = [way for way in ways if results.draws_of(way) == everywhere]  # means over the same draws
    rows = [
        [
            str(way),
            *_both(results, way),
            results.mean(way, "shift", "aurc"),
            results.mean_of_tests(way, "shift", "ece"),
        ]
        for way in ways
    ]
    said = (
        "Last column: the ECE as a mean over all shifted test sets, each counted once. All other means count "
        "each data set once, so that the single shifted set of SPCC weighs as much as the 54 of CIFAR-10."
    )
    return [said, "", *table(["method", *HEAD, "AURC", "every shifted set: ECE"], rows)]


def _by_set(results: Results) -> list[str]:
    ways = [*results.ours, *(Way(m) for m in BASELINES if results.has(Way(m)))]
    parts = {name: results.of_sets([name]) for name in results.sets}
    rows = [[str(way), *(_pair(part, way, "ece") for part in parts.values())] for way in ways]
    floor = ["floor: confidences exactly right", *(_pair(p, BASE, "ece_floor") for p in parts.values())]
    bounds = [[_bound(way), *(_pair(p, way, "ece_told") for p in parts.values())] for way in results.ours]
    return table(["method", *parts], [*rows, *bounds, floor])


def _bound(way: Way) -> str:
    return f"bound: {way}, told the accuracy of every test set"


def _limits(results: Results) -> list[str]:
    """What is left to gain, and what no method without labels can gain."""
    said = (
        "What is left. *Told*: one number is added to the log-odds of each test set, so that "
        "the mean confidence is its accuracy: what an exact estimate of accuracy, which takes labels, would "
        "give. "
        "*Floor*: confidences exactly right; test sets are finite."
    )
    share = results.mean(BASE, "shift", "ece")
    ways = [(str(BASE), BASE, "ece"), *((str(way), way, "ece") for way in results.ours)]
    ways += [(_bound(way), way, "ece_told") for way in results.ours]
    ways += [("floor: confidences exactly right", BASE, "ece_floor")]
    rows = [
        [name, results.mean(way, "in", key), at := results.mean(way, "shift", key), at / share]
        for name, way, key in ways
    ]
    return [said, "", *table(["", "in: ECE", "shift: ECE", "of temperature's"], rows)]


def _pair(results: Results, way: Way, key: str) -> str:
    return f"{results.mean(way, 'in', key):.3f} / {results.mean(way, 'shift', key):.3f}"


def _likeness(results: Results) -> list[str]:
    like, unlike = results.only(lambda r: bool(r["like"])), results.only(lambda r: not r["like"])
    ways = [BASE, *results.best_baselines(3), *results.ours]
    rows = [
        [str(way), *(part.mean(way, "shift", key) for part in (like, unlike) for key in SCORES)]
        for way in ways
    ]
    return table(["method", "like: ECE", "NLL", "AUROC", "unlike: ECE", "NLL", "AUROC"], rows)


def _windows(results: Results) -> list[str]:
    ways = [way for way in (PER_SAMPLE, *(Way(CONTEXT.method, w) for w in WINDOWS)) if results.has(way)]
    rows: list[list[object]] = [[str(way), *_both(results, way)] for way in ways]
    mixed = [results.mean(CONTEXT, kind, key) for kind in ("mixed in", "mixed") for key in SCORES]
    if np.isfinite(mixed).any():
        rows.append([f"{CONTEXT}, 30 % of them shifted (clean rows; shifted rows)", *mixed])
    return table(["windows", *HEAD], rows)


def _ablations(results: Results) -> list[str]:
    tried = [Way(m, w) for w in (0, CONTEXT.window) for m in ABLATIONS]
    ways = [*results.ours, *(way for way in tried if results.has(way))]
    shared = set.intersection(*(results.draws_of(way) for way in ways)) if ways else set()
    part = results.of_draws(shared)
    names = ", ".join(f"{name} {seed}" for name, seed in sorted(shared)) or "none"
    said = f"On the data sets and seeds where every variant was scored: {names}."
    return [said, "", *table(["method", *HEAD], [[str(way), *_both(part, way)] for way in ways])]


def _estimates(results: Results) -> list[str]:
    ways = [SOFTMAX, BASE, *results.best_baselines(3), *results.ours]
    rows = []
    for way in ways:
        gaps = [abs(r["confidence"] - r["accuracy"]) for r in results.of(way, "shift")]
        rows.append([str(way), results.estimate_error(way), max(gaps, default=float("nan"))])
    return [
        "Distance of the mean confidence of a shifted set from its accuracy.",
        "",
        *table(["method", "mean", "largest"], rows),
    ]


def _novelty(results: Results) -> list[str]:
    rows = []
    for name in results.sets:
        part = results.of_sets([name])
        for kind, what in (("shift", "shifted from in-domain"), ("unknown", "unknown from known classes")):
            cells = [part.mean(PER_SAMPLE, kind, f"{kind}_{k}") for k in NOVELTIES]
            if np.isfinite(cells).any():
                rows.append([name, what, *cells])
    said = (
        "Best layer: the distance of the one layer that tells best, chosen for each set with the answers in "
        "sight."
    )
    head = ["data set", "what", "novelty (ours)", "max softmax", "energy", "best layer"]
    return [said, "", *table(head, rows)]


def _intervals(results: Results) -> list[str]:
    def cell(part: Results, way: Way, kind: str) -> str:
        return f"{part.mean(way, kind, 'coverage'):.3f} ({part.mean(way, kind, 'width'):.3f})"

    rows = []
    for name in results.sets:
        part = results.of_sets([name])
        cells = [cell(part, way, kind) for kind in ("in", "shift") for way in results.ours]
        rows.append([name, *cells, part.mean(PER_SAMPLE, "in", "fit_seconds")])
    kinds = [f"{where}: {way}" for where in ("in domain", "under shift") for way in results.ours]
    intro = (
        "Share of samples in confidence bands where the number of correct answers is what the intervals say"
    )
    return [
        f"{intro}; in brackets their mean width. There are fifteen bands of a test set: right intervals give "
        "0.90 with a standard deviation of 0.08 for one draw in domain, and of 0.045 for three.",
        "",
        *table(["data set", *kinds, "fit (processor s)"], rows),
    ]


def _every_set(results: Results) -> list[str]:
    ways = [BASE, *results.ours]

    def both(way: Way, key: str) -> dict[tuple[str, str], float]:
        return results.by_test(way, "in", key) | results.by_test(way, "shift", key)

    found = {(way, key): both(way, key) for way in ways for key in SCORES}
    accuracy = both(BASE, "accuracy")
    rows = []
    for where in accuracy:
        cells = (" / ".join(f"{found[way, key].get(where, np.nan):.3f}" for way in ways) for key in SCORES)
        rows.append([*where, accuracy[where], *cells])
    shown = " / ".join(map(str, ways))
    head = ["data set", "test set", "accuracy", *(key.upper() for key in SCORES)]
    return [f"Each cell: {shown}.", "", *table(head, rows)]
