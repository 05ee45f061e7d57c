"""Batches of any form, as inputs of a network."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from salgp.labels import LABEL_KEYS
from salgp.logits import refuse_masked
from salgp.network.taps import shape_of

__all__ = ["Batch", "are_numbers", "are_texts", "first_rows", "rebatched"]

Keywords = Mapping[str, Any]
Inputs = tuple[Any, ...]

ROWS, BYTES = 256, 1_000_000
"""Batches are joined up to so many samples, unless their inputs are larger than so many bytes: a processor
takes up to half as long again for each image where the activations of a batch leave its caches.
"""

LabelsAt = str | int | None
"""Where a batch has its labels: key of a mapping or position in a tuple; None for the default places."""


@dataclass(frozen=True)
class KnownInputs:
    """The inputs beside the labels, so that a later batch without labels keeps all of its inputs.

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
        taken = () if called_otherwise else _names_of(network)
        count = len(batch.inputs)
        return KnownInputs(count, taken[:count], batch.labels_at)


Known = KnownInputs | None


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

    inputs: Inputs = ()
    keywords: Keywords = field(default_factory=dict)
    labels: Any = None
    form: str = "single"
    labels_at: LabelsAt = None
    extra: Inputs = ()

    @staticmethod
    def of(item: Any, labels_at: LabelsAt = None, known: Known = None) -> Batch:
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
        item = _tensors(item)
        if isinstance(item, Mapping):
            return _from_mapping(item, labels_at, known)
        if not isinstance(item, tuple | list) or isinstance(item, PackedSequence) or are_texts(item):
            return Batch((item,))
        return _from_tuple(tuple(item), labels_at, known)

    @staticmethod
    def given(
        inputs: Inputs,
        keywords: Keywords,
        network: nn.Module,
        labels_at: LabelsAt = None,
        known: Known = None,
    ) -> Batch:
        """Read the arguments of a call: inputs as the network takes them, or one batch as a loader makes it
        by name.

        Example:
            >>> x, network = torch.zeros(2, 3), nn.Linear(3, 2)
            >>> sorted(Batch.given(({"input": x, "truth": [0, 1]},), {}, network, "truth").keywords)
            ['input']
        """
        for x in inputs:
            several = isinstance(x, list) and isinstance(next(iter(x), None), Mapping | tuple)
            if several or isinstance(x, DataLoader | Dataset | Iterator):
                raise TypeError(
                    f"expected one batch, got a {type(x).__name__} of several; for all that a loader yields "
                    f"there is .predict(loader)"
                )
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            both = {**inputs[0], **keywords}
            return Batch.of(both, labels_at if labels_at in both else None, known)
        named = _named_in_a_call(keywords, network, known) if keywords else {}
        form = "mapping" if named and not inputs else "single" if len(inputs) == 1 else "tuple"
        return Batch(tuple(map(_tensors, inputs)), named, form=form)

    def mask(self, network: nn.Module | None = None) -> Tensor | None:
        """The ``attention_mask`` ``(N, T)`` of its tokens, by name or by the place at which the network takes
        it; None where there is none. The part of it that stands for a key-value cache is left out.

        Example:
            >>> Batch(keywords={"attention_mask": torch.tensor([[1, 1, 0]])}).mask()
            tensor([[1, 1, 0]])
        """
        names = _names_of(network) if network is not None and len(self.inputs) > 1 else ()
        by_place = dict(zip(names, self.inputs, strict=False))
        named = {**by_place, **self.keywords}
        mask, ids = named.get("attention_mask"), named.get("input_ids")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        if isinstance(ids, Tensor) and ids.ndim == 2:
            mask = mask[:, -ids.shape[1] :]
        return mask

    @property
    def numbers(self) -> tuple[int | str | None, Any]:
        """Where the first floating-point input is, and the input; masks are none.

        Example:
            >>> Batch((), {"attention_mask": torch.ones(2, 3), "x": torch.zeros(2, 4)}).numbers[0]
            'x'
        """
        return self._first(are_numbers, ("mask",))

    @property
    def tokens(self) -> tuple[int | str | None, Any]:
        """Where the first whole numbers ``(n, T)`` are, and the input; masks and types of tokens are none."""
        return self._first(_are_tokens, ("mask", "type"))

    @property
    def texts(self) -> tuple[int | str | None, Any]:
        """Where the first raw texts are, and the input."""
        return self._first(are_texts)

    def _first(self, wanted: Callable[[Any], bool], other: Sequence[str] = ()) -> tuple[Any, Any]:
        """The first input of a kind; a name that holds one of some words is that of something else."""
        for where, x in [*enumerate(self.inputs), *self.keywords.items()]:
            elsewhere = isinstance(where, str) and any(word in where for word in other)
            if wanted(x) and not elsewhere:
                return where, x
        return None, None

    @property
    def is_empty(self) -> bool:
        """Has it no samples, as the last batch of some loaders?"""
        x = self._first(lambda x: isinstance(x, Tensor))[1]
        return x is not None and x.shape[:1] == (0,)

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

    @property
    def as_made(self) -> Any:
        """The batch in the form in which the loader made it, without labels where there are none."""
        if self.form == "single":
            return self.inputs[0]
        if self.form == "pair":
            return dict(self.keywords), self.labels
        labels = {} if self.labels is None else {self.labels_at: self.labels}
        if self.form == "tuple":
            return (*self.inputs, *labels.values(), *self.extra)
        return {**self.keywords, **labels}

    def fits(self, network: nn.Module) -> bool:
        """Does the network take so many inputs by position?

        Example:
            >>> Batch((torch.zeros(2, 3), torch.zeros(2))).fits(nn.Linear(3, 4))
            False
        """
        return len(self.inputs) <= _parameters_of(network)[1]

    def arguments(self, network: nn.Module) -> tuple[Inputs, dict[str, Any]]:
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
        raise TypeError(_unknown_keywords(list(self.keywords), taken or (), unknown[-1]))

    def to(self, device: torch.device | str, dtype: torch.dtype | None) -> Batch:
        """Inputs as tensors on ``device``, floating-point ones as ``dtype`` (None: as they are)."""
        inputs = _tensors(self.inputs, device, dtype)
        keywords = _tensors(self.keywords, device, dtype)
        return replace(self, inputs=inputs, keywords=keywords)

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
        parts = self._members()
        plain = all(map(_has_rows, parts[:-1]))
        if not plain or any(len(x) != n for x in parts):
            return self
        return self._with_members([_taken(x, rows) for x in parts])

    def _members(self) -> list[Any]:
        return [*self.inputs, *self.keywords.values(), *self.extra, self.labels]

    def _with_members(self, new: Sequence[Any]) -> Batch:
        i = len(self.inputs)
        j = i + len(self.keywords)
        return replace(
            self,
            inputs=tuple(new[:i]),
            keywords=dict(zip(self.keywords, new[i:j], strict=True)),
            extra=tuple(new[j:-1]),
            labels=new[-1],
        )

    def with_input(self, where: str | int, new: Any) -> Batch:
        """The same batch with one input replaced: a position, or the name of a keyword."""
        if isinstance(where, str):
            return replace(self, keywords={**self.keywords, where: new})
        inputs = list(self.inputs)
        inputs[where] = new
        return replace(self, inputs=tuple(inputs))


def are_texts(item: Any) -> bool:
    """Is it a list of raw texts, one for each sample?"""
    listed = isinstance(item, tuple | list) and len(item) > 0
    return listed and all(isinstance(x, str) for x in item)


def _unknown_keywords(keywords: Sequence[str], taken: Sequence[str], unknown: str) -> str:
    return (
        f"the batch has {', '.join(map(repr, keywords))}, but the network's forward takes "
        f"{', '.join(taken) or 'no names'}; pass "
        f"reader=salgp.Reader(forward=lambda model, batch: model(batch[{keywords[0]!r}])), or if one of them "
        f"holds the labels, reader=salgp.Reader(labels_at={unknown!r})"
    )


def _has_rows(x: Any) -> bool:
    array = isinstance(x, Tensor | np.ndarray) and x.ndim > 0
    return array or are_texts(x)


def are_numbers(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


def _are_tokens(item: Any) -> bool:
    whole = isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32)
    return whole and item.ndim == 2


def in_pieces(loader: Any, rows: int = 32) -> Any:
    """A list of batches with large batches of raw texts cut into smaller ones; any other loader as it is.

    Example:
        >>> in_pieces([(["a", "b", "c"], [0, 1, 0])], rows=2)
        [(['a', 'b'], [0, 1]), (['c'], [0])]
    """
    if not isinstance(loader, list | tuple):
        return loader
    return [piece for item in loader for piece in _pieces(item, rows)]


def _pieces(item: Any, rows: int) -> list[Any]:
    if are_texts(item):
        return _cut(item, rows)
    if not isinstance(item, tuple | list) or not item or not are_texts(item[0]):
        return [item]
    sizes = {len(part) if hasattr(part, "__len__") else None for part in item}
    if len(sizes) > 1:
        return [item]
    return list(zip(*(_cut(part, rows) for part in item), strict=True))


def _cut(part: Any, rows: int) -> list[Any]:
    return [part[i : i + rows] for i in range(0, len(part), rows)]


def _from_mapping(item: Keywords, labels_at: LabelsAt, known: Known) -> Batch:
    keywords = dict(item)
    where = _label_key(keywords, labels_at, known)
    labels = keywords.pop(where) if where else None
    return Batch((), keywords, labels, "mapping", where)


def _label_key(keywords: Keywords, labels_at: LabelsAt, known: Known) -> str | None:
    names = known.names if known else ()
    if names and set(names) == set(keywords):
        return None
    if isinstance(labels_at, str):
        if labels_at not in keywords:
            keys = ", ".join(map(str, keywords))
            raise KeyError(f"labels_at={labels_at!r} is none of the batch's keys: {keys}")
        return labels_at
    free = [key for key in LABEL_KEYS if key in keywords and key not in names]
    filled = [key for key in free if keywords[key] is not None]
    empty = free if names else []  # no labels, and no input either
    return next(iter(filled or empty), None)


def _named_in_a_call(keywords: Keywords, network: nn.Module, known: Known) -> Keywords:
    """The inputs among the keywords of a call. What has a usual name of labels is an input all the same if
    the network takes it and had its labels elsewhere; not ``labels``, which Hugging Face's networks take for
    their loss.
    """
    key = _label_key(keywords, None, known)
    if known is not None and key not in ("labels", known.labels_at):
        taken = _parameters_of(network)[0]
        key = None if taken is None or key in taken else key
    return {name: _tensors(x) for name, x in keywords.items() if name != key}


def _from_tuple(item: Inputs, labels_at: LabelsAt, known: Known) -> Batch:
    if len(item) == 0:
        raise ValueError(
            "the loader gave an empty tuple; expected (inputs, labels), inputs alone, or a mapping"
        )
    first_named = isinstance(item[0], Mapping)
    if known and len(item) == known.count and not first_named:
        return Batch(item, form="tuple")
    at = _label_position(labels_at, len(item))
    inputs, (labels, *extra) = item[:at], item[at:]
    if len(item) == 1:
        inputs, labels = item, None
    if first_named and len(inputs) == 1:
        inner = _from_mapping(item[0], labels_at, known)
        return replace(inner, labels=inner.labels if labels is None else labels, form="pair")
    return Batch(inputs, {}, labels, "tuple", at, tuple(extra))


def _label_position(labels_at: LabelsAt, n: int) -> int:
    at = labels_at if isinstance(labels_at, int) else -1
    if at not in range(-n, n):
        raise IndexError(f"labels_at={labels_at} is not a position in a batch of {n} items")
    return at % n


def _names_of(network: nn.Module) -> tuple[str, ...]:
    """Names that a network's forward takes; none where it takes any."""
    return _parameters_of(network)[0] or ()


def _parameters_of(network: nn.Module) -> tuple[tuple[str, ...] | None, float]:
    """Names that a network's forward takes (None: any), and how many inputs by position."""
    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):
        return None, math.inf
    positional, either, several, named, any_name = inspect._ParameterKind
    kinds = [p.kind for p in parameters]
    by_position = sum(kind in (positional, either) for kind in kinds)
    names = tuple(p.name for p in parameters if p.kind in (either, named))
    most = math.inf if several in kinds else by_position
    return None if any_name in kinds else names, most


def _tensors(value: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Any:
    """NumPy arrays of numbers as tensors, also inside a tuple or mapping; all of them on ``device``, and the
    floating-point ones as ``dtype``; None leaves them as they are.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        refuse_masked(value, "inputs")
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, PackedSequence):
        return value._replace(data=_tensors(value.data, device, dtype))
    if isinstance(value, Mapping):
        return {key: _tensors(x, device, dtype) for key, x in value.items()}
    if not isinstance(value, tuple | list):
        return value
    parts = [_tensors(x, device, dtype) for x in value]
    named = hasattr(value, "_fields")
    return type(value)(*parts) if named else type(value)(parts)


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


def _join_well(batches: Sequence[Batch]) -> bool:
    layouts = set(map(_layout, batches))
    if len(layouts) > 1 or None in layouts:
        return False
    rows = sum(len(batch.labels) for batch in batches)
    size = sum(x.nbytes for batch in batches for x in batch._members())
    return rows <= ROWS and size <= BYTES


def _layout(batch: Batch) -> tuple[Any, ...] | None:
    """What batches to be joined have in common; None of one that holds more than tensors of its samples."""
    n, parts = len(batch.labels), batch._members()
    if not all(isinstance(x, Tensor) and x.shape[:1] == (n,) for x in parts):
        return None
    shapes = [x.shape[1:] for x in parts]
    return tuple(batch.keywords), len(batch.inputs), batch.form, len(batch.extra), *shapes


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    members = zip(*map(Batch._members, batches), strict=True)
    return batches[0]._with_members(list(map(torch.cat, members)))


def _taken(x: Any, rows: slice | Tensor) -> Any:
    """Rows of an array, or members of a list of texts or labels."""
    if isinstance(x, Tensor | np.ndarray):
        return x[rows]
    return [x[i] for i in torch.arange(len(x))[rows].tolist()]
