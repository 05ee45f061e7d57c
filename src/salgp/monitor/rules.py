"""Status of a monitor: alarms, expected and measured accuracy, and which features and classes shifted.

Every function reads settings, state and log, and changes nothing. `alarms` sets the limit that the evidence
of `salgp.monitor.martingale` must pass, so that a false alarm has at most the stated probability.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from salgp.estimate.accuracy import Estimate, Spread, from_sums
from salgp.metrics.interval import exact_interval
from salgp.metrics.metric import IntArray
from salgp.monitor.martingale import BANDS, effects
from salgp.monitor.records import Record, Settings, State

__all__ = ["ClassShift", "FeatureShift", "Status", "alarms", "expected", "measured"]

CAUSES = {"shift": "the inputs changed", "accuracy": "labels show more errors than the confidences say"}


@dataclass(frozen=True)
class FeatureShift:
    """How far one feature has shifted.

    Args:
        feature: ``"confidence"``, ``"novelty"``, ``"class"`` or ``"layer ..."``.
        effect: Cliff's delta of the window against the reference, from -1 to 1.
        evidence: log10 of the capital of the bets on it.
    """

    feature: str
    effect: float
    evidence: float

    @property
    def size(self) -> str:
        """The effect in words, by the usual limits of Cliff's delta (Romano et al. 2006)."""
        limits = {"negligible": 0.147, "small": 0.33, "medium": 0.474}
        return next((word for word, limit in limits.items() if abs(self.effect) < limit), "large")


@dataclass(frozen=True)
class ClassShift:
    """Share of a predicted class, in the reference and in the window, and its expected accuracy there."""

    label: int
    reference: float
    now: float
    accuracy: Estimate


@dataclass(frozen=True)
class Status:
    """Status of a monitor.

    Args:
        alarm: ``"shift"`` (the inputs changed), ``"accuracy"`` (labels show more errors than the confidences
            say), both or none.
        false_alarm: probability of ever seeing an alarm though nothing changed; where labels are given, if
            the calibrator is right to within the tolerance.
        accuracy: of the window, estimated without labels.
        measured: of the labelled samples of the window; None without labels.
        reference: mean confidence of the reference.
        matters: did accuracy fall by more than the tolerance, and certainly by something? Measured accuracy
            decides where there is enough of it.
        may_matter: could it have fallen by more than the tolerance? The interval does not exclude it.
        evidence: log10 of the capital of the bets for each alarm, which needs ``log10(2 / false_alarm)``.
        features: those that shifted most first.
        classes: those whose share changed most first.
        n: samples in the window.
        batches: batches so far.
    """

    alarm: tuple[str, ...]
    false_alarm: float
    accuracy: Estimate
    measured: Estimate | None
    reference: float
    matters: bool
    may_matter: bool
    evidence: dict[str, float]
    features: tuple[FeatureShift, ...]
    classes: tuple[ClassShift, ...]
    n: int
    batches: int

    def __str__(self) -> str:
        return f"{self.headline} {self.details}"

    @property
    def headline(self) -> str:
        """The alarm in one sentence."""
        if not self.alarm:
            return "No alarm." if self.batches else "Ready: no new data yet."
        return f"Alarm: {' and '.join(CAUSES[name] for name in self.alarm)} ({self._weight})."

    @property
    def details(self) -> str:
        """Accuracy, measured before expected, and the largest shift where there is an alarm."""
        now = f"{self.accuracy} of the last {self.n:,} samples, " if self.batches else ""
        said = f"Expected accuracy {now}{100 * self.reference:.1f} % on the reference."
        if self.measured is not None:
            said = f"Measured accuracy {self.measured} on {self.measured.n:,} labels; e{said[1:]}"
        most = self.features[0]
        return f"{said} Largest shift: {most.feature} ({most.size})." if self.alarm else said

    @property
    def _weight(self) -> str:
        if self.matters:
            return "this matters"
        return "whether it matters cannot be told yet" if self.may_matter else "too little to matter so far"


def status_of(settings: Settings, state: State, bands: IntArray, log: Sequence[Record]) -> Status:
    """Status of a monitor.

    Args:
        settings: of the monitor.
        state: after the last batch.
        bands: ``(J, CELLS)`` band of each cell.
        log: all records.
    """
    batches = [record for record in log if record.n]
    fed = batches[-settings.window :]
    first = fed[0].number if fed else 0
    recent = [record for record in with_late_labels(log) if record.number >= first]
    found, labelled = expected(settings, fed), measured(recent, settings.level)
    best = labelled or found
    return Status(
        alarm=alarms(settings, state),
        false_alarm=settings.false_alarm,
        accuracy=found,
        measured=labelled,
        reference=settings.reference,
        matters=_matters(settings, found, labelled),
        may_matter=best.n > 0 and best.lower < settings.reference - settings.tolerance,
        evidence={name: getattr(state, name).log_total / math.log(10) for name in CAUSES},
        features=_feature_shifts(settings, state, bands),
        classes=_class_shifts(settings, fed),
        n=found.n,
        batches=len(batches),
    )


def alarms(settings: Settings, state: State) -> tuple[str, ...]:
    """Which alarms stand: each has half of the stated probability."""
    limit = math.log(2 / settings.false_alarm)
    return tuple(name for name in CAUSES if getattr(state, name).peak >= limit)


def expected(settings: Settings, fed: Sequence[Record]) -> Estimate:
    """Accuracy of some batches, estimated without labels."""
    n = _total(fed, "n")
    spread = _spread(settings, _total(fed, "std") / max(n, 1))
    total, variance = _total(fed, "confidence"), _total(fed, "variance")
    return from_sums(n, total, variance, spread, settings.level)


def measured(records: Sequence[Record], level: float) -> Estimate | None:
    """Accuracy of the labelled samples with its exact interval; None without labels."""
    n, right = _total(records, "labelled"), _total(records, "right")
    if n == 0:
        return None
    lower, upper = map(float, exact_interval(right, n, level))
    return Estimate(right / n, lower, upper, level, n)


def _total(records: Sequence[Record], name: str) -> Any:
    return sum(getattr(record, name) for record in records)


def with_late_labels(log: Sequence[Record]) -> list[Record]:
    """The log with late labels added to the batch of the same key; those without one stay by themselves."""
    place = {record.key: i for i, record in enumerate(log) if record.n}
    found: dict[int, Record] = {}
    for i, record in enumerate(log):
        batch = -1 if record.n or record.key is None else place.get(record.key, -1)
        if batch in found:
            found[batch] = _with_labels(found[batch], record)
        else:
            found[i] = record
    return list(found.values())


def _with_labels(batch: Record, late: Record) -> Record:
    names = ("labelled", "right", "right_expected")
    return replace(batch, **{name: getattr(batch, name) + getattr(late, name) for name in names})


def _matters(settings: Settings, found: Estimate, labelled: Estimate | None) -> bool:
    """Labels decide; the estimate counts beside them only where they do not contradict it."""
    if labelled is None:
        return _fell(settings, found)
    agree = labelled.lower <= found.upper
    return _fell(settings, labelled) or (_fell(settings, found) and agree)


def _fell(settings: Settings, found: Estimate) -> bool:
    """By more than the tolerance, and certainly by something."""
    return found.value < settings.reference - settings.tolerance and found.upper < settings.reference


def _feature_shifts(settings: Settings, state: State, bands: IntArray) -> tuple[FeatureShift, ...]:
    """Every feature against the reference, largest effect first."""
    pairs = zip(bands, state.reference, strict=True)
    reference = np.stack([np.bincount(own, counts, minlength=BANDS) for own, counts in pairs])
    effect = effects(reference, state.recent.sum(0))
    evidence = (state.shift.log_features / math.log(10)).clip(-99)
    found = map(FeatureShift, settings.features, effect.tolist(), evidence.tolist())
    return tuple(sorted(found, key=lambda shift: -abs(shift.effect)))


def _class_shifts(settings: Settings, fed: Sequence[Record]) -> tuple[ClassShift, ...]:
    """Every predicted class against the reference, largest change of its share first."""
    if not fed:
        return ()
    count = np.sum([record.class_count for record in fed], axis=0)
    total = np.sum([record.class_confidence for record in fed], axis=0)
    share = (count / count.sum()).tolist()
    accuracy = (_class_accuracy(settings, *sums) for sums in zip(count.tolist(), total.tolist(), strict=True))
    found = map(ClassShift, range(len(count)), settings.class_share, share, accuracy)
    return tuple(sorted(found, key=lambda shift: -abs(shift.now - shift.reference)))


def _class_accuracy(settings: Settings, n: int, confidence: float) -> Estimate:
    variance = confidence * (1 - confidence / n) if n else 0.0  # an upper bound of the sum of c (1 - c)
    return from_sums(n, confidence, variance, _spread(settings, 0.0), settings.level)


def _spread(settings: Settings, error_bars: float) -> Spread | float:
    """Systematic error of the confidences: as measured, else the mean of the calibrator's error bars."""
    if settings.spread is None:
        return error_bars
    base, slope, factor, level = settings.spread
    return Spread(base, slope, settings.reference, factor, level)
