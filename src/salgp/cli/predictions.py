"""Features and what a calibrator says of them; predictions as files, one row per sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli import files
from salgp.cli.console import Console, UsageError
from salgp.cli.options import split_names
from salgp.cli.preflight import check_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.features import Features
    from salgp.prediction import Prediction

__all__ = ["context_of", "predicted", "uncalibrated", "write_prediction"]


def predicted(
    console: Console,
    calibrator: Path,
    features: Path,
    any_network: bool,
    *,
    probs: str | None = None,
    context: int | str | None = None,
    field_labels: Path | None = None,
    labelled: bool = False,
    augmented: bool = False,
) -> tuple[files.FeatureFile, Prediction]:
    """Features and what a calibrator says of them.

    Args:
        console: to speak.
        calibrator: its folder.
        features: file.
        any_network: accept features of another network.
        probs: columns of a table that hold the probabilities.
        context: samples that were met together.
        field_labels: file of labelled samples from the same place, to correct the confidences by.
        labelled: refuse features without labels.
        augmented: predict augmented samples, too, not only those they were made of.
    """
    check_inputs(calibrator, features, field_labels)
    columns = split_names(probs)
    fitted = files.read_calibrator(calibrator, any_network)
    loaded = files.read_features(features, columns)
    if labelled:
        files.labels_of(loaded)
    files.check_source(calibrator, loaded, any_network)
    loaded = loaded if augmented else files.original_samples(console, loaded)
    with console.progress(f"predicting {len(loaded.features):,} samples"):
        prediction = fitted.predict(loaded.features, context)
    if field_labels is None:
        return loaded, prediction
    known = files.original_samples(console, files.read_labelled(field_labels, columns)[0])
    files.check_source(calibrator, known, any_network)
    if labelled:
        files.note_shared(console, (features.name, loaded.features), {"--field-labels": known.features})
    from salgp.estimate import learn_correction

    around = None if context is None else fitted.context(loaded.features)
    correction = learn_correction(fitted.predict(known.features, around), files.labels_of(known))
    console.say(f"{known.path.name}: {correction}")
    return loaded, correction(prediction)


def uncalibrated(features: Features) -> Prediction:
    """The network's own confidence as a prediction."""
    from salgp.prediction import Prediction

    return Prediction.from_probs(features, features.probs)


def context_of(text: str | None) -> int | str | None:
    """The value of ``--context``.

    Example:
        >>> context_of("40"), context_of("all")
        (40, 'all')
    """
    if text is None or text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--context {text}: expected 'all' or the number of samples in a window")
    return int(text)


def write_prediction(
    path: Path,
    prediction: Prediction,
    before: Tensor,
    classes: Sequence[str] | None = None,
    act: Tensor | None = None,
    sets: Tensor | None = None,
) -> Path:
    """Write one row per sample: label, confidence, its error bar, and the network's own confidence.

    Args:
        path: of a ``.safetensors``, ``.csv`` or ``.parquet`` file.
        prediction: calibrated.
        before: ``(n,)`` the network's own confidence.
        classes: names; a table has them in a column ``class``, and in ``probs.NAME``.
        act: ``(n,)`` what a rule says of each answer.
        sets: ``(n, c)`` prediction sets; a table has them in ``set.NAME``.
    """
    from salgp.file_signatures import PREDICTION_TABLE
    from salgp.io.arrays import write_table

    more = {"network_confidence": before} | ({} if act is None else {"act": act})
    if path.suffix == ".safetensors":
        return _write_tensors(path, prediction, more | ({} if sets is None else {"sets": sets}))
    columns = _columns(prediction, {name: x.cpu().numpy() for name, x in more.items()}, classes, sets)
    return write_table(path, columns, PREDICTION_TABLE)


def _columns(
    prediction: Prediction, more: dict[str, Any], classes: Sequence[str] | None, sets: Tensor | None
) -> dict[str, Any]:
    """One column per figure; the class probabilities become one column each."""
    import numpy as np

    arrays = prediction.numpy()
    columns = {k: x for k, x in arrays.items() if x.ndim == 1}
    n_classes = arrays["probs"].shape[1]
    named = classes is not None and len(set(classes)) == n_classes
    names = list(classes) if classes is not None and named else list(range(n_classes))
    if named:
        columns = {"label": columns.pop("label"), "class": np.array(names)[arrays["label"]], **columns}
    columns |= more
    terms = prediction.layers
    if terms is not None:
        columns |= {
            f"correction.{name}": terms.mean[:, j].cpu().numpy() for j, name in enumerate(terms.names)
        }
    columns |= {f"probs.{name}": arrays["probs"][:, j] for j, name in enumerate(names)}
    if sets is not None:
        columns |= {f"set.{name}": sets[:, j].cpu().numpy() for j, name in enumerate(names)}
    return columns


def _write_tensors(path: Path, prediction: Prediction, more: dict[str, Tensor]) -> Path:
    import torch

    from salgp.io import write_tensors

    tensors = {k: torch.as_tensor(x) for k, x in prediction.numpy().items()} | more
    terms = prediction.layers
    if terms is not None:
        tensors |= {"layers.mean": terms.mean} | ({} if terms.std is None else {"layers.std": terms.std})
    names = "[]" if terms is None else json.dumps(terms.names)
    told = {"format": files.PREDICTION_FORMAT, "format_version": "1", "layers": names}
    return write_tensors(path, tensors, told)
