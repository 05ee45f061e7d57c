"""``salgp compare``: several calibrators, fitted on the same data and scored on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import salgp
from salgp.calibrators.registry import known_names
from salgp.cli import options
from salgp.cli.checks import check_inputs
from salgp.cli.console import Console, score_table, sentence
from salgp.cli.fit import fitting_rows, read_reference
from salgp.cli.inputs import note_shared, read_alike

if TYPE_CHECKING:
    from torch import Tensor

    from salgp import Features, Prediction
    from salgp.cli.fit import Labelled
    from salgp.files import FeatureFile

__all__ = []

SORTED_BY = "nll_correct"
HeldOut = Annotated[Path | None, Option(help="Features to score on. Default: half of FEATURES.")]
Methods = Annotated[str | None, Option("--method", "-m", help="Methods, with commas. Default: all.")]


def compare(
    console: Console,
    features: options.FeaturesFile,
    test: HeldOut = None,
    method: Methods = None,
    reference: options.Reference = None,
    probs: options.Probs = None,
) -> None:
    """Fit calibrators on the same data and score all of them on the same held-out data.

    Example:
        salgp compare calibration.safetensors --test test.safetensors
        salgp compare scores.csv --method temperature,beta,vector
    """
    methods = options.split_names(method) or known_names()
    options.check_method(*methods)
    check_inputs(features, test, reference)
    columns = options.split_names(probs)
    loaded = salgp.files.read_features(features, columns)
    data = loaded.features, loaded.known_labels
    if test is None:
        data, held_out = _halves(*data)
    else:
        held_out = _held_out(console, test, columns, loaded)
    known = read_reference(console, reference, loaded, data[0])
    predictions, failed = _fit_all(console, methods, data, held_out[0], known)
    comparison = salgp.metrics.compare(predictions, held_out[1]).best_first(SORTED_BY)
    for name, reason in failed.items():
        console.say(f"note: {name} was left out: {reason}")
    n, n_test = len(data[0]), len(held_out[0])
    rows = "" if data[0].groups is None else " rows (augmented samples included)"
    title = f"fitted on {n:,}{rows}, scored on {n_test:,} samples; best first by {SORTED_BY}"
    told = {"scores": comparison.as_dict(), "left_out": failed, "n_fit": n, "n_test": n_test}
    console.finish(told, score_table(comparison, title))


def _held_out(console: Console, test: Path, columns: list[str] | None, known: FeatureFile) -> Labelled:
    """The data to score on, like those that are known but apart from them."""
    tested = read_alike(console, test, columns, known)
    note_shared(console, "--test", tested.features, known.path.name, known.features)
    return tested.features, tested.known_labels


def _halves(features: Features, labels: Tensor) -> tuple[Labelled, Labelled]:
    """Two pairs of features and labels; augmented samples stay on the side of their original, and none is
    scored.
    """
    import torch

    first, original = features.originals
    if len(first) < 2:
        raise ValueError(f"{len(first)} samples are too few to split; give the data to score on with --test")
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(0))
    n_fit = len(first) // 2
    fitted = torch.isin(original, order[:n_fit])
    rows = first[order[n_fit:].sort().values]
    return (features[fitted], labels[fitted]), (features[rows], labels[rows])


def _fit_all(
    console: Console, methods: list[str], data: Labelled, held_out: Features, reference: Any
) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Predictions of the methods that could be fitted, and the reasons of the others."""
    predictions: dict[str, Prediction] = {}
    failed: dict[str, str] = {}
    with console.progress("comparing", total=len(methods)) as advance:
        for name in methods:
            advance(0, f"fitting {name}")
            try:
                calibrator = salgp.calibrators.get(name)
                with console.warnings_as_notes(f"{name}: "):
                    calibrator.fit(*fitting_rows(calibrator, *data), reference=reference)
                    predictions[name] = calibrator.predict(held_out)
            except (ValueError, TypeError, RuntimeError, ImportError) as error:
                failed[name] = sentence(error)
            advance()
    if not predictions:
        name, why = next(iter(failed.items()))
        raise ValueError(f"no method could be fitted; the first one, {name}, said: {why}")
    return predictions, failed
