"""Choose a rule from labelled samples: one threshold for all answers, or one for every predicted class."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.decide.costs import cheapest
from salgp.decide.fixed_sequence import Sorted, furthest, own_order, samples_needed
from salgp.decide.rule import NEVER, Rule
from salgp.labels import as_labels
from salgp.metrics.metric import FloatArray, to_double
from salgp.prediction import Prediction, checked

__all__ = ["choose_threshold"]

ERROR = 0.05
"""Share of wrong answers that is promised where none is named."""


def choose_threshold(
    prediction: Prediction,
    labels: Any,
    error: float | None = None,
    assurance: float = 0.95,
    *,
    per_class: bool = False,
    cost_wrong: float | None = None,
    cost_ask: float | None = None,
) -> Rule:
    """The rule that acts most often and keeps the error rate.

    The labelled samples must not have been used to fit the calibrator, and new samples must come from where
    they come from: under shift a promise made elsewhere does not hold (`salgp.Monitor` watches for that).

    Args:
        prediction: of the labelled samples.
        labels: ``(n,)`` true classes; -1 for a class the network does not know, which is never right.
        error: largest acceptable share of wrong answers among those acted on; by default 0.05.
        assurance: probability, over the draw of the labelled samples, that the promise holds.
        per_class: a threshold and a promise for every predicted class; all hold together.
        cost_wrong: with ``cost_ask``: minimise the mean cost instead of bounding the error.
        cost_ask: price of asking.

    Returns:
        The rule. Where none is reachable it acts on nothing, and its promise says how many labelled samples
        would be needed.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> s = 0.5 + 0.5 * torch.rand(2000, generator=g)
        >>> right = torch.rand(2000, generator=g) < s
        >>> p = Prediction(torch.zeros(2000, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> rule = choose_threshold(p, (~right).long(), error=0.1)
        >>> print(rule.promise)  # doctest: +ELLIPSIS
        Act above a confidence of 0.8...: at most 10 % of the answers acted on are wrong, ...
    """
    promised, assurance = float(ERROR if error is None else error), float(assurance)
    if not 0.5 <= assurance < 1:
        raise ValueError(f"assurance must be at least 0.5 and below 1, got {assurance}")
    shape = checked(prediction).probs.shape
    label = prediction.label.cpu().numpy()
    wrong = label != as_labels(labels, *shape).cpu().numpy()
    if not len(wrong):
        raise ValueError("a threshold needs labelled samples, got none")
    confidence = to_double(prediction.confidence)
    if (cost_wrong is None) != (cost_ask is None):
        raise ValueError("give both cost_wrong and cost_ask, or neither")
    if cost_wrong is not None and cost_ask is not None:
        if per_class or error is not None:
            advice = "leave error and per_class out, or promise an error rate instead of costs"
            raise ValueError(f"a rule by costs has one threshold, found by the prices; {advice}")
        return cheapest(confidence, wrong, float(cost_wrong), float(cost_ask), assurance)
    if per_class:
        return _each_class(confidence, wrong, label, shape[1], promised, assurance)
    return _largest(confidence, wrong, promised, assurance)


def _largest(confidence: FloatArray, wrong: NDArray[np.bool_], error: float, assurance: float) -> Rule:
    """The furthest threshold that its tests reach."""
    n = len(wrong)
    samples = Sorted.of(confidence, wrong)
    order = own_order(samples, error, 1 - assurance)
    last = furthest(samples, order, error)
    if last is None:
        needed = _needed(samples.errors, error, assurance)
        return Rule((NEVER,), error, assurance, n, needed=needed)
    limit = order.limits[last]
    kept = int(samples.above(limit))
    return Rule((float(limit),), error, assurance, n, kept, int(samples.errors[kept]))


def _needed(errors: NDArray[np.int64], error: float, assurance: float) -> int | None:
    """Labelled samples with which the best threshold would pass, if its error rate is what was seen."""
    n = len(errors) - 1
    least = samples_needed(error, assurance)
    if n < least:
        return least
    m = np.arange(least, n + 1)
    seen = (errors[m] + 0.5) / (m + 1)  # never taken for zero
    hopeful = np.flatnonzero(seen < 0.9 * error)
    if not len(hopeful):
        return None
    tried = hopeful[:: len(hopeful) // 20 + 1]
    totals = [samples_needed(error, assurance, seen[k]) * n / m[k] for k in tried]
    return max(n + 1, math.ceil(min(totals)))


def _each_class(
    confidence: FloatArray,
    wrong: NDArray[np.bool_],
    label: NDArray[np.int64],
    n_classes: int,
    error: float,
    assurance: float,
) -> Rule:
    """One rule per predicted class, each with its share of ``1 - assurance``, so that all hold together."""
    each = 1 - (1 - assurance) / n_classes
    rules = []
    for number in range(n_classes):
        of = label == number
        rules.append(_largest(confidence[of], wrong[of], error, each) if of.any() else Rule((NEVER,)))
    n, limits = len(wrong), tuple(rule.threshold[0] for rule in rules)
    scarce = [rule.needed * n / rule.n for rule in rules if rule.needed is not None]
    needed = math.ceil(max(scarce)) if scarce else None
    kept, failed = sum(rule.kept for rule in rules), sum(rule.wrong for rule in rules)
    return Rule(limits, error, assurance, n, kept, failed, needed)
