"""Commands that make something of a fitted calibrator: report, score, demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.calibrating import AnyNetwork, Cal, Feats, Force, Out, predicted
from salgp.cli.shell import Shell, UsageError, command

if TYPE_CHECKING:
    from salgp.features import Features
    from salgp.prediction import Prediction

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    command(app, "report", "salgp report cal test.safetensors -o report.html")(report)
    command(app, "score", "salgp score cal shards/ -o scored/ --engine local")(score)
    command(app, "demo", "salgp demo --out demo")(demo)


def report(
    shell: Shell,
    calibrator: Cal,
    features: Feats,
    out: Out,
    new_data: Annotated[
        Path | None, typer.Option(help="Features of unlabelled new data, for a section on shift.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="The samples as pictures (.npz, .safetensors or image folder), in the same order."),
    ] = None,
    inputs: Annotated[str | None, typer.Option(help="Array of --images that holds the pictures.")] = None,
    classes: Annotated[str | None, typer.Option(help="Class names, separated by commas.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="CAL,...", help="Further calibrators for comparison, separated by commas."),
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Can this network be trusted?",
    error: Annotated[
        float | None, typer.Option(min=0, max=1, help="Acceptable share of wrong answers.")
    ] = None,
    any_network: AnyNetwork = False,
    force: Force = False,
) -> None:
    """Write one self-contained HTML page: verdict, figures, reliability, layers, what to send to a human."""
    files.check_inputs(calibrator, features, new_data, images)
    files.check_target(out, force, features, calibrator)
    from salgp.report import build

    _, labels = files.read_labelled(features)
    loaded, prediction = predicted(calibrator, features, any_network, shell)
    fitted = files.read_calibrator(calibrator)
    method, others = fitted.display_name, {}
    for folder in map(Path, files.split_names(compare) or []):
        rival = files.read_calibrator(folder)
        taken = rival.display_name == method or rival.display_name in others
        name = f"{rival.display_name} ({folder.name})" if taken else rival.display_name
        if name in others:
            raise UsageError(f"--compare {folder}: given twice")
        others[name] = rival.predict(loaded.features)
    with shell.progress("writing the report"):
        build(
            out,
            loaded.features,
            labels,
            prediction,
            force=force,
            method=method,
            title=title,
            acceptable_error=error,
            class_names=files.split_names(classes)
            or loaded.classes
            or files.read_origin(calibrator).get("classes"),
            images=None if images is None else _pictures(images, inputs, len(loaded.features)),
            others=others,
            new_data=None if new_data is None else _new_data(calibrator, new_data, any_network, shell),
            settings={
                "calibrator": calibrator.name,
                "features": features.name,
                **fitted.get_params(deep=False),
            },
        )
    shell.finish({"report": str(out), "bytes": out.stat().st_size}, f"report: {out} (open it in any browser)")


def score(
    shell: Shell,
    calibrator: Cal,
    features: Annotated[
        Path,
        typer.Argument(metavar="STORE", help="Folder of shards, as `salgp extract -o FOLDER` writes it."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the scored shards; a stopped run continues there.")
    ],
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Pieces of work at a time. Default: one per core.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster, e.g. auto. Default: start Ray here.")
    ] = None,
    layers: Annotated[bool, typer.Option(help="Also write each layer's part of the correction.")] = False,
) -> None:
    """Score any number of samples shard by shard, on this machine or on Ray; continues where it
    was stopped.
    """
    if engine not in ("local", "ray"):
        raise UsageError(f"--engine {engine}: expected local or ray")
    files.check_inputs(calibrator, features)
    files.read_calibrator(calibrator)
    if features.is_file():
        raise UsageError(
            f"{features} is one file; score works on a folder of shards (salgp extract -o "
            f"FOLDER), salgp apply on a file"
        )
    from salgp.store import score as run

    done = run(
        features,
        calibrator,
        out,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
        layers=layers,
        progress=not (shell.quiet or shell.json),
    )
    shell.finish(
        {
            "out": str(out),
            "rows": done.rows,
            "new_rows": done.new_rows,
            "seconds": done.seconds,
            "precision": done.precision,
        },
        f"{done.rows:,} samples in {out}, {done.new_rows:,} of them now ({done.rate:,.0f} per second)",
    )


def demo(
    shell: Shell,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the demo's files.")] = Path(
        "salgp-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of data, network and calibration.")] = 0,
    force: Force = False,
) -> None:
    """Train a small network on hand-drawn digits, calibrate it, and show what that buys on photographs of
    them.
    """
    from salgp.cli.tables import score_table

    files.check_target(out / "report.html", force)
    from salgp.demo import STEPS, run_demo

    with shell.progress("demo", total=STEPS) as advance:
        result = run_demo(out, seed=seed, force=force, progress=lambda text: advance(1, text))
    shown: list[Any] = [
        score_table(result.scores[name], f"{name}: {what}") for name, what in result.tests.items()
    ]
    layers = ", ".join(f"{name} ({size:.2f})" for name, size in result.layers.items())
    text = (
        f"What this means. {result.words}\n\nlayers that mattered (mean correction, {result.unit}): "
        f"{layers}\n\nreport: {result.report} (open it in any browser)"
    )
    scores = {name: comparison.as_dict() for name, comparison in result.scores.items()}
    kept = {"report": str(result.report), "scores": scores, "layers": result.layers, "words": result.words}
    shell.finish(kept, *shown, text)


def _new_data(calibrator: Path, path: Path, any_network: bool, shell: Shell) -> tuple[Features, Prediction]:
    loaded, prediction = predicted(calibrator, path, any_network, shell)
    return loaded.features, prediction


def _pictures(path: Path, inputs: str | None, n: int) -> Any:
    from salgp.cli.inputs import open_inputs

    found = open_inputs(path, batch_size=max(n, 1), inputs=files.split_names(inputs), scale=1.0)
    batch = next(iter(found))
    return (batch[0] if isinstance(batch, tuple) else batch).numpy()
