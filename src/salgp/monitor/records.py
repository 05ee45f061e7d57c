"""The numbers a monitor keeps, and the folder it keeps them in.

``monitor.json`` (settings and reference counts, written once), ``state.safetensors`` (everything needed to go
on, replaced whole after every batch, with the batch's record inside) and ``log.jsonl`` (one record per batch,
append-only, with chained checksums). The state is written first: a monitor killed between the two finds the
missing record in the state and appends it. A lock keeps two writers apart; each reads what the other wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from salgp.monitor.martingale import Promise, Wealth
from salgp.storage import (
    FormatError,
    append_line,
    from_json,
    read_header,
    read_lines,
    read_metadata,
    read_tensors,
    readable,
    reading,
    write_header,
    write_tensors,
)

__all__ = [
    "Record",
    "Settings",
    "State",
    "create",
    "keepable_record",
    "keepable_settings",
    "last_number",
    "read",
    "read_log",
    "read_settings",
    "write",
]

SETTINGS, STATE, LOG = "monitor.json", "state.safetensors", "log.jsonl"
KIND = "salgp-monitor"
MOST_SAMPLES = 2**48
"""More than any monitor has seen."""
MOST_BLOCKS = 2**31
"""More blocks and batches than any has; their squares are still numbers of the machine."""
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Settings:
    """What never changes in the life of a monitor.

    Args:
        channels: their names.
        n_classes: of the network.
        n_reference: samples of the reference.
        home: mean confidence of the reference.
        class_share: ``(c,)`` shares of the predicted classes in the reference.
        false_alarm: chance of ever alarming though nothing changed and the calibrator is right to within
            the tolerance.
        tolerance: fall of accuracy that matters.
        window: batches that "now" consists of.
        level: of intervals.
        spread: ``(base, slope, factor)`` of what calibration does not know, or None.
        class_names: for people, or None.
        seed: of the random ties.
        calibrator: digest of the one that predicts, or None where it is not known.
        spread_level: that the factor of ``spread`` was measured for; monitors of earlier versions have None,
            and take it for ``level``.
    """

    channels: tuple[str, ...]
    n_classes: int
    n_reference: int
    home: float
    class_share: tuple[float, ...]
    false_alarm: float
    tolerance: float
    window: int
    level: float
    spread: tuple[float, float, float] | None
    class_names: tuple[str, ...] | None
    seed: int
    calibrator: str | None = None
    spread_level: float | None = None


@dataclass(frozen=True)
class Record:
    """One batch, or one delivery of late labels (``n`` = 0).

    Args:
        number: 1, 2, ...
        key: the caller's name of the batch, else its number.
        time: when, ISO 8601.
        n: samples.
        confidence: sum of the confidences.
        variance: sum of ``c (1 - c)``.
        std: sum of the error bars.
        class_count: ``(c,)`` predicted classes.
        class_confidence: ``(c,)`` sums of their confidences.
        labelled: samples with labels.
        right: of those.
        promised: sum of their confidences.
        shift: logarithm of the money bet against "nothing changed", afterwards.
        promise: logarithm of that against "right as often as promised", afterwards.
        alarm: which alarms stand afterwards: ``"shift"``, ``"promise"``.
        named: is the key the caller's? Earlier versions did not keep it: their numbers count as names.
    """

    number: int
    key: str
    time: str
    n: int = 0
    confidence: float = 0.0
    variance: float = 0.0
    std: float = 0.0
    class_count: tuple[int, ...] = ()
    class_confidence: tuple[float, ...] = ()
    labelled: int = 0
    right: int = 0
    promised: float = 0.0
    shift: float = 0.0
    promise: float = 0.0
    alarm: tuple[str, ...] = ()
    named: bool = True


@dataclass(frozen=True, eq=False)
class State:
    """Everything needed to go on.

    Args:
        wealth: against "nothing changed".
        promise: against "right as often as promised".
        home: ``(J, CELLS)`` counts of the reference.
        recent: ``(window, J, BANDS)`` band counts of the last batches, oldest first; empty ones are 0.
        last: number of the last record.
    """

    wealth: Wealth
    promise: Promise
    home: IntArray
    recent: IntArray
    last: int = 0

    def with_bands(self, counts: IntArray) -> State:
        """One more batch in the window; the oldest leaves."""
        return replace(self, recent=np.concatenate([self.recent[1:], counts[None]]))


def keepable_settings(settings: Settings) -> Settings:
    """The settings as `read_settings` would give them; refused where it would refuse them."""
    found = readable(settings, "a monitor")
    if not _in_range(found):
        raise ValueError(f"a monitor: a number is out of its range in {found}")
    return found


def keepable_record(record: Record, settings: Settings) -> Record:
    """The record as `read` would give it; refused where it would refuse it, before anything is written."""
    found = readable(record, "a batch to be watched")
    _check_classes([found], settings, "a batch to be watched")
    return found


def create(folder: Path, settings: Settings, state: State) -> None:
    """Start the folder of a new monitor; refuse one that holds a monitor already."""
    if (folder / SETTINGS).exists():
        raise FileExistsError(
            f"{folder} holds a monitor already; go on with Monitor.open, or choose another folder"
        )
    foreign = [path for path in (folder / LOG, folder / STATE) if path.exists() and not _begun(path)]
    if foreign:
        raise FileExistsError(f"{foreign[0]} is not of a monitor; it is left alone: choose another folder")
    _write_state(folder, state, None)
    write_header(folder / SETTINGS, KIND, 1, asdict(settings))


def write(folder: Path, state: State, record: Record) -> None:
    """Keep a batch: first the state, then the log."""
    _write_state(folder, state, record)
    append_line(folder / LOG, asdict(record))


def read(folder: Path, settings: Settings) -> tuple[State, list[Record]]:
    """State and log; a record that only the state has is appended to the log."""
    tensors, metadata = read_tensors(folder / STATE)
    if metadata.get("kind") != "salgp-monitor-state":
        raise FormatError(f"{folder / STATE}: not the state of a monitor")
    log = read_log(folder)
    state = _state(tensors, metadata, folder)
    _check_shapes(state, settings, folder / STATE)
    if state.last < len(log):
        raise FormatError(
            f"{folder / STATE}: knows {state.last} records, the log has {len(log)}; restore the file"
        )
    if state.last > len(log):
        with reading(folder / STATE, "the state of a monitor"):
            kept = json.loads(metadata["record"])
        if kept is None or state.last != len(log) + 1:
            raise FormatError(
                f"{folder / LOG}: has {len(log)} records, the state has {state.last}; restore the file"
            )
        log.append(from_json(Record, kept, folder / STATE))
        _check_numbers(log, folder / STATE)
        _check_classes(log, settings, folder / STATE)
        append_line(folder / LOG, kept)
    _check_classes(log, settings, folder / LOG)
    return state, log


def read_log(folder: Path) -> list[Record]:
    """All records, oldest first."""
    log = [from_json(Record, line, folder / LOG) for line in read_lines(folder / LOG)]
    _check_numbers(log, folder / LOG)
    return log


def last_number(folder: Path) -> int:
    """Number of the last record, whoever wrote it."""
    metadata = read_metadata(folder / STATE)
    with reading(folder / STATE, "the state of a monitor"):
        return int(json.loads(metadata["numbers"])["last"])


def read_settings(folder: Path) -> Settings:
    """Settings of a monitor; refused where they were changed since it was started."""
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no monitor; start one with Monitor.start(reference, state=...)"
        )
    found = from_json(Settings, read_header(path, KIND, 1), path)
    if not _in_range(found):
        raise FormatError(f"{path}: not the settings of a monitor: a number is out of its range")
    return found


def _in_range(settings: Settings) -> bool:
    measured = settings.level if settings.spread_level is None else settings.spread_level
    rates = (settings.false_alarm, settings.level, measured, 1 - settings.tolerance)
    counts = (settings.window, settings.n_reference, len(settings.channels), settings.seed + 1)
    shares = (settings.home, *settings.class_share)
    named = settings.class_share if settings.class_names is None else settings.class_names
    return (
        all(0 < rate <= 1 for rate in rates)
        and all(count >= 1 for count in counts)
        and all(0 <= share <= 1 for share in shares)
        and len(settings.class_share) == len(named) == settings.n_classes
    )


def _begun(path: Path) -> bool:
    """Is this all that a monitor killed at its start has left?"""
    try:
        return path.name == STATE and read_metadata(path).get("kind") == "salgp-monitor-state"
    except FormatError:
        return False


def _write_state(folder: Path, state: State, record: Record | None) -> None:
    arrays = {
        "counts": state.wealth.counts,
        "log_money": state.wealth.log_money,
        "promise": state.promise.log_money,
        "home": state.home,
        "recent": state.recent,
    }
    numbers = {
        "last": state.last,
        "blocks": state.wealth.blocks,
        "peak": state.wealth.peak,
        "promise_blocks": state.promise.blocks,
        "promise_peak": state.promise.peak,
    }
    kept = json.dumps(None if record is None else asdict(record))
    metadata = {"kind": "salgp-monitor-state", "numbers": json.dumps(numbers), "record": kept}
    write_tensors(
        folder / STATE, {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}, metadata
    )


def _state(tensors: dict[str, torch.Tensor], metadata: dict[str, str], folder: Path) -> State:
    with reading(folder / STATE, "the whole state of a monitor"):
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        numbers = json.loads(metadata["numbers"])
        wealth = Wealth(arrays["counts"], arrays["log_money"], int(numbers["blocks"]), float(numbers["peak"]))
        promise = Promise(arrays["promise"], int(numbers["promise_blocks"]), float(numbers["promise_peak"]))
        return State(wealth, promise, arrays["home"], arrays["recent"], int(numbers["last"]))


def _check_shapes(state: State, settings: Settings, path: Path) -> None:
    """Every array has the shape and type that the settings ask for."""
    j, begun = len(settings.channels), Wealth.start(np.zeros((0, len(settings.channels)), dtype=np.int64))
    expected = {
        "counts": (state.wealth.counts, begun.counts.shape, "i"),
        "log_money": (state.wealth.log_money, begun.log_money.shape, "f"),
        "promise": (state.promise.log_money, Promise.start().log_money.shape, "f"),
        "home": (state.home, begun.counts.shape, "i"),
        "recent": (state.recent, (settings.window, j, *state.recent.shape[2:]), "i"),
    }
    counted = (state.wealth.blocks, state.promise.blocks, state.last)
    if not all(0 <= count <= MOST_BLOCKS for count in counted):
        raise FormatError(
            f"{path}: holds {min(counted)} to {max(counted)} blocks and records, which none has"
        )
    if any(math.isnan(peak) for peak in (state.wealth.peak, state.promise.peak)):
        raise FormatError(f"{path}: holds values that no bet gives")
    for name, (x, shape, kind) in expected.items():
        if x.shape != shape or x.dtype.kind != kind:
            raise FormatError(f"{path}: {name} is {x.dtype} of shape {x.shape}, expected {shape}")
        if _beyond_counting(x) if kind == "i" else np.isnan(x).any() or x.max(initial=0) == np.inf:
            raise FormatError(f"{path}: {name} holds values that no count and no bet gives")


def _beyond_counting(x: NDArray[Any]) -> bool:
    """No number of samples is negative, and their sum fits a number."""
    return bool(x.min(initial=0) < 0 or x.max(initial=0) > MOST_SAMPLES)


def _check_numbers(log: Sequence[Record], path: Path) -> None:
    """Records are numbered 1, 2, ... without a gap."""
    for expected, record in enumerate(log, 1):
        if record.number != expected:
            raise FormatError(f"{path}: expected record {expected}, got {record.number}; restore the file")


def _check_classes(log: Sequence[Record], settings: Settings, path: Path | str) -> None:
    """Every batch counts the classes that the settings name."""
    for record in log:
        counts = {len(record.class_count), len(record.class_confidence)}
        if counts != ({settings.n_classes} if record.n else {0}):
            raise FormatError(
                f"{path}: record {record.number} counts {max(counts)} classes, expected {settings.n_classes}"
            )
