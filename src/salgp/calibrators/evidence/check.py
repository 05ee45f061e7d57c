"""What a fit knows of itself before it is used: measured on samples and on disturbances it has not seen.

In domain, each calibration sample is judged by the model without it. Under shift, each family of
perturbations is judged by a model that was fitted without that family. Both stand beside the network's own
confidence and temperature scaling. The families also tell how far an unseen shift may be off: what their mean
log-odds miss, relative to the weight of the expert for shift, widens the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.evidence.environment import Environment, Surroundings, fit_environment
from salgp.calibrators.evidence.experts import Expert, InDomain, fit_shift
from salgp.calibrators.evidence.rows import FittedRows
from salgp.metrics import auroc, ece, nll_correct

__all__ = [
    "LeftOut",
    "check_table",
    "in_windows",
    "leave_families_out",
    "mixed_log_odds",
    "unseen_spread",
    "verdict",
]

LARGEST_UNSEEN = 4.0
"""Beyond this variance of the log-odds an interval says nothing anyway."""

FEW_ERRORS = 10
"""Fewer errors among the calibration samples tell little about errors."""

Table = dict[str, dict[str, dict[str, float]]]
"""Situation -> method -> score -> value."""


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Copies of one family, judged in windows by a model that has not seen the family.

    Args:
        rows: ``(n,)`` which rows they are.
        log_odds: ``(n,)``.
        lean: ``(n,)`` weight of the expert for shift.
    """

    rows: Tensor
    log_odds: Tensor
    lean: Tensor


def mixed_log_odds(
    environment: Environment, seen: Surroundings, inside: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-odds ``(n,)`` of samples in an environment, and the weight of the expert for shift."""
    lean = environment.lean(seen.m)
    return torch.lerp(inside, shift, lean) - environment.doubt(seen), lean


def leave_families_out(
    rows: FittedRows,
    inside: InDomain,
    n_classes: int,
    *,
    caution: float,
    ridge: float,
    window: int,
    seed: int,
    crowding: bool = True,
) -> dict[int, LeftOut]:
    """Judge each family of copies by experts and environments of the others; nothing where there is one."""
    families = rows.families
    if len(families) < 2:
        return {}
    f_in = inside.log_odds(rows.view)
    windows: dict[str, Any] = {"window": window, "seed": seed, "crowding": crowding}
    return {k: _judged(rows, f_in, k, n_classes, caution, ridge, windows) for k in families}


def _judged(
    rows: FittedRows,
    f_in: Tensor,
    family: int,
    n_classes: int,
    caution: float,
    ridge: float,
    windows: dict[str, Any],
) -> LeftOut:
    kept = (rows.family != family).nonzero()[:, 0]
    shift: Expert = fit_shift(rows[kept], n_classes, caution=caution, ridge=ridge)
    f_shift = shift.log_odds(rows.view)
    others = rows[kept]
    environment = fit_environment(others, f_in[kept], f_shift[kept], n_classes, **windows)
    held = (rows.family == family).nonzero()[:, 0]
    held = held[rows.strength[held].argsort(stable=True)]
    label = rows.view.label[held]
    opinions = environment.opinions(f_in[held], f_shift[held], label)
    seen = in_windows(environment, opinions, label, _window_numbers(rows.strength[held], windows["window"]))
    f, lean = mixed_log_odds(environment, seen, f_in[held], f_shift[held])
    return LeftOut(held, f, lean)


def in_windows(environment: Environment, opinions: Tensor, label: Tensor, number: Tensor) -> Surroundings:
    """What every sample's window shows, given the number of its window, ``(n,)``."""
    found, window = number.unique(return_inverse=True)
    return environment.surroundings(environment.sums(opinions, label, window, len(found)), window, label)


def _window_numbers(strength: Tensor, size: int) -> Tensor:
    """Number of the window of each row: runs of ``size`` rows of equal strength."""
    _, level = strength.unique_consecutive(return_inverse=True)
    start = torch.cat([level.new_zeros(1), torch.bincount(level).cumsum(0)])[level]
    within = (torch.arange(len(level), device=level.device) - start) // size
    return level * len(level) + within


def unseen_spread(rows: FittedRows, left_out: dict[int, LeftOut]) -> float:
    """Variance of the log-odds of an unseen shift, per squared weight of the expert for shift."""
    if not left_out:
        return 0.0
    missed = [_missed(part.log_odds, rows.correct[part.rows]) for part in left_out.values()]
    leaned = [float(part.lean.square().mean()) for part in left_out.values()]
    return min(sum(x * x for x in missed) / max(sum(leaned), 0.1 * len(leaned)), LARGEST_UNSEEN)


def _missed(f: Tensor, correct: Tensor) -> float:
    """Constant that makes the mean confidence right; half a sample on either side keeps it finite."""
    wanted = (float(correct.sum()) + 0.5) / (len(correct) + 1)
    delta = 0.0
    for _ in range(30):
        p = torch.sigmoid(f + delta)
        slope = float((p * (1 - p)).mean())
        delta += max(-1.0, min(1.0, (wanted - float(p.mean())) / max(slope, 1e-6)))
    return delta


def check_table(
    rows: FittedRows, raw: Tensor, left_out_one: Tensor, families: dict[int, LeftOut], name: str
) -> Table:
    """Scores in domain and on left-out families: uncalibrated, temperature scaling, and ours.

    Of the families it is the mean of their scores: taken together, too much confidence on one would make up
    for too little on another.

    Args:
        rows: the calibration data.
        raw: ``(n,)`` log-odds of the network's own confidence.
        left_out_one: ``(n,)`` log-odds of every row without its group.
        families: from `leave_families_out`.
        name: of our method.
    """
    first = (~rows.is_copy).nonzero()[:, 0]
    table = {"in domain": _compared(rows, first, raw, left_out_one[first], name)}
    if families:
        each = [_compared(rows, part.rows, raw, part.log_odds, name) for part in families.values()]
        table["left-out families"] = {method: _mean([one[method] for one in each]) for method in each[0]}
    return table


def _mean(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each score over those that have it; NaN where none has."""
    columns = {key: torch.tensor([one[key] for one in scores], dtype=torch.float64) for key in scores[0]}
    return {key: float(column.nanmean()) for key, column in columns.items()}


def _compared(
    rows: FittedRows, index: Tensor, raw: Tensor, ours: Tensor, name: str
) -> dict[str, dict[str, float]]:
    methods = {"uncalibrated": raw[index], "temperature": rows.view.t[index], name: ours}
    return {method: _scores(f, rows.correct[index]) for method, f in methods.items()}


def _scores(f: Tensor, correct: Tensor) -> dict[str, float]:
    confidence = torch.sigmoid(f)
    found = {"ece": ece(confidence, correct), "nll": nll_correct(confidence, correct)}
    mixed = 0 < float(correct.mean()) < 1
    return {**found, "auroc": auroc(f, correct) if mixed else float("nan")}


def verdict(table: Table, trust: float, name: str, errors: int = FEW_ERRORS, doubt: str | None = None) -> str:
    """One sentence on what the fit found.

    Args:
        table: from `check_table`.
        trust: weight of the layers in domain.
        name: of our method.
        errors: how many calibration samples are classified wrongly; few are said.
        doubt: why the labels may not be those of the samples; then nothing else is worth saying.

    Example:
        >>> scores = {"uncalibrated": {"nll": 0.3}, "temperature": {"nll": 0.2}, "ours": {"nll": 0.1}}
        >>> verdict({"in domain": scores}, 1.0, "ours")[:50]
        'In domain the layers help: negative log-likelihood'
    """
    if doubt is not None:
        return f"Not to be relied on: {doubt}"
    inside = table["in domain"]
    if trust == 0:
        text = "In domain the layers add nothing certain, so temperature scaling is used there"
    else:
        text = (
            f"In domain the layers help: negative log-likelihood {inside[name]['nll']:.3f} with samples left "
            f"out, temperature scaling {inside['temperature']['nll']:.3f}"
        )
    if errors < FEW_ERRORS:
        text += f" (a finding on {errors} error{'' if errors == 1 else 's'} only)"
    if "left-out families" not in table:
        return f"{text}. No disturbed copies were rehearsed, so nothing is known about shift."
    shifted = table["left-out families"]
    return (
        f"{text}. On disturbances left out of the fit the mean calibration error is "
        f"{shifted[name]['ece']:.3f}, temperature scaling's {shifted['temperature']['ece']:.3f}."
    )
