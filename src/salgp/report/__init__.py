"""One self-contained HTML page that says, in plain words first, whether confidences can be trusted.

From predictions to one HTML file: no network, no other file, everything escaped.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from salgp.features import Features
from salgp.io import refuse_foreign, write_whole
from salgp.labels import as_labels
from salgp.metrics import evaluate
from salgp.prediction import Prediction
from salgp.report.figures import reliability, slider
from salgp.report.page import data_uri, page
from salgp.report.selective import acceptable_levels, chosen_level, least_promise
from salgp.report.slices import confusions, shift
from salgp.report.slices import slices as slices_of
from salgp.report.summary import Scored, metric_changes, most_corrected, scored, term_shares
from salgp.report.text import verdict

__all__ = ["build", "render"]


def build(
    path: str | os.PathLike[str],
    features: Features,
    labels: Any,
    prediction: Prediction,
    *,
    force: bool = False,
    **options: Any,
) -> Path:
    """Write the report of a calibrated prediction on labelled data as one HTML file.

    Args:
        path: target, e.g. ``report.html``.
        features: what was predicted on.
        labels: ``(n,)`` true classes.
        prediction: of the calibrator.
        force: replace an existing report; any other file is left alone.
        options: of `render`: ``method``, ``title``, ``class_names``, ``images``, ``others``, ``new_data``,
            ``settings``, ``acceptable_error``, ``slices`` and ``fit``.

    Returns:
        The path written.

    Example:
        >>> import tempfile, torch
        >>> g = torch.Generator().manual_seed(0)
        >>> features, labels = Features(3 * torch.randn(60, 3, generator=g)), torch.arange(60) % 3
        >>> prediction = Prediction.from_confidence(features, torch.full((60,), 0.4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     build(folder + "/report.html", features, labels, prediction).read_text().startswith(
        ...         "<!doctype html>"
        ...     )
        True
    """
    if Path(path).exists() and not force:
        raise FileExistsError(f"{path} exists already; choose another name, or pass force=True to replace it")
    refuse_foreign(path, "report")
    text = render(features, labels, prediction, **options)
    return write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def render(
    features: Features,
    labels: Any,
    prediction: Prediction,
    *,
    method: str = "calibration",
    title: str = "Can this model be trusted?",
    class_names: Sequence[str] | None = None,
    images: Any = None,
    others: Mapping[str, Prediction] | None = None,
    new_data: tuple[Features, Prediction] | None = None,
    settings: Mapping[str, Any] | None = None,
    acceptable_error: float | None = None,
    slices: Mapping[str, Sequence[Any]] | None = None,
    fit: str | None = None,
) -> str:
    """The report as a string of HTML.

    Args:
        features: what was predicted on.
        labels: ``(n,)`` true classes; -1 for a class the model does not know.
        prediction: of the calibrator.
        method: name of the calibrator, for the reader.
        title: heading of the page.
        class_names: by default the class numbers.
        images: ``(n, ...)`` pictures of the samples, for thumbnails, or any sequence of ``n``; only those
            that are shown are asked for.
        others: predictions of other methods on the same samples, for a table; all names must differ.
        new_data: unlabelled features and their prediction, for the section on new data.
        settings: listed at the end.
        acceptable_error: share of wrong answers that may remain; by default the smallest at which at least
            four fifths of the answers can be used.
        slices: name to ``(n,)`` values: parts of the data to look at one by one, such as the camera.
        fit: what the calibrator's fit found, its ``verdict_``.

    Returns:
        The page.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> features, labels = Features(3 * torch.randn(60, 3, generator=g)), torch.arange(60) % 3
        >>> prediction = Prediction.from_confidence(features, torch.full((60,), 0.4))
        >>> page = render(features, labels, prediction, title="Digits of March")
        >>> "<title>Digits of March</title>" in page
        True
    """
    y = as_labels(labels, len(features), features.n_classes).cpu()
    _check(features, prediction, images, class_names, slices)
    everyone = _everyone(features, prediction, method, others)
    sides = {name: scored(one, y) for name, one in everyone.items()}
    before, after = sides[MODEL], sides[method]
    summary = _summary(before, after, y, method, acceptable_error)
    name_of = partial(_name, class_names)
    columns = {PREDICTED: list(map(name_of, prediction.label.tolist())), **(slices or {})}
    return page(
        title=title,
        method=method,
        n=len(y),
        n_classes=features.n_classes,
        n_unknown=int((y < 0).sum()),
        name_of=name_of,
        picture=None if images is None else lambda row: data_uri(images[row]),
        samples=most_corrected(features, y, prediction),
        layers=term_shares(features, prediction),
        parts=slices_of(before, after, columns),
        confusions=confusions(after, y.numpy()),
        others=others and {name: (evaluate(one, y), sides[name]) for name, one in everyone.items()},
        shift=new_data and shift((features, prediction), new_data, summary["point"], after.accuracy),
        settings=dict(settings or {}),
        fit=fit,
        by_class=PREDICTED,
        model=MODEL,
        reliability=reliability,
        **summary,
    )


MODEL = "model alone"
"""What the model's own confidence is called beside other methods."""

PREDICTED = "predicted class"
"""The column of parts that every report has."""


def _summary(
    before: Scored, after: Scored, labels: Tensor, method: str, acceptable_error: float | None
) -> dict[str, Any]:
    """Verdict, scores, and what can be used without asking."""
    changes = metric_changes(before, after, labels)
    levels = acceptable_levels(before, after, labels, acceptable_error)
    point = chosen_level(levels, acceptable_error, len(labels))
    least = least_promise(levels, point)
    said = verdict(before, after, method, point, changes, least)
    scores = {"before": before, "after": after, "changes": changes}
    return {**scores, "point": point, "verdict": said, **slider(before, after, levels, point)}


def _name(class_names: Sequence[str] | None, label: int) -> str:
    """The number itself where there are no names."""
    if label < 0:
        return "unknown class"
    return str(label if class_names is None else class_names[label])


def _check(
    features: Features,
    prediction: Prediction,
    images: Any,
    class_names: Sequence[str] | None,
    slices: Mapping[str, Sequence[Any]] | None,
) -> None:
    n = len(features)
    if n == 0:
        raise ValueError("no samples: there is nothing to report on")
    if len(prediction) != n:
        raise ValueError(
            f"the prediction has {len(prediction)} samples, the features {n}; they must describe the same "
            f"samples"
        )
    if images is not None and len(images) != n:
        raise ValueError(f"{len(images)} images for {n} samples; give one per sample, in the same order")
    if class_names is not None and len(class_names) < features.n_classes:
        raise ValueError(f"{len(class_names)} class names for {features.n_classes} classes")
    for name, values in (slices or {}).items():
        if len(values) != n:
            raise ValueError(f"slices[{name!r}] has {len(values)} values for {n} samples")


def _everyone(
    features: Features, prediction: Prediction, method: str, others: Mapping[str, Prediction] | None
) -> dict[str, Prediction]:
    """All methods by name, the model itself first and ours last."""
    names = [MODEL, *(others or {}), method]
    for name in (MODEL, method):
        if names.count(name) > 1:
            raise ValueError(f"two methods are called {name!r}; give every method a name of its own")
    own = Prediction.from_probs(features, features.probs)
    return {MODEL: own, **(others or {}), method: prediction}
