"""The log of a monitor as a table: one row per batch or delivery of late labels, for other programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.monitor.judging import expected
from salgp.monitor.records import Record, Settings

__all__ = ["history"]


def history(settings: Settings, log: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """Columns ``number``, ``key``, ``time``, ``n``; ``accuracy``, ``lower``, ``upper`` (expected, without
    labels; NaN where no sample came); ``labelled``, ``right``, ``promised`` (how many right answers the
    confidences promised among those); ``shift_evidence``, ``promise_evidence`` (powers of ten);
    ``shift_alarm``, ``promise_alarm``; and ``count.CLASS`` for every predicted class.
    """
    found = [expected(settings, [record]) for record in log]
    columns: dict[str, list[Any]] = {
        name: [getattr(record, name) for record in log] for name in ("number", "key", "time", "n")
    }
    columns |= {
        "accuracy": [each.value for each in found],
        "lower": [each.lower if each.n else math.nan for each in found],
        "upper": [each.upper if each.n else math.nan for each in found],
    }
    columns |= {name: [getattr(record, name) for record in log] for name in ("labelled", "right", "promised")}
    for name in ("shift", "promise"):
        columns[f"{name}_evidence"] = [getattr(record, name) / math.log(10) for record in log]
        columns[f"{name}_alarm"] = [name in record.alarm for record in log]
    for number, label in enumerate(_names(settings)):
        columns[f"count.{label}"] = [record.class_count[number] if record.n else 0 for record in log]
    return {name: np.array(values) for name, values in columns.items()}


def _names(settings: Settings) -> Sequence[str | int]:
    """Of the classes; their numbers where two have one name."""
    names = settings.class_names or ()
    return names if len(set(names)) == settings.n_classes else range(settings.n_classes)
