"""The paper's layer-structured covariances (ML, HL, ICM) and their relatives, and the rows they read.

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
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from salgp.features import Features
from salgp.gp.covariance import ARD, Covariance, Index, Same, Stationary, Sum, kernel_on
from salgp.gp.fitting import Observations
from salgp.gp.kernels import Rows
from salgp.io import storable

__all__ = ["Structure", "structure"]

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

    Example:
        >>> structure("ml", {"conv1": 4, "conv2": 2}, 10).covariance.reads() == {
        ...     ("features", "squared"),
        ...     ("confidence", "squared"),
        ... }
        True
    """
    _check(name, widths, kernel, groups)
    layers = tuple(widths)
    L, width = len(layers), max(widths.values())
    levels = {"class": ("class",), "nested": groups}.get(name, ("layer",) if name in STACKED else ())
    stacked = name in STACKED and levels != ("class",)
    terms = (*layers, "confidence") if name == "sum" else ()
    k = functools.partial(kernel_on, kernel=kernel)
    B = Index("layer", L, rank or 0, keep_shared=shared_offset)

    def icm(q: int) -> Covariance:
        shared = Stationary("joint", kernel, f"latent{q}", unit=True)
        return shared * Index("layer", L, 1 if rank is None else rank, f"layer{q}")

    def additive() -> Covariance:
        local = Stationary("joint", kernel, "local", per="layer", n_groups=L)
        return k("joint", name="global") + local

    formulas: dict[str, Callable[[], Covariance]] = {
        "single": lambda: k("features"),
        "rio": lambda: k("features") + k("confidence"),
        "red": lambda: ARD("features", width) + ARD("softmax", n_classes),
        "global": lambda: k("first"),
        "class": lambda: _nested(k, "first", levels),
        "concat": lambda: k("concat"),
        "sum": lambda: Sum(tuple(map(k, [*(f"layer:{x}" for x in layers), "confidence"]))),
        "ml": lambda: k("features") + k("confidence") + B,
        "hl": lambda: k("joint", name="global") + Same("layer") * k("joint", name="local"),
        "additive": additive,
        "icm": lambda: icm(0),
        "lcm": lambda: functools.reduce(operator.add, map(icm, range(n_latent))),
        "nested": lambda: _nested(k, "joint" if stacked else "concat", levels),
    }
    return Structure(formulas[name](), layers, stacked, terms, levels)


def _nested(k: Callable[..., Covariance], block: str, levels: Sequence[str]) -> Covariance:
    local = (Same(level) * k(block, name=f"local-{level.replace('/', '-')}") for level in levels)
    return Sum((k(block, name="global"), *local))


def _check(name: str, widths: Mapping[str, int], kernel: str, groups: tuple[str, ...]) -> None:
    if name not in STRUCTURES:
        raise ValueError(f"unknown covariance {name!r}; choose from {', '.join(STRUCTURES)}")
    kernel_on("", kernel)  # refuses an unknown one
    if name in ("single", "rio", "red") and len(widths) != 1:
        raise ValueError(f"covariance {name!r} reads exactly one layer, got {len(widths)}; select it first")
    if kernel == "linear" and name in ("additive", "icm", "lcm"):
        raise ValueError(f"covariance {name!r} needs a kernel with a lengthscale, not 'linear'")
    known = ("layer", "class", "layer/class")
    if name == "nested" and not (groups and set(groups) <= set(known)):
        raise ValueError(f"groups of a nested covariance must come from {known}, got {groups}")


def rows_of(structure: Structure, features: Features) -> Rows:
    """Rows of the given features: blocks ``(n, d)``, or ``(n, L, d)`` where the structure is stacked."""
    names = sorted({block for block, _ in structure.covariance.reads()})
    blocks = {name: _block(name, structure, features) for name in names}
    return Rows(blocks, {name: _group(name, structure, features) for name in structure.groups})


def _block(name: str, structure: Structure, features: Features) -> Tensor:
    if name.startswith("layer:"):
        return features.layers[name.removeprefix("layer:")]
    if name == "softmax":
        return features.probs.double()
    s = features.probs.double().amax(dim=1, keepdim=True)
    layers = [features.layers[layer] for layer in structure.layers]
    if name == "confidence":
        return s[:, None, :] if structure.stacked else s
    if name in ("first", "concat"):
        seen = layers[:1] if name == "first" else layers
        return torch.cat([*(x.double() for x in seen), s], dim=1)
    if not structure.stacked:
        return layers[0]
    width = max(x.shape[1] for x in layers)
    padded = [pad(x, (0, width - x.shape[1])) for x in layers]
    stacked = torch.stack(padded, dim=1)
    if name == "features":
        return stacked
    repeated = s[:, None, :].expand(-1, len(layers), -1)
    return torch.cat([stacked.double(), repeated], dim=2)


def _group(name: str, structure: Structure, features: Features) -> Tensor:
    label = features.label
    if not structure.stacked:
        return label
    n, L = label.shape[0], len(structure.layers)  # len() of a tensor is a constant in an exported graph
    label = label[:, None].expand(n, L)
    layer = torch.arange(L, device=label.device).expand_as(label)
    groups = {"layer": layer, "class": label, "layer/class": layer * features.n_classes + label}
    return groups[name]


def observe(structure: Structure, features: Features, labels: Tensor) -> Observations:
    """Rows and residuals of labelled samples, as a fit and an update see them."""
    target = features.residual(labels).double().repeat_interleave(structure.repeats)
    return Observations(rows_of(structure, features).flatten(), target)
