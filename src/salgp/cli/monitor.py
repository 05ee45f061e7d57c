"""``salgp monitor``: watch new batches for shift and falling accuracy; the state is kept in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

import salgp
from salgp.cli import options
from salgp.cli.checks import check_apart, check_inputs, check_no_other, check_suffix, check_target
from salgp.cli.console import FAILURE, Console, UsageError, pasteable
from salgp.cli.inputs import SavedCalibrator, read_calibrator, read_samples

if TYPE_CHECKING:
    from salgp import Monitor
    from salgp.files import FeatureFile
    from salgp.monitor.records import Record

__all__ = []

WRITTEN = {".html": "monitor page", ".csv": "monitor history", ".parquet": "monitor history"}
"""Suffix of what is written on request, and its kind."""

State = Annotated[Path, Option(help="Folder that keeps everything; made on the first call.")]
Batches = Annotated[
    list[Path] | None,
    Argument(metavar="DATA...", help="Features of new batches, oldest first, with labels or without."),
]
Baseline = Annotated[
    Path | None,
    Option(help="First call: features like the calibration data, but not those it was fitted on."),
]
FalseAlarm = Annotated[float, Option(help="First call: chance of an alarm though nothing changes.")]
Tolerance = Annotated[float, Option(help="First call: fall of accuracy that matters.")]
Late = Annotated[list[Path] | None, Option(help="Labelled features of samples fed before. Repeatable.")]
Written = Annotated[
    list[Path] | None,
    Option("--out", "-o", help="Write a page (.html), or one row per batch (.csv, .parquet). Repeatable."),
]
Fail = Annotated[bool, Option("--fail", help="Exit with code 1 while an alarm stands.")]


@dataclass(frozen=True)
class StartOptions:
    """Options of the first call."""

    reference: Baseline = None
    false_alarm: FalseAlarm = 0.01
    tolerance: Tolerance = 0.02


def monitor(
    console: Console,
    calibrator: options.CalibratorFolder,
    state: State,
    *,
    data: Batches = None,
    start: StartOptions,
    late: Late = None,
    out: Written = None,
    fail: Fail = False,
) -> None:
    """Watch new data without labels: expected accuracy, what shifted, and an alarm.

    The alarm is false with at most the stated chance, however long one watches. A batch is named after
    its file and its contents; one that was counted before is not counted again.

    Example:
        salgp monitor cal --state watch --reference held_out.safetensors
        salgp monitor cal today.safetensors --state watch -o watch.html
    """
    batches, labelled, written = data or [], late or [], out or []
    inputs = [calibrator, start.reference, *batches, *labelled]
    check_inputs(*inputs)
    check_apart(state, *inputs)
    check_no_other(state)
    for path in written:
        check_suffix(path, *WRITTEN)
        check_target(path, WRITTEN[path.suffix], True, *inputs)
    fitted = read_calibrator(calibrator)
    watching = _opened(console, fitted, state, start)
    for path in batches:
        _feed(console, watching, fitted, path)
    for path in labelled:
        _observe(console, watching, fitted, path)
    for path in written:
        _write(watching, path)
    status = watching.status()
    shown = str(status)
    if not batches and not labelled:
        shown += "\nnext: " + pasteable("salgp", "monitor", calibrator, "NEW.safetensors", "--state", state)
    seen = {"alarm": list(status.alarm), "matters": status.matters, "may_matter": status.may_matter}
    files = {"state": str(state), "out": [str(path) for path in written]}
    console.finish(watching.metrics() | files | seen, shown)
    if fail and status.alarm:
        raise Exit(FAILURE)


def _opened(console: Console, fitted: SavedCalibrator, state: Path, start: StartOptions) -> Monitor:
    """The monitor in a folder, or a new one."""
    from salgp.calibrators.base import calibrator_digest

    _check_start(state, start.reference)
    digest = calibrator_digest(fitted.calibrator)
    if start.reference is None:
        return salgp.Monitor.open(state, digest)
    loaded = read_samples(console, start.reference)
    return salgp.Monitor.start(
        fitted.predict(console, loaded),
        state,
        false_alarm=start.false_alarm,
        tolerance=start.tolerance,
        class_names=loaded.classes,
        calibrator=digest,
    )


def _check_start(state: Path, reference: Path | None) -> None:
    if (state / "monitor.json").exists():
        if reference is not None:
            advice = "leave out --reference, or choose another --state"
            raise UsageError(f"{state} holds a monitor already; {advice}")
    elif reference is None:
        raise UsageError(
            f"{state} holds no monitor yet; give --reference FEATURES that the calibrator was not fitted on"
        )


def _feed(console: Console, watching: Monitor, fitted: SavedCalibrator, path: Path) -> None:
    """Count a batch, unless its samples were counted before, under whatever name."""
    loaded = read_samples(console, path)
    key, fed = _records(watching, loaded)
    earlier = [record.name.rpartition(" ")[0] for record in fed if record.n]
    if not earlier:
        watching.feed(fitted.predict(console, loaded), loaded.labels, key=key)
        return
    new = loaded.labels is not None and not any(record.labelled for record in fed)
    hint = "; its labels are new: give it as --late" if new else ""
    console.say(f"note: {path.name} was counted before as {earlier[0]}, and is not counted again{hint}")


def _observe(console: Console, watching: Monitor, fitted: SavedCalibrator, path: Path) -> None:
    """Count labels of samples fed before: they tell nothing of a shift, but measure the accuracy."""
    loaded = read_samples(console, path, labelled=True)
    key, fed = _records(watching, loaded)
    if any(record.labelled for record in fed):
        console.say(f"note: labels of {path.name} were counted before, and are not counted again")
        return
    keys = [record.key for record in fed if record.n]
    if not keys:
        taken = "its labels are taken for some of those that were"
        console.say(f"note: no batch of exactly the samples of {path.name} was fed before; {taken}")
    prediction = fitted.predict(console, loaded)
    watching.observe(prediction, loaded.known_labels, key=[*keys, key][0])


def _records(watching: Monitor, loaded: FeatureFile) -> tuple[str, list[Record]]:
    """The name of a batch, and what was recorded of the same samples: tomorrow's data may come under the name
    of today's.
    """
    contents = _contents(loaded.features)[:16]
    fed = [record for record in watching.log if record.name.endswith(contents)]
    return f"{loaded.path.name} {contents}", fed


def _contents(features: salgp.Features) -> str:
    found = sha256()
    for x in (features.logits, *features.layers.values()):
        found.update(x.contiguous().numpy().data)
    return found.hexdigest()


def _write(watching: Monitor, path: Path) -> None:
    from salgp.io.arrays import write_table

    if path.suffix == ".html":
        watching.page(path)
    else:
        write_table(path, watching.history())
