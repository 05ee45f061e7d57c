"""From what a monitor keeps to what it says: alarms, expected and measured accuracy, what moved.

Nothing here changes anything: every function reads settings, state and log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from salgp.estimate.accuracy import Estimate, Spread, from_sums
from salgp.monitor.channels import effects
from salgp.monitor.records import Record, Settings, State
from salgp.monitor.status import ClassMove, Move, Status

__all__ = ["alarms", "expected", "judge"]

IntArray = NDArray[np.int64]


def judge(settings: Settings, state: State, bands: IntArray, log: Sequence[Record]) -> Status:
    """How things stand.

    Args:
        settings: of the monitor.
        state: after the last batch.
        bands: ``(J, CELLS)`` band of each cell.
        log: all records.
    """
    fed = [record for record in log if record.n][-settings.window :]
    first = fed[0].number if fed else 0
    labelled = [record for record in log if record.labelled and record.number >= first]
    found = expected(settings, fed)
    measured = _measured(labelled, settings.level)
    ten = math.log(10)
    return Status(
        alarms(settings, state),
        settings.false_alarm,
        found,
        measured,
        settings.home,
        any(_fell(settings, each) for each in (found, measured) if each is not None),
        _may_have_fallen(settings, found if measured is None else measured),
        (state.wealth.log_total / ten, state.promise.log_total / ten),
        _moves(settings, state, bands),
        _classes(settings, fed),
        sum(record.n for record in fed),
        sum(record.n > 0 for record in log),
    )


def alarms(settings: Settings, state: State) -> tuple[str, ...]:
    """Which alarms stand: each has half of the stated rate."""
    limit = math.log(2 / settings.false_alarm)
    peaks = {"shift": state.wealth.peak, "promise": state.promise.peak}
    return tuple(name for name, peak in peaks.items() if peak >= limit)


def expected(settings: Settings, fed: Sequence[Record]) -> Estimate:
    """Accuracy of some batches, estimated without labels."""
    n = sum(record.n for record in fed)
    spread = _spread(settings, sum(record.std for record in fed) / max(n, 1))
    total = sum(record.confidence for record in fed)
    variance = sum(record.variance for record in fed)
    return from_sums(n, total, variance, spread, settings.level)


def _measured(labelled: Sequence[Record], level: float) -> Estimate | None:
    n, right = sum(record.labelled for record in labelled), sum(record.right for record in labelled)
    if n == 0:
        return None
    share = (right + 2) / (n + 4)  # Agresti and Coull: covers also near 0 and 1
    found = from_sums(n + 4, right + 2, (n + 4) * share * (1 - share), None, level)
    return replace(found, value=right / n, n=n)


def _fell(settings: Settings, found: Estimate) -> bool:
    """By more than the tolerance, and surely by something."""
    return found.value < settings.home - settings.tolerance and found.upper < settings.home


def _may_have_fallen(settings: Settings, found: Estimate) -> bool:
    """By more than the tolerance, for all we know."""
    return found.n > 0 and found.lower < settings.home - settings.tolerance


def _moves(settings: Settings, state: State, bands: IntArray) -> tuple[Move, ...]:
    """Every channel against home, those that moved most first."""
    size = state.recent.shape[2]
    home = [np.bincount(own, counts, minlength=size) for own, counts in zip(bands, state.home, strict=True)]
    effect = effects(np.stack(home), state.recent.sum(0))
    money = state.wealth.log_channels / math.log(10)
    found = [
        Move(name, float(effect[j]), float(max(money[j], -99))) for j, name in enumerate(settings.channels)
    ]
    return tuple(sorted(found, key=lambda move: -abs(move.effect)))


def _classes(settings: Settings, fed: Sequence[Record]) -> tuple[ClassMove, ...]:
    """Every predicted class against home, those whose share changed most first."""
    if not fed:
        return ()
    count = np.sum([record.class_count for record in fed], axis=0)
    total = np.sum([record.class_confidence for record in fed], axis=0)
    moves = [
        ClassMove(
            k,
            settings.class_share[k],
            float(count[k] / count.sum()),
            _class_accuracy(settings, int(count[k]), float(total[k])),
        )
        for k in range(settings.n_classes)
    ]
    return tuple(sorted(moves, key=lambda move: -abs(move.now - move.home)))


def _class_accuracy(settings: Settings, n: int, confidence: float) -> Estimate:
    variance = confidence * (1 - confidence / n) if n else 0.0  # an upper bound of the sum of c (1 - c)
    return from_sums(n, confidence, variance, _spread(settings, 0.0), settings.level)


def _spread(settings: Settings, bars: float) -> Spread | float:
    """What calibration does not know: as measured, else the mean of its own error bars."""
    if settings.spread is None:
        return bars
    base, slope, factor = settings.spread
    measured = settings.level if settings.spread_level is None else settings.spread_level
    return Spread(base, slope, settings.home, factor, measured)
