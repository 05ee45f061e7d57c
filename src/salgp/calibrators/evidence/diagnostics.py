"""Check of a fit: its scores on samples and families of augmentations that were left out, and a verdict.

The model is fitted again four times, from the temperature on: each time without a quarter of the families and
with one half of the calibration samples. The other half, as it came and under the families left out, is then
scored beside the network's own confidence and temperature scaling. So what is reported comes from a fit to
half of the data: new data of the same kind should do no worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.evidence.fitting import families_of
from salgp.calibrators.evidence.layer_spaces import Evidence
from salgp.calibrators.evidence.mixture import Mixture, Scales, moderated, samples_of
from salgp.calibrators.evidence.windows import window_sums
from salgp.features import Features
from salgp.metrics import auroc, debiased_ece, nll_correct

__all__ = ["Check", "HeldOut", "answers_of", "held_out", "verdict"]

Learn = Callable[[Features, Tensor, Evidence], tuple[Scales, Mixture, Any]]
"""``learn(features, labels, evidence)`` fits the model; the rows it fitted may follow."""
Scores = dict[str, float]
Check = dict[str, dict[str, Scores]]
"""Situation -> method -> score -> value."""

FITS = 4
WINDOW = 50
"""Samples per window of augmented samples."""
WORTH_SAYING = 0.02
"""Accuracy that another last layer must promise."""
LARGEST_VARIANCE = 4.0
"""With a larger variance of the log-odds an interval covers nearly everything."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Samples of one family, or calibration samples as they came, scored by a fit that has not seen them.

    Args:
        family: of augmentations; 0 for calibration samples.
        correct: ``(n,)`` 0 or 1.
        network: ``(n,)`` log-odds of the network.
        temperature: ``(n,)`` by temperature scaling.
        single: ``(n,)`` by the model, each sample by itself.
        context: ``(n,)`` by the model, in windows.
        own_weight: ``(n,)`` shift weight of each sample by itself.
        shift_weight: ``(n,)`` in windows.
    """

    family: int
    correct: Tensor
    network: Tensor
    temperature: Tensor
    single: Tensor
    context: Tensor
    own_weight: Tensor
    shift_weight: Tensor

    def moderated(self, level_variance: float) -> HeldOut:
        """The same with the confidence of a model that knows this variance."""
        single = moderated(self.single, level_variance * self.own_weight.square())
        context = moderated(self.context, level_variance * self.shift_weight.square())
        return replace(self, single=single, context=context)


def held_out(features: Features, labels: Tensor, evidence: Evidence, learn: Learn) -> list[HeldOut]:
    """Every part of the data, scored by a fit to others."""
    first, original = features.originals
    half = (features[first].confidence_rank % 2)[original]
    family = families_of(features)
    known = sorted(set(family.tolist()) - {0})
    found = []
    for i in range(FITS if known else 2):
        left_out = known[i::FITS]
        scored = half == i % 2
        away = torch.isin(family, family.new_tensor(left_out))
        train = ~scored & ~away
        scales, model = learn(features[train], labels[train], evidence[train])[:2]
        for k in [0, *left_out]:
            rows = scored & (family == k)
            if rows.any():
                found.append(_scored(k, features[rows], labels[rows], evidence[rows], scales, model))
    return found


def check_fit(parts: Sequence[HeldOut], name: str) -> Check:
    """Scores in domain, and under families left out, by each sample itself and in windows.

    Of the families it is the mean of their scores: taken together, too much confidence on one would make up
    for too little on another. ``low`` and ``high`` are the ECE of the family that is done best and worst, but
    for a tenth of them on either side.
    """
    in_domain = [part for part in parts if part.family == 0]
    shifted = [part for part in parts if part.family]
    table = {"in domain": _compared(in_domain, name, "single")}
    if shifted:
        table["left-out families"] = _compared(shifted, name, "single")
        table["left-out families, in context"] = _compared(shifted, name, "context")
    return table


def family_variance(parts: Sequence[HeldOut]) -> tuple[float, float]:
    """Variance of the log-odds on a family that was not seen, per squared shift weight, and that of the mean
    over the families; of one family it is not known, and 0.
    """
    shifted = [part for part in parts if part.family]
    if not shifted:
        return 0.0, 0.0
    missed = [_missed(part.context, part.correct) for part in shifted]
    weight = [float(part.shift_weight.square().mean()) for part in shifted]
    n = len(shifted)
    variance = sum(x * x for x in missed) / max(sum(weight), 0.1 * n)
    found = min(variance, LARGEST_VARIANCE)
    return found, found / (n - 1) if n > 1 else 0.0


def check_answers(logits: Tensor, distance: Tensor, labels: Tensor) -> Check:
    """Accuracy of network and nearest class on samples of known class, from `class_log_distances`."""
    known = labels >= 0
    if not known.any():
        return {}
    network, nearest = logits.argmax(dim=1), distance.mean(dim=0).argmin(dim=1)
    return {"answers": answers_of((network == labels)[known], (nearest == labels)[known])}


def answers_of(network: Tensor, nearest: Tensor) -> dict[str, Scores]:
    """Accuracy of the network's answers, and of the nearest class in its layers alone.

    Args:
        network: ``(n,)`` is the network right?
        nearest: ``(n,)`` is the nearest class?

    Returns:
        ``accuracy`` of both; ``low`` is what the layers gain at least, two standard errors below the mean.
    """
    gain = nearest.double() - network.double()
    low = float(gain.mean() - 2 * gain.std(correction=0) / math.sqrt(len(gain)))
    return {
        "network": {"accuracy": float(network.double().mean())},
        "nearest class": {"accuracy": float(nearest.double().mean()), "low": low},
    }


def verdict(
    check: Check, layers_in_domain: bool, name: str, *, errors: int, warning: str | None = None
) -> str:
    """The scores of the check in a few sentences.

    Args:
        check: from `check_fit`, with ``answers`` from `answers_of`.
        layers_in_domain: are the layers used in domain?
        name: of our method.
        errors: how many calibration samples are classified wrongly.
        warning: why the labels may not be those of the samples; then nothing else is worth saying.
    """
    if warning is not None:
        return f"Not to be relied on: {warning}"
    in_domain = check["in domain"]
    if not layers_in_domain:
        text = "In domain the layers add nothing certain, so temperature scaling is used there"
    else:
        text = (
            f"In domain the layers help: negative log-likelihood {in_domain[name]['nll']:.3f} on samples "
            f"left out, temperature scaling {in_domain['temperature']['nll']:.3f}"
        )
    text += f" ({errors} error{'' if errors == 1 else 's'} among the calibration samples)."
    text += _better_answers(check)
    if "left-out families" not in check:
        return f"{text} Without augmented samples nothing is known about shift."
    alone, together = check["left-out families"], check["left-out families, in context"]
    return (
        f"{text} Under augmentations left out of the fit the calibration error is {alone[name]['ece']:.3f} "
        f"({alone[name]['low']:.3f} to {alone[name]['high']:.3f}) by single samples and "
        f"{together[name]['ece']:.3f} ({together[name]['low']:.3f} to {together[name]['high']:.3f}) with a "
        f"context, temperature scaling's {alone['temperature']['ece']:.3f}."
    )


def _better_answers(check: Check) -> str:
    """A sentence where the layers alone answer clearly better than the network, else nothing."""
    if "answers" not in check:
        return ""
    gain = check["answers"]["nearest class"]["low"]
    network, nearest = (found["accuracy"] for found in check["answers"].values())
    if gain <= 0 or nearest < network + WORTH_SAYING:
        return ""
    return (
        f" The nearest class in the layers is right on {nearest:.0%}, the network on {network:.0%}: consider "
        f"replacing its last layer."
    )


def _scored(
    family: int, features: Features, labels: Tensor, evidence: Evidence, scales: Scales, model: Mixture
) -> HeldOut:
    samples = samples_of(features, evidence, scales)
    single = model(samples)
    context = single
    if model.window is not None:
        context = model(samples, window_sums(model.parts(samples), _window_numbers(features)))
    correct = features.correct(labels).double()
    weights = single.shift_weight, context.shift_weight
    return HeldOut(family, correct, samples.network, samples.t, single.mean, context.mean, *weights)


def _window_numbers(features: Features) -> Tensor:
    """Number of the window of each row: runs of `WINDOW` rows of equal strength."""
    level = torch.zeros_like(features.label)
    if features.strengths is not None:
        level = features.strengths.to(level.device).unique(return_inverse=True)[1]
    sizes = torch.bincount(level)
    start = sizes.cumsum(0) - sizes
    rank = level.argsort(stable=True).argsort()
    return level * len(level) + (rank - start[level]) // WINDOW


def _compared(parts: Sequence[HeldOut], name: str, ours: str) -> dict[str, Scores]:
    methods = {"uncalibrated": "network", "temperature": "temperature", name: ours}
    found = {}
    for method, field in methods.items():
        found[method] = _mean([_scores(getattr(part, field), part.correct) for part in parts])
    return found


def _mean(scores: Sequence[Scores]) -> Scores:
    """Mean of each score over the parts that have it, and the range of the ECE."""
    columns = {key: torch.tensor([one[key] for one in scores], dtype=torch.float64) for key in scores[0]}
    found = {key: float(column.nanmean()) for key, column in columns.items()}
    ece = columns["ece"]
    low, high = ece.quantile(ece.new_tensor([0.1, 0.9])).tolist()
    return {**found, "low": low, "high": high}


def _scores(f: Tensor, correct: Tensor) -> Scores:
    confidence = torch.sigmoid(f)
    mixed = 0 < float(correct.mean()) < 1
    return {
        "ece": debiased_ece(confidence, correct),
        "nll": nll_correct(confidence, correct),
        "auroc": auroc(f, correct) if mixed else math.nan,
    }


def _missed(f: Tensor, correct: Tensor) -> float:
    """Constant that makes the mean confidence right; half a sample on either side keeps it finite."""
    wanted = (float(correct.sum()) + 0.5) / (len(correct) + 1)
    delta = 0.0
    for _ in range(30):
        p = torch.sigmoid(f + delta)
        slope = float((p * (1 - p)).mean())
        step = (wanted - float(p.mean())) / max(slope, 1e-6)
        delta += max(-1.0, min(1.0, step))
    return delta
