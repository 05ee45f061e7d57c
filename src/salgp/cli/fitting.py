"""``salgp fit``: a calibrator from labelled features, in memory or out of core."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.options import AnyNetwork, Feats, Force, Method, Out, Reference, known_methods
from salgp.cli.settings import settings_of
from salgp.cli.shell import Shell, UsageError, command, did_you_mean
from salgp.cli.targets import check_folder, check_inputs, check_target

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.calibrators import Calibrator
    from salgp.features import Features

__all__ = [
    "check_method",
    "fitting_rows",
    "make_calibrator",
    "notes_on",
    "origin_of",
    "read_reference",
    "register",
    "samples_of",
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "fit", "salgp fit calibration.safetensors -o cal", "salgp fit logits.npz -o cal")(fit)


def fit(
    shell: Shell,
    features: Feats,
    out: Out,
    method: Method = None,
    reference: Reference = None,
    layers: Annotated[str | None, typer.Option(help="Use only these layers, separated by commas.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An argument of the method; may be repeated."),
    ] = None,
    any_network: AnyNetwork = False,
    force: Force = False,
) -> None:
    """Fit a calibrator on labelled features, or on any framework's logits or probabilities, and save it.

    Class scores come as .npz, .csv or .parquet: arrays 'logits' or 'probs', 'labels', and embeddings as
    'layers.NAME'; in a table one column per class, e.g. probs.cat, probs.dog, label.
    """
    check_inputs(features, reference)
    check_target(out, force, features, reference)
    check_method(method)
    check_folder(out)
    if layers is None and files.is_large(features, reference):
        if reference is not None:
            files.check_same_network(
                files.first_rows(features)[0], files.first_rows(reference)[0], any_network
            )
        return fit_large(shell, features, out, make_calibrator(method, setting or [], True), reference, force)
    loaded, labels = files.read_labelled(features)
    chosen = files.split_names(layers)
    data = loaded.features if chosen is None else loaded.features.select(chosen)
    calibrator = make_calibrator(method, setting or [], bool(data.layers))
    known = read_reference(shell, reference, loaded, data, any_network)
    data, labels = fitting_rows(calibrator, data, labels)
    for note in notes_on(calibrator, loaded, data, known is not None):
        shell.say(f"note: {note}")
    counted = _counted(data)
    with shell.progress(f"fitting {calibrator.name} on {counted}"):
        calibrator.fit(data, labels, known)
    files.save_calibrator(out, calibrator, origin_of(loaded), force, loaded.metadata.get("module"))
    shell.finish(
        {
            "calibrator": str(out),
            "method": calibrator.name,
            "n": len(data),
            "layers": list(calibrator.layer_widths_),
        },
        f"fitted {calibrator.name} on {counted}; saved in "
        f"{out}\nnext: salgp evaluate {shlex.quote(str(out))} TEST{features.suffix}",
    )
    return None


def fit_large(
    shell: Shell, features: Path, out: Path, calibrator: Calibrator, reference: Path | None, force: bool
) -> None:
    """Fit out of core to a folder of shards; called again after a kill, it goes on where it stopped."""
    import shutil

    from salgp.store import fit_store

    loaded, n = files.first_rows(features)
    work = out.with_name(f"{out.name}.unfinished")
    with shell.progress(f"fitting {calibrator.name} on {n:,} samples, out of core"):
        fit_store(calibrator, features, reference=reference, work=work)
    files.save_calibrator(out, calibrator, origin_of(loaded) | {"n": n}, force, loaded.metadata.get("module"))
    shutil.rmtree(work)
    shell.finish(
        {
            "calibrator": str(out),
            "method": calibrator.name,
            "n": n,
            "layers": list(calibrator.layer_widths_),
        },
        f"fitted {calibrator.name} on {n:,} samples, out of core; saved in {out}",
    )


def check_method(*methods: str | None) -> None:
    """Refuse names that no calibrator has, and suggest the nearest."""
    known = known_methods()
    for name in methods:
        if name is not None and name not in (*known, "auto"):
            raise UsageError(
                f"no calibrator called {name!r}; {did_you_mean(name, known)}known: {', '.join(known)}"
            )


def notes_on(calibrator: Calibrator, loaded: files.FeatureFile, data: Features, reference: bool) -> list[str]:
    """What the user should know about the data a calibrator is fitted on."""
    notes = []
    if loaded.metadata.get("unused"):
        notes.append(f"columns not used: {loaded.metadata['unused']}")
    if calibrator.uses_copies and data.groups is None:
        from_network = loaded.metadata.get("network") is not None
        copies = (
            "salgp extract --perturb makes some"
            if from_network
            else "expect no more than for data like these"
        )
        notes.append(
            f"no perturbed copies in {loaded.path.name}: {calibrator.name} has rehearsed no shift; {copies}"
        )
    if calibrator.uses_reference and not reference:
        notes.append(
            "no --reference given: the calibration samples are compared with each other; features of the "
            "training data serve better"
        )
    return notes


def make_calibrator(method: str | None, settings: Sequence[str], has_layers: bool = True) -> Calibrator:
    """A calibrator by name (None or auto: what suits the data) with ``NAME=VALUE`` settings; values are JSON
    or else plain text.
    """
    from salgp.outputs import method_for

    calibrator = method_for(method, has_layers)
    known = calibrator.get_params(deep=False)
    constructor = type(calibrator).__init__
    return calibrator.set_params(**settings_of(calibrator.name, constructor, known, settings))


def fitting_rows(calibrator: Calibrator, features: Features, labels: Tensor) -> tuple[Features, Tensor]:
    """What a method learns from: perturbed copies only where it knows what they are, else the original
    samples.
    """
    from salgp.calibrators.copies import without_copies

    if calibrator.uses_copies or features.groups is None:
        return features, labels
    plain, rows = without_copies(features)
    return plain, labels[rows]


def _counted(features: Features) -> str:
    from salgp.calibrators.copies import originals

    n = len(originals(features)[0])
    copies = f" and {len(features) - n:,} perturbed copies" if len(features) > n else ""
    return f"{n:,} samples{copies}"


def samples_of(shell: Shell, loaded: files.FeatureFile) -> files.FeatureFile:
    """The samples themselves: perturbed copies, which are there to be fitted on, do not count among them."""
    from dataclasses import replace

    from salgp.calibrators.copies import without_copies

    plain, rows = without_copies(loaded.features)
    copies = len(loaded.features) - len(plain)
    if copies:
        shell.say(
            f"note: {loaded.path.name} holds {copies:,} perturbed copies; they are left out, and its "
            f"{len(plain):,} samples count"
        )
    return replace(loaded, features=plain, labels=None if loaded.labels is None else loaded.labels[rows])


def origin_of(loaded: files.FeatureFile) -> dict[str, Any]:
    """What a calibrator remembers of the features it was fitted on."""
    import salgp

    kept = {
        "features": loaded.path.name,
        "n": len(loaded.features),
        "salgp": salgp.__version__,
        "network": loaded.metadata.get("network"),
    }
    return kept | ({} if loaded.classes is None else {"classes": loaded.classes})


def read_reference(
    shell: Shell, path: Path | None, given: files.FeatureFile, data: Features, any_network: bool
) -> tuple[Features, Tensor] | None:
    """Features and labels of the training data, with the layers of ``data``, which came from ``given``."""
    if path is None:
        return None
    loaded = samples_of(shell, files.read_labelled(path)[0])
    files.check_same_network(given, loaded, any_network)
    return loaded.features.select(data.layer_names), files.labels_of(loaded)
