"""True classes: integers, one per sample, and -1 for a class the network does not know."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.logits import refuse_masked

__all__ = ["LABEL_KEYS", "as_labels", "class_labels", "look_up", "pop_labels"]

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
"""Names under which labels stand beside the inputs of a network."""


def as_labels(labels: Any, n: int, n_classes: int | None = None) -> Tensor:
    """Check class indices ``(n,)``; -1 marks a true class the network does not know.

    Whole numbers may be of any type, so that labels of a table or of a binary loss (0. and 1.) work.

    Example:
        >>> as_labels([0, 1, -1], 3)
        tensor([ 0,  1, -1])
        >>> as_labels([0.0, 1.0, 1.0], 3)
        tensor([0, 1, 1])
    """
    refuse_masked(labels, "labels")
    y = labels if isinstance(labels, Tensor) else _tensor(labels)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2 and len(y) == n:
        raise ValueError(f"labels must have shape ({n},), one per sample, got {tuple(y.shape)}; {_ONE_HOT}")
    _check_whole(y)
    if y.shape != (n,):
        raise ValueError(f"labels must have shape ({n},), one per sample, got {tuple(y.shape)}")
    y = y.long()  # before comparing: an unsigned 0 is not above -1
    top = n_classes if n_classes is not None else torch.iinfo(torch.int64).max
    bad = ((y < -1) | (y >= top)).nonzero()
    if len(bad):
        i = int(bad[0, 0])
        raise ValueError(
            f"label {int(y[i])} of sample {i} is out of range: expected 0..{top - 1}, or -1 for an "
            f"unknown class"
        )
    return y


def _tensor(labels: Any) -> Tensor:
    try:
        return torch.from_numpy(np.array(labels))
    except (TypeError, ValueError) as error:
        why = f"labels must be integers, got {np.asarray(labels).dtype}: map class names to 0..c-1 first"
        raise TypeError(why) from error


def _check_whole(y: Tensor) -> None:
    whole = not y.dtype.is_floating_point or bool((y == y.round()).all())
    if not whole or y.dtype.is_complex or y.dtype == torch.bool:
        raise TypeError(
            f"labels must be integer class indices 0, 1, ..., got {y.dtype}"
            f"{'' if whole else ' with values that are no whole numbers'}; {_KINDS}"
        )


def class_labels(labels: Any, n: int, n_classes: int, classes: Sequence[str] | None = None) -> Tensor:
    """Labels ``(n,)`` as class numbers, from class numbers (also 0. and 1. as floats), one-hot rows or names.

    Data of other classes than the network's may be read and predicted; who learns from labels or scores by
    them asks whether the network knows them.

    Example:
        >>> class_labels(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), 2, 3)
        tensor([1, 0])
        >>> class_labels(torch.tensor([0.0, 1.0]), 2, 2)
        tensor([0, 1])
        >>> class_labels(["eel", "cat"], 2, 3, classes=["cat", "dog", "eel"])
        tensor([2, 0])
    """
    if classes is not None and len(classes) != n_classes:
        raise ValueError(f"classes names {len(classes)} classes, but the network has {n_classes}")
    if classes is not None and len(set(classes)) != n_classes:
        raise ValueError(f"classes must have different names, got {', '.join(classes)}")
    y = labels if isinstance(labels, Tensor) else np.asarray(labels)
    if isinstance(y, np.ndarray) and y.ndim == 1:
        names = y.tolist()
        if all(isinstance(name, str) for name in names):
            return as_labels(_numbers(names, classes), n)
    if y.ndim == 2 and y.shape == (n, n_classes):
        return as_labels(_from_one_hot(torch.as_tensor(y)), n)
    return as_labels(labels, n)


def pop_labels(arrays: dict[str, Any]) -> Any:
    """Take the labels out of named arrays; None where there are none.

    Example:
        >>> arrays = {"x": [1.5, 2.5], "y": [0, 1]}
        >>> pop_labels(arrays), arrays
        ([0, 1], {'x': [1.5, 2.5]})
    """
    key = next((name for name in LABEL_KEYS if name in arrays), None)
    return None if key is None else arrays.pop(key)


def look_up(labels: Sequence[Any], places: Mapping[Any, int], where: str = "") -> list[int]:
    """Class numbers of labels by their place among the classes.

    Example:
        >>> look_up(["eel", "cat"], {"cat": 0, "eel": 1})
        [1, 0]
        >>> look_up(["dog"], {"cat": 0, "eel": 1}, "data.csv: ")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: data.csv: label 'dog' is none of the classes cat, eel; samples of a ...
    """
    unknown = [label for label in labels if label not in places]
    if unknown:
        known = ", ".join(str(name) for name in places if places[name] >= 0)
        raise ValueError(
            f"{where}label {unknown[0]!r} is none of the classes {known}; samples of a class that the "
            f"network does not know have the label -1"
        )
    return [places[label] for label in labels]


def _numbers(names: list[str], classes: Sequence[str] | None) -> list[int]:
    """Class numbers of class names."""
    if classes is None:
        raise TypeError(
            f"labels are names, such as {names[0]!r}; pass classes=[...], the names in the order of the "
            f"network's outputs"
        )
    return look_up(names, {name: k for k, name in enumerate(classes)})


def _from_one_hot(y: Tensor) -> Tensor:
    binary, single = (y == 0) | (y == 1), y.sum(dim=1) == 1
    if not (binary.all() and single.all()):
        raise ValueError(
            f"labels of shape {tuple(y.shape)} must be one-hot, a single 1 in each row; for several "
            f"(multi-label) or uncertain classes per sample calibrate one class at a time"
        )
    return y.argmax(dim=1)


_KINDS = "for true and false pass labels.long(); real targets (regression) cannot be calibrated here"
_ONE_HOT = (
    "one-hot labels become class indices by labels.argmax(1); several classes per sample (multi-label) are "
    "not supported: calibrate each class as a binary problem"
)
