"""What goes into a network: batches of any form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from salgp.labels import LABEL_KEYS, as_labels, refuse_masked
from salgp.logits import shape_of

__all__ = [
    "Batch",
    "KnownInputs",
    "LabelsAt",
    "are_texts",
    "class_labels",
    "first_rows",
    "in_pieces",
    "rebatched",
]

ROWS, BYTES = 256, 16_000_000
"""Batches are joined up to so many samples, unless their inputs are larger than so many bytes."""

LabelsAt = str | int | None
"""Where a batch has its labels: key of a mapping or position in a tuple; None for the usual places."""


@dataclass(frozen=True)
class KnownInputs:
    """What the inputs beside the labels were, so that a later batch without labels is not robbed of one.

    Args:
        count: how many.
        names: of them; none where they came by position and the network does not say.
        labels_at: where the labels stood.

    Example:
        >>> x, gain = torch.zeros(2, 3), torch.ones(2, 1)
        >>> known = KnownInputs.of(Batch.of((x, gain, [0, 1])), nn.Bilinear(3, 1, 2))
        >>> known.names
        ('input1', 'input2')
        >>> Batch.of((x, gain), known=known).labels is None
        True
    """

    count: int
    names: tuple[str, ...] = ()
    labels_at: LabelsAt = None

    @staticmethod
    def of(batch: Batch, network: nn.Module, called_otherwise: bool = False) -> KnownInputs | None:
        """Those of a batch with labels, else None; names are the network's, unless a function calls it."""
        if batch.labels is None:
            return None
        if batch.keywords:
            names = tuple(name for name in batch.keywords if isinstance(name, str))
            return KnownInputs(len(names), names, batch.labels_at)
        taken = None if called_otherwise else _parameters_of(network)[0]
        count = len(batch.inputs)
        return KnownInputs(count, (taken or ())[:count], batch.labels_at)


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass and, where known, their labels.

    Args:
        inputs: positional arguments of the network.
        keywords: keyword arguments of the network.
        labels: true classes.
        form: what the loader made: ``"single"`` (inputs alone), ``"tuple"``, ``"mapping"``, or ``"pair"`` (a
            mapping and labels).
        labels_at: where the labels stood.
        extra: what stood behind the labels of a tuple, and goes nowhere but to ``forward``.
    """

    inputs: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    labels: Any = None
    form: str = "single"
    labels_at: LabelsAt = None
    extra: tuple[Any, ...] = ()

    @staticmethod
    def of(item: Any, labels_at: LabelsAt = None, known: KnownInputs | None = None) -> Batch:
        """Read what a loader yields.

        ``x`` alone has no labels; of a tuple or list the last element is the labels and the others are the
        inputs; a mapping gives keyword arguments, and its ``labels`` (or ``label``, ``targets``, ``target``,
        ``y``) are the labels. Of ``(x, y, id)`` the labels are at position 1: what stands behind them is no
        input. Where it is known which inputs there are, a batch of these and no more has no labels.

        Example:
            >>> Batch.of((torch.zeros(2, 3), torch.tensor([0, 1]))).labels
            tensor([0, 1])
            >>> sorted(Batch.of({"input_ids": torch.zeros(2, 3), "labels": [0, 1]}).keywords)
            ['input_ids']
            >>> Batch.of((torch.zeros(2, 3), [0, 1], ["a", "b"]), labels_at=1).labels
            [0, 1]
        """
        if isinstance(item, DataLoader):
            raise TypeError(
                "the loader gave a DataLoader in place of a batch; to join several, make one of all their "
                "data: DataLoader(torch.utils.data.ConcatDataset([...]))"
            )
        item = _as_tensors(item)
        if isinstance(item, Mapping):
            return _from_mapping(item, labels_at, known)
        if not isinstance(item, tuple | list) or isinstance(item, PackedSequence) or are_texts(item):
            return Batch((item,))
        return _from_tuple(tuple(item), labels_at, known)

    @staticmethod
    def given(
        inputs: tuple[Any, ...],
        keywords: Mapping[str, Any],
        network: nn.Module,
        labels_at: LabelsAt = None,
        known: KnownInputs | None = None,
    ) -> Batch:
        """Read the arguments of a call: inputs as the network takes them, or one batch as a loader makes it
        by name.

        Example:
            >>> x, network = torch.zeros(2, 3), nn.Linear(3, 2)
            >>> sorted(Batch.given(({"input": x, "truth": [0, 1]},), {}, network, "truth").keywords)
            ['input']
        """
        _refuse_loaders(inputs)
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            both = {**inputs[0], **keywords}
            return Batch.of(both, labels_at if labels_at in both else None, known)
        named = _named_in_a_call(keywords, network, known) if keywords else {}
        form = "mapping" if named and not inputs else "single" if len(inputs) == 1 else "tuple"
        return Batch(tuple(map(_as_tensors, inputs)), named, form=form)

    def mask(self, network: nn.Module | None = None) -> Tensor | None:
        """The ``attention_mask`` ``(N, T)`` of its tokens, by name or by the place at which the network takes
        it; None where there is none. The part of it that stands for a key-value cache is left out.

        Example:
            >>> ids, mask = (
            ...     torch.ones(2, 3, dtype=torch.long),
            ...     torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
            ... )
            >>> Batch(keywords={"input_ids": ids, "attention_mask": mask}).mask()
            tensor([[1, 1, 0],
                    [1, 1, 1]])
        """
        several = network is not None and len(self.inputs) > 1
        names = (_parameters_of(network)[0] or ()) if network is not None and several else ()
        named = {**dict(zip(names, self.inputs, strict=False)), **self.keywords}
        mask, ids = named.get("attention_mask"), named.get("input_ids")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        cached = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] < mask.shape[1]
        return mask[:, -ids.shape[1] :] if cached and ids is not None else mask

    @property
    def is_empty(self) -> bool:
        """Has it no samples, as the last batch of some loaders?"""
        first = next((x for x in (*self.inputs, *self.keywords.values()) if isinstance(x, Tensor)), None)
        return first is not None and first.ndim > 0 and len(first) == 0

    @property
    def shapes(self) -> str:
        """What goes into the network, in words.

        Example:
            >>> Batch((torch.zeros(5, 3), torch.zeros(5).long())).shapes
            '(n, 3) of torch.float32 and (n,) of torch.int64'
            >>> Batch(keywords={"ids": torch.zeros(5, 3, 2)}).shapes
            "'ids' (n, 3, 2) of torch.float32"
        """
        named = [f"{key!r} {shape_of(x)}" for key, x in self.keywords.items()]
        return " and ".join([*map(shape_of, self.inputs), *named])

    def hint_for(self, network: nn.Module) -> str:
        """How to call a network that does not take the inputs as they are; nothing where they are arrays, and
        enough.

        Example:
            >>> Batch(((torch.zeros(2, 3), torch.zeros(2, 1)),), form="tuple").hint_for(nn.Linear(3, 1))
            '; for batches ((a, b), y): reader=salgp.Reader(forward=lambda model, batch: model(*batch[0]))'
            >>> Batch.of((torch.zeros(2, 3), torch.zeros(2, 1))).hint_for(nn.Bilinear(3, 1, 2))
            "; the last was taken for labels: if it is an input, name them, {'input1': ..., 'input2': ...}"
        """
        plain = Tensor | np.ndarray | PackedSequence
        other = [x for x in (*self.inputs, *self.keywords.values()) if not isinstance(x, plain)]
        if not other:
            return self._missing(_required(network))
        nested = len(self.inputs) == 1 and isinstance(other[0], tuple | list)
        if nested and self.form == "single":  # the argument of a call; no loader makes this form
            return "; give the inputs by themselves, classifier(x), or the whole batch to .predict([batch])"
        way = "model(*batch[0])" if nested else "..."
        of = "for batches ((a, b), y): " if nested else "pass "
        return f"; {of}reader=salgp.Reader(forward=lambda model, batch: {way})"

    def _missing(self, required: Sequence[str]) -> str:
        if self.form != "tuple" or self.labels is None or len(self.inputs) >= len(required):
            return ""
        named = ", ".join(f"{name!r}: ..." for name in required)
        return f"; the last was taken for labels: if it is an input, name them, {{{named}}}"

    @property
    def as_made(self) -> Any:
        """The batch in the form in which the loader made it, without labels where there are none."""
        if self.form == "single":
            return self.inputs[0]
        if self.form == "tuple":
            return (*self.inputs, *(() if self.labels is None else (self.labels,)), *self.extra)
        if self.form == "pair":
            return dict(self.keywords), self.labels
        named = {} if self.labels is None else {self.labels_at: self.labels}
        return {**self.keywords, **named}

    def fits(self, network: nn.Module) -> bool:
        """Does the network take so many inputs by position?

        Example:
            >>> Batch((torch.zeros(2, 3), torch.zeros(2))).fits(nn.Linear(3, 4))
            False
        """
        return len(self.inputs) <= _parameters_of(network)[1]

    def arguments(self, network: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a network, after a look at what it takes."""
        if not self.keywords and len(self.inputs) < 2:
            return self.inputs, {}
        taken, most = _parameters_of(network)
        if len(self.inputs) > most:
            raise TypeError(
                f"the batch has {len(self.inputs)} inputs besides its labels, but the network takes "
                f"{most}; if the labels are not last, as in (x, y, id), say where they are: "
                f"reader=salgp.Reader(labels_at=1)"
            )
        unknown = [] if taken is None else [key for key in self.keywords if key not in taken]
        if not unknown:
            return self.inputs, dict(self.keywords)
        if len(self.keywords) == 1 and not self.inputs:
            return tuple(self.keywords.values()), {}
        first = next(iter(self.keywords))
        raise TypeError(
            f"the batch has {', '.join(map(repr, self.keywords))}, but the network's forward takes "
            f"{', '.join(taken or ()) or 'no names'}; pass "
            f"reader=salgp.Reader(forward=lambda model, batch: model(batch[{first!r}])), or if one of them "
            f"holds the labels, reader=salgp.Reader(labels_at={unknown[-1]!r})"
        )

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Batch:
        """Inputs as tensors on ``device``, floating-point ones as ``dtype`` (None: as they are)."""
        inputs = _sent(self.inputs, device, dtype)
        if not self.keywords and all(new is old for new, old in zip(inputs, self.inputs, strict=True)):
            return self
        return replace(self, inputs=inputs, keywords=_sent(dict(self.keywords), device, dtype))

    def take(self, rows: slice | Tensor) -> Batch:
        """Some samples, where it is plain which axis counts them; else the whole batch.

        Example:
            >>> Batch((torch.arange(4.0),), labels=torch.arange(4)).take(torch.tensor([0, 3])).labels
            tensor([0, 3])
        """
        try:
            n = len(self.labels)
        except TypeError:
            return self
        parts = (*self.inputs, *self.keywords.values(), *self.extra)
        plain = all(are_texts(x) or (isinstance(x, Tensor | np.ndarray) and x.ndim > 0) for x in parts)
        if not plain or any(len(x) != n for x in parts):
            return self
        keywords = {key: _taken(x, rows) for key, x in self.keywords.items()}
        inputs, extra = (tuple(_taken(x, rows) for x in xs) for xs in (self.inputs, self.extra))
        return replace(self, inputs=inputs, keywords=keywords, labels=_taken(self.labels, rows), extra=extra)

    def with_input(self, where: str | int, new: Any) -> Batch:
        """The same batch with one input replaced: a position, or the name of a keyword."""
        if isinstance(where, str):
            return replace(self, keywords={**self.keywords, where: new})
        return replace(self, inputs=(*self.inputs[:where], new, *self.inputs[where + 1 :]))


def are_texts(item: Any) -> bool:
    """Is it a list of raw texts, one for each sample?"""
    return isinstance(item, tuple | list) and len(item) > 0 and all(isinstance(x, str) for x in item)


def in_pieces(loader: Any, rows: int = 32) -> Any:
    """A list of batches with large batches of raw texts cut into smaller ones; any other loader as it is.

    Example:
        >>> in_pieces([(["a", "b", "c"], [0, 1, 0])], rows=2)
        [(['a', 'b'], [0, 1]), (['c'], [0])]
    """
    if not isinstance(loader, list | tuple):
        return loader
    return [piece for item in loader for piece in _pieces(item, rows)]


def _pieces(item: Any, rows: int) -> Iterator[Any]:
    if are_texts(item):
        yield from (item[i : i + rows] for i in range(0, len(item), rows))
        return
    alike = isinstance(item, tuple | list) and len(item) > 1 and are_texts(item[0])
    if not alike or any(not hasattr(part, "__len__") or len(part) != len(item[0]) for part in item):
        yield item
        return
    for i in range(0, len(item[0]), rows):
        yield tuple(part[i : i + rows] for part in item)


def class_labels(labels: Any, n: int, n_classes: int, classes: Sequence[str] | None = None) -> Tensor:
    """Labels ``(n,)`` as class numbers, from class numbers (also 0. and 1. as floats), one-hot rows or names.

    Data of other classes than the network's may be read and predicted; who learns from labels or judges by
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
    y = labels if isinstance(labels, Tensor) else np.asarray(labels)
    if isinstance(y, np.ndarray) and y.ndim == 1 and all(isinstance(name, str) for name in y.tolist()):
        return as_labels(_numbers(y.tolist(), classes), n)
    if y.ndim == 2 and y.shape == (n, n_classes):
        return as_labels(_from_one_hot(torch.as_tensor(y)), n)
    return as_labels(labels, n)


def _numbers(names: list[str], classes: Sequence[str] | None) -> list[int]:
    """Class numbers of class names."""
    if classes is None:
        raise TypeError(
            f"labels are names, such as {names[0]!r}; pass classes=[...], the names in the order of the "
            f"network's outputs"
        )
    numbers = {name: k for k, name in enumerate(classes)}
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise ValueError(
            f"label {unknown[0]!r} is none of the classes {', '.join(classes)}; samples of a class that the "
            f"network does not know have the label -1"
        )
    return [numbers[name] for name in names]


def _from_mapping(item: Mapping[str, Any], labels_at: LabelsAt, known: KnownInputs | None) -> Batch:
    keywords = dict(item)
    where = _label_key(keywords, labels_at, known)
    labels = keywords.pop(where, None) if where is not None else None
    return Batch((), keywords, labels, "mapping", where)


def _label_key(keywords: Mapping[str, Any], labels_at: LabelsAt, known: KnownInputs | None) -> str | None:
    names = () if known is None else known.names
    if names and set(names) == set(keywords):
        return None
    if not isinstance(labels_at, str):
        free = [key for key in LABEL_KEYS if key not in names]
        filled = [key for key in free if keywords.get(key) is not None]
        empty = [key for key in free if key in keywords and names]  # no labels, and no input either
        return next(iter(filled + empty), None)
    if labels_at not in keywords:
        raise KeyError(
            f"labels_at={labels_at!r} is none of the batch's keys: {', '.join(map(str, keywords))}"
        )
    return labels_at


def _named_in_a_call(
    keywords: Mapping[str, Any], network: nn.Module, known: KnownInputs | None
) -> Mapping[str, Any]:
    """The inputs among the keywords of a call. What has a usual name of labels is an input all the same if
    the network takes it and had its labels elsewhere; not ``labels``, which Hugging Face's networks take for
    their loss.
    """
    key = _label_key(keywords, None, known)
    if known is not None and key not in ("labels", known.labels_at):
        taken = _parameters_of(network)[0]
        key = None if taken is None or key in taken else key
    return {name: _as_tensors(x) for name, x in keywords.items() if name != key}


def _from_tuple(item: tuple[Any, ...], labels_at: LabelsAt, known: KnownInputs | None) -> Batch:
    if len(item) == 0:
        raise ValueError(
            "the loader gave an empty tuple; expected (inputs, labels), inputs alone, or a mapping"
        )
    if known is not None and len(item) == known.count and not isinstance(item[0], Mapping):
        return Batch(item, form="tuple")
    at = labels_at if isinstance(labels_at, int) else len(item) - 1
    at = at + len(item) if at < 0 else at
    if not 0 <= at < len(item):
        raise IndexError(f"labels_at={labels_at} is not a position in a batch of {len(item)} items")
    only = len(item) == 1
    inputs, labels, extra = (item, None, ()) if only else (item[:at], item[at], item[at + 1 :])
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        inner = _from_mapping(inputs[0], labels_at if isinstance(labels_at, str) else None, known)
        return replace(inner, labels=inner.labels if labels is None else labels, form="pair")
    return Batch(inputs, {}, labels, "tuple", at, extra)


def _parameters_of(network: nn.Module) -> tuple[tuple[str, ...] | None, float]:
    """Names the network's forward takes (None: any), and how many inputs by position."""
    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):
        return None, math.inf
    kinds = [p.kind for p in parameters]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else sum(k in placed for k in kinds)
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return None, most
    return tuple(p.name for p in parameters if p.kind in named), most


def _required(network: nn.Module) -> list[str]:
    """Names of the inputs that the network cannot do without."""
    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _refuse_loaders(inputs: tuple[Any, ...]) -> None:
    for x in inputs:
        several = isinstance(x, list) and len(x) > 0 and isinstance(x[0], Mapping | tuple)
        if several or isinstance(x, DataLoader | Dataset | Iterator):
            raise TypeError(
                f"expected one batch, got a {type(x).__name__} of several; for all that a loader yields "
                f"there is .predict(loader)"
            )


def _from_one_hot(y: Tensor) -> Tensor:
    if not bool(((y == 0) | (y == 1)).all()) or not bool((y.sum(dim=1) == 1).all()):
        raise ValueError(
            f"labels of shape {tuple(y.shape)} must be one-hot, a single 1 in each row; for several "
            f"(multi-label) or "
            f"uncertain classes per sample calibrate one class at a time"
        )
    return y.argmax(dim=1)


def _as_tensors(value: Any) -> Any:
    """NumPy arrays of numbers as tensors, also inside a tuple or mapping."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        refuse_masked(value, "inputs")
        return torch.as_tensor(value)
    if type(value) in (tuple, list):
        return type(value)(map(_as_tensors, value))
    if isinstance(value, Mapping):
        return {key: _as_tensors(x) for key, x in value.items()}
    return value


def _sent(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(
            device=device, dtype=dtype if dtype is not None and value.is_floating_point() else value.dtype
        )
    if isinstance(value, PackedSequence):
        return value._replace(data=_sent(value.data, device, dtype))
    if isinstance(value, Mapping):
        return {k: _sent(v, device, dtype) for k, v in value.items()}
    if isinstance(value, list):
        return [_sent(v, device, dtype) for v in value]
    if isinstance(value, tuple):
        parts = [_sent(v, device, dtype) for v in value]
        return tuple(parts) if getattr(value, "_fields", None) is None else type(value)(*parts)
    return value


def first_rows(batches: Sequence[Batch], rows: int) -> Iterator[Batch]:
    """The first batches with so many samples together; the last of them is cut where that is possible."""
    for batch in batches:
        if rows <= 0:
            return
        part = batch.take(slice(rows))
        rows -= len(part.labels)
        yield part


def rebatched(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Neighbouring batches joined into larger ones, where they consist of plain tensors of one shape."""
    waiting: list[Batch] = []
    for batch in batches:
        if waiting and not _join_well([*waiting, batch]):
            yield _joined(waiting)
            waiting = []
        waiting.append(batch)
    yield _joined(waiting)


def _members(batch: Batch) -> list[Any]:
    return [*batch.inputs, *batch.keywords.values(), *batch.extra, batch.labels]


def _join_well(batches: Sequence[Batch]) -> bool:
    columns = list(zip(*(_members(batch) for batch in batches), strict=False))
    same_keys = len({(tuple(b.keywords), len(b.inputs), len(b.extra), b.form) for b in batches}) == 1
    n = [len(batch.labels) for batch in batches]
    plain = same_keys and all(
        isinstance(x, Tensor) and x.ndim > 0 and len(x) == n[i] and x.shape[1:] == xs[0].shape[1:]
        for xs in columns
        for i, x in enumerate(xs)
    )
    return plain and sum(n) <= ROWS and sum(x.nbytes for xs in columns for x in xs) <= BYTES


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return replace(
        first,
        inputs=tuple(torch.cat(xs) for xs in zip(*(b.inputs for b in batches), strict=True)),
        keywords={key: torch.cat([b.keywords[key] for b in batches]) for key in first.keywords},
        labels=torch.cat([b.labels for b in batches]),
        extra=tuple(torch.cat(xs) for xs in zip(*(b.extra for b in batches), strict=True)),
    )


def _taken(x: Any, rows: slice | Tensor) -> Any:
    """Rows of an array, or members of a list of texts or labels."""
    if isinstance(x, Tensor | np.ndarray):
        return x[rows]
    return [x[i] for i in torch.arange(len(x))[rows].tolist()]
