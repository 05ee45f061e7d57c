"""A monitor for other programs: the log as a table, the status as a dictionary and in Prometheus' format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.estimate.accuracy import Estimate
from salgp.monitor.records import Record, Settings
from salgp.monitor.rules import Status, expected

__all__ = ["history", "metrics", "prometheus"]

LABELS = {"alarm": "kind", "evidence": "kind", "effect": "feature", "predicted_share": "class"}
"""Prometheus label of each metric that is a dictionary."""


def history(settings: Settings, log: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """The log as columns, one row per batch or delivery of late labels.

    Returns:
        ``number``, ``key``, ``time``, ``n``; ``accuracy``, ``lower``, ``upper`` (expected, NaN without
        samples); ``labelled``, ``right``, ``right_expected`` (sum of the confidences of the
        labelled samples); ``shift_evidence``, ``accuracy_evidence`` (log10); ``shift_alarm``,
        ``accuracy_alarm``; and ``count.CLASS`` for every predicted class.
    """
    found = [expected(settings, [record]) for record in log]
    columns: dict[str, list[Any]] = {
        "number": [record.number for record in log],
        "key": [record.name for record in log],
        "time": [record.time for record in log],
        "n": [record.n for record in log],
        "accuracy": [each.value for each in found],
        "lower": [each.lower if each.n else math.nan for each in found],
        "upper": [each.upper if each.n else math.nan for each in found],
    }
    columns |= {
        name: [getattr(record, name) for record in log] for name in ("labelled", "right", "right_expected")
    }
    for name in ("shift", "accuracy"):
        columns[f"{name}_evidence"] = [getattr(record, name) / math.log(10) for record in log]
        columns[f"{name}_alarm"] = [name in record.alarm for record in log]
    for number, label in enumerate(_class_names(settings)):
        columns[f"count.{label}"] = [record.class_count[number] if record.n else 0 for record in log]
    return {name: np.array(values) for name, values in columns.items()}


def metrics(settings: Settings, status: Status) -> dict[str, Any]:
    """The status as plain numbers, those of features, classes and alarms by name."""
    names = _class_names(settings)
    return {
        "batches": status.batches,
        "window_samples": status.n,
        "alarm": {name: int(name in status.alarm) for name in status.evidence},
        "matters": int(status.matters),
        **_accuracy("expected_accuracy", status.accuracy),
        **({} if status.measured is None else _accuracy("measured_accuracy", status.measured)),
        "labelled_samples": 0 if status.measured is None else status.measured.n,
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
            lines += [f'{prefix}_{name}{{{LABELS[name]}="{_escaped(k)}"}} {v}' for k, v in value.items()]
        else:
            lines.append(f"{prefix}_{name} {str(value).replace('nan', 'NaN')}")
    return "\n".join(lines) + "\n"


def _accuracy(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_lower": found.lower, f"{name}_upper": found.upper}


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _class_names(settings: Settings) -> Sequence[str | int]:
    """Their numbers where two classes have one name."""
    names = settings.class_names or ()
    return names if len(set(names)) == settings.n_classes else range(settings.n_classes)
