"""Two questions to every layer: does it agree with the predicted class, and has it seen such input before?

Both are answered by distances to reference samples, usually the network's training set, in a space of its own
for each layer: features are scaled to unit length (the direction carries the meaning, the length mostly
brightness and contrast), then centred and whitened along at most ``width`` principal directions. With
``d_own``, ``d_other`` and ``d_any`` the mean distances to the ``k`` nearest reference points of the
predicted class, of other classes, and of any,

    agreement = log d_other - log d_own,        novelty = log d_any.

A reference need not keep the training set: `salgp.calibrators.evidence.condense` lists the forms. With class
statistics the distances are Mahalanobis distances to the classes. A sample whose predicted class has no
reference point is neither supported nor contradicted; its agreement is the usual one, the median over
reference samples. Calibration samples may serve as their own reference, see
`salgp.calibrators.evidence.left_out`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from salgp.calibrators.evidence.condense import (
    FORMS,
    PRECISIONS,
    class_rows,
    class_statistics,
    few_points,
    packed_points,
    unpacked,
)
from salgp.features import Features
from salgp.logits import tell_nothing
from salgp.neighbours import ClassDistances, ClassIndex, nearest_of_classes, side_distances
from salgp.storage import storable

__all__ = [
    "Evidence",
    "FEW_ROWS",
    "LARGEST_LOG_RATIO",
    "LayerSpace",
    "NEAREST",
    "PLACE",
    "Reference",
    "WIDTH",
    "condensed_reference",
    "distances_to_classes",
    "layer_evidence",
    "make_reference",
    "place_and_length",
    "points_per_class",
    "principal_directions",
    "white_space",
    "wide",
]

NEAREST = 3
"""Neighbours averaged over."""
WIDTH = 64
"""Largest number of principal directions kept per layer."""
LARGEST_LOG_RATIO = 6.0
"""Agreement is kept within this bound; a copy of a reference sample would make it infinite."""
POINTS = 200
"""Points per class and layer that stand for a training set: what that costs is measured by
`benchmarks/reference.py`.
"""
PLACE = 16
"""Whitened coordinates of a layer by which a disturbed sample is told from an original."""
FEWEST_POINTS = 5
MOST_POINTS = 10_000
"""Points of a layer in all, where there are many classes."""
FACTOR_ENTRIES = 500_000
"""Most numbers in the covariances of the classes of one layer; beyond, the classes share one."""
FEW_ROWS = 64
"""Samples up to which all layers are projected at once."""
TYPICAL_ROWS = 256
"""Reference samples whose agreement tells the usual one."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the layers say about ``n`` predictions.

    Args:
        agreement: ``(n, L)``; positive where the layer sides with the predicted class.
        novelty: ``(n, L)``; large where the layer is far from all reference samples.
        place: ``(n, q L)`` the first `PLACE` whitened coordinates of every layer.
        length: ``(n,)`` of the last layer's features, before they are scaled to unit length.
    """

    agreement: Tensor
    novelty: Tensor
    place: Tensor
    length: Tensor

    def __getitem__(self, rows: Tensor) -> Evidence:
        return Evidence(self.agreement[rows], self.novelty[rows], self.place[rows], self.length[rows])


@storable
@dataclass(frozen=True, eq=False)
class LayerSpace:
    """Where distances of one layer are measured: unit length, centred, whitened.

    Args:
        centre: ``(d,)`` mean of the unit-length reference features.
        directions: ``(d, q)`` principal directions, each divided by its standard deviation.
        points: ``(m, q)`` reference points in that space, perhaps as whole numbers of steps.
        step: ``(q,)`` of the points' coordinates; None where they are stored as they are.
        factors: ``(m, q, q)`` or ``(1, q, q)``, of the covariances around the points where these are class
            means.
    """

    centre: Tensor
    directions: Tensor
    points: Tensor
    step: Tensor | None = None
    factors: Tensor | None = None

    @cached_property
    def precise(self) -> tuple[Tensor, Tensor]:
        """Directions, and the centre along them, in double precision."""
        directions = self.directions.double()
        return directions, self.centre.double() @ directions

    @cached_property
    def rough(self) -> tuple[Tensor, Tensor]:
        """The same in single precision."""
        return self.precise[0].float(), self.precise[1].float()

    def project(self, x: Tensor, precise: bool = True) -> Tensor:
        """Coordinates ``(n, q)`` of features ``(n, d)``, in double precision, or single."""
        directions, centre = self.precise if precise else self.rough
        x = x.to(directions)
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)
        return (x @ directions) / length - centre

    def to(self, device: torch.device) -> LayerSpace:
        """The same space on another device."""
        parts = (self.centre, self.directions, self.points, self.step, self.factors)
        return LayerSpace(*(None if x is None else x.to(device) for x in parts))  # type: ignore[arg-type]


@storable
@dataclass(frozen=True, eq=False)
class Reference:
    """Reference points of every layer, and their classes.

    Args:
        layers: name of the layer -> its space.
        classes: ``(m,)`` class of each reference point.
        k: neighbours averaged over.
        form: one of `salgp.calibrators.evidence.condense.FORMS`.
        typical: ``(L,)`` usual agreement, for samples of a class without reference points.
    """

    layers: dict[str, LayerSpace]
    classes: Tensor
    k: int = NEAREST
    form: str = "full"
    typical: Tensor | None = None

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def n_entries(self) -> int:
        """Points of all layers: so many distances does one sample have."""
        return len(self.classes) * len(self.layers)

    @cached_property
    def index(self) -> ClassIndex:
        """The points of all layers made ready for the search, once: that costs more than comparing a single
        sample with them.
        """
        return ClassIndex.build(self._side_by_side, self.classes, white=True)

    @cached_property
    def directions(self) -> tuple[list[Tensor], Tensor]:
        """Directions ``(d, q)`` of each layer, and all centres along them ``(L, q)``, in double precision;
        narrow ones filled up with zeros.
        """
        spaces = [space.precise for space in self.layers.values()]
        q = max(D.shape[1] for D, _ in spaces)
        return [_wider(D, q) for D, _ in spaces], torch.stack([_wider(c, q) for _, c in spaces])

    @cached_property
    def single_directions(self) -> tuple[list[Tensor], Tensor]:
        """The same in single precision."""
        directions, centre = self.directions
        return [D.float() for D in directions], centre.float()

    @cached_property
    def members(self) -> Tensor:
        """Which numbers are of which layer, ``(d_1 + ... + d_L, L)``, 1 or 0, in double precision."""
        return torch.block_diag(
            *(space.directions.new_ones(len(space.directions), 1) for space in self.layers.values())
        ).double()

    @cached_property
    def places(self) -> tuple[int, ...]:
        """How many coordinates of each layer tell its place."""
        return tuple(min(space.directions.shape[1], PLACE) for space in self.layers.values())

    @cached_property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Means times factors ``(L, C, q)`` and factors ``(L, C or 1, q, q)`` of the classes, in single
        precision.
        """
        q = self._side_by_side.shape[-1]
        factors = torch.stack(
            [_wider(s.factors.float(), q, 2) for s in self.layers.values() if s.factors is not None]
        )
        return (self._side_by_side[:, :, None, :] @ factors)[:, :, 0, :], factors

    def serves_single(self, n_classes: int) -> bool:
        """Are there points in the processor's memory, of every class more than are asked for?"""
        if self.form == "statistics" or not self.classes.is_cpu or not self.layers:
            return False
        return len(self.index.size) == n_classes + 1 and self.k + self.index.spare <= self.index.fewest

    @cached_property
    def ready(self) -> bool:
        """True, and all that is worked out once is."""
        return bool(
            self.directions
            and (self.statistics if self.form == "statistics" else self.index.first is not None)
        )

    @cached_property
    def ready_for_graph(self) -> bool:
        """True, and all that an exported graph holds is worked out."""
        return bool(
            self.single_directions
            and (self.statistics if self.form == "statistics" else self.index.for_graph) is not None
        )

    @property
    def _side_by_side(self) -> Tensor:
        """Points of all layers ``(L, m, q)``, narrow ones filled up with zeros."""
        points = [unpacked(s.points, s.step) for s in self.layers.values()]
        q = max(x.shape[1] for x in points)
        return torch.stack([_wider(x, q) for x in points])

    def to(self, device: torch.device) -> Reference:
        """The same reference on another device."""
        if self.classes.device == device:
            return self
        spaces = {name: space.to(device) for name, space in self.layers.items()}
        typical = None if self.typical is None else self.typical.to(device)
        return Reference(spaces, self.classes.to(device), self.k, self.form, typical)


def make_reference(
    features: Features,
    labels: Tensor,
    *,
    k: int = NEAREST,
    width: int = WIDTH,
    form: str = "full",
    size: int | None = None,
    precision: str = "half",
    seed: int = 0,
) -> Reference:
    """Build the spaces of all layers from reference samples.

    Args:
        features: of the reference samples, usually the network's training set.
        labels: ``(m,)`` their true classes.
        k: neighbours averaged over.
        width: largest number of principal directions per layer.
        form: what is kept of the samples: ``full``, ``sample``, ``herding``, ``prototypes`` or
            ``statistics``, see `salgp.calibrators.evidence.condense`.
        size: points per class and layer, of the forms from ``sample`` to ``prototypes``; by default 200, and
            fewer where there are more than 50 classes.
        precision: in which points are stored, ``single``, ``half`` or ``8-bit``.
        seed: of the choice.

    Returns:
        The reference; `layer_evidence` compares with it.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]), k=1)
        >>> len(reference), reference.layers["a"].points.shape
        (4, torch.Size([4, 2]))
    """
    spaces = {name: _space(x, _checked(width, "width")) for name, x in features.layers.items()}
    return condensed_reference(
        spaces, features, labels, k=k, form=form, size=size, precision=precision, seed=seed
    )


def condensed_reference(
    spaces: dict[str, LayerSpace],
    features: Features,
    labels: Tensor,
    *,
    k: int = NEAREST,
    form: str = "full",
    size: int | None = None,
    precision: str = "half",
    seed: int = 0,
) -> Reference:
    """The points that stand for reference samples, in spaces that are known already; see `make_reference`."""
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    most = points_per_class(size, features.n_classes)
    classes = labels.to(features.logits.device)
    condensed = [
        _condensed(space, features.layers[name], classes, form, most, precision, seed)
        for name, space in spaces.items()
    ]
    kept = dict(zip(spaces, (space for space, _ in condensed), strict=True))
    reference = Reference(kept, condensed[0][1] if condensed else classes, _checked(k, "k"), form)
    return replace(reference, typical=_typical_agreement(reference, features, classes))


def points_per_class(size: int | None, n_classes: int) -> int:
    """Points kept of each class: ``size``, or `POINTS`, and fewer where there are so many classes that a
    layer would have more than `MOST_POINTS`.

    Example:
        >>> points_per_class(None, 10), points_per_class(None, 1000), points_per_class(7, 1000)
        (200, 10, 7)
    """
    usual = max(FEWEST_POINTS, min(POINTS, MOST_POINTS // max(n_classes, 1)))
    return usual if size is None else _checked(size, "size")


def layer_evidence(
    reference: Reference, features: Features, own: Tensor | None = None, *, refine: bool = True
) -> Evidence:
    """Agreement and novelty of every layer.

    Args:
        reference: what to compare with.
        features: ``n`` samples with the reference's layers.
        own: ``(n,)`` reference row to leave out for each sample (-1: none), where the sample is part of the
            reference; for a ``full`` reference only.
        refine: False for all in single precision, at twice the speed; see `salgp.neighbours`.

    Returns:
        What they say, in double precision.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]), k=1)
        >>> seen = layer_evidence(
        ...     reference,
        ...     Features(
        ...         torch.tensor([[2.0, 0.0], [0.0, 2.0]]), {"a": torch.tensor([[9.0, 1.0], [9.0, 1.0]])}
        ...     ),
        ... )
        >>> (seen.agreement > 0).flatten()  # both look like class 0; the second is predicted as class 1
        tensor([ True, False])
    """
    if own is not None and reference.form != "full":
        raise ValueError(f"rows can be left out of a full reference only; this one holds {reference.form}")
    reference = reference.to(features.logits.device)
    query, length = _coordinates(reference, features, refine)
    if reference.form == "statistics":
        sides = _mahalanobis(reference, query, features.label)
    else:
        plenty = len(reference.index.size) == features.n_classes + 1
        sides = side_distances(
            reference.index, query, features.label, reference.k, own, refine=refine, plenty=plenty
        )
    return _evidence(sides, reference.typical, _place(query, reference.places), length)


def place_and_length(reference: Reference, features: Features) -> tuple[Tensor, Tensor]:
    """What `Evidence` knows of samples besides their distances: ``place`` and ``length``."""
    reference = reference.to(features.logits.device)
    query, length = _coordinates(reference, features, True)
    return _place(query, reference.places), length


def distances_to_classes(reference: Reference, features: Features, own: Tensor | None = None) -> Tensor:
    """Distance ``(L, n, C)`` to the nearest reference point of every class the network knows, at every layer;
    infinite where a class has none. Arguments are those of `layer_evidence`.
    """
    reference = reference.to(features.logits.device)
    query, _ = _coordinates(reference, features, True)
    if reference.form == "statistics":
        found = _to_means(reference, query)
        D = found.new_full((*found.shape[:2], features.n_classes), torch.inf)
        return D.index_copy_(2, reference.classes, found)
    return nearest_of_classes(reference.index, query, features.n_classes, own)


def _coordinates(reference: Reference, features: Features, precise: bool) -> tuple[Tensor, Tensor]:
    """Coordinates ``(L, n, q)`` of all layers, narrow ones filled up with zeros, and the length ``(n,)`` of
    the last layer's features.

    Of a few samples lengths and centres are taken off in all layers at once.
    """
    layers = [features.layers[name] for name in reference.layers]
    if not torch.compiler.is_exporting() and len(features) > FEW_ROWS:
        found = [s.project(x, precise) for s, x in zip(reference.layers.values(), layers, strict=True)]
        q = max(x.shape[1] for x in found)
        return torch.stack([_wider(x, q) for x in found]), torch.linalg.vector_norm(wide(layers[-1]), dim=1)
    single = torch.compiler.is_exporting()  # the search works in single precision, as everything after it
    directions, centre = reference.single_directions if single else reference.directions
    layers = [x.to(centre) for x in layers]
    length = (torch.cat(layers, dim=1).square() @ reference.members.to(centre)).sqrt()  # (n, L)
    along = torch.cat([x @ D for x, D in zip(layers, directions, strict=True)], dim=1)
    query = along.unflatten(1, centre.shape) / length.clamp_min(1e-12)[:, :, None] - centre
    return query.transpose(0, 1), length[:, -1]


def _place(query: Tensor, widths: tuple[int, ...]) -> Tensor:
    if set(widths) == {PLACE}:
        return query[:, :, :PLACE].float().transpose(0, 1).flatten(1)
    return torch.cat([x[:, :width].float() for x, width in zip(query, widths, strict=True)], dim=1)


def _evidence(sides: ClassDistances, typical: Tensor | None, place: Tensor, length: Tensor) -> Evidence:
    distance = wide(sides.all.mT)  # (3, n, L)
    logs = distance.clamp(1e-9, 1e9).log()
    own, other, anyone = (logs[i] for i in range(3))  # one operation each in a graph, unbinding two
    agreement = (other - own).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if not sides.complete and (torch.compiler.is_exporting() or not bool((distance < torch.inf).all())):
        usual = torch.zeros_like(own[:1]) if typical is None else typical.to(own)
        agreement = torch.where((distance[:2] < torch.inf).all(dim=0), agreement, usual)
    return Evidence(agreement, anyone, place, length)


def wide(x: Tensor) -> Tensor:
    """In double precision; in a graph in single, since runtimes have few operations in double.

    Example:
        >>> wide(torch.zeros(1)).dtype
        torch.float64
    """
    return x.float() if torch.compiler.is_exporting() else x.double()


def _mahalanobis(reference: Reference, query: Tensor, label: Tensor) -> ClassDistances:
    """Distance to the predicted class, to the nearest other, and to the nearest of all."""
    D = _to_means(reference, query)
    is_own = label[:, None] == reference.classes
    own = D.masked_fill(~is_own, torch.inf).amin(dim=-1)
    other = D.masked_fill(is_own, torch.inf).amin(dim=-1)
    return ClassDistances(torch.stack([own, other, torch.minimum(own, other)]))


def _to_means(reference: Reference, query: Tensor) -> Tensor:
    """Mahalanobis distances ``(L, n, C)`` to the classes that have statistics."""
    means, factors = reference.statistics
    x = query.float()[:, None] @ factors  # (L, C or 1, n, q)
    return (x - means[:, :, None, :]).norm(dim=-1).mT


def _typical_agreement(reference: Reference, features: Features, classes: Tensor) -> Tensor | None:
    """Median agreement ``(L,)`` of some reference samples with the network's predictions; None where every
    class has reference samples enough.

    Where the samples came without class scores, the network is taken to predict their true ``classes``.
    """
    known = reference.classes[reference.classes >= 0]
    counts = torch.bincount(known, minlength=features.n_classes)
    if int(counts.min()) > 1 or not reference.layers:
        return None
    rows = torch.linspace(0, len(features) - 1, min(TYPICAL_ROWS, len(features))).long()
    rows = rows.to(reference.classes.device)
    if tell_nothing(features.logits):
        rows = rows[classes[rows] >= 0]
        true = one_hot(classes.clamp_min(0), features.n_classes)
        features = replace(features, logits=true.to(features.logits))
    some = features[rows]
    found = layer_evidence(reference, some, rows if reference.form == "full" else None).agreement
    own = counts[some.label] > int(reference.form == "full")
    return found[own].quantile(0.5, dim=0) if bool(own.any()) else found.new_zeros(found.shape[1])


def _condensed(
    space: LayerSpace, x: Tensor, classes: Tensor, form: str, size: int, precision: str, seed: int
) -> tuple[LayerSpace, Tensor]:
    """The space with what is kept of the samples, and its classes."""
    points = space.project(x)
    if form == "statistics":
        known = classes >= 0
        names, means, factors = class_statistics(points[known], classes[known], FACTOR_ENTRIES)
        return replace(space, points=means.float(), factors=factors.float()), names
    if form != "full":
        parts = [(c, few_points(points[rows], size, form, seed)) for c, rows in class_rows(classes)]
        points = torch.cat([p for _, p in parts])
        classes = torch.cat([classes.new_full((len(p),), c) for c, p in parts])
    kept, step = packed_points(points, precision)
    return replace(space, points=kept.contiguous(), step=step), classes


def _space(x: Tensor, width: int) -> LayerSpace:
    return white_space(*principal_directions(normalize(x.double(), dim=1)), width)


def principal_directions(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean ``(d,)`` of samples ``(n, d)``, variances ``(q,)`` along their principal directions, largest
    first, and these ``(d, q)``.

    Example:
        >>> _, variance, directions = principal_directions(
        ...     torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, 0.0]])
        ... )
        >>> variance, directions.abs()
        (tensor([1., 0.]), tensor([[0., 1.],
                [1., 0.]]))
    """
    centre = x.mean(dim=0)
    centred = x - centre
    if x.shape[1] > len(x):
        _, S, Vh = torch.linalg.svd(centred, full_matrices=False)
        return centre, S.square() / max(len(x) - 1, 1), Vh.T
    values, vectors = torch.linalg.eigh(centred.T @ centred / max(len(x) - 1, 1))
    return centre, values.flip(0).clamp_min(0), vectors.flip(1)


def white_space(
    centre: Tensor, variance: Tensor, directions: Tensor, width: int, ridge: float = 1e-3
) -> LayerSpace:
    """A space without points from a mean, and variances along principal directions, largest first."""
    kept = variance[:width] > 1e-6 * variance[0].clamp_min(1e-30)
    scale = (variance[:width] + ridge * variance[0]).clamp_min(1e-30).rsqrt()
    white = (directions[:, :width] * scale)[:, kept] if bool(kept.any()) else directions[:, :1]
    nothing = white.new_zeros(0, white.shape[1]).float()
    return LayerSpace(centre.float(), white.float().contiguous(), nothing)


def _wider(x: Tensor, q: int, axes: int = 1) -> Tensor:
    """Filled up with zeros to width ``q`` along the last axes."""
    missing = q - x.shape[-1]
    return x if missing == 0 else pad(x, (0, missing) * axes)


def _checked(value: int, name: str) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
