"""From features to GP rows: the layer-structured covariances of the paper and its relatives, by name.

``single, rio, red, global, class, concat, sum`` see one row per sample. ``ml, hl, additive, icm, lcm`` and
``nested`` see one row per sample and layer, ``x_(i,l) = [pad(f_i^(l)); s_i; l]``, all with the sample's
residual as target.

| name | covariance |
|---|---|
| single | ``k(f, f')`` of one layer |
| rio | ``k(f, f') + k(s, s')`` of one layer |
| red | ARD kernels on ``f`` and on the whole softmax vector |
| ml | ``k(f, f') + k(s, s') + B[l, l']``, ``B = a 11' + diag(b)`` (or ``W W' + diag(v)``) |
| hl | ``k([f,s]) + [l = l'] k'([f,s])`` |
| additive | ``k([f,s]) + [l = l'] k_l([f,s])`` |
| icm, lcm | ``sum_q k_q([f,s]) B_q[l, l']``; with ``rank=0`` the reduced ``a k + [l = l'] b_l k`` |
| nested | ``k_0 + sum_j [g_j = g_j'] k_j``; groups are layer, predicted class, or class within layer |
| global | ``k([f^(1),s])`` of the first layer |
| class | ``k([f^(1),s]) + [c = c'] k'([f^(1),s])``, ``c`` the predicted class |
| concat | one kernel on all layers and the confidence side by side |
| sum | ``sum_l k_l(f^(l)) + k(s, s')`` |

``class_offset`` adds ``v [c = c']`` to any of them: an index kernel over the predicted class.

What a layerwise GP is fitted to: rows, targets, weights and mean of the observations, made in one place.

A fit, an update, and a pass over a store that does not fit into memory all see their samples through
`observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from salgp.features import Features
from salgp.gp.covariance import ARD, Constant, Covariance, Index, Product, Same, Stationary, Sum, kernel_on
from salgp.gp.kernels import Rows
from salgp.io import storable

__all__ = ["observe", "rows_of", "structure"]

STACKED = ("ml", "hl", "additive", "icm", "lcm", "nested")
STRUCTURES = ("single", "rio", "red", "global", "class", "concat", "sum", *STACKED)


@storable
@dataclass(frozen=True)
class Structure:
    """A covariance together with how features become its rows.

    Args:
        covariance: the formula.
        layers: names of the layers it reads.
        stacked: one row per sample and layer, or one per sample?
        terms: names of the summands that are independent corrections (``sum`` only).
        groups: group names a row carries.
    """

    covariance: Covariance
    layers: tuple[str, ...]
    stacked: bool
    terms: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stacked and self.terms:
            raise ValueError(f"terms {self.terms} are of samples, not of stacked rows")

    @property
    def has_layer_terms(self) -> bool:
        """Does each layer (or term) have a correction of its own?"""
        return self.stacked or bool(self.terms) or len(self.layers) == 1

    def split(self) -> tuple[Covariance | None, Covariance | None]:
        """The part that knows no layers, and the part that depends on the layer."""
        terms = self.covariance.terms if isinstance(self.covariance, Sum) else (self.covariance,)
        free = tuple(t for t in terms if not t.uses_group("layer"))
        local = tuple(t for t in terms if t.uses_group("layer"))
        return (Sum(free) if free else None), (Sum(local) if local else None)

    @property
    def repeats(self) -> int:
        """Rows in which each sample's observation stands."""
        return len(self.layers) if self.stacked else 1


def structure(
    name: str,
    widths: Mapping[str, int],
    n_classes: int,
    *,
    kernel: str = "matern52",
    rank: int | None = None,
    n_latent: int = 2,
    groups: tuple[str, ...] = ("layer",),
    shared_offset: bool = True,
    class_offset: bool = False,
    confidence: bool = True,
) -> Structure:
    """Build the structure called ``name`` for layers of the given widths.

    Args:
        name: one of `STRUCTURES`.
        widths: layer name -> width.
        n_classes: of the network.
        kernel: base kernel.
        rank: of ``B``; 0 for ``a 11' + diag(b)``; None for 0 in ``ml`` and 1 in ``icm`` and ``lcm``.
        n_latent: terms of ``lcm``.
        groups: levels of ``nested``.
        shared_offset: does the global prediction of ``ml`` keep ``a``?
        class_offset: add an offset for each predicted class?
        confidence: does ``sum`` have a term of the confidence?

    Example:
        >>> structure("ml", {"conv1": 4, "conv2": 2}, 10).covariance.reads() == {
        ...     ("features", "squared"),
        ...     ("confidence", "squared"),
        ... }
        True
    """
    if name not in STRUCTURES:
        raise ValueError(f"unknown covariance {name!r}; choose from {', '.join(STRUCTURES)}")
    if name in ("single", "rio", "red") and len(widths) != 1:
        raise ValueError(f"covariance {name!r} reads exactly one layer, got {len(widths)}; select it first")
    if kernel == "linear" and name in ("additive", "icm", "lcm"):
        raise ValueError(f"covariance {name!r} needs a kernel with a lengthscale, not 'linear'")
    layers = tuple(widths)
    if name == "nested":
        structure = _nested(layers, kernel, tuple(groups))
    elif name == "sum":
        structure = _sum(layers, kernel, confidence)
    elif name == "class":
        structure = _by_class(layers, "first", kernel)
    else:
        size = _Size(len(layers), max(widths.values()), n_classes, rank, n_latent, shared_offset)
        structure = _plain(name, layers, _FORMULAS[name](kernel, size))
    return _with_class_offset(structure) if class_offset else structure


def _plain(name: str, layers: tuple[str, ...], covariance: Covariance) -> Structure:
    stacked = name in STACKED
    return Structure(covariance, layers, stacked, (), ("layer",) if stacked else ())


@dataclass(frozen=True)
class _Size:
    """What the formulas below depend on besides the kernel.

    Args:
        layers: number of layers.
        width: of the widest.
        classes: of the network.
        rank: of ``B``; None for each formula's own.
        latent: terms of ``lcm``.
        shared_offset: does the global prediction of ``ml`` keep ``a``?
    """

    layers: int
    width: int
    classes: int
    rank: int | None
    latent: int
    shared_offset: bool


def _rio(kernel: str, size: _Size) -> Covariance:
    return kernel_on("features", kernel) + kernel_on("confidence", kernel)


def _red(kernel: str, size: _Size) -> Covariance:
    """Its kernels are ARD whatever ``kernel`` is, which must be a known one all the same."""
    kernel_on("features", kernel)
    return ARD("features", size.width) + ARD("softmax", size.classes)


def _ml(kernel: str, size: _Size) -> Covariance:
    among = Index("layer", size.layers, size.rank or 0, keep_shared=size.shared_offset)
    return kernel_on("features", kernel) + kernel_on("confidence", kernel) + among


def _hl(kernel: str, size: _Size) -> Covariance:
    local = Product((Same("layer"), kernel_on("joint", kernel, "local")))
    return kernel_on("joint", kernel, "global") + local


def _additive(kernel: str, size: _Size) -> Covariance:
    local = Stationary("joint", kernel, "local", per="layer", n_groups=size.layers)
    return kernel_on("joint", kernel, "global") + local


_FORMULAS: dict[str, Callable[[str, _Size], Covariance]] = {
    "single": lambda kernel, size: kernel_on("features", kernel),
    "rio": _rio,
    "red": _red,
    "global": lambda kernel, size: kernel_on("first", kernel),
    "concat": lambda kernel, size: kernel_on("concat", kernel),
    "ml": _ml,
    "hl": _hl,
    "additive": _additive,
    "icm": lambda kernel, size: _coregionalised(kernel, size, 1),
    "lcm": lambda kernel, size: _coregionalised(kernel, size, size.latent),
}


def rows_of(structure: Structure, features: Features) -> Rows:
    """Rows of the given features: blocks ``(n, d)``, or ``(n, L, d)`` where the structure is stacked."""
    names = {block for block, _ in structure.covariance.reads()}
    blocks = {name: _block(name, structure, features) for name in sorted(names)}
    return Rows(blocks, {name: _group(name, structure, features) for name in structure.groups})


def _block(name: str, structure: Structure, features: Features) -> Tensor:
    s = features.probs.double().amax(dim=1, keepdim=True)
    if name.startswith("layer:"):
        return features.layers[name.removeprefix("layer:")]
    if name == "softmax":
        return features.probs.double()
    if name == "first":
        return torch.cat([features.layers[structure.layers[0]].double(), s], dim=1)
    if name == "concat":
        return torch.cat([*(features.layers[k].double() for k in structure.layers), s], dim=1)
    if not structure.stacked:
        return s if name == "confidence" else features.layers[structure.layers[0]]
    L = len(structure.layers)
    if name == "confidence":
        return s[:, None, :].expand(-1, L, -1)
    width = max(features.layers[k].shape[1] for k in structure.layers)
    padded = torch.stack([_pad(features.layers[k], width) for k in structure.layers], dim=1)
    return (
        padded if name == "features" else torch.cat([padded.double(), s[:, None, :].expand(-1, L, -1)], dim=2)
    )


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))


def _group(name: str, structure: Structure, features: Features) -> Tensor:
    n, L = features.logits.shape[0], len(structure.layers)
    layer = torch.arange(L, device=features.logits.device).expand(n, L)
    label = features.label
    if not structure.stacked:
        return label
    return {
        "layer": layer,
        "class": label[:, None].expand(n, L),
        "layer/class": layer * features.n_classes + label[:, None],
    }[name]


def _coregionalised(kernel: str, size: _Size, n_latent: int) -> Covariance:
    rank = 1 if size.rank is None else size.rank
    terms = [
        Product(
            (
                Stationary("joint", kernel, f"latent{q}", unit=True),
                Index("layer", size.layers, rank, f"layer{q}"),
            )
        )
        for q in range(n_latent)
    ]
    return terms[0] if n_latent == 1 else Sum(tuple(terms))


def _sum(layers: tuple[str, ...], kernel: str, confidence: bool) -> Structure:
    terms: tuple[Covariance, ...] = tuple(kernel_on(f"layer:{k}", kernel) for k in layers)
    names = layers
    if confidence:
        terms, names = (*terms, kernel_on("confidence", kernel)), (*layers, "confidence")
    return Structure(Sum(terms), layers, False, names)


def _nested(layers: tuple[str, ...], kernel: str, groups: tuple[str, ...]) -> Structure:
    known = ("layer", "class", "layer/class")
    if not groups or any(g not in known for g in groups):
        raise ValueError(f"groups of a nested covariance must come from {known}, got {groups}")
    if groups == ("class",):
        return _by_class(layers, "concat", kernel)
    locals_ = [Product((Same(g), kernel_on("joint", kernel, f"local-{g.replace('/', '-')}"))) for g in groups]
    return Structure(Sum((kernel_on("joint", kernel, "global"), *locals_)), layers, True, (), groups)


def _by_class(layers: tuple[str, ...], block: str, kernel: str) -> Structure:
    """One row per sample; a function shared by all classes, and one of each predicted class."""
    local = Product((Same("class"), kernel_on(block, kernel, "local-class")))
    return Structure(Sum((kernel_on(block, kernel, "global"), local)), layers, False, (), ("class",))


def _with_class_offset(structure: Structure) -> Structure:
    """The same structure with an unknown number for each predicted class added."""
    offset = Product((Same("class"), Constant("predicted-class")))
    terms = structure.covariance.terms if isinstance(structure.covariance, Sum) else (structure.covariance,)
    groups = structure.groups if "class" in structure.groups else (*structure.groups, "class")
    names = (*structure.terms, "predicted class") if structure.terms else ()
    return replace(structure, covariance=Sum((*terms, offset)), groups=groups, terms=names)


LIKELIHOODS = ("gaussian", "bernoulli")


@dataclass(frozen=True, eq=False)
class Observations:
    """Samples as a GP sees them.

    Args:
        rows: ``N`` flat rows; a stacked structure has one per sample and layer.
        target: ``(N,)`` residuals (Gaussian) or correctness (Bernoulli).
        weight: of each row in the likelihood.
        design: ``(N, p)`` columns of the parametric mean of the log-odds; ``(N, 0)`` where the mean is zero.
    """

    rows: Rows
    target: Tensor
    weight: float
    design: Tensor

    def offset(self, mean_weights: Tensor) -> Tensor | None:
        """``(N,)`` parametric log-odds, or None where the mean is zero."""
        return self.design @ mean_weights if self.design.shape[1] else None


def observe(
    structure: Structure,
    features: Features,
    labels: Tensor,
    likelihood: str,
    tempering: bool = False,
    design: Tensor | None = None,
) -> Observations:
    """Observations of labelled samples.

    Args:
        structure: covariance and row layout.
        features: of the samples.
        labels: ``(n,)`` true classes.
        likelihood: ``gaussian`` on the residual, ``bernoulli`` on correctness.
        tempering: weigh each of a sample's ``L`` rows by ``1/L``.
        design: ``(n, p)`` columns of a Bernoulli likelihood's mean, by default those of `log_odds_design`.
    """
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood must be 'gaussian' or 'bernoulli', got {likelihood!r}")
    repeats = structure.repeats
    weight = 1.0 / repeats if tempering else 1.0
    rows = flat_rows(structure, features)
    if likelihood == "gaussian":
        target = features.residual(labels).double().repeat_interleave(repeats)
        return Observations(rows, target, weight, target.new_zeros(len(target), 0))
    columns = log_odds_design(features) if design is None else design
    target = features.correct(labels).double().repeat_interleave(repeats)
    return Observations(rows, target, weight, columns.repeat_interleave(repeats, 0))


def flat_rows(structure: Structure, features: Features) -> Rows:
    """Rows of the features, one after the other."""
    rows = rows_of(structure, features)
    return rows.flatten() if structure.stacked else rows


def log_odds_design(features: Features, limit: float = 12.0) -> Tensor:
    """Columns of the parametric mean: one, and ``logit(s)`` computed from the logits without cancellation."""
    z = features.logits.double()
    rest = z.scatter(1, features.label[:, None], -torch.inf).logsumexp(dim=1)
    return torch.stack([torch.ones_like(rest), (z.amax(dim=1) - rest).clamp(-limit, limit)], dim=1)
