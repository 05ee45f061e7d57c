"""A rule: act where the confidence exceeds a threshold, ask elsewhere; its guarantee, file and graph."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from salgp.io import FormatError, from_json, read_header, refuse_foreign, write_header
from salgp.prediction import Prediction, checked

__all__ = ["ALWAYS", "NEVER", "Rule", "RuleModule"]

ALWAYS, NEVER = -1.0, 1.0
"""Thresholds that every confidence exceeds, and none."""

_KIND = "salgp-rule"


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
        needed: labelled samples that would make a rule reachable where there is none, for all classes where
            each has its own; None if it is not a matter of samples.
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
        """Boolean ``(n,)``: act on this answer? Labels and confidences alone go to `module`."""
        classes = checked(prediction).probs.shape[1]
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
        seen = f"on {self.n:,} labelled samples it acted on {self.coverage:.1%}"
        more = "" if self.needed is None else f"; all classes would need about {self.needed:,}"
        return f"Act {_where(self)}: {_bound(self)} with {self.assurance:.0%} assurance; {seen}{more}."

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rule as JSON, for instance as ``rule.json`` in the folder of its calibrator; no other
        calibrator is then saved there (`salgp.calibrators.Calibrator.save`).

        A rule that is there already is replaced; any other file is left alone with a `FileExistsError`.
        """
        refuse_foreign(path, "rule")
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
        """Boolean ``(n,)``: act on this answer?"""
        return confidence.to(self.threshold.dtype) > self.threshold[label]


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


def _bound(rule: Rule) -> str:
    if rule.error is None:
        return f"the mean cost per sample is at most {rule.cost_bound:.3g}"
    each = " of each class" if _by_class(rule) else ""
    return f"at most {100 * rule.error:.3g} % of the answers acted on{each} are wrong,"


def _by_class(rule: Rule) -> bool:
    return len(rule.threshold) > 1


def _where(rule: Rule) -> str:
    first = rule.threshold[0]
    if _by_class(rule):
        return f"above its class's threshold ({_range(rule.threshold)})"
    return "always" if first <= ALWAYS else f"above a confidence of {first:.4g}"


def _range(limits: tuple[float, ...]) -> str:
    used = [max(limit, 0) for limit in limits if limit < NEVER]
    never = len(limits) - len(used)
    text = f"{min(used):.4g} to {max(used):.4g}"
    return f"{text}; never for {never} of {len(limits)} classes" if never else text
