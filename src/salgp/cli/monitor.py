"""``salgp monitor``: watch new batches for shift and falling accuracy; the state is kept in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from salgp.cli import files, options
from salgp.cli.console import FAILURE, Console, UsageError, command, pasteable
from salgp.cli.predictions import predicted
from salgp.cli.preflight import check_apart, check_no_other, check_suffix, check_target

if TYPE_CHECKING:
    from salgp.monitor import Monitor
    from salgp.prediction import Prediction

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
    any_network: options.AnyNetwork = False,
) -> None:
    """Watch new data without labels: expected accuracy, what shifted, and an alarm.

    The alarm is false with at most the stated chance, however long one watches. A batch is named after
    its file and its contents; one that was counted before is not counted again.
    """
    given = [*(data or []), *(late or [])]
    check_apart(state, calibrator, reference, *given)
    check_no_other(state)
    for path in out or []:
        check_suffix("--out", path, *WRITTEN)
        check_target(path, True, calibrator, reference, *given, kind=WRITTEN[path.suffix])
    watching = _opened(console, calibrator, state, reference, any_network, false_alarm, tolerance)
    for path in data or []:
        _feed(console, watching, *predicted(console, calibrator, path, any_network))
    for path in late or []:
        _observe(console, watching, *predicted(console, calibrator, path, any_network))
    _write(watching, out or [])
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
    console: Console,
    calibrator: Path,
    state: Path,
    reference: Path | None,
    any_network: bool,
    false_alarm: float,
    tolerance: float,
) -> Monitor:
    from salgp.calibrators.base import calibrator_digest
    from salgp.monitor import Monitor

    begun = (state / "monitor.json").exists()
    if begun and reference is not None:
        raise UsageError(
            f"--reference: {state} holds a monitor already; leave it out, or choose another --state"
        )
    digest = calibrator_digest(files.read_calibrator(calibrator))
    if begun:
        return Monitor.open(state, digest)
    if reference is None:
        raise UsageError(
            f"{state} holds no monitor yet; give --reference FEATURES that the calibrator was not fitted on"
        )
    loaded, prediction = predicted(console, calibrator, reference, any_network)
    return Monitor.start(
        prediction,
        state,
        false_alarm=false_alarm,
        tolerance=tolerance,
        class_names=loaded.classes,
        calibrator=digest,
    )


def _feed(console: Console, watching: Monitor, loaded: files.FeatureFile, prediction: Prediction) -> None:
    """Count a batch, unless its samples were counted before, under whatever name."""
    name, contents = loaded.path.name, _contents(loaded)
    fed = [record for record in watching.log if record.name.endswith(contents)]
    earlier = next((record.name.rpartition(" ")[0] for record in fed if record.n), None)
    if earlier is None:
        watching.feed(prediction, loaded.labels, key=f"{name} {contents}")
        return
    other = "" if earlier == name else f" as {earlier}"
    new = loaded.labels is not None and not any(record.labelled for record in fed)
    hint = "; its labels are new: give it as --late" if new else ""
    console.say(f"note: {name} was counted before{other}, and is not counted again{hint}")


def _observe(console: Console, watching: Monitor, loaded: files.FeatureFile, prediction: Prediction) -> None:
    """Count labels of samples fed before: they tell nothing of a shift, but measure the accuracy."""
    if loaded.labels is None:
        raise UsageError(f"--late: {loaded.path} has no labels; give it without --late")
    name, contents = loaded.path.name, _contents(loaded)
    fed = [record for record in watching.log if record.name.endswith(contents)]
    if any(record.labelled for record in fed):
        console.say(f"note: labels of {name} were counted before, and are not counted again")
        return
    batch = next((record for record in fed if record.n), None)
    if batch is None:
        console.say(
            f"note: no batch of exactly the samples of {name} was fed before; its labels are taken for some "
            f"of those that were"
        )
    watching.observe(prediction, loaded.labels, key=f"{name} {contents}" if batch is None else batch.key)


def _write(watching: Monitor, paths: Sequence[Path]) -> None:
    from salgp.io.arrays import write_table

    for path in paths:
        if path.suffix == ".html":
            watching.page(path)
        else:
            write_table(path, watching.history())


def _contents(loaded: files.FeatureFile) -> str:
    """Digest of the samples: tomorrow's data may come under the name of today's."""
    found = hashlib.sha256()
    for x in (loaded.features.logits, *loaded.features.layers.values()):
        found.update(x.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
