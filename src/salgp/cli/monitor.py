"""``salgp monitor``: watch new batches for shift and falling accuracy; the state is kept in a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from salgp.cli import options
from salgp.cli.console import FAILURE, Console, UsageError, command, pasteable
from salgp.cli.predictions import SavedCalibrator, read_calibrator, read_samples
from salgp.cli.preflight import check_apart, check_inputs, check_no_other, check_suffix, check_target

if TYPE_CHECKING:
    from salgp.files import FeatureFile
    from salgp.monitor import Monitor
    from salgp.monitor.records import Record

__all__ = ["register"]

WRITTEN = {".html": "monitor page", ".csv": "monitor history", ".parquet": "monitor history"}
"""Suffix of what is written on request, and its kind."""

State = Annotated[Path, typer.Option("--state", help="Folder that keeps everything; made on the first call.")]
Batches = Annotated[
    list[Path] | None,
    typer.Argument(metavar="DATA...", help="Features of new batches, oldest first, with labels or without."),
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        "--reference", help="First call: features like the calibration data, but not those it was fitted on."
    ),
]
FalseAlarm = Annotated[
    float,
    typer.Option("--false-alarm", help="First call: chance of ever alarming though nothing changes."),
]
Tolerance = Annotated[float, typer.Option("--tolerance", help="First call: fall of accuracy that matters.")]
Late = Annotated[
    list[Path] | None,
    typer.Option("--late", help="Features with labels that came later, of samples fed before. Repeatable."),
]
Written = Annotated[
    list[Path] | None,
    typer.Option(
        "--out", "-o", help="Write a page (.html), or one row per batch (.csv, .parquet). Repeatable."
    ),
]
Fail = Annotated[bool, typer.Option("--fail", help="Exit with code 1 while an alarm stands.")]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    begin = "salgp monitor cal --state watch --reference held_out.safetensors"
    command(app, "monitor", begin, "salgp monitor cal today.safetensors --state watch -o watch.html")(monitor)


def monitor(
    console: Console,
    calibrator: options.CalibratorFolder,
    state: State,
    data: Batches = None,
    reference: Baseline = None,
    false_alarm: FalseAlarm = 0.01,
    tolerance: Tolerance = 0.02,
    late: Late = None,
    out: Written = None,
    fail: Fail = False,
) -> None:
    """Watch new data without labels: expected accuracy, what shifted, and an alarm.

    The alarm is false with at most the stated chance, however long one watches. A batch is named after
    its file and its contents; one that was counted before is not counted again.
    """
    given = [*(data or []), *(late or [])]
    check_inputs(calibrator, reference, *given)
    check_apart(state, calibrator, reference, *given)
    check_no_other(state)
    for path in out or []:
        check_suffix(path, *WRITTEN)
        check_target(path, WRITTEN[path.suffix], True, calibrator, reference, *given)
    fitted = read_calibrator(calibrator)
    watching = _opened(
        console, fitted, state, reference, {"false_alarm": false_alarm, "tolerance": tolerance}
    )
    for path in data or []:
        _feed(console, watching, fitted, path)
    for path in late or []:
        _observe(console, watching, fitted, path)
    for path in out or []:
        _write(watching, path)
    status = watching.status()
    following = pasteable("salgp", "monitor", calibrator, "NEW.safetensors", "--state", state)
    told = watching.metrics() | {
        "state": str(state),
        "out": [str(path) for path in out or []],
        "alarm": list(status.alarm),
        "matters": status.matters,
        "may_matter": status.may_matter,
    }
    console.finish(told, str(status) if given else f"{status}\nnext: {following}")
    if fail and status.alarm:
        raise typer.Exit(FAILURE)


def _opened(
    console: Console, fitted: SavedCalibrator, state: Path, reference: Path | None, settings: dict[str, float]
) -> Monitor:
    """The monitor in a folder, or a new one."""
    from salgp.calibrators.base import calibrator_digest
    from salgp.monitor import Monitor

    begun = (state / "monitor.json").exists()
    if begun and reference is not None:
        raise UsageError(f"{state} holds a monitor already; leave out --reference, or choose another --state")
    if not begun and reference is None:
        raise UsageError(
            f"{state} holds no monitor yet; give --reference FEATURES that the calibrator was not fitted on"
        )
    digest = calibrator_digest(fitted.calibrator)
    if reference is None:
        return Monitor.open(state, digest)
    loaded = read_samples(console, reference)
    prediction = fitted.predict(console, loaded)
    return Monitor.start(prediction, state, class_names=loaded.classes, calibrator=digest, **settings)  # type: ignore[arg-type]


def _feed(console: Console, watching: Monitor, fitted: SavedCalibrator, path: Path) -> None:
    """Count a batch, unless its samples were counted before, under whatever name."""
    loaded = read_samples(console, path)
    key, fed = _records(watching, loaded)
    earlier = next((record.name.rpartition(" ")[0] for record in fed if record.n), None)
    if earlier is None:
        watching.feed(fitted.predict(console, loaded), loaded.labels, key=key)
        return
    new = loaded.labels is not None and not any(record.labelled for record in fed)
    hint = "; its labels are new: give it as --late" if new else ""
    console.say(f"note: {path.name} was counted before as {earlier}, and is not counted again{hint}")


def _observe(console: Console, watching: Monitor, fitted: SavedCalibrator, path: Path) -> None:
    """Count labels of samples fed before: they tell nothing of a shift, but measure the accuracy."""
    loaded = read_samples(console, path, labelled=True)
    key, fed = _records(watching, loaded)
    if any(record.labelled for record in fed):
        console.say(f"note: labels of {path.name} were counted before, and are not counted again")
        return
    batch = next((record for record in fed if record.n), None)
    if batch is None:
        console.say(
            f"note: no batch of exactly the samples of {path.name} was fed before; its labels are taken for "
            f"some of those that were"
        )
    prediction = fitted.predict(console, loaded)
    watching.observe(prediction, loaded.known_labels, key=key if batch is None else batch.key)


def _records(watching: Monitor, loaded: FeatureFile) -> tuple[str, list[Record]]:
    """The name of a batch, and what was recorded of the same samples: tomorrow's data may come under the name
    of today's.
    """
    found = hashlib.sha256()
    for x in (loaded.features.logits, *loaded.features.layers.values()):
        found.update(x.contiguous().numpy().tobytes())
    contents = found.hexdigest()[:16]
    fed = [record for record in watching.log if record.name.endswith(contents)]
    return f"{loaded.path.name} {contents}", fed


def _write(watching: Monitor, path: Path) -> None:
    from salgp.io.arrays import write_table

    if path.suffix == ".html":
        watching.page(path)
    else:
        write_table(path, watching.history())
