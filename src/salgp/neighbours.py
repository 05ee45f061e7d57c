"""The one nearest-neighbour search: exact, in blocks, fast in single precision and right in double.

Candidates are found by matrix products in single precision on centred and scaled data. A few more than asked
for are kept, and their distances are computed again from the differences in the precision of the data: a
duplicate is at distance 0 whatever the size of the features, and a rounding error of the first step can only
hurt where more neighbours than the spare ones are equally far to seven digits. Whoever scores millions may
leave out that second step.

`ClassIndex` holds points of one or more spaces, sorted by class. Layers of a network are such spaces: padded
with zeros to one width they are searched together, which for a single sample costs as much as one of them.
Of the classes only two sides matter, the class asked for and all others, so that a thousand classes cost no
more than two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

__all__ = [
    "BLOCK",
    "ClassDistances",
    "ClassIndex",
    "class_distances",
    "nearest",
    "nearest_of_classes",
    "side_distances",
]

CHUNK_ENTRIES = 4_000_000
"""Distances held at once: so many that starting an operation costs little beside it."""
FEWEST_ROWS = 32
"""Rows compared at once all the same, up to 16 times those distances."""
SPARE = 3
"""Candidates kept beyond those asked for."""
BLOCK = 32
"""Columns of which only the smallest is looked at first, where there is much to look through."""
MANY = 40_000
"""Entries from which that pays."""
SHORT = 512
"""Columns up to which a row is sorted whole where only its smallest entries are wanted."""
ROWS_PER_CLASS = 64
"""Samples per class from which those of one class are compared together."""
TABLE_ENTRIES = 1_000_000
"""Most entries of the table of every class's columns; beyond, columns are counted for each sample."""


def nearest(
    query: Tensor, reference: Tensor, k: int, *, leave_one_out: bool = False
) -> tuple[Tensor, Tensor]:
    """The ``k`` nearest reference rows of each query row, nearest first.

    Args:
        query: ``(n, d)``.
        reference: ``(m, d)``.
        k: number of neighbours; fewer come back where the reference has fewer rows.
        leave_one_out: the query *is* the reference; a row is not its own neighbour.

    Returns:
        Distances ``(n, k)`` and row numbers ``(n, k)``.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [3.0]])
        >>> nearest(x, x, 1, leave_one_out=True)
        (tensor([[1.],
                [1.],
                [2.]]), tensor([[1],
                [0],
                [1]]))
    """
    k = min(k, len(reference) - int(leave_one_out))
    if k < 1:
        raise ValueError(
            f"no neighbours to compare with: the reference has {len(reference)} row(s); give a "
            f"larger reference or calibration set"
        )
    index = ClassIndex.build(reference[None], torch.zeros(len(reference), dtype=torch.long))
    own = torch.arange(len(query), device=query.device) if leave_one_out else None
    parts = [(query.new_zeros(0, k), torch.zeros(0, k, dtype=torch.long, device=query.device))]
    for rows in _chunks(len(query), len(reference)):
        D = index.compare(query[None, rows], None if own is None else own[rows])
        near, column = _smallest(D, min(k + SPARE, len(reference)))
        exact = index.exact(query[None, rows], near, column)
        distance, place = exact.sort(dim=-1, stable=True)
        parts.append((distance[0, :, :k], column.gather(-1, place)[0, :, :k]))
    return torch.cat([d for d, _ in parts]), torch.cat([i for _, i in parts])


def class_distances(
    query: Tensor, label: Tensor, reference: Tensor, classes: Tensor, *, leave_one_out: bool = False
) -> tuple[Tensor, Tensor]:
    """Distance of each query row to the nearest reference row of its own class, and of any other.

    Args:
        query: ``(n, d)``.
        label: ``(n,)`` class of each query row.
        reference: ``(m, d)``.
        classes: ``(m,)`` class of each reference row.
        leave_one_out: the query *is* the reference; a row is not its own neighbour.

    Returns:
        Two ``(n,)`` tensors, infinite where there is no such row.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [3.0]])
        >>> class_distances(torch.tensor([[0.5]]), torch.tensor([1]), x, torch.tensor([0, 0, 1]))
        (tensor([2.5000]), tensor([0.5000]))
    """
    if len(reference) == 0:
        return query.new_full((len(query),), torch.inf), query.new_full((len(query),), torch.inf)
    own = torch.arange(len(query), device=query.device) if leave_one_out else None
    sides = side_distances(ClassIndex.build(reference[None], classes), query[None], label, 1, own)
    return sides.own[0], sides.other[0]


@dataclass(frozen=True, eq=False)
class ClassDistances:
    """Mean distances to the nearest points in each of ``S`` spaces; infinite where there are none.

    Args:
        all: ``(3, S, n)``: of the class asked for, of all other classes, and of whatever class.
        complete: is it known that there are always points enough, so that none is infinite?
    """

    all: Tensor
    complete: bool = False

    @property
    def own(self) -> Tensor:
        """``(S, n)`` to the class asked for."""
        return self.all[0]

    @property
    def other(self) -> Tensor:
        """``(S, n)`` to all other classes."""
        return self.all[1]


def side_distances(
    index: ClassIndex,
    query: Tensor,
    label: Tensor,
    k: int,
    leave_out: Tensor | None = None,
    *,
    refine: bool = True,
    plenty: bool = False,
) -> ClassDistances:
    """Mean distance to the ``k`` nearest points of the class asked for, of other classes, and of any.

    Args:
        index: the points.
        query: ``(S, n, q)``, in each space.
        label: ``(n,)`` class asked for.
        k: neighbours averaged over; fewer where there are fewer.
        leave_out: ``(n,)`` point (in the order in which they were given) that a sample is not compared with;
            -1 for none.
        refine: compute the distances again from the differences; without, they are those of the search, right
            to three to six digits.
        plenty: promise that each label is a class with points, so that few samples need fewer looks at
            distances that might be infinite.

    Example:
        >>> points = torch.tensor([[[0.0], [1.0], [3.0]]])
        >>> index = ClassIndex.build(points, torch.tensor([0, 0, 1]))
        >>> side_distances(index, torch.tensor([[[0.5]]]), torch.tensor([1]), k=2).all.flatten()
        tensor([2.5000, 0.5000, 0.5000])
    """
    plenty = plenty and leave_out is None and k + index.spare <= index.fewest
    if torch.compiler.is_exporting():
        return ClassDistances(_sides_in_graph(index, query, label, k, plenty), plenty)
    if len(label) >= ROWS_PER_CLASS * len(index.size):
        return ClassDistances(_sides_by_class(index, query, label, k, leave_out, refine), plenty)
    parts = [
        _sides_of_block(index, query[:, rows], label[rows], k, _rows_of(leave_out, rows), refine, plenty)
        for rows in _chunks(query.shape[1], index.fast.shape[0] * index.fast.shape[2])
    ]
    if not parts:
        return ClassDistances(query.new_zeros(3, query.shape[0], 0))
    return ClassDistances(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2), plenty)


def nearest_of_classes(
    index: ClassIndex, query: Tensor, n_classes: int, leave_out: Tensor | None = None
) -> Tensor:
    """Distance ``(S, n, C)`` to the nearest point of every class, right to three to six digits; infinite
    where a class has none.

    Args:
        index: the points.
        query: ``(S, n, q)``, in each space.
        n_classes: ``C``.
        leave_out: ``(n,)`` point that a sample is not compared with; -1 for none.

    Example:
        >>> index = ClassIndex.build(torch.tensor([[[0.0], [1.0], [3.0]]]), torch.tensor([0, 0, 2]))
        >>> nearest_of_classes(index, torch.tensor([[[0.5]]]), 3).flatten()
        tensor([0.5000,    inf, 2.5000])
    """
    S, n, _ = query.shape
    near = torch.full((S, n, n_classes), torch.inf, device=query.device)
    runs = list(zip(index.start[:-1].tolist(), index.size[:-1].tolist(), strict=True))
    for rows in _chunks(n, index.fast.shape[0] * index.fast.shape[2]):
        D = index.compare(query[:, rows], _rows_of(leave_out, rows))
        for c, (start, size) in enumerate(runs):
            if size:
                near[:, rows, c] = D[:, :, start : start + size].amin(dim=-1)
        near[:, rows] = index.rough(query[:, rows], near[:, rows])
    return near


@dataclass(frozen=True, eq=False)
class ClassIndex:
    """Points of ``S`` spaces sorted by class, ready to be searched; made by `build`.

    Args:
        points: ``(S, m, q)`` as they were given, sorted by class.
        fast: ``(S, q, m')`` in single precision, centred and scaled, with ``m' - m`` points far away. A point
            is a column: so laid out, one sample is compared two to three times as fast.
        squares: ``(S, 1, m')`` squared lengths of those; infinite for the points far away.
        centre: ``(S, 1, q)``, taken off before the search.
        scale: number all coordinates are divided by before the search.
        rank: ``(m,)`` where each point went.
        start: ``(C + 1,)`` first point of each class; the last entry stands for a class without points.
        size: ``(C + 1,)`` number of points of each class.
        largest: the largest of those.
        columns: ``(C + 1, largest)`` the points of each class, filled up with the last one far away; None
            where that would be too large.
    """

    points: Tensor
    fast: Tensor
    squares: Tensor
    centre: Tensor | None
    scale: float
    rank: Tensor
    start: Tensor
    size: Tensor
    largest: int
    columns: Tensor | None

    @staticmethod
    def build(points: Tensor, classes: Tensor, *, white: bool = False) -> ClassIndex:
        """Sort and prepare points ``(S, m, q)`` of classes ``(m,)``; a class of -1 is nobody's own.

        ``white`` says that the points are centred and of moderate size already: then single precision is
        all that is kept of them.
        """
        classes = classes.to(points.device)
        order = classes.argsort(stable=True)
        known = classes[classes >= 0]
        size = torch.cat([torch.bincount(known), known.new_zeros(1)])
        start = size.cumsum(0) - size + (len(classes) - len(known))
        points = points[:, order]
        centre = None if white else points.mean(dim=1, keepdim=True)
        centred = points if centre is None else points - centre
        scale = 1.0 if white else max(float(centred.abs().amax()), 1e-30) if centred.numel() else 1.0
        fast, squares = _padded(centred.float() if white else (centred / scale).float())
        points = points.float() if white else points
        largest = max(int(size.max()), 1)
        columns = None
        if len(size) * largest <= TABLE_ENTRIES:
            columns = _columns(start, size, largest, fast.shape[-1] - 1)
        rank = order.argsort()
        return ClassIndex(points, fast, squares, centre, scale, rank, start, size, largest, columns)

    def own_columns(self, label: Tensor) -> Tensor:
        """Columns ``(n, largest)`` of the points of each label's class, filled up with one far away."""
        label = label.clamp_max(len(self.size) - 1)  # -1 counts from the end: no points there either
        if self.columns is not None:
            return self.columns[label]
        return _columns(self.start[label], self.size[label], self.largest, self.fast.shape[-1] - 1)

    def compare(self, query: Tensor, leave_out: Tensor | None = None, room: Tensor | None = None) -> Tensor:
        """Approximate squared distances ``(S, n, m')``, up to a constant per row; written into ``room``,
        which has as many rows or more, where it is given.
        """
        out = None if room is None else room[:, : query.shape[1]]
        D = torch.baddbmm(self.squares, self._scaled(query), self.fast, alpha=-2, out=out)
        if leave_out is not None:
            here = (leave_out >= 0).nonzero()[:, 0]
            D[:, here, self.rank[leave_out[here]]] = torch.inf
        return D

    def exact(self, query: Tensor, near: Tensor | None, column: Tensor) -> Tensor:
        """Distances ``(S, n, K)`` from ``query`` to the points in ``column``, from their differences;
        infinite where ``near`` is, if that is known at all.
        """
        chosen = self._chosen(column)
        distance = torch.linalg.vector_norm(chosen - query[:, :, None, :].to(chosen.dtype), dim=-1)
        return distance if near is None else distance.masked_fill(near == torch.inf, torch.inf)

    def _chosen(self, column: Tensor) -> Tensor:
        """Points ``(S, n, K, q)``."""
        S, n, K = column.shape
        m = self.points.shape[1]
        place = column.clamp_max(m - 1)
        if S > 1:
            place = place + self.first
        return self.points.view(S * m, -1).index_select(0, place.flatten()).view(S, n, K, -1)

    @cached_property
    def spaces(self) -> list[ClassIndex]:
        """An index for each space: distances in one of them fit into the cache, where many samples are
        compared.
        """
        S = len(self.fast)
        if S == 1:
            return [self]
        centres = [None] * S if self.centre is None else self.centre.split(1)
        parts = zip(self.points.split(1), self.fast.split(1), self.squares.split(1), centres, strict=True)
        return [replace(self, points=p, fast=f, squares=s, centre=c) for p, f, s, c in parts]

    @cached_property
    def fewest(self) -> int:
        """So many points has every class, and so many have all others together."""
        if len(self.size) < 3:
            return 0
        return min(int(self.size[:-1].min()), self.points.shape[1] - self.largest)

    @cached_property
    def for_graph(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What an exported graph holds: points ``(S, m, q)`` as rows, the last one far away, half their
        squared lengths ``(S, 1, m)``, the points of each class ``(C + 1, largest)`` and the class ``(m,)`` of
        each point, -1 where it is nobody's own.
        """
        m = self.points.shape[1]
        points = pad(self.points.float(), (0, 0, 0, 1))
        half_squares = points.square().sum(dim=-1) / 2
        half_squares[:, m] = torch.inf
        known = torch.arange(len(self.size), device=self.size.device).repeat_interleave(self.size)
        class_of = pad(pad(known, (m - len(known), 0), value=-1), (0, 1), value=-1)
        return points, half_squares[:, None, :], _columns(self.start, self.size, self.largest, m), class_of

    @cached_property
    def first(self) -> Tensor:
        """Number of each space's first point ``(S, 1, 1)``, counted through all spaces."""
        S, m, _ = self.points.shape
        return (m * torch.arange(S, device=self.points.device))[:, None, None]

    def rough(self, query: Tensor, near: Tensor) -> Tensor:
        """Distances of the search itself, from what `compare` gave."""
        q = self._scaled(query)
        return self.scale * (near + q.square().sum(dim=-1, keepdim=True)).clamp_min(0).sqrt()

    @property
    def spare(self) -> int:
        """Candidates kept beyond those asked for; fewer among points that lose nothing in single
        precision.
        """
        return SPARE if self.centre is not None else 1

    def _scaled(self, query: Tensor) -> Tensor:
        q = query if self.centre is None else query - self.centre
        return (q / self.scale if self.scale != 1.0 else q).float()


def _sides_in_graph(index: ClassIndex, query: Tensor, label: Tensor, k: int, plenty: bool) -> Tensor:
    """Mean distances ``(3, S, n)`` for an exported graph: few operations, since a runtime pays for each, and
    the points once, as rows. The nearest have the largest ``x . p - |p|^2 / 2``: runtimes are several times
    as fast with a product that has no factor.
    """
    points, half_squares, columns, class_of = index.for_graph
    S, m, q = points.shape
    first = m * torch.arange(S, device=points.device)[:, None, None]
    x = query.float()
    D = x @ points.mT - half_squares  # (S, n, m)
    own = columns.index_select(0, label if plenty else label.clamp_max(len(columns) - 1)).expand(S, -1, -1)
    own_near, where = D.gather(-1, own).topk(min(k, own.shape[-1]), dim=-1, sorted=False)
    others = torch.where(class_of == label[:, None], -torch.inf, D)
    other_near, other = others.topk(min(k, m), dim=-1, sorted=False)
    chosen = embedding(torch.cat([own.gather(-1, where), other], dim=-1) + first, points.view(-1, q))
    distance = torch.linalg.vector_norm(chosen - x[:, :, None, :], dim=-1)
    if plenty:
        anyone = _least(distance, k).mean(dim=-1, keepdim=True)
        return torch.cat([distance.unflatten(-1, (2, k)).mean(dim=-1), anyone], dim=-1).movedim(-1, 0)
    missing = torch.cat([own_near, other_near], dim=-1) == -torch.inf
    return _mean_of_least(_least_of_sides(distance.masked_fill(missing, torch.inf), own_near.shape[-1], k))


def _sides_by_class(
    index: ClassIndex, query: Tensor, label: Tensor, k: int, leave_out: Tensor | None, refine: bool
) -> Tensor:
    """The same for many samples, those with one label together: their own class is one run of columns."""
    order = label.argsort(stable=True)
    query, leave_out = query.index_select(1, order), _rows_of(leave_out, order)
    blocks = list(_blocks_of_labels(label[order], index.fast.shape[2]))
    most = max((rows.stop - rows.start for _, rows in blocks), default=0)
    room = index.fast.new_empty(1, most, index.fast.shape[2])  # for distances, used again and again
    found = []
    for space, x in zip(index.spaces, query.split(1), strict=True):
        parts = [
            _sides_of_block(space, x[:, rows], one, k, _rows_of(leave_out, rows), refine, room=room)
            for one, rows in blocks
        ]
        found.append(torch.cat(parts, dim=2))
    return torch.cat(found, dim=1).index_select(2, order.argsort())


def _blocks_of_labels(label: Tensor, width: int) -> Iterator[tuple[int, slice]]:
    """Runs of equal labels, at most so many rows that distances to ``width`` points have room."""
    labels, sizes = label.unique_consecutive(return_counts=True)
    first = 0
    for one, size in zip(labels.tolist(), sizes.tolist(), strict=True):
        for some in _chunks(size, width):
            yield one, slice(first + some.start, first + min(some.stop, size))
        first += size


def _rows_of(x: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    return None if x is None else x[rows]


def _sides_of_block(
    index: ClassIndex,
    query: Tensor,
    label: Tensor | int,
    k: int,
    leave_out: Tensor | None,
    refine: bool,
    plenty: bool = False,
    room: Tensor | None = None,
) -> Tensor:
    """Mean distances ``(3, S, n)`` of a few samples, with a label each or one for all."""
    D = index.compare(query, leave_out, room)
    most = k + (index.spare if refine else 0)
    take = _take_run if isinstance(label, int) else _take_own
    own_near, own_column = take(D, index, label, most, refine)  # type: ignore[arg-type]
    if not refine:
        distance = index.rough(query, torch.cat([own_near, _smallest_values(D, most)], dim=-1))
        return _mean_of_least(_least_of_sides(distance, own_near.shape[-1], k))
    other_near, other_column = _smallest(D, min(most, D.shape[-1]))
    near = torch.cat([own_near, other_near], dim=-1)
    assert own_column is not None
    column = torch.cat([own_column, other_column], dim=-1)
    distance = index.exact(query, None if plenty else near, column)
    least = _least_of_sides(distance, own_near.shape[-1], k)
    return least.mean(dim=-1) if plenty else _mean_of_least(least)


def _least_of_sides(distance: Tensor, n_own: int, k: int) -> Tensor:
    """The ``k`` smallest distances ``(3, S, n, k)`` to the own class, which are the first ``n_own``, to the
    others, and to all; infinite where there are fewer.
    """
    if 2 * n_own == distance.shape[-1]:
        both = _least(distance.unflatten(-1, (2, n_own)), k)
        own, other = both.unbind(dim=-2)
    else:
        own, other = (_least(side, k) for side in distance.tensor_split([n_own], dim=-1))
        both = torch.stack([own, other], dim=-2)
    return torch.stack([own, other, _least(both.flatten(-2), k)])


def _least(distance: Tensor, k: int) -> Tensor:
    if distance.shape[-1] == k:
        return distance
    if distance.shape[-1] < k:
        distance = pad(distance, (0, k - distance.shape[-1]), value=torch.inf)
    return distance.topk(k, dim=-1, largest=False, sorted=False).values


def _take_own(
    D: Tensor, index: ClassIndex, label: Tensor, k: int, places: bool
) -> tuple[Tensor, Tensor | None]:
    """The smallest entries among the own class's columns, which become infinite in ``D``, and their
    ``places`` if wanted.
    """
    column = index.own_columns(label).expand(len(D), -1, -1)
    entries = D.gather(-1, column)
    D.scatter_(-1, column, torch.inf)
    if not places:
        return _smallest_values(entries, k), None
    near, where = _smallest(entries, min(k, entries.shape[-1]))
    return near, column.gather(-1, where)


def _take_run(D: Tensor, index: ClassIndex, label: int, k: int, places: bool) -> tuple[Tensor, Tensor | None]:
    """`_take_own` for samples of one class, whose columns are a run."""
    known = 0 <= label < len(index.size) - 1
    start, size = (int(index.start[label]), int(index.size[label])) if known else (0, 0)
    if size < k:
        return _take_own(D, index, torch.full((D.shape[1],), label, device=D.device), k, places)
    entries = D[:, :, start : start + size]
    near, column = _smallest(entries, k) if places else (_smallest_values(entries, k), None)
    entries.fill_(torch.inf)
    return near, None if column is None else column + start


def _columns(start: Tensor, size: Tensor, most: int, far: int) -> Tensor:
    """Numbers from ``start`` on, ``(n, most)``, and ``far`` where there are no more."""
    place = torch.arange(most, device=start.device)
    return torch.where(place < size[:, None], start[:, None] + place, far)


def _smallest(D: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` smallest entries of each row and their columns, in no order.

    In long rows the ``k`` smallest lie in the ``k`` blocks with the smallest minima: a minimum without its
    place is several times faster to find than one with it.
    """
    m = D.shape[-1]
    if m % BLOCK or m < BLOCK * k or D.numel() < MANY:
        return D.topk(k, dim=-1, largest=False, sorted=False)
    chosen, entries = _nearest_blocks(D, k)
    near, where = entries.topk(k, dim=-1, largest=False, sorted=False)
    return near, chosen.gather(-1, where // BLOCK) * BLOCK + where % BLOCK


def _smallest_values(D: Tensor, k: int) -> Tensor:
    """The ``k`` smallest entries of each row alone; NumPy sorts short rows several times as fast as torch
    finds the largest.
    """
    m = D.shape[-1]
    blocks = m % BLOCK == 0 and m >= BLOCK * k
    if D.device.type != "cpu" or D.numel() < MANY or not (blocks or m <= SHORT):
        return D.topk(min(k, m), dim=-1, largest=False, sorted=False).values
    entries = _nearest_blocks(D, k)[1] if blocks and m > SHORT else D
    return torch.from_numpy(np.sort(entries.numpy(), axis=-1)[..., :k])


def _nearest_blocks(D: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` blocks of each row with the smallest minima, and their entries ``(..., k BLOCK)``."""
    count = D.shape[-1] // BLOCK
    blocks = D.unflatten(-1, (count, BLOCK))
    least = blocks.amin(dim=-1)
    if D.device.type != "cpu" or count <= k:
        chosen = least.topk(k, dim=-1, largest=False, sorted=False).indices
    else:  # NumPy is two to three times as fast
        chosen = torch.from_numpy(np.argpartition(least.numpy(), k - 1, axis=-1)[..., :k])
    first = torch.arange(0, D.numel() // BLOCK, count, device=D.device).view(*D.shape[:-1], 1)
    entries = D.reshape(-1, BLOCK).index_select(0, (chosen + first).flatten())
    return chosen, entries.view(*D.shape[:-1], k * BLOCK)


def _mean_of_least(least: Tensor) -> Tensor:
    """Mean of the finite entries of each row; infinite where there are none."""
    if not torch.compiler.is_exporting() and bool(least.amax() < torch.inf):
        return least.mean(dim=-1)
    finite = least < torch.inf
    count = finite.sum(dim=-1)
    mean: Tensor = least.where(finite, 0.0).sum(dim=-1) / count
    return mean.where(count > 0, torch.inf)


def _padded(points: Tensor) -> tuple[Tensor, Tensor]:
    """Points as columns, filled up to whole blocks by points that are never near, at least one; and all
    squared lengths.
    """
    squares = points.square().sum(dim=-1)
    missing = BLOCK - points.shape[1] % BLOCK
    columns = pad(points.mT, (0, missing))
    squares = pad(squares, (0, missing), value=torch.inf)
    return columns.contiguous(), squares[:, None, :].contiguous()


def _chunks(n: int, width: int) -> Iterator[slice]:
    """Rows at a time."""
    width = max(width, 1)
    step = max(1, CHUNK_ENTRIES // width, min(FEWEST_ROWS, 16 * CHUNK_ENTRIES // width))
    return (slice(i, i + step) for i in range(0, n, step))
