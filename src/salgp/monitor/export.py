"""A monitor for other programs: the log as a table, the status as a dictionary and in Prometheus' format."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.estimate.accuracy import Estimate
from salgp.monitor.records import Record, Settings
from salgp.monitor.rules import CAUSES, Status, expected

__all__ = ["history", "metrics", "prometheus"]

LABELS = {"alarm": "kind", "evidence": "kind", "effect": "feature", "predicted_share": "class"}
"""Prometheus label of each metric that is a dictionary."""
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def history(settings: Settings, log: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """The log as columns, one row per batch or delivery of late labels.

    Returns:
        ``number``, ``key``, ``time``, ``n``; ``accuracy``, ``lower``, ``upper`` (expected, NaN without
        samples); ``labelled``, ``right``, ``right_expected`` (sum of the confidences of the
        labelled samples); ``shift_evidence``, ``accuracy_evidence`` (log10); ``shift_alarm``,
        ``accuracy_alarm``; and ``count.CLASS`` for every predicted class.
    """
    names = _class_names(settings)
    empty = _row(settings, Record("", 0, None, ""), names)
    rows = [_row(settings, record, names) for record in log]
    return {name: np.array([row[name] for row in rows]) for name in empty}


def _row(settings: Settings, record: Record, names: Sequence[str | int]) -> dict[str, Any]:
    found = expected(settings, [record])
    counts = record.class_count or (0,) * len(names)
    return {
        "number": record.number,
        "key": record.name,
        "time": record.time,
        "n": record.n,
        "accuracy": found.value,
        "lower": found.lower if found.n else math.nan,
        "upper": found.upper if found.n else math.nan,
        "labelled": record.labelled,
        "right": record.right,
        "right_expected": record.right_expected,
        "shift_evidence": record.shift / math.log(10),
        "shift_alarm": "shift" in record.alarm,
        "accuracy_evidence": record.accuracy / math.log(10),
        "accuracy_alarm": "accuracy" in record.alarm,
        **{f"count.{name}": count for name, count in zip(names, counts, strict=True)},
    }


def metrics(settings: Settings, status: Status) -> dict[str, Any]:
    """The status as plain numbers, those of features, classes and alarms by name."""
    names = _class_names(settings)
    return {
        "batches": status.batches,
        "window_samples": status.n,
        "alarm": {name: int(name in status.alarm) for name in CAUSES},
        "matters": int(status.matters),
        **_accuracy("expected_accuracy", status.accuracy),
        **(_accuracy("measured_accuracy", status.measured) if status.measured else {}),
        "labelled_samples": status.measured.n if status.measured else 0,
        "reference_accuracy": status.reference,
        "evidence": dict(status.evidence),
        "evidence_limit": math.log10(2 / status.false_alarm),
        "effect": {shift.feature: shift.effect for shift in status.features},
        "predicted_share": {str(names[shift.label]): shift.now for shift in status.classes},
    }


def prometheus(found: Mapping[str, Any], prefix: str = "salgp") -> str:
    r"""`metrics` in Prometheus' text format.

    Example:
        >>> print(prometheus({"batches": 3, "alarm": {"shift": 1}}), end="")
        # TYPE salgp_batches gauge
        salgp_batches 3
        # TYPE salgp_alarm gauge
        salgp_alarm{kind="shift"} 1
    """
    lines = []
    for name, value in found.items():
        lines.append(f"# TYPE {prefix}_{name} gauge")
        if isinstance(value, Mapping):
            label = LABELS[name]
            lines += [f'{prefix}_{name}{{{label}="{k.translate(ESCAPES)}"}} {v}' for k, v in value.items()]
        else:
            lines.append(f"{prefix}_{name} {str(value).replace('nan', 'NaN')}")
    return "\n".join(lines) + "\n"


def _accuracy(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_lower": found.lower, f"{name}_upper": found.upper}


def _class_names(settings: Settings) -> Sequence[str | int]:
    """Their numbers where two classes have one name."""
    n, names = settings.n_classes, settings.class_names or ()
    return names if len(set(names)) == n else range(n)
