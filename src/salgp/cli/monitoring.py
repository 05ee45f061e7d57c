"""The command that watches: ``salgp monitor CAL DATA... --state DIR``."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.applying import predicted
from salgp.cli.options import AnyNetwork, Cal
from salgp.cli.predictions import TABLES, check_suffix, write_table
from salgp.cli.shell import FAILURE, Shell, UsageError, command
from salgp.cli.targets import check_apart, check_no_other, check_target

if TYPE_CHECKING:
    from salgp.monitor import Monitor, Record, Status
    from salgp.prediction import Prediction

__all__ = ["register"]

FEWEST_DIGITS = 8
"""Of a digest of contents in the key of a batch."""


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(
        app,
        "monitor",
        "salgp monitor cal --state watch --reference home.safetensors",
        "salgp monitor cal today.safetensors --state watch --page watch.html",
    )(monitor)


def monitor(
    shell: Shell,
    calibrator: Cal,
    state: Annotated[Path, typer.Option(help="Folder that keeps everything; made on the first call.")],
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DATA...", help="Features of new batches, oldest first; labels are used if there."
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="Features from home that the calibrator was not fitted on, for the first call."),
    ] = None,
    false_alarm: Annotated[
        float,
        typer.Option(help="Chance of ever alarming though nothing changes (labels: see docs); set at first."),
    ] = 0.01,
    tolerance: Annotated[
        float, typer.Option(help="Fall of accuracy that matters; set on the first call.")
    ] = 0.02,
    late: Annotated[
        list[Path] | None,
        typer.Option(
            help="Features with labels that came later, of samples fed before; each sample once. Repeatable."
        ),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write the last weeks as one HTML page.")] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="Write the whole log as a table, one row per batch (.parquet or .csv)."),
    ] = None,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with code 1 while an alarm stands.")] = False,
    any_network: AnyNetwork = False,
) -> None:
    """Watch new data without labels: expected accuracy, what moved, and an alarm.

    The alarm is false with at most the stated chance, however long one watches. A batch is named after
    its file and its contents; one that was counted before is not counted again.
    """
    given = [*(data or []), *(late or [])]
    check_apart(state, calibrator, reference, *given)
    check_no_other(state)
    _check_written(page, history, calibrator, reference, *given)
    watching = _opened(shell, calibrator, state, reference, false_alarm, tolerance, any_network)
    for path in data or []:
        _feed(shell, watching, *predicted(calibrator, path, any_network, shell))
    for path in late or []:
        _observe(shell, watching, *predicted(calibrator, path, any_network, shell))
    status, written = watching.status(), _written(watching, page, history)
    quoted, quoted_state = shlex.quote(str(calibrator)), shlex.quote(str(state))
    hint = "" if given else f"\nnext: salgp monitor {quoted} NEW.safetensors --state {quoted_state}"
    shell.finish(_summary(watching, status) | written, f"{status}{hint}")
    if fail and status.alarm:
        raise typer.Exit(FAILURE)


def _check_written(page: Path | None, history: Path | None, *inputs: Path | None) -> None:
    """Refuse, before any work is done, what cannot be written."""
    if page is not None:
        check_target(page, True, *inputs, kind="monitor page")
    if history is not None:
        check_suffix(history, *TABLES)
        check_target(history, True, *inputs, kind="monitor history")


def _written(watching: Monitor, page: Path | None, history: Path | None) -> dict[str, str | None]:
    """Write what was asked for, and say where."""
    if page is not None:
        watching.page(page)
    if history is not None:
        write_table(history, watching.history())
    asked = {"page": page, "history": history}
    return {name: None if path is None else str(path) for name, path in asked.items()}


def _feed(shell: Shell, watching: Monitor, loaded: files.FeatureFile, prediction: Prediction) -> None:
    before, earlier = watching.status().batches, _fed_as(watching, loaded)
    if earlier is None:
        watching.feed(prediction, loaded.labels, key=_key(loaded))
    if watching.status().batches == before:
        other = "" if earlier in (None, loaded.path.name) else f" as {earlier}"
        shell.say(
            f"note: {loaded.path.name} was counted before{other}, and is not counted again"
            f"{_hint(watching, loaded)}"
        )


def _observe(shell: Shell, watching: Monitor, loaded: files.FeatureFile, prediction: Prediction) -> None:
    """Labels of samples fed before: they say nothing of a shift, but whether confidences keep their word."""
    if loaded.labels is None:
        raise UsageError(f"--late: {loaded.path} has no labels; give it without --late")
    before = len(watching.log)
    if _fed_as(watching, loaded) is None:
        shell.say(
            f"note: no batch of exactly the samples of {loaded.path.name} was fed before; its labels are "
            f"taken for some of those that were"
        )
    if not _has_labels(watching, loaded):
        watching.observe(prediction, loaded.labels, key=_key(loaded))
    if len(watching.log) == before:
        shell.say(f"note: labels of {loaded.path.name} were counted before, and are not counted again")


def _hint(watching: Monitor, loaded: files.FeatureFile) -> str:
    unused = loaded.labels is not None and not _has_labels(watching, loaded)
    return "; its labels are new: give it as --late" if unused else ""


def _has_labels(watching: Monitor, loaded: files.FeatureFile) -> bool:
    """Were the labels of these samples counted, at once or later, under whatever name?"""
    return any(record.labelled and _same_contents(record, loaded) for record in watching.log)


def _fed_as(watching: Monitor, loaded: files.FeatureFile) -> str | None:
    """The file name under which these samples were fed before, or None."""
    found = (record for record in watching.log if record.n and _same_contents(record, loaded))
    return next((record.key.rpartition(" ")[0] for record in found), None)


def _same_contents(record: Record, loaded: files.FeatureFile) -> bool:
    """Keys of earlier versions have fewer digits."""
    theirs = record.key.rpartition(" ")[2]
    return len(theirs) >= FEWEST_DIGITS and _contents(loaded).startswith(theirs)


def _key(loaded: files.FeatureFile) -> str:
    """Name and contents: tomorrow's data may come under the name of today's."""
    return f"{loaded.path.name} {_contents(loaded)}"


def _contents(loaded: files.FeatureFile) -> str:
    from salgp.store.manifest import update_digest

    found = hashlib.sha256()
    update_digest(found, [loaded.features.logits, loaded.features.layers])
    return found.hexdigest()[:16]


def _calibrator_digest(folder: Path) -> str:
    """Of what it learned and how it is set; not of where it came from."""
    from salgp.storage import digest

    parts = [digest(folder / f"calibrator.{suffix}") for suffix in ("json", "safetensors")]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _opened(
    shell: Shell,
    calibrator: Path,
    state: Path,
    reference: Path | None,
    false_alarm: float,
    tolerance: float,
    any_network: bool,
) -> Monitor:
    from salgp.monitor import Monitor

    begun = (state / "monitor.json").exists()
    if begun and reference is not None:
        raise UsageError(
            f"--reference: {state} holds a monitor already; leave it out, or choose another --state"
        )
    if begun:
        files.read_calibrator(calibrator)
        return Monitor.open(state, _calibrator_digest(calibrator))
    if reference is None:
        raise UsageError(
            f"{state} holds no monitor yet; give --reference FEATURES from home that the calibrator was not "
            f"fitted on"
        )
    loaded, prediction = predicted(calibrator, reference, any_network, shell)
    return Monitor.start(
        prediction,
        state,
        false_alarm=false_alarm,
        tolerance=tolerance,
        class_names=loaded.classes,
        calibrator=_calibrator_digest(calibrator),
    )


def _summary(watching: Monitor, status: Status) -> dict[str, Any]:
    measured = status.measured
    return {
        "state": str(watching.folder),
        "alarm": list(status.alarm),
        "matters": status.matters,
        "may_matter": status.may_matter,
        "false_alarm": status.false_alarm,
        "accuracy": status.accuracy.value,
        "accuracy_interval": [status.accuracy.lower, status.accuracy.upper],
        "measured": None if measured is None else measured.value,
        "home": status.home,
        "evidence": list(status.evidence),
        "moves": {move.channel: move.effect for move in status.moves},
        "n": status.n,
        "batches": status.batches,
    }
