"""`Monitor`: a stream of batches, how well it goes, what moved, and an alarm that keeps its word."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.estimate.accuracy import Estimate, Spread
from salgp.labels import as_labels
from salgp.monitor import records
from salgp.monitor.channels import band_counts, band_of_cells, channel_cells, channel_names
from salgp.monitor.history import history
from salgp.monitor.judging import alarms, expected, judge
from salgp.monitor.martingale import Promise, Wealth
from salgp.monitor.records import Record, Settings, State
from salgp.monitor.status import Status
from salgp.prediction import Prediction, checked
from salgp.storage import locked
from salgp.tables import as_frame

__all__ = ["Monitor"]

_WAIT = 60.0
"""Seconds to wait for another writer."""


class Monitor:
    """Watch a stream of predictions.

    Make one with `Monitor.start` and go on with `Monitor.open`. Without a folder it lives in memory.

    Example:
        >>> import torch
        >>> def batch(n, seed, power=1.0):
        ...     g = torch.Generator().manual_seed(seed)
        ...     s = (0.5 + 0.5 * torch.rand(n, generator=g)) ** power
        ...     return Prediction(torch.zeros(n, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> monitor = Monitor.start(batch(1000, 0))
        >>> monitor.feed(batch(500, 1)).alarm
        ()
        >>> print(monitor.feed(batch(500, 2, power=3.0)))  # doctest: +ELLIPSIS
        Alarm: the inputs changed (this matters); expected accuracy 6..., at home 7...
    """

    def __init__(self, settings: Settings, state: State, log: Sequence[Record], folder: Path | None) -> None:
        self.settings = settings
        self.folder = folder
        self._state = state
        self._log = list(log)
        self._bands = band_of_cells(state.home)

    @staticmethod
    def start(
        reference: Prediction,
        state: str | os.PathLike[str] | None = None,
        *,
        false_alarm: float = 0.01,
        tolerance: float = 0.02,
        window: int = 20,
        level: float = 0.9,
        spread: Spread | None = None,
        class_names: Sequence[str] | None = None,
        seed: int = 0,
        calibrator: str | None = None,
    ) -> Monitor:
        """Begin to watch.

        Args:
            reference: of samples from where the network is at home, which the calibrator was not fitted on:
                its own calibration samples look more familiar than any new ones.
            state: folder to keep everything in; it must not hold a monitor yet.
            false_alarm: chance of ever alarming, over the whole life of the monitor, though nothing changed.
                Labels test whether answers are right as often as promised, to within ``tolerance``: where
                they are given, the calibrator must be that good from the start.
            tolerance: fall of accuracy that matters; with labels at least twice ``sqrt(a (1 - a) / n)``, for
                an accuracy ``a`` and ``n`` calibration samples.
            window: batches that "now" consists of.
            level: of the intervals.
            spread: what calibration does not know (`salgp.estimate.measure_spread`).
            class_names: for people.
            seed: of the random ties.
            calibrator: digest of the one that predicts, so that `open` can refuse another.
        """
        _check_start(reference, false_alarm, tolerance, window, level, class_names)
        _check_kept(seed, calibrator)
        values = channel_cells(reference)
        wealth = Wealth.start(values)
        c = reference.probs.shape[1]
        share = np.bincount(reference.label.cpu().numpy(), minlength=c) / len(reference)
        made = Settings(
            channel_names(reference),
            c,
            len(reference),
            float(reference.confidence.double().mean()),
            tuple(share.tolist()),
            false_alarm,
            tolerance,
            window,
            level,
            None if spread is None else (spread.base, spread.slope, spread.factor),
            None if class_names is None else tuple(str(name) for name in class_names),
            seed,
            calibrator,
            None if spread is None else spread.level,
        )
        settings = records.keepable_settings(made)
        bands = band_counts(values[:0], band_of_cells(wealth.counts))
        empty = np.zeros((settings.window, *bands.shape), dtype=np.int64)
        begun = State(wealth, Promise.start(), wealth.counts, empty)
        if state is None:
            return Monitor(settings, begun, [], None)
        with locked(state, _WAIT) as folder:
            records.create(folder, settings, begun)
        return Monitor(settings, begun, [], Path(state))

    @staticmethod
    def open(state: str | os.PathLike[str], calibrator: str | None = None) -> Monitor:
        """Go on where a folder ends, also after a kill.

        Args:
            state: the folder.
            calibrator: digest of the one that predicts now; refused where the monitor was started with
                another, whose confidences at home are not those of this one.
        """
        settings = records.read_settings(Path(state))
        if calibrator and settings.calibrator and calibrator != settings.calibrator:
            raise ValueError(
                f"{state} was started with another calibrator ({settings.calibrator[:8]}, now "
                f"{calibrator[:8]}): its confidences would look like a change of the data; go on with that "
                f"one, or start a new monitor in another folder"
            )
        with locked(state, _WAIT) as folder:
            return Monitor(settings, *records.read(folder, settings), Path(state))

    @property
    def log(self) -> tuple[Record, ...]:
        """All batches and deliveries of labels so far."""
        return tuple(self._log)

    def feed(
        self,
        prediction: Prediction,
        labels: Any = None,
        *,
        key: str | int | None = None,
        time: str | None = None,
    ) -> Status:
        """Watch one batch, in the order of time.

        Args:
            prediction: of the batch.
            labels: ``(n,)`` true classes where they are known already.
            key: name of the batch, a text or a whole number (5 is the same name as "5"); one that was fed
                before is not counted again, so that a job may be repeated after a kill. Without one the log
                shows its number, which is no name.
            time: ISO 8601; by default now.
        """
        self._check(prediction)
        if not len(prediction):
            return self.status()
        name = _name(key)
        with self._turn(name, fed=True) as number:
            if number:
                self._keep(*self._fed(prediction, labels, number, name, time))
        return self.status()

    def observe(
        self, prediction: Prediction, labels: Any, *, key: str | int | None = None, time: str | None = None
    ) -> Status:
        """Labels that came later, for some or all samples of batches fed before.

        Every label is to be delivered once, here or in `feed`: each counts as a new answer, and moves the
        evidence. Only a ``key`` makes it safe to repeat a delivery. Without one, the same labels given again
        cannot be told from new ones of samples that look alike.

        Args:
            prediction: the predictions made then, for the samples that have labels now.
            labels: ``(n,)`` their true classes.
            key: name of the delivery, a text or a whole number; one seen before is not counted again.
            time: ISO 8601; by default now.
        """
        self._check(prediction)
        if not len(prediction):
            return self.status()
        given = _name(key)
        name = None if given is None else f"labels {given}"
        with self._turn(name, fed=False) as number:
            if number:
                record = _blank(number, name, f"labels {number}", time)
                self._keep(*self._labelled(self._state, record, prediction, labels))
        return self.status()

    def status(self) -> Status:
        """How things stand, without feeding anything."""
        return judge(self.settings, self._state, self._bands, self._log)

    def page(self, path: str | os.PathLike[str], title: str = "Is it still doing well?") -> Path:
        """Write the last weeks as one HTML page that needs no other file.

        A page of a monitor that is there already is replaced; any other file is left alone with a
        `FileExistsError`.
        """
        from salgp.monitor.page import write_page

        return write_page(path, self, title)

    def history(self) -> dict[str, NDArray[Any]]:
        """The log as columns, one row per batch, see `salgp.monitor.history`."""
        return history(self.settings, self._log)

    def to_frame(self) -> Any:
        """The log as a table, one row per batch: when, how many samples, the expected accuracy with its
        interval, evidence, alarms, predicted classes; see `salgp.monitor.history`.

        Returns:
            A pandas data frame, whose ``to_parquet`` writes it for other programs; where pandas is not
            installed a pyarrow table, and without that a mapping from column name to NumPy array.

        Example:
            >>> import torch
            >>> p = Prediction(
            ...     torch.zeros(60, dtype=torch.long), torch.full((60, 2), 0.5), torch.full((60,), 0.5)
            ... )
            >>> list(Monitor.start(p).to_frame())[:5]
            ['number', 'key', 'time', 'n', 'accuracy']
        """
        return as_frame(self.history())

    @contextmanager
    def _turn(self, key: str | None, fed: bool) -> Iterator[int]:
        """Be the only writer, up to date with all others; gives the next number, 0 if the key is known."""
        if self.folder is None:
            yield self._next(key, fed)
            return
        with locked(self.folder, _WAIT):
            if records.last_number(self.folder) != self._state.last or len(self._log) != self._state.last:
                self._state, self._log = records.read(self.folder, self.settings)
            yield self._next(key, fed)

    def _next(self, key: str | None, fed: bool) -> int:
        """Batches and deliveries of labels have names of their own; numbers are no names."""
        known = {record.key for record in self._log if record.named and (record.n > 0) == fed}
        return 0 if key in known else self._state.last + 1

    def _keep(self, state: State, made: Record) -> None:
        record = records.keepable_record(made, self.settings)
        if self.folder is not None:
            records.write(self.folder, state, record)
        self._state = state
        self._log.append(record)

    def _fed(
        self, prediction: Prediction, labels: Any, number: int, key: str | None, time: str | None
    ) -> tuple[State, Record]:
        values = channel_cells(prediction)
        rng = np.random.default_rng([self.settings.seed, number])
        state = replace(self._state, wealth=self._state.wealth.bet(values, rng))
        state = state.with_bands(band_counts(values, self._bands))
        s = prediction.confidence.detach().cpu().double().numpy()
        label, c = prediction.label.cpu().numpy(), self.settings.n_classes
        record = replace(
            _blank(number, key, str(number), time),
            n=len(s),
            confidence=float(s.sum()),
            variance=float((s * (1 - s)).sum()),
            std=0.0 if prediction.std is None else float(prediction.std.double().sum()),
            class_count=tuple(np.bincount(label, minlength=c).tolist()),
            class_confidence=tuple(np.bincount(label, s, minlength=c).tolist()),
        )
        if labels is not None:
            return self._labelled(state, record, prediction, labels)
        return self._closed(state, record)

    def _labelled(
        self, state: State, record: Record, prediction: Prediction, labels: Any
    ) -> tuple[State, Record]:
        y = as_labels(labels, len(prediction), self.settings.n_classes).cpu()
        right = (prediction.label.cpu() == y).numpy()
        s = prediction.confidence.detach().cpu().double().numpy()
        promise = state.promise.bet(s, right, self.settings.tolerance)
        counted = replace(record, labelled=len(s), right=int(right.sum()), promised=float(s.sum()))
        return self._closed(replace(state, promise=promise), counted)

    def _closed(self, state: State, record: Record) -> tuple[State, Record]:
        state = replace(state, last=record.number)
        shift, promise = state.wealth.log_total, state.promise.log_total
        return state, replace(record, shift=shift, promise=promise, alarm=alarms(self.settings, state))

    def estimate_of(self, record: Record) -> Estimate:
        """Expected accuracy of one batch of the log."""
        return expected(self.settings, [record])

    def _check(self, prediction: Prediction) -> None:
        if checked(prediction).probs.shape[1] != self.settings.n_classes:
            raise ValueError(
                f"this monitor watches a network of {self.settings.n_classes} classes, "
                f"got {prediction.probs.shape[1]}"
            )
        if channel_names(prediction) != self.settings.channels:
            raise ValueError(
                f"this monitor watches {', '.join(self.settings.channels)}; the prediction has "
                f"{', '.join(channel_names(prediction))}; feed it from the calibrator it was started with"
            )


def _name(key: Any) -> str | None:
    """The name of a batch as it is kept."""
    if key is None or isinstance(key, str):
        return key
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return str(int(key))
    raise TypeError(
        f"key must be a text or a whole number, got a {type(key).__name__} ({key!r:.60}); "
        f"name the batch by a text, such as key=str(...)"
    )


def _blank(number: int, key: str | None, shown: str, time: str | None) -> Record:
    """A record without numbers; ``shown`` is what stands in the log where there is no key."""
    when = datetime.now(UTC).isoformat(timespec="seconds") if time is None else time
    datetime.fromisoformat(when)
    return Record(number, shown if key is None else key, when, named=key is not None)


def _check_start(
    reference: Prediction,
    false_alarm: float,
    tolerance: float,
    window: int,
    level: float,
    names: Sequence[str] | None,
) -> None:
    if len(checked(reference)) < 50:
        raise ValueError(f"a reference needs at least 50 samples from home, got {len(reference)}")
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm must be between 0 and 1, got {false_alarm}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance}")
    if window < 1:
        raise ValueError(f"window must be at least 1 batch, got {window}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    if names is not None and len(names) != reference.probs.shape[1]:
        raise ValueError(f"expected {reference.probs.shape[1]} class names, got {len(names)}")


def _check_kept(seed: int, calibrator: str | None) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be a whole number of 0 or more, got {seed!r}")
    if calibrator is not None and not isinstance(calibrator, str):
        raise TypeError(
            f"calibrator must be the digest of one, a text, or None; got a {type(calibrator).__name__}"
        )
