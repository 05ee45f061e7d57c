"""From what a monitor keeps to what it says: alarms, expected and measured accuracy, what shifted.

Nothing here changes anything: every function reads settings, state and log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from salgp.estimate.accuracy import Estimate, Spread, from_sums
from salgp.metrics.exact import exact_interval
from salgp.monitor.features import effects
from salgp.monitor.records import Record, Settings, State
from salgp.monitor.status import ClassShift, FeatureShift, Status

__all__ = ["alarms", "expected", "measured", "status_of", "with_late_labels"]

IntArray = NDArray[np.int64]


def status_of(settings: Settings, state: State, bands: IntArray, log: Sequence[Record]) -> Status:
    """How things stand.

    Args:
        settings: of the monitor.
        state: after the last batch.
        bands: ``(J, CELLS)`` band of each cell.
        log: all records.
    """
    batches = [record for record in log if record.n]
    fed = batches[-settings.window :]
    first = fed[0].number if fed else 0
    found = expected(settings, fed)
    labelled = measured(
        [record for record in with_late_labels(log) if record.number >= first], settings.level
    )
    return Status(
        alarms(settings, state),
        settings.false_alarm,
        found,
        labelled,
        settings.reference,
        _matters(settings, found, labelled),
        _may_have_fallen(settings, found if labelled is None else labelled),
        {name: total / math.log(10) for name, total in _log_totals(state).items()},
        _feature_shifts(settings, state, bands),
        _class_shifts(settings, fed),
        sum(record.n for record in fed),
        len(batches),
    )


def alarms(settings: Settings, state: State) -> tuple[str, ...]:
    """Which alarms stand: each has half of the stated probability."""
    limit = math.log(2 / settings.false_alarm)
    peaks = {"shift": state.shift.peak, "accuracy": state.accuracy.peak}
    return tuple(name for name, peak in peaks.items() if peak >= limit)


def expected(settings: Settings, fed: Sequence[Record]) -> Estimate:
    """Accuracy of some batches, estimated without labels."""
    n = sum(record.n for record in fed)
    spread = _spread(settings, sum(record.std for record in fed) / max(n, 1))
    total = sum(record.confidence for record in fed)
    variance = sum(record.variance for record in fed)
    return from_sums(n, total, variance, spread, settings.level)


def measured(records: Sequence[Record], level: float) -> Estimate | None:
    """Accuracy of the labelled samples with its exact interval; None without labels."""
    n, right = sum(record.labelled for record in records), sum(record.right for record in records)
    if n == 0:
        return None
    lower, upper = exact_interval(np.array([right]), np.array([n]), level)
    return Estimate(right / n, float(lower[0]), float(upper[0]), level, n)


def with_late_labels(log: Sequence[Record]) -> list[Record]:
    """The log with late labels added to the batch of the same key; those without one stay by themselves."""
    place = {record.key: i for i, record in enumerate(log) if record.n}
    found: dict[int, Record] = {}
    for i, record in enumerate(log):
        batch = None if record.n or record.key is None else place.get(record.key)
        if batch is None or batch not in found:
            found[i] = record
            continue
        own = found[batch]
        found[batch] = replace(
            own,
            labelled=own.labelled + record.labelled,
            right=own.right + record.right,
            right_expected=own.right_expected + record.right_expected,
        )
    return list(found.values())


def _log_totals(state: State) -> dict[str, float]:
    return {"shift": state.shift.log_total, "accuracy": state.accuracy.log_total}


def _matters(settings: Settings, found: Estimate, labelled: Estimate | None) -> bool:
    """Labels decide; the estimate alone counts only where they do not exclude a fall."""
    if labelled is None:
        return _fell(settings, found)
    return _fell(settings, labelled) or (_fell(settings, found) and _may_have_fallen(settings, labelled))


def _fell(settings: Settings, found: Estimate) -> bool:
    """By more than the tolerance, and certainly by something."""
    return found.value < settings.reference - settings.tolerance and found.upper < settings.reference


def _may_have_fallen(settings: Settings, found: Estimate) -> bool:
    """The interval does not exclude a fall by more than the tolerance."""
    return found.n > 0 and found.lower < settings.reference - settings.tolerance


def _feature_shifts(settings: Settings, state: State, bands: IntArray) -> tuple[FeatureShift, ...]:
    """Every feature against the reference, largest effect first."""
    size = state.recent.shape[2]
    pairs = zip(bands, state.reference, strict=True)
    reference = np.stack([np.bincount(own, counts, minlength=size) for own, counts in pairs])
    effect = effects(reference, state.recent.sum(0))
    evidence = np.maximum(state.shift.log_features / math.log(10), -99)
    found = [
        FeatureShift(name, float(effect[j]), float(evidence[j])) for j, name in enumerate(settings.features)
    ]
    return tuple(sorted(found, key=lambda shift: -abs(shift.effect)))


def _class_shifts(settings: Settings, fed: Sequence[Record]) -> tuple[ClassShift, ...]:
    """Every predicted class against the reference, largest change of its share first."""
    if not fed:
        return ()
    count = np.sum([record.class_count for record in fed], axis=0)
    total = np.sum([record.class_confidence for record in fed], axis=0)
    found = [
        ClassShift(
            k,
            settings.class_share[k],
            float(count[k] / count.sum()),
            _class_accuracy(settings, int(count[k]), float(total[k])),
        )
        for k in range(settings.n_classes)
    ]
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
