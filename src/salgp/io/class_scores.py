"""Class scores of any framework from a file: ``.npz``, ``.csv``, Parquet.

The name of an array says what it is: ``logits`` or ``probs`` (one of the two), ``labels``, and
``layers.<name>`` for embeddings. A table has one column per class and per embedding entry: ``probs.cat``,
``probs.dog``, ``layers.embedding.0``. What stands behind the dot of a class column is the name of the class.
Columns of other names are named by the caller.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from salgp.io.arrays import Array, Arrays, is_numeric_column, read_arrays
from salgp.io.files import AnyPath
from salgp.labels import look_up, pop_labels

__all__ = ["read_scores"]

OUTPUTS = {"logits": "logits", "probs": "probabilities", "probabilities": "probabilities"}
"""Name of the arrays -> what the numbers are, as in `salgp.logits.OUTPUTS`."""
LAYER = "layers."
ENTRY = re.compile(r"layers\.(.+)\.(\d+)")
"""How a column is called by a layer and a position in its embedding."""
WHOLE = re.compile(r"([+-]?\d+)(\.0*)?")
"""How a column is called by a whole number, also by programs that write all numbers with a point."""


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Contents of a file of class scores.

    Args:
        output: ``"logits"`` or ``"probabilities"``.
        values: ``(n, c)`` class scores.
        labels: ``(n,)`` class numbers, or None.
        layers: embeddings by name.
        classes: names of the classes, where columns have them.
        unused: columns that are none of these.
    """

    output: str
    values: Array
    labels: Array | None = None
    layers: Mapping[str, Array] = field(default_factory=dict)
    classes: list[str] | None = None
    unused: list[str] = field(default_factory=list)


def read_scores(path: AnyPath, probs: Sequence[str] | None = None) -> ClassScores:
    """Class scores, labels and embeddings of a file.

    Args:
        path: the file, or a folder of Parquet files.
        probs: columns that hold the probabilities, one per class and called by it; by default those called
            ``probs.CLASS`` or ``logits.CLASS``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "x.csv").write_text("ant,bee,label\\n0.9,0.1,ant\\n0.2,0.8,bee\\n")
        ...     scores = read_scores(folder + "/x.csv", probs=["ant", "bee"])
        >>> scores.values.tolist(), scores.labels
        ([[0.9, 0.1], [0.2, 0.8]], array([0, 1]))
    """
    path = Path(path)
    arrays = read_arrays(path)
    labels = pop_labels(arrays)
    if probs is not None:
        arrays = _called_probs(arrays, probs, path)
    output, values, classes = _class_scores(arrays, path)
    layers, unused = _layers(arrays)
    numbers = None if labels is None else _numbers(labels, classes, path)
    return ClassScores(output, values, numbers, layers, classes, unused)


def _called_probs(arrays: Arrays, probs: Sequence[str], path: Path) -> Arrays:
    """The arrays, with the named columns called ``probs.NAME`` and in the order of the names."""
    missing = [name for name in probs if name not in arrays]
    if missing:
        raise KeyError(f"{path}: no column named {missing[0]!r}; it has {', '.join(arrays)}")
    named = {f"probs.{name}": arrays[name] for name in probs}
    others = [name for name in arrays if name not in probs]
    return named | {name: arrays[name] for name in others}


def _class_scores(arrays: Arrays, path: Path) -> tuple[str, Array, list[str] | None]:
    """Take logits or probabilities out of the arrays, with the class names where columns have them."""
    kind = _kind_of_scores(arrays, path)
    if kind in arrays:
        return OUTPUTS[kind], arrays.pop(kind), None
    names = _class_names(arrays, kind)
    columns = [arrays.pop(f"{kind}.{name}") for name in names]
    if not all(map(is_numeric_column, columns)):
        raise TypeError(f"{path}: the columns {kind}.CLASS must hold one number per row")
    values = np.column_stack([x.astype(np.float64) for x in columns])
    numbered = names == [str(k) for k in range(len(names))]
    return OUTPUTS[kind], values, None if numbered else names


def _kind_of_scores(arrays: Arrays, path: Path) -> str:
    """The one of `OUTPUTS` that is there, whole or as columns."""
    kinds = [kind for kind in OUTPUTS if kind in arrays or _class_names(arrays, kind)]
    if len(kinds) == 1:
        return kinds[0]
    found = ", ".join(arrays) or "nothing"
    what = f"both {' and '.join(kinds)}" if kinds else "no class scores"
    columns = "one column per class: logits.CLASS or probs.CLASS"
    advice = f"name them 'logits' (before any softmax) or 'probs', or {columns}"
    network = "(inputs of a network go through salgp extract first)"
    other = f"name the columns of probabilities with --probs A,B,... {network}"
    raise ValueError(f"{path}: {what} here (it has {found}); {advice}; or {other}")


def _class_names(arrays: Arrays, kind: str) -> list[str]:
    """What stands behind the dot of the columns; numbers in their order."""
    columns = [name for name in arrays if name.startswith(f"{kind}.")]
    names = [name.removeprefix(f"{kind}.") for name in columns]
    numbered = all(map(str.isdecimal, names))
    return sorted(names, key=int) if numbered else names


def _layers(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], list[str]]:
    """Embeddings by name, whole or from numbered columns; and what else there is."""
    layers: dict[str, Array] = {}
    parts: dict[str, dict[int, Array]] = {}
    rest = []
    for name, x in arrays.items():
        entry = ENTRY.fullmatch(name)
        if name.startswith(LAYER) and x.ndim == 2:
            layers[name.removeprefix(LAYER)] = x
        elif entry and x.ndim == 1:
            layer, place = entry.groups()
            parts.setdefault(layer, {})[int(place)] = x
        else:
            rest.append(name)
    for name, columns in parts.items():
        ordered = [columns[k] for k in sorted(columns)]
        layers[name] = np.column_stack([x.astype(np.float32) for x in ordered])
    return layers, rest


def _numbers(labels: Array, classes: list[str] | None, path: Path) -> Array:
    """Class numbers; labels that are names, or numbers that columns are called by, are looked up there."""
    if labels.dtype.kind in "OSU":
        if classes is None:
            advice = "name the columns probs.CLASS or logits.CLASS, or store the labels as class numbers"
            named = f"the labels are names ({labels[0]}, ...), the class scores are only numbered"
            raise TypeError(f"{path}: {named}; {advice}")
        names = list(map(str, labels.tolist()))
        order = {name: k for k, name in enumerate(classes)}
        return np.array(look_up(names, order, f"{path}: "))
    whole = labels.dtype.kind in "iuf" and labels.ndim == 1 and bool((labels == np.round(labels)).all())
    places = _places(classes or [], path) if whole else {}
    return np.array(look_up(list(map(int, labels)), places, f"{path}: ")) if places else labels


def _places(classes: list[str], path: Path) -> dict[int, int]:
    """Place of each number among the columns that are called by one; empty where none is."""
    numbers = filter(None, map(WHOLE.fullmatch, classes))
    called = [int(number[1]) for number in numbers]
    if called and len(set(called)) < len(classes):
        some = f"of the class columns {', '.join(classes)} only some are called by a number of their own"
        advice = "name the columns alike, or write the labels as these names"
        raise ValueError(f"{path}: the labels are numbers, and {some}; {advice}")
    places = {number: place for place, number in enumerate(called)}
    return {-1: -1} | places if called else {}
