"""Forms of layer evidence that were compared with the one in use, on the development sets of the shift suite.

What a window may change, what describes it, whether the gate is asked beside it, whether the expert for shift
is judged on families it has not seen, and how many originals the gate may touch:

    python -m salgp_study.suite features --data DATA --cache CACHE
    python benchmarks/forms.py --cache CACHE
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.evidence import environment as windows
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.experts import fit_shift
from salgp.calibrators.evidence.gate import Gate
from salgp.calibrators.evidence.model import within
from salgp.calibrators.evidence.reference import layer_evidence
from salgp.calibrators.evidence.rows import View
from salgp.features import Features
from salgp.gp.logistic import logistic
from salgp.metrics import ece, nll_correct
from salgp_study.suite.cache import CachedCase, case_folder, is_complete, read_case
from salgp_study.suite.protocol import read_protocol

WINDOW, MOVED = 50, 15
"""Samples of a window, and how many of a mixed one have moved."""
LARGEST_T = 4.0
Statistics = Callable[["JudgedRows"], Tensor]
Judge = Callable[["JudgedRows"], Tensor]


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """What is known of samples: their view, both experts' log-odds, the gate's answer, and the truth."""

    view: View
    inside: Tensor
    shift: Tensor
    share: Tensor
    correct: Tensor
    true: Tensor

    def __getitem__(self, rows: Tensor) -> JudgedRows:
        rest = (self.inside, self.shift, self.share, self.correct, self.true)
        return JudgedRows(self.view[rows], *(x[rows] for x in rest))


@dataclass(frozen=True, eq=False)
class Form:
    """One way to use a window.

    Args:
        statistics: what describes it.
        leaning: may it lean to the expert for shift only, or also add a constant and a slope of ``t``?
        gated: weight of the window from which on the gate beside it is believed in full; None to leave the
            gate out.
        unseen: is the expert for shift judged on families it has not seen?
    """

    statistics: Statistics
    leaning: bool = True
    gated: float | None = None
    unseen: bool = False


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted calibrator with its calibration rows and its test sets."""

    calibrator: LayerEvidence
    rows: JudgedRows
    unseen_shift: Tensor
    tests: list[tuple[str, JudgedRows]]


def confidences(seen: JudgedRows) -> Tensor:
    """The two numbers in use."""
    return torch.stack([torch.sigmoid(seen.shift), torch.sigmoid(seen.inside)], dim=1)


def with_numbers(*more: Callable[[JudgedRows], Tensor]) -> Statistics:
    """The two numbers and others besides."""
    return lambda seen: torch.cat([confidences(seen), *(f(seen)[:, None] for f in more)], dim=1)


def mean_novelty(seen: JudgedRows) -> Tensor:
    return seen.view.height.mean(dim=1)


def largest_novelty(seen: JudgedRows) -> Tensor:
    return seen.view.height.amax(dim=1)


def mean_agreement(seen: JudgedRows) -> Tensor:
    return within(seen.view.agreement, 4.0).mean(dim=1)


def gate_answer(seen: JudgedRows) -> Tensor:
    return within(torch.logit(seen.share, eps=1e-6), 8.0)


FORMS: dict[str, Form] = {
    "constant, slope and leaning (six weights)": Form(confidences, leaning=False),
    "leaning alone (two weights)": Form(confidences),
    "- and the gate": Form(confidences, gated=0.0),
    "- and the gate, believed from a weight of .1 on": Form(confidences, gated=0.1),
    "- .2": Form(confidences, gated=0.2),
    "- .4": Form(confidences, gated=0.4),
    "- .6": Form(confidences, gated=0.6),
    "- .4, and mean novelty": Form(with_numbers(mean_novelty), gated=0.4),
    "- and largest novelty": Form(with_numbers(largest_novelty), gated=0.4),
    "- and mean agreement": Form(with_numbers(mean_agreement), gated=0.4),
    "- and the gate's answer": Form(with_numbers(gate_answer), gated=0.4),
    "- expert for shift judged on families it has not seen": Form(confidences, gated=0.4, unseen=True),
}
GUARDS: dict[str, float | None] = {
    "gate alone, leaves 90 % of the originals as they are": 0.9,
    "98 %": 0.98,
    "99 %": 0.99,
    "all": 1.0,
    "99 %, or fewer where touching them helps (in use)": None,
}


class WindowModel:
    """The environment's model in some form."""

    def __init__(self, fitted: Fitted, form: Form) -> None:
        rows, seen = fitted.calibrator.seen_, fitted.rows
        self.form, self.gate = form, fitted.calibrator.evidence_.gate
        shift = fitted.unseen_shift if form.unseen else seen.shift
        judged = replace(seen, shift=shift)
        values, first, label = form.statistics(judged), ~rows.is_copy, rows.view.label
        centred = values[first] - values[first].mean(dim=0)
        n_classes = fitted.calibrator.n_classes_
        total = values.new_zeros(n_classes, values.shape[1]).index_add_(0, label[first], centred)
        count = torch.bincount(label[first], minlength=n_classes)
        self.usual = total / (count[:, None] + windows.CLASS_PRIOR)
        values = values - self.usual[label]
        self.centre = values[first].mean(dim=0)
        self.spread = values[first].std(dim=0, correction=0).clamp_min(1e-6)
        self._learn(fitted, judged, values)

    def _learn(self, fitted: Fitted, seen: JudgedRows, values: Tensor) -> None:
        rows, generator = fitted.calibrator.seen_, torch.Generator().manual_seed(0)
        drawn = list(windows._windows(rows, WINDOW, generator))
        index = torch.cat([part for part, _ in drawn])
        weight = torch.cat([torch.full((part.numel(),), w).double() for part, w in drawn])
        m = self._moved(values[index].mean(dim=1), torch.full((len(index),), float(WINDOW)))
        flat = index.flatten()
        X = self._columns(m.repeat_interleave(WINDOW, dim=0), seen, flat)
        scale = (X.square().mean(dim=0) + windows.FLOOR**2).sqrt()
        weight = weight * (len(rows) / weight.sum())
        prior = torch.full((X.shape[1],), windows.RIDGE * len(rows)).double()
        w = logistic(X / scale, rows.correct[flat], weight, prior, seen.inside[flat])
        self.weights = w / scale

    def _moved(self, mean: Tensor, count: Tensor) -> Tensor:
        return windows._compressed((mean - self.centre) / self.spread, count.double())

    def _columns(self, m: Tensor, seen: JudgedRows, rows: Tensor) -> Tensor:
        t, gap = seen.view.t[rows], (seen.shift - seen.inside)[rows]
        if self.form.leaning:
            return m * gap[:, None]
        parts = torch.stack([torch.ones_like(t), within(t, LARGEST_T), gap], dim=1)
        return (m[:, :, None] * parts[:, None, :]).flatten(1)

    def __call__(self, seen: JudgedRows) -> Tensor:
        """Log-odds in windows of consecutive samples."""
        values = self.form.statistics(seen) - self.usual[seen.view.label]
        number = torch.arange(len(values)) // WINDOW
        count = torch.bincount(number)
        mean = values.new_zeros(len(count), values.shape[1]).index_add_(0, number, values) / count[:, None]
        m = self._moved(mean, count)[number]
        if not self.form.leaning:
            return seen.inside + self._columns(m, seen, torch.arange(len(values))) @ self.weights
        lean = (m @ self.weights).clamp(0.0, 1.0)
        if self.form.gated is not None:
            assert self.gate is not None
            alone = passed(seen, self.gate.guard)
            believed = alone * (lean / self.form.gated).clamp(max=1.0) if self.form.gated else alone
            lean = 1 - (1 - lean) * (1 - believed)
        return seen.inside + lean * (seen.shift - seen.inside)


def in_use(fitted: Fitted) -> Judge:
    """The form in use: two numbers, the gate, and crowding."""
    model = fitted.calibrator.evidence_
    environment, gate = model.environment, model.gate
    assert environment is not None
    assert gate is not None

    def judge(seen: JudgedRows) -> Tensor:
        number, label = torch.arange(len(seen.correct)) // WINDOW, seen.view.label
        opinions = environment.opinions(seen.inside, seen.shift, label)
        sums = environment.sums(opinions, label, number, int(number[-1]) + 1)
        around = environment.surroundings(sums, number, label)
        lean = environment.joined(passed(seen, gate.guard), around.m)
        return seen.inside + lean * (seen.shift - seen.inside) - environment.doubt(around)

    return judge


def passed(seen: JudgedRows, guard: float) -> Tensor:
    """What the gate says of single samples under a guard."""
    if guard == 1:
        return torch.zeros_like(seen.share)
    return ((seen.share - guard) / (1 - guard)).clamp_min(0.0)


def fit(case: CachedCase) -> Fitted:
    """Fit the default, and judge every family of copies by an expert that has not seen it."""
    features, labels = case.calibration
    calibrator = LayerEvidence().fit(features, labels, case.reference)
    rows = calibrator.seen_
    evidence = layer_evidence(calibrator.evidence_.reference, features)
    known = _seen(calibrator, features, labels, evidence)
    unseen = known.shift.clone()
    for family in rows.families:
        kept, held = (rows.family != family).nonzero()[:, 0], (rows.family == family).nonzero()[:, 0]
        options = {"caution": calibrator.caution, "ridge": calibrator.ridge}
        unseen[held] = fit_shift(rows[kept], features.n_classes, **options).log_odds(rows.view[held])
    tests = [
        (test.kind, _seen(calibrator, test.features, test.labels))
        for test in case.tests
        if test.kind != "unknown"
    ]
    return Fitted(calibrator, known, unseen, tests)


def _seen(
    calibrator: LayerEvidence, features: Features, labels: Tensor, evidence: object = None
) -> JudgedRows:
    model = calibrator.evidence_
    assert model.shift is not None
    assert model.gate is not None
    found = evidence or layer_evidence(model.reference, features)
    view = model.view(features, found)
    open_gate = Gate(model.gate.centre, model.gate.scale, model.gate.weights, 0.0)
    share = open_gate(view, found.place)
    inside, shift = model.inside.log_odds(view), model.shift.log_odds(view)
    return JudgedRows(view, inside, shift, share, features.correct(labels).double(), labels)


def guarded(case: CachedCase, share: float | None) -> Judge:
    """Log-odds of single samples with a guard."""
    gate = LayerEvidence(guard=share).fit(*case.calibration, case.reference).evidence_.gate
    assert gate is not None

    return lambda seen: seen.inside + passed(seen, gate.guard) * (seen.shift - seen.inside)


def scores(fitted: Fitted, judge: Judge) -> list[float]:
    """ECE and NLL in domain, their means over the shifted sets, over what has moved in mixed windows, and
    over in-domain and shifted sets in windows of one true class.
    """
    inside = next(seen for kind, seen in fitted.tests if kind == "in")
    found: dict[str, list[tuple[float, float]]] = {
        "in": [],
        "shift": [],
        "mixed": [],
        "in 1": [],
        "shift 1": [],
    }
    for kind, seen in fitted.tests:
        found[kind].append(_scores(judge(seen), seen.correct))
        alike = seen[seen.true.argsort(stable=True)]
        found[f"{kind} 1"].append(_scores(judge(alike), alike.correct))
        if kind == "shift":
            whole, moved = mixed(inside, seen)
            found["mixed"].append(_scores(judge(whole)[moved], whole.correct[moved]))
    return [x for kind in found for x in np.mean(found[kind], axis=0)]


def _scores(f: Tensor, correct: Tensor) -> tuple[float, float]:
    p = torch.sigmoid(f)
    return ece(p, correct), nll_correct(p, correct)


def mixed(inside: JudgedRows, shifted: JudgedRows) -> tuple[JudgedRows, Tensor]:
    """Windows that are in domain but for some samples, and which those are."""
    still = WINDOW - MOVED
    count = min(len(shifted.correct) // MOVED, len(inside.correct) // still)
    both = JudgedRows(
        View(*(torch.cat([getattr(s.view, f.name) for s in (inside, shifted)]) for f in fields(View))),
        *(
            torch.cat([getattr(s, name) for s in (inside, shifted)])
            for name in ("inside", "shift", "share", "correct", "true")
        ),
    )
    first = torch.arange(count * still).reshape(count, still)
    second = len(inside.correct) + torch.arange(count * MOVED).reshape(count, MOVED)
    moved = torch.cat([torch.zeros(count, still), torch.ones(count, MOVED)], dim=1).bool().flatten()
    return both[torch.cat([first, second], dim=1).flatten()], moved


def measured(cache: Path, seeds: list[int]) -> Iterator[tuple[str, str, list[float]]]:
    """Data set, form, scores."""
    for name in read_protocol().development:
        for seed in seeds:
            folder = case_folder(cache, name, seed)
            if not is_complete(folder):
                continue
            case = read_case(folder)
            fitted = fit(case)
            yield name, "temperature", scores(fitted, lambda seen: seen.view.t)
            for title, form in FORMS.items():
                yield name, title, scores(fitted, WindowModel(fitted, form))
            yield (
                name,
                "two numbers, the gate from .4 on, and crowding (in use)",
                scores(fitted, in_use(fitted)),
            )
            for title, share in GUARDS.items():
                yield name, title, scores(fitted, guarded(case, share))


def table(rows: list[tuple[str, str, list[float]]]) -> str:
    """Means over data sets, each the mean of its seeds."""
    lines = [
        "| form | in: ECE | NLL | shift: ECE | NLL | moved part of mixed windows: ECE | NLL "
        "| in, windows of one true class: ECE | NLL | shift, the same: ECE | NLL |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for form in dict.fromkeys(form for _, form, _ in rows):
        sets = dict.fromkeys(name for name, _, _ in rows)
        per_set = [np.mean([x for n, f, x in rows if (n, f) == (name, form)], axis=0) for name in sets]
        lines.append(f"| {form} | " + " | ".join(f"{x:.4f}" for x in np.mean(per_set, axis=0)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="features of the shift suite")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/forms.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = list(measured(arguments.cache, arguments.seeds))
    sets = ", ".join(dict.fromkeys(name for name, _, _ in rows))
    head = (
        f"# Forms compared\n\nWritten by `python benchmarks/forms.py`. Development sets: {sets}; "
        f"windows of {WINDOW}, mixed ones with {MOVED} samples that have moved. Means over the sets.\n"
    )
    arguments.out.write_text(f"{head}\n{table(rows)}\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
