"""Settings, state and log of a monitor, and their files.

``monitor.json`` (settings, written once), ``state.safetensors`` (everything needed to go on, replaced whole
after every batch, with the batch's record inside) and ``log.jsonl`` (one record per batch, append-only, with
chained checksums). All three carry the monitor's random id, so that files of two monitors are never mixed.
The state is written first: a monitor killed between the two finds the missing record in the state and appends
it. A lock keeps two writers apart; each reads what the other wrote.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from salgp.io import (
    FormatError,
    append_line,
    from_json,
    read_header,
    read_lines,
    read_tensors,
    reading,
    write_header,
    write_tensors,
)
from salgp.metrics.metric import IntArray
from salgp.monitor.martingale import BANDS, AccuracyMartingale, ConformalMartingale

__all__ = ["Record", "Settings", "State", "read", "write"]

SETTINGS, STATE, LOG = "monitor.json", "state.safetensors", "log.jsonl"
KIND, STATE_KIND = "salgp-monitor", "salgp-monitor-state"
LARGEST_COUNT = 2**48
"""More samples than any stream has; the sum over all cells is still a whole number of 64 bits."""


@dataclass(frozen=True)
class Settings:
    """Settings, which stay the same for the life of a monitor.

    Args:
        id: random, the same in all files of a monitor.
        features: names of what is monitored.
        n_classes: of the network.
        n_reference: samples of the reference.
        reference: mean confidence of the reference.
        class_share: ``(c,)`` shares of the predicted classes in the reference.
        false_alarm: probability of ever alarming though nothing changed and the calibrator is right to within
            the tolerance.
        tolerance: fall of accuracy that matters.
        window: batches that "now" consists of.
        level: of intervals.
        spread: ``(base, slope, factor, level)`` of a `salgp.estimate.Spread`, or None.
        class_names: for display, or None.
        seed: of the random ties.
        calibrator: digest of the one that predicts, or None where it is not known.
    """

    id: str
    features: tuple[str, ...]
    n_classes: int
    n_reference: int
    reference: float
    class_share: tuple[float, ...]
    false_alarm: float
    tolerance: float
    window: int
    level: float
    spread: tuple[float, float, float, float] | None
    class_names: tuple[str, ...] | None
    seed: int
    calibrator: str | None = None

    def __post_init__(self) -> None:
        names = self.class_names
        rules = {
            f"a reference needs at least 50 samples, got {self.n_reference}": self.n_reference >= 50,
            f"false_alarm must be between 0 and 1, got {self.false_alarm}": 0 < self.false_alarm < 1,
            f"tolerance must be at least 0 and below 1, got {self.tolerance}": 0 <= self.tolerance < 1,
            f"window must be at least 1 batch, got {self.window}": self.window >= 1,
            f"level must be between 0 and 1, got {self.level}": 0 < self.level < 1,
            f"seed must be a whole number of 0 or more, got {self.seed}": self.seed >= 0,
            f"reference must be between 0 and 1, got {self.reference}": 0 <= self.reference <= 1,
            f"expected {self.n_classes} shares of classes": len(self.class_share) == self.n_classes,
            "shares of classes must be between 0 and 1": all(0 <= x <= 1 for x in self.class_share),
            f"expected {self.n_classes} class names": names is None or len(names) == self.n_classes,
            "the level of a spread must be between 0 and 1": self.spread is None or 0 < self.spread[3] < 1,
            "a monitor starts with the features confidence and class": self.features[:2]
            == ("confidence", "class"),
        }
        for sentence, holds in rules.items():
            if not holds:
                raise ValueError(sentence)


@dataclass(frozen=True)
class Record:
    """One batch, or one delivery of late labels (``n`` = 0).

    Args:
        monitor: id of the monitor.
        number: 1, 2, ...
        key: the caller's name of the batch, or None; late labels with the key of a batch belong to it.
        time: when, ISO 8601.
        n: samples.
        confidence: sum of the confidences.
        variance: sum of ``c (1 - c)``.
        std: sum of the error bars.
        class_count: ``(c,)`` predicted classes.
        class_confidence: ``(c,)`` sums of their confidences.
        labelled: samples with labels.
        right: correct answers among those.
        right_expected: sum of their confidences.
        shift: log capital of the bets against "the inputs did not change", afterwards.
        accuracy: log capital of those against "right as often as the confidences say", afterwards.
        alarm: which alarms stand afterwards: ``"shift"``, ``"accuracy"``.
    """

    monitor: str
    number: int
    key: str | None
    time: str
    n: int = 0
    confidence: float = 0.0
    variance: float = 0.0
    std: float = 0.0
    class_count: tuple[int, ...] = ()
    class_confidence: tuple[float, ...] = ()
    labelled: int = 0
    right: int = 0
    right_expected: float = 0.0
    shift: float = 0.0
    accuracy: float = 0.0
    alarm: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The key, or else the number."""
        if self.key is not None:
            return self.key
        return f"batch {self.number}" if self.n else f"labels {self.number}"


@dataclass(frozen=True, eq=False)
class State:
    """Everything needed to go on.

    Args:
        shift: evidence against "the inputs did not change".
        accuracy: evidence against "right as often as the confidences say".
        reference: ``(J, CELLS)`` counts of the reference.
        recent: ``(window, J, BANDS)`` band counts of the last batches, oldest first; empty ones are 0.
        last: number of the last record.
    """

    shift: ConformalMartingale
    accuracy: AccuracyMartingale
    reference: IntArray
    recent: IntArray
    last: int = 0

    @staticmethod
    def start(reference: IntArray, window: int) -> State:
        """Before the first batch; ``reference`` are the cells ``(n, J)`` of the reference samples."""
        shift = ConformalMartingale.start(reference)
        recent = np.zeros((window, len(shift.counts), BANDS), dtype=np.int64)
        return State(shift, AccuracyMartingale.start(), shift.counts, recent)

    def with_bands(self, counts: IntArray) -> State:
        """One more batch in the window; the oldest leaves."""
        return replace(self, recent=np.concatenate([self.recent[1:], counts[None]]))


def create(folder: Path, settings: Settings, state: State) -> None:
    """Start the folder of a new monitor; refuse one that holds a monitor already."""
    if (folder / SETTINGS).exists():
        raise FileExistsError(
            f"{folder} holds a monitor already; go on with Monitor.open, or choose another folder"
        )
    for path in (folder / LOG, folder / STATE):
        if path.exists() and not _unfinished(path):
            raise FileExistsError(f"{path} is not of a monitor; it is left alone: choose another folder")
    _write_state(folder, settings.id, state, None)
    write_header(folder / SETTINGS, KIND, 1, asdict(settings))


def write(folder: Path, state: State, record: Record) -> None:
    """Keep a batch: first the state, then the log."""
    _write_state(folder, record.monitor, state, record)
    append_line(folder / LOG, asdict(record))


def read(folder: Path, settings: Settings) -> tuple[State, list[Record]]:
    """State and log; a record that only the state has is appended to the log."""
    path = folder / LOG
    state, pending = _read_state(folder / STATE, settings)
    lines = read_lines(path)
    if pending is not None and state.last == len(lines) + 1:
        append_line(path, pending)
        lines.append(pending)
    if state.last != len(lines):
        raise FormatError(
            f"{folder}: the log has {len(lines)} records, the state {state.last}; restore the files"
        )
    log = [from_json(Record, line, path) for line in lines]
    for number, record in enumerate(log, 1):
        _check_origin(path, record.monitor, settings)
        classes = {len(record.class_count), len(record.class_confidence)}
        if record.number != number or classes != {settings.n_classes if record.n else 0}:
            raise FormatError(f"{path}: line {number} is not of this monitor; restore the file")
    if pending is not None and lines[-1:] != [pending]:
        raise FormatError(f"{folder}: {LOG} and {STATE} end with different records; restore the files of one")
    return state, log


def last_number(folder: Path) -> int:
    """Number of the last record, whoever wrote it."""
    _, metadata = read_tensors(folder / STATE)
    with reading(folder / STATE, "the state of a monitor"):
        return int(json.loads(metadata["numbers"])["last"])


def read_settings(folder: Path) -> Settings:
    """Settings of a monitor; refused where they were changed since it was started."""
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no monitor; start one with Monitor.start(reference, state=...)"
        )
    with reading(path, "the settings of a monitor"):
        return from_json(Settings, read_header(path, KIND, 1), path)


def _check_origin(path: Path, monitor: str | None, settings: Settings) -> None:
    if monitor != settings.id:
        raise FormatError(f"{path}: belongs to another monitor than {SETTINGS}; restore the files of one")


def _unfinished(path: Path) -> bool:
    """Is this all that a monitor killed at its start has left?"""
    try:
        return path.name == STATE and read_tensors(path)[1].get("kind") == STATE_KIND
    except FormatError:
        return False


def _arrays(state: State) -> dict[str, NDArray[Any]]:
    return {
        "counts": state.shift.counts,
        "shift": state.shift.log_capital,
        "accuracy": state.accuracy.log_capital,
        "reference": state.reference,
        "recent": state.recent,
    }


def _write_state(folder: Path, monitor: str, state: State, record: Record | None) -> None:
    numbers = {
        "last": state.last,
        "shift": [state.shift.blocks, state.shift.peak],
        "accuracy": [state.accuracy.blocks, state.accuracy.peak],
    }
    metadata = {
        "kind": STATE_KIND,
        "monitor": monitor,
        "numbers": json.dumps(numbers),
        "record": json.dumps(None if record is None else asdict(record)),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in _arrays(state).items()}
    write_tensors(folder / STATE, tensors, metadata)


def _read_state(path: Path, settings: Settings) -> tuple[State, Any]:
    """The state, and its record as the log would have it."""
    tensors, metadata = read_tensors(path)
    if metadata.get("kind") != STATE_KIND:
        raise FormatError(f"{path}: not the state of a monitor")
    _check_origin(path, metadata.get("monitor"), settings)
    with reading(path, "the state of a monitor"):
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        _check_arrays(arrays, settings)
        return _state(arrays, json.loads(metadata["numbers"])), json.loads(metadata["record"])


def _check_arrays(arrays: dict[str, NDArray[Any]], settings: Settings) -> None:
    fresh = State.start(np.zeros((0, len(settings.features)), dtype=np.int64), settings.window)
    for name, expected in _arrays(fresh).items():
        found = arrays[name]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            wanted = f"{expected.dtype} of shape {expected.shape}"
            raise FormatError(f"{name} is {found.dtype} of shape {found.shape}, expected {wanted}")
    for name in ("counts", "reference", "recent"):
        counts = arrays[name]
        if counts.min() < 0 or counts.max() > LARGEST_COUNT:
            raise FormatError("numbers of samples must be from 0 to 2^48")


def _state(arrays: dict[str, NDArray[Any]], numbers: dict[str, Any]) -> State:
    shift = ConformalMartingale(arrays["shift"], *numbers["shift"], counts=arrays["counts"])
    accuracy = AccuracyMartingale(arrays["accuracy"], *numbers["accuracy"])
    return State(shift, accuracy, arrays["reference"], arrays["recent"], int(numbers["last"]))
