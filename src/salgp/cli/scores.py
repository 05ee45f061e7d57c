"""Files of class scores from any framework as features: ``.npz``, ``.csv``, Parquet.

The name of an array says what it is: ``logits`` or ``probs`` (one of the two), ``labels``, and
``layers.<name>`` for embeddings. A table has one column per class and per embedding entry: ``probs.cat``,
``probs.dog``, ``layers.embedding.0``. What stands behind the dot of a class column is the name of the class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli.arrays import pop_labels, read_arrays

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.features import Features

__all__ = ["read_scores"]

KINDS = {"logits": "logits", "probs": "probs", "probabilities": "probs"}
LAYER = "layers."
WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
"""How a column is called by a whole number, also by programs that write all numbers with a point."""


def read_scores(path: Path) -> tuple[Features, Tensor | None, list[str] | None, list[str]]:
    """Features, labels (or None), class names (or None), and the columns that were not used."""
    from salgp.features import Features
    from salgp.labels import as_labels
    from salgp.storage import reading

    arrays = read_arrays(path)
    labels = pop_labels(arrays)
    kind, scores, classes = _class_scores(arrays, path)
    layers, rest = _layers(arrays)
    make = Features.from_logits if kind == "logits" else Features.from_probs
    with reading(path, "class scores"):
        features = make(scores, layers)
    named = None if labels is None else _numbers(labels, classes, path)
    with reading(path, "class scores with labels"):
        y = None if named is None else as_labels(named, len(features), features.n_classes)
    return features, y, classes, rest


def _class_scores(arrays: dict[str, Any], path: Path) -> tuple[str, Any, list[str] | None]:
    """Take logits or probabilities out of the arrays, with the class names where columns have them."""
    kinds = [kind for kind in KINDS if kind in arrays or any(name.startswith(f"{kind}.") for name in arrays)]
    if len(kinds) != 1:
        found = ", ".join(arrays) or "nothing"
        what = "no class scores" if not kinds else f"both {' and '.join(kinds)}"
        raise ValueError(
            f"{path}: {what} here (it has {found}); name them 'logits' (before any softmax) or 'probs', or "
            f"one column per class: logits.CLASS or probs.CLASS"
        )
    kind = kinds[0]
    if kind in arrays:
        return KINDS[kind], arrays.pop(kind), None
    names = [name.partition(".")[2] for name in arrays if name.startswith(f"{kind}.")]
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    matrix = _side_by_side([arrays.pop(f"{kind}.{name}") for name in names], kind, path)
    numbered = names == [str(k) for k in range(len(names))]
    return KINDS[kind], matrix, None if numbered else names


def _layers(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Embeddings by name, whole or from numbered columns; and what else there is."""
    import numpy as np

    layers: dict[str, Any] = {}
    parts: dict[str, dict[int, Any]] = {}
    rest = []
    for name, x in arrays.items():
        numbered = re.fullmatch(r"layers\.(.+)\.(\d+)", name)
        if name.startswith(LAYER) and x.ndim == 2:
            layers[name.removeprefix(LAYER)] = x
        elif numbered and x.ndim == 1:
            parts.setdefault(numbered[1], {})[int(numbered[2])] = x
        else:
            rest.append(name)
    for name, columns in parts.items():
        layers[name] = np.stack([columns[k].astype(np.float32) for k in sorted(columns)], axis=1)
    return layers, rest


def _side_by_side(columns: Sequence[Any], kind: str, path: Path) -> Any:
    import numpy as np

    if any(x.ndim != 1 or x.dtype.kind not in "fiu" for x in columns):
        raise TypeError(f"{path}: the columns {kind}.CLASS must hold one number per row")
    return np.stack([x.astype(np.float64) for x in columns], axis=1)


def _numbers(labels: Any, classes: list[str] | None, path: Path) -> Any:
    """Class numbers; labels that are names, or numbers that columns are called by, are looked up there."""
    import numpy as np

    if labels.dtype.kind not in "OSU":
        return labels if classes is None else _by_number(labels, classes, path)
    if classes is None:
        raise TypeError(
            f"{path}: the labels are names ({labels[0]}, ...), the class scores are only numbered; name the "
            f"columns probs.CLASS or logits.CLASS, or store the labels as class numbers"
        )
    unknown = sorted({str(x) for x in labels.tolist()} - set(classes))
    if unknown:
        raise ValueError(
            f"{path}: label {unknown[0]!r} is none of the classes {', '.join(classes)}; a class the "
            f"classifier does not know is written as number -1"
        )
    return np.array([classes.index(str(x)) for x in labels.tolist()], dtype=np.int64)


def _by_number(labels: Any, classes: list[str], path: Path) -> Any:
    """Numbers as labels: of the columns so called, where columns are called by numbers, and else places."""
    import numpy as np

    numbers = [int(name.partition(".")[0]) for name in classes if WHOLE.fullmatch(name)]
    if not numbers or not _whole(labels):
        return labels
    if len(set(numbers)) < len(classes):
        raise ValueError(
            f"{path}: the labels are numbers, and of the class columns {', '.join(classes)} only some are "
            f"called by a number of their own; name the columns alike, or write the labels as these names"
        )
    places = {-1: -1} | {number: place for place, number in enumerate(numbers)}
    unknown = sorted({int(x) for x in labels.tolist()} - set(places))
    if unknown:
        raise ValueError(
            f"{path}: label {unknown[0]} is none of the classes {', '.join(classes)}; a class the "
            f"classifier does not know is written as number -1"
        )
    return np.array([places[int(x)] for x in labels.tolist()], dtype=np.int64)


def _whole(labels: Any) -> bool:
    """Are these whole numbers, one per row? What else there may be is refused with labels of any table."""
    import numpy as np

    if labels.dtype.kind not in "iuf" or labels.ndim != 1:
        return False
    return bool((np.isfinite(labels) & (labels == np.round(labels))).all())
