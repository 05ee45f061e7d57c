"""``salgp compare``: every calibrator on the same data, scored on the same held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.datasets import note_shared
from salgp.cli.fitting import check_method, fitting_rows, read_reference, samples_of
from salgp.cli.options import AnyNetwork, Feats, Reference, Seed, known_methods
from salgp.cli.shell import Shell, UsageError, command, sentence
from salgp.cli.tables import score_table
from salgp.cli.targets import check_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.features import Features
    from salgp.metrics import Comparison
    from salgp.prediction import Prediction

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "compare", "salgp compare calibration.safetensors --test test.safetensors")(compare)


def compare(
    shell: Shell,
    features: Feats,
    test: Annotated[
        Path | None, typer.Option(help="Labelled features to score on. Default: a random part of FEATURES.")
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Part of FEATURES to fit on, where no --test is given.")
    ] = 0.5,
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas. Default: all.")] = None,
    reference: Reference = None,
    sort: Annotated[
        str, typer.Option(help="Score to sort by, such as ece, nll_correct, brier or auroc.")
    ] = "nll_correct",
    seed: Seed = 0,
    any_network: AnyNetwork = False,
) -> None:
    """Fit every calibrator on the same data and score all of them on the same held-out data."""
    chosen = _chosen_methods(methods)
    check_inputs(features, test, reference)
    from salgp.metrics import METRICS

    if sort not in METRICS:
        raise UsageError(f"--sort {sort}: no such score; choose one of {', '.join(METRICS)}")
    loaded, labels = files.read_labelled(features)
    if test is None:
        (data, y), (held_out, truth) = _parted(loaded.features, labels, share, seed)
    else:
        data, y = loaded.features, labels
        held_out, truth = _held_out(shell, test, loaded, any_network)
    known = read_reference(shell, reference, loaded, data, any_network)
    predictions, failed = _fit_all(shell, chosen, (data, y), held_out, known)
    if not predictions:
        raise ValueError(
            f"no method could be fitted; the first one, {next(iter(failed))}, said: "
            f"{next(iter(failed.values()))}"
        )
    comparison = _sorted(predictions, truth, sort)
    for name, reason in failed.items():
        shell.say(f"note: {name} was left out: {reason}")
    copies = "" if data.groups is None else " rows (copies included)"
    title = f"fitted on {len(data):,}{copies}, scored on {len(held_out):,} samples; best first by {sort}"
    shell.finish(
        {"scores": comparison.as_dict(), "left_out": failed, "n_fit": len(data), "n_test": len(held_out)},
        score_table(comparison, title),
    )


def _chosen_methods(methods: str | None) -> list[str]:
    chosen = files.split_names(methods) or known_methods()
    check_method(*chosen)
    return chosen


def _held_out(
    shell: Shell, test: Path, given: files.FeatureFile, any_network: bool
) -> tuple[Features, Tensor]:
    """The samples to score on, of the network of ``given``, which is fitted on."""
    loaded = samples_of(shell, files.read_labelled(test)[0])
    files.check_same_network(given, loaded, any_network)
    note_shared(shell, ("--test", loaded.features), {given.path.name: given.features})
    return loaded.features, files.labels_of(loaded)


def _parted(features: Features, labels: Tensor, share: float, seed: int) -> Any:
    """Two pairs of features and labels; perturbed copies stay on the side of their original, and none is
    scored.
    """
    import torch

    from salgp.calibrators.copies import originals

    first, original = originals(features)
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))
    n_fit = max(1, round(share * len(first)))
    if n_fit >= len(first):
        raise ValueError(f"{len(first)} samples are too few to split; give the data to score on with --test")
    fitted = torch.isin(original, order[:n_fit])
    rows = first[order[n_fit:].sort().values]
    return (features[fitted], labels[fitted]), (features[rows], labels[rows])


def _fit_all(
    shell: Shell, methods: Sequence[str], data: tuple[Features, Tensor], held_out: Features, reference: Any
) -> tuple[dict[str, Prediction], dict[str, str]]:
    from salgp.calibrators import get

    predictions: dict[str, Prediction] = {}
    failed: dict[str, str] = {}
    with shell.progress("comparing", total=len(methods)) as advance:
        for name in methods:
            advance(0, f"fitting {name}")
            try:
                calibrator = get(name)
                with shell.notes_about(name):
                    calibrator.fit(*fitting_rows(calibrator, *data), reference=reference)
                    predictions[name] = calibrator.predict(held_out)
            except (ValueError, TypeError, RuntimeError, ImportError) as error:
                failed[name] = sentence(error)
            advance()
    return predictions, failed


def _sorted(predictions: Mapping[str, Prediction], truth: Tensor, sort: str) -> Comparison:
    from salgp.metrics import compare as compare_predictions

    return compare_predictions(predictions, truth).best_first(sort)
