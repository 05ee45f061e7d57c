"""Act or ask: a threshold on the confidence that keeps a promise, or that costs least.

`choose_threshold` gives the `Rule` that acts most often while, with the stated assurance, at most a share
``error`` of the answers acted on is wrong. It is Learn-then-Test (Angelopoulos et al. 2021) with exact
binomial tails. Sort ``n`` labelled samples by confidence. Rule ``m`` acts on what is more confident than the
``(m + 1)``-th of them. The rules are tested in the order ``m_0 < m_1 < ... <= n``, which depends on ``n``,
``error`` and ``assurance`` only, each by

    p_m = P(Binomial(m, error) <= wrong answers among the first m)  <=  doubt,

and the last one before the first failure is kept. A fixed order needs no correction for the number of rules.
There are three such orders: one from half of the samples on, with four fifths of the doubt ``1 -
assurance``; where that fails at once, one from a quarter; and at last one from the fewest samples that can
pass. Starting only among the very few most confident would end at the first unlucky one of them.

Why thresholds may be taken from the very samples they are tested on: given the ``(m + 1)``-th confidence, the
``m`` samples above it are independent draws from all that is above it, so that their number of errors is
binomial with just the error rate that rule ``m`` will have. The first rule that must not pass is either
``m_0``, or it keeps exactly the samples above the confidence where the error rate crosses ``error``; in both
cases its ``p_m`` is below ``doubt`` with at most that chance. This holds where the error rate crosses
``error`` once as the threshold falls. Whoever doubts that gives ``thresholds`` fixed beforehand: then nothing
is assumed but that new samples come like the labelled ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import bdtr, betaincinv
from torch import Tensor, nn

from salgp.labels import as_labels
from salgp.prediction import Prediction
from salgp.storage import FormatError, from_json, read_header, write_header

__all__ = ["ALWAYS", "NEVER", "Rule", "RuleModule", "choose_threshold", "samples_needed"]

ALWAYS, NEVER = -1.0, 1.0
"""Thresholds that every confidence exceeds, and none."""

_KIND = "salgp-rule"

_STEP = 1.005
"""Ratio of two consecutive numbers of kept samples: what coarser steps would lose of the coverage."""

_STARTS = ((1 / 2, 0.8), (1 / 4, 0.1), (0.0, 0.1))
"""Share of the samples that each order of tests starts with, and its share of the doubt."""

_COST_GRID = np.linspace(-3, 3, 25)
"""Thresholds tried for a cost, in log-odds around the one that is best for calibrated confidences."""


@dataclass(frozen=True)
class Rule:
    """Act where the confidence exceeds a threshold; ask elsewhere.

    Args:
        threshold: one number, or one per class; `NEVER` where no threshold keeps the promise.
        error: promised largest share of wrong answers among those acted on, or None.
        assurance: probability that the promise holds.
        n: labelled samples the rule was chosen on.
        kept: how many of them it acts on.
        wrong: how many of those were wrong.
        needed: labelled samples that would make a rule reachable where there is none; None if unknown.
        cost_wrong: price of acting wrongly, or None.
        cost_ask: price of asking, or None.
        cost_bound: upper bound of the mean cost per sample, with the stated assurance.

    Example:
        >>> rule = Rule((0.9,), error=0.05, assurance=0.95, n=1000, kept=700, wrong=20)
        >>> p = Prediction(torch.tensor([0, 1]), torch.eye(2), torch.tensor([0.95, 0.7]))
        >>> rule(p)
        tensor([ True, False])
    """

    threshold: tuple[float, ...]
    error: float | None = None
    assurance: float = 0.95
    n: int = 0
    kept: int = 0
    wrong: int = 0
    needed: int | None = None
    cost_wrong: float | None = None
    cost_ask: float | None = None
    cost_bound: float | None = None

    def __call__(self, prediction: Prediction) -> Tensor:
        """Boolean ``(n,)``: act on this answer?"""
        classes = prediction.probs.shape[1]
        return self.module(classes).to(prediction.label.device)(prediction.label, prediction.confidence)

    def module(self, n_classes: int) -> RuleModule:
        """The rule as a `torch.nn.Module` of ``(label, confidence)``, to be exported with a graph."""
        if len(self.threshold) not in (1, n_classes):
            raise ValueError(
                f"this rule has a threshold for each of {len(self.threshold)} classes, the prediction has "
                f"{n_classes}; apply it to the network it was chosen for"
            )
        limits = torch.tensor(self.threshold, dtype=torch.float64)
        return RuleModule(limits.expand(n_classes).clone())

    @property
    def reachable(self) -> bool:
        """Does the rule act on anything at all?"""
        return any(limit < NEVER for limit in self.threshold)

    @property
    def coverage(self) -> float:
        """Share of the labelled samples that the rule acts on."""
        return self.kept / max(self.n, 1)

    @property
    def promise(self) -> str:
        """The rule in one sentence."""
        if not self.reachable:
            return _no_rule(self)
        where = (
            f"above its class's threshold ({_range(self.threshold)})"
            if len(self.threshold) > 1
            else "always"
            if self.threshold[0] <= ALWAYS
            else f"above a confidence of {self.threshold[0]:.4g}"
        )
        seen = f"on {self.n:,} labelled samples it acted on {self.coverage:.1%}"
        if self.error is None:
            return (
                f"Act {where}: the mean cost per sample is at most {self.cost_bound:.3g} "
                f"with {self.assurance:.0%} assurance; {seen}."
            )
        each = " of each class" if len(self.threshold) > 1 else ""
        return (
            f"Act {where}: at most {100 * self.error:.3g} % of the answers acted on{each} are wrong, "
            f"with {self.assurance:.0%} assurance; {seen}."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rule as JSON, for instance as ``rule.json`` in the folder of its calibrator."""
        write_header(path, _KIND, 1, asdict(self))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Rule:
        """Read what `save` wrote; one that was changed since is refused."""
        rule = from_json(Rule, read_header(path, _KIND, 1), path)
        if not rule.threshold:
            raise FormatError(f"{path}: a rule needs a threshold, got none")
        if not 0 <= rule.wrong <= rule.kept <= rule.n:
            raise FormatError(
                f"{path}: a rule chosen on {rule.n} samples cannot act on {rule.kept} and err on {rule.wrong}"
            )
        if rule.error is None and rule.cost_bound is None and rule.n:
            raise FormatError(f"{path}: a rule promises an error or a cost, this one neither")
        return rule


class RuleModule(nn.Module):
    """A rule inside a graph: ``(label (n,), confidence (n,)) -> act (n,)``.

    Args:
        threshold: ``(c,)``.

    Example:
        >>> RuleModule(torch.tensor([0.5, 0.9]))(torch.tensor([0, 1]), torch.tensor([0.8, 0.8]))
        tensor([ True, False])
    """

    threshold: Tensor

    def __init__(self, threshold: Tensor) -> None:
        super().__init__()
        self.register_buffer("threshold", threshold)

    def forward(self, label: Tensor, confidence: Tensor) -> Tensor:
        """Where to act."""
        return confidence.to(self.threshold.dtype) > self.threshold[label]


def choose_threshold(
    prediction: Prediction,
    labels: Any,
    error: float = 0.05,
    assurance: float = 0.95,
    *,
    per_class: bool = False,
    cost_wrong: float | None = None,
    cost_ask: float | None = None,
    thresholds: Sequence[float] | None = None,
) -> Rule:
    """The rule that acts most often and keeps its promise.

    The labelled samples must not have been used to fit the calibrator, and new samples must come from where
    they come from: under shift a promise made elsewhere does not hold (`salgp.Monitor` watches for that).

    Args:
        prediction: of the labelled samples.
        labels: ``(n,)`` true classes; -1 for a class the network does not know, which is never right.
        error: largest acceptable share of wrong answers among those acted on.
        assurance: probability, over the draw of the labelled samples, that the promise holds.
        per_class: a threshold and a promise for every predicted class; all hold together.
        cost_wrong: with ``cost_ask``: minimise the mean cost instead of bounding the error.
        cost_ask: price of asking.
        thresholds: tried from the highest to the lowest instead of those of the samples; fix them beforehand.

    Returns:
        The rule. Where none is reachable it acts on nothing, and its promise says how many labelled samples
        would be needed.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> s = 0.5 + 0.5 * torch.rand(2000, generator=g)
        >>> right = torch.rand(2000, generator=g) < s
        >>> p = Prediction(torch.zeros(2000, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> rule = choose_threshold(p, (~right).long(), error=0.1)
        >>> print(rule.promise)  # doctest: +ELLIPSIS
        Act above a confidence of 0.8...: at most 10 % of the answers acted on are wrong, ...
    """
    _check_levels(error, assurance)
    y = as_labels(labels, len(prediction), prediction.probs.shape[1]).cpu()
    label = prediction.label.cpu()
    wrong = (label != y).numpy()
    confidence = prediction.confidence.detach().cpu().double().numpy()
    if not len(wrong):
        raise ValueError("a threshold needs labelled samples, got none")
    if (cost_wrong is None) != (cost_ask is None):
        raise ValueError("give both cost_wrong and cost_ask, or neither")
    if cost_wrong is not None and cost_ask is not None:
        return _cheapest(confidence, wrong, cost_wrong, cost_ask, assurance)
    if not per_class:
        return _largest(confidence, wrong, error, assurance, thresholds)
    return _each_class(
        confidence, wrong, label.numpy(), prediction.probs.shape[1], error, assurance, thresholds
    )


def samples_needed(error: float, assurance: float = 0.95, observed: float = 0.0) -> int:
    """Kept samples needed to show an error rate of at most ``error`` if ``observed`` of them are wrong.

    Example:
        >>> samples_needed(0.05), samples_needed(0.05, observed=0.03)
        (59, 386)
    """
    _check_levels(error, assurance)
    if not 0 <= observed < error:
        raise ValueError(f"an observed error of {observed} can never show one of at most {error}")
    low, high = 0, 1
    while not _passes(high, math.ceil(observed * high), error, 1 - assurance):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        enough = _passes(middle, math.ceil(observed * middle), error, 1 - assurance)
        low, high = (low, middle) if enough else (middle, high)
    return high


def _largest(
    confidence: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    error: float,
    assurance: float,
    thresholds: Sequence[float] | None,
) -> Rule:
    """The first order of tests that passes anything at all."""
    n = len(wrong)
    doubt = 1 - assurance
    order = np.argsort(-confidence, kind="stable")
    falling = confidence[order]
    errors = np.concatenate([[0], np.cumsum(wrong[order])])
    if thresholds is not None:
        orders = [(_sorted(thresholds), doubt)]
    else:
        parts = [(math.ceil(start * n), share * doubt) for start, share in _STARTS]
        orders = [(_own_thresholds(falling, first, error, part), part) for first, part in parts]
    for limits, part in orders:
        kept = np.searchsorted(-falling, -limits, side="left")  # samples strictly above each
        passed = bdtr(errors[kept], kept, error) <= part
        n_passed = len(passed) if passed.all() else int(np.argmin(passed))
        if n_passed:
            m = int(kept[n_passed - 1])
            return Rule((float(limits[n_passed - 1]),), error, assurance, n, m, int(errors[m]))
    return Rule((NEVER,), error, assurance, n, needed=_needed(errors, n, error, assurance))


def _own_thresholds(
    falling: NDArray[np.float64], first: int, error: float, doubt: float
) -> NDArray[np.float64]:
    """The ``(m + 1)``-th largest confidence for numbers ``m`` that do not depend on the samples.

    Ties may leave fewer than ``m`` above it; thresholds that keep too few to pass whatever their labels are
    left out.
    """
    n = len(falling)
    least = samples_needed(error, 1 - doubt)
    first = max(first, least)
    if first > n:
        return np.zeros(0)
    steps = math.ceil(math.log(n / first) / math.log(_STEP)) + 1
    counts = np.unique(np.minimum(np.ceil(first * _STEP ** np.arange(steps)), n).astype(int))
    limits = np.append(falling, ALWAYS)[counts]
    return limits[np.searchsorted(-falling, -limits, side="left") >= least]


def _passes(kept: int, wrong: int, error: float, doubt: float) -> bool:
    return bool(bdtr(wrong, kept, error) <= doubt)


def _needed(errors: NDArray[np.int_], n: int, error: float, assurance: float) -> int | None:
    """Labelled samples with which the best threshold would pass, if its error rate is what was seen."""
    least = samples_needed(error, assurance)
    if n < least:
        return least
    m = np.arange(least, n + 1)
    seen = (errors[m] + 0.5) / (m + 1)  # never taken for zero
    hopeful = m[seen < 0.9 * error]
    if not len(hopeful):
        return None
    totals = [
        samples_needed(error, assurance, (errors[k] + 0.5) / (k + 1)) * n / k
        for k in hopeful[:: len(hopeful) // 20 + 1]
    ]
    return max(n + 1, math.ceil(min(totals)))


def _each_class(
    confidence: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    label: NDArray[np.int64],
    n_classes: int,
    error: float,
    assurance: float,
    thresholds: Sequence[float] | None,
) -> Rule:
    """One rule per predicted class, each with its share of the doubt, so that all promises hold together."""
    each = 1 - (1 - assurance) / n_classes
    rows = [label == number for number in range(n_classes)]
    rules = [
        _largest(confidence[of], wrong[of], error, each, thresholds) if of.any() else Rule((NEVER,))
        for of in rows
    ]
    scarce = [rule.needed for rule in rules if rule.needed is not None]
    return Rule(
        tuple(rule.threshold[0] for rule in rules),
        error,
        assurance,
        len(wrong),
        sum(rule.kept for rule in rules),
        sum(rule.wrong for rule in rules),
        needed=max(scarce) * n_classes if scarce else None,
    )


def _cheapest(
    confidence: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    cost_wrong: float,
    cost_ask: float,
    assurance: float,
) -> Rule:
    """The threshold of least observed cost among a few that the prices alone determine.

    Acting costs ``(1 - confidence) cost_wrong`` on average, so ``1 - cost_ask / cost_wrong`` is best for
    calibrated confidences; the others are there for confidences that are not. The bound holds for all of them
    together, hence for the one chosen.
    """
    if not 0 < cost_ask < cost_wrong:
        raise ValueError(f"expected 0 < cost_ask < cost_wrong, got {cost_ask} and {cost_wrong}")
    best = math.log((cost_wrong - cost_ask) / cost_ask)
    limits = np.concatenate([[ALWAYS], 1 / (1 + np.exp(-(best + _COST_GRID))), [NEVER]])
    acts = confidence[:, None] > limits  # (n, thresholds)
    asked, failed = (~acts).sum(0), (acts & wrong[:, None]).sum(0)
    n = len(wrong)
    costs = (cost_ask * asked + cost_wrong * failed) / n
    chosen = int(np.argmin(costs))
    doubt = (1 - assurance) / (2 * len(limits))
    bound = sum(
        price * _upper(int(count[chosen]), n, doubt)
        for price, count in ((cost_ask, asked), (cost_wrong, failed))
    )
    return Rule(
        (float(limits[chosen]),),
        assurance=assurance,
        n=n,
        kept=int(acts[:, chosen].sum()),
        wrong=int(failed[chosen]),
        cost_wrong=cost_wrong,
        cost_ask=cost_ask,
        cost_bound=float(min(bound, cost_wrong)),
    )


def _upper(count: int, n: int, doubt: float) -> float:
    """Clopper-Pearson upper bound of a share."""
    return 1.0 if count == n else float(betaincinv(count + 1, n - count, 1 - doubt))


def _no_rule(rule: Rule) -> str:
    if rule.error is None:
        return (
            f"Always ask: on {rule.n:,} labelled samples acting never paid at these prices; "
            f"the mean cost per sample is at most {rule.cost_bound:.3g}."
        )
    text = (
        f"No rule: on {rule.n:,} labelled samples no threshold keeps the error at or below "
        f"{100 * rule.error:.3g} % with {rule.assurance:.0%} assurance; "
    )
    if rule.needed is None:
        return text + "the most confident answers are wrong too often, so accept a larger error."
    return text + f"about {rule.needed:,} labelled samples would be needed."


def _range(limits: tuple[float, ...]) -> str:
    used = [limit for limit in limits if limit < NEVER]
    never = len(limits) - len(used)
    text = f"{max(min(used), 0):.4g} to {max(max(used), 0):.4g}"
    return text if not never else f"{text}; never for {never} of {len(limits)} classes"


def _sorted(thresholds: Sequence[float]) -> NDArray[np.float64]:
    limits = np.asarray(thresholds, dtype=np.float64)
    if limits.ndim != 1 or not len(limits) or not np.isfinite(limits).all():
        raise ValueError("thresholds must be a list of finite numbers")
    return -np.sort(-limits)


def _check_levels(error: float, assurance: float) -> None:
    if not 0 < error < 1:
        raise ValueError(f"error must be between 0 and 1, got {error}")
    if not 0.5 <= assurance < 1:
        raise ValueError(f"assurance must be at least 0.5 and below 1, got {assurance}")
