"""`Monitor`: takes batches and labels in, keeps state and log, and gives the status."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from salgp.estimate.accuracy import Spread
from salgp.extras import as_frame, require
from salgp.io import locked, readable
from salgp.labels import as_labels
from salgp.metrics.metric import to_double
from salgp.monitor import export, records
from salgp.monitor.martingale import band_counts, band_of_cells, feature_cells, feature_names
from salgp.monitor.records import Record, Settings, State
from salgp.monitor.rules import Status, alarms, status_of
from salgp.prediction import Prediction, checked

__all__ = ["Monitor"]

_WAIT = 60.0
"""Seconds to wait for another writer."""


class Monitor:
    """Monitor a stream of predictions, without labels, with few, or with late ones.

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
        Alarm: the inputs changed (this matters). Expected accuracy 6..., 7... on the reference. ...
    """

    def __init__(self, settings: Settings, state: State, log: Sequence[Record], folder: Path | None) -> None:
        self.settings = settings
        self.folder = folder
        self._state = state
        self._log = list(log)
        self._bands = band_of_cells(state.reference)

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
        """Begin to monitor.

        Args:
            reference: prediction of data as they should be, which the calibrator was not fitted on: its own
                calibration samples look more familiar than any new ones.
            state: folder to keep everything in; it must not hold a monitor yet.
            false_alarm: probability of ever alarming, over the whole life of the monitor, though nothing
                changed. Labels test whether answers are right as often as the confidences say, to within
                ``tolerance``: where they are given, the calibrator must be that good from the start.
            tolerance: fall of accuracy that matters; with labels at least twice ``sqrt(a (1 - a) / n)``, for
                an accuracy ``a`` and ``n`` calibration samples.
            window: batches that "now" consists of.
            level: of the intervals.
            spread: systematic error of the confidences (`salgp.estimate.measure_spread`).
            class_names: for display.
            seed: of the random ties.
            calibrator: digest of the one that predicts, so that `open` can refuse another.
        """
        values = feature_cells(checked(reference))
        c, n = reference.probs.shape[1], len(reference)
        share = np.bincount(reference.label.cpu().numpy(), minlength=c) / max(n, 1)
        made = Settings(
            secrets.token_hex(8),
            feature_names(reference),
            c,
            n,
            float(reference.confidence.double().mean()) if n else 0.0,
            tuple(share.tolist()),
            false_alarm,
            tolerance,
            window,
            level,
            None if spread is None else (spread.base, spread.slope, spread.factor, spread.level),
            None if class_names is None else tuple(str(name) for name in class_names),
            seed,
            calibrator,
        )
        settings = readable(made, "a monitor")
        begun = State.start(values, settings.window)
        if state is not None:
            with locked(state, _WAIT) as folder:
                records.create(folder, settings, begun)
        return Monitor(settings, begun, [], None if state is None else Path(state))

    @staticmethod
    def open(state: str | os.PathLike[str], calibrator: str | None = None) -> Monitor:
        """Go on where a folder ends, also after a kill.

        Args:
            state: the folder.
            calibrator: digest of the one that predicts now; refused where the monitor was started with
                another, whose confidences are not comparable.
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
        """Add one batch, in the order of time.

        Args:
            prediction: of the batch.
            labels: ``(n,)`` true classes where they are known already.
            key: name of the batch, a text or a whole number (5 is the same name as "5"); one that was fed
                before is not counted again, so that a job may be repeated after a kill.
            time: ISO 8601; by default now.
        """
        return self._add(prediction, labels, key, time, fed=True)

    def observe(
        self, prediction: Prediction, labels: Any, *, key: str | int | None = None, time: str | None = None
    ) -> Status:
        """Add labels that came later, for some or all samples of batches fed before.

        Every label is to be delivered once, here or in `feed`: each counts as a new answer. Only a ``key``
        makes it safe to repeat a delivery.

        Args:
            prediction: the predictions made then, for the samples that have labels now.
            labels: ``(n,)`` their true classes.
            key: name of the delivery; one seen before is not counted again. With the key of a batch, the
                labels are shown and counted with that batch.
            time: ISO 8601; by default now.
        """
        return self._add(prediction, labels, key, time, fed=False)

    def status(self) -> Status:
        """The present status, without a new batch."""
        return status_of(self.settings, self._state, self._bands, self._log)

    def metrics(self) -> dict[str, Any]:
        """The status as plain numbers, for a dashboard.

        Example:
            >>> import torch
            >>> half = torch.full((60, 2), 0.5)
            >>> monitor = Monitor.start(Prediction(torch.zeros(60).long(), half, half[:, 0]))
            >>> monitor.metrics()["alarm"]
            {'shift': 0, 'accuracy': 0}
        """
        return export.metrics(self.settings, self.status())

    def prometheus(self) -> str:
        """`metrics` in Prometheus' text format, the answer of a ``/metrics`` endpoint."""
        return export.prometheus(self.metrics())

    def page(self, path: str | os.PathLike[str], title: str = "Is the model still doing well?") -> Path:
        """Write the last weeks as one HTML page that needs no other file.

        A page of a monitor that is there already is replaced; any other file is left alone with a
        `FileExistsError`.
        """
        require("jinja2")
        from salgp.monitor.page import write_page

        return write_page(path, self.settings, self.status(), self._log, title)

    def history(self) -> dict[str, NDArray[Any]]:
        """The log as columns, one row per batch, see `salgp.monitor.export.history`."""
        return export.history(self.settings, self._log)

    def to_frame(self) -> Any:
        """`history` as a pandas data frame, whose ``to_parquet`` writes it for other programs.

        Where pandas is not installed it is a pyarrow table, and without that a mapping of arrays.

        Example:
            >>> import torch
            >>> half = torch.full((60, 2), 0.5)
            >>> p = Prediction(torch.zeros(60).long(), half, half[:, 0])
            >>> list(Monitor.start(p).to_frame())[:5]
            ['number', 'key', 'time', 'n', 'accuracy']
        """
        return as_frame(self.history())

    def _add(
        self, prediction: Prediction, labels: Any, key: str | int | None, time: str | None, fed: bool
    ) -> Status:
        self._check(prediction)
        name = _name(key)
        if len(prediction):
            with self._only_writer():
                known = {record.key for record in self._log if (record.n > 0) == fed}
                if name is None or name not in known:
                    self._keep(*self._next(prediction, labels, name, time, fed))
        return self.status()

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Be the only writer, up to date with all others."""
        if self.folder is None:
            yield
            return
        with locked(self.folder, _WAIT):
            if not records.last_number(self.folder) == self._state.last == len(self._log):
                self._state, self._log = records.read(self.folder, self.settings)
            yield

    def _keep(self, state: State, record: Record) -> None:
        record = readable(record, "a batch to be monitored")
        if self.folder is not None:
            records.write(self.folder, state, record)
        self._state = state
        self._log.append(record)

    def _next(
        self, prediction: Prediction, labels: Any, key: str | None, time: str | None, fed: bool
    ) -> tuple[State, Record]:
        """State and record after one more batch, or delivery of labels."""
        state = replace(self._state, last=self._state.last + 1)
        when = datetime.now(UTC).isoformat(timespec="seconds") if time is None else time
        datetime.fromisoformat(when)
        record = Record(self.settings.id, state.last, key, when)
        if fed:
            state, record = self._fed(state, record, prediction)
        if labels is not None:
            state, record = self._labelled(state, record, prediction, labels)
        shift, accuracy = state.shift.log_total, state.accuracy.log_total
        return state, replace(record, shift=shift, accuracy=accuracy, alarm=alarms(self.settings, state))

    def _fed(self, state: State, record: Record, prediction: Prediction) -> tuple[State, Record]:
        values = feature_cells(prediction)
        rng = np.random.default_rng([self.settings.seed, record.number])
        state = replace(state, shift=state.shift.bet(values, rng))
        s, label = to_double(prediction.confidence), prediction.label.cpu().numpy()
        c = self.settings.n_classes
        counted = replace(
            record,
            n=len(s),
            confidence=float(s.sum()),
            variance=float((s * (1 - s)).sum()),
            std=0.0 if prediction.std is None else float(to_double(prediction.std).sum()),
            class_count=tuple(np.bincount(label, minlength=c).tolist()),
            class_confidence=tuple(np.bincount(label, s, c).tolist()),
        )
        return state.with_bands(band_counts(values, self._bands)), counted

    def _labelled(
        self, state: State, record: Record, prediction: Prediction, labels: Any
    ) -> tuple[State, Record]:
        y = as_labels(labels, *prediction.probs.shape).cpu()
        right = (prediction.label.cpu() == y).numpy()
        s = to_double(prediction.confidence)
        accuracy = state.accuracy.bet(s, right, self.settings.tolerance)
        n_right, stated = int(right.sum()), float(s.sum())
        counted = replace(record, labelled=len(s), right=n_right, right_expected=stated)
        return replace(state, accuracy=accuracy), counted

    def _check(self, prediction: Prediction) -> None:
        n_classes, names = checked(prediction).probs.shape[1], feature_names(prediction)
        own = self.settings
        if n_classes != own.n_classes:
            raise ValueError(f"this monitor is of a network of {own.n_classes} classes, got {n_classes}")
        if names != own.features:
            raise ValueError(
                f"this monitor is of {', '.join(own.features)}; the prediction has {', '.join(names)}; "
                f"feed it from the calibrator it was started with"
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
