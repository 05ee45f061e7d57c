"""From features to GP rows: the layer-structured covariances of the paper and its relatives, by name.

``single, rio, red, concat, sum`` see one row per sample. ``ml, hl, additive, icm, lcm, nested`` see one row
per sample and layer, ``x_(i,l) = [pad(f_i^(l)); s_i; l]``, all with the sample's residual as target.

| name | covariance |
|---|---|
| single | ``k(f, f')`` of one layer |
| rio | ``k(f, f') + k(s, s')`` of one layer |
| red | ARD kernels on ``f`` and on the whole softmax vector |
| ml | ``k(f, f') + k(s, s') + B[l, l']``, ``B = a 11' + diag(b)`` (or ``W W' + diag(v)``) |
| hl | ``k([f,s]) + [l = l'] k'([f,s])`` |
| additive | ``k([f,s]) + [l = l'] k_l([f,s])`` |
| icm, lcm | ``sum_q k_q([f,s]) B_q[l, l']`` |
| nested | ``k_0 + sum_j [g_j = g_j'] k_j``; groups are layer, predicted class, or class within layer |
| concat | one kernel on all layers and the confidence side by side |
| sum | ``sum_l k_l(f^(l)) + k(s, s')`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.features import Features
from salgp.gp.covariance import ARD, Covariance, Index, Product, Rows, Same, Stationary, Sum
from salgp.storage import storable

__all__ = ["STACKED", "STRUCTURES", "Structure", "log_odds_design", "rows_of", "structure"]

STACKED = ("ml", "hl", "additive", "icm", "lcm", "nested")
STRUCTURES = ("single", "rio", "red", "concat", "sum", *STACKED)


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

    @property
    def has_layer_terms(self) -> bool:
        """Does each layer (or term) have a correction of its own?"""
        return self.stacked or bool(self.terms) or len(self.layers) == 1

    def split(self) -> tuple[Covariance | None, Covariance | None]:
        """The part shared by all layers, and the part that depends on the layer."""
        terms = self.covariance.terms if isinstance(self.covariance, Sum) else (self.covariance,)
        shared = tuple(t for t in terms if not t.uses_group("layer"))
        local = tuple(t for t in terms if t.uses_group("layer"))
        return (Sum(shared) if shared else None), (Sum(local) if local else None)


def structure(
    name: str,
    widths: Mapping[str, int],
    n_classes: int,
    *,
    kernel: str = "matern52",
    rank: int = 0,
    n_latent: int = 2,
    groups: tuple[str, ...] = ("layer",),
) -> Structure:
    """Build the structure called ``name`` for layers of the given widths.

    Example:
        >>> structure("ml", {"conv1": 4, "conv2": 2}, 10).covariance.reads() == {
        ...     ("features", "squared"),
        ...     ("confidence", "squared"),
        ... }
        True
    """
    if name not in STRUCTURES:
        raise ValueError(f"unknown covariance {name!r}; choose from {', '.join(STRUCTURES)}")
    layers, L = tuple(widths), len(widths)
    joint = Stationary("joint", kernel, "global")
    if name in ("single", "rio", "red") and L != 1:
        raise ValueError(f"covariance {name!r} reads exactly one layer, got {L}; select it first")
    if name == "nested":
        return _nested(layers, kernel, tuple(groups))
    if name == "sum":
        terms: tuple[Covariance, ...] = tuple(Stationary(f"layer:{k}", kernel) for k in layers)
        return Structure(
            Sum((*terms, Stationary("confidence", kernel))), layers, False, (*layers, "confidence")
        )
    covariances: dict[str, Covariance] = {
        "single": Stationary("features", kernel),
        "rio": Stationary("features", kernel) + Stationary("confidence", kernel),
        "red": ARD("features", max(widths.values())) + ARD("softmax", n_classes),
        "concat": Stationary("concat", kernel),
        "ml": Stationary("features", kernel) + Stationary("confidence", kernel) + Index("layer", L, rank),
        "hl": joint + Product((Same("layer"), Stationary("joint", kernel, "local"))),
        "additive": joint + Stationary("joint", kernel, "local", per="layer", n_groups=L),
        "icm": _coregionalised(kernel, L, max(rank, 1), 1),
        "lcm": _coregionalised(kernel, L, max(rank, 1), n_latent),
    }
    stacked = name in STACKED
    return Structure(covariances[name], layers, stacked, (), ("layer",) if stacked else ())


def rows_of(structure: Structure, features: Features) -> Rows:
    """Rows of the given features: blocks ``(n, d)``, or ``(n, L, d)`` where the structure is stacked."""
    names = {block for block, _ in structure.covariance.reads()}
    blocks = {name: _block(name, structure, features) for name in sorted(names)}
    return Rows(blocks, {name: _group(name, structure, features) for name in structure.groups})


def log_odds_design(features: Features, limit: float = 12.0) -> Tensor:
    """Columns of the parametric mean: one, and ``logit(s)`` computed from the logits without cancellation."""
    z = features.logits.double()
    rest = z.scatter(1, features.label[:, None], -torch.inf).logsumexp(dim=1)
    return torch.stack([torch.ones_like(rest), (z.amax(dim=1) - rest).clamp(-limit, limit)], dim=1)


def _block(name: str, structure: Structure, features: Features) -> Tensor:
    s = features.probs.double().amax(dim=1, keepdim=True)
    if name.startswith("layer:"):
        return features.layers[name.removeprefix("layer:")]
    if name == "softmax":
        return features.probs.double()
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


def _coregionalised(kernel: str, n_layers: int, rank: int, n_latent: int) -> Covariance:
    terms = [
        Product(
            (
                Stationary("joint", kernel, f"latent{q}", unit=True),
                Index("layer", n_layers, rank, f"layer{q}"),
            )
        )
        for q in range(n_latent)
    ]
    return terms[0] if n_latent == 1 else Sum(tuple(terms))


def _nested(layers: tuple[str, ...], kernel: str, groups: tuple[str, ...]) -> Structure:
    known = ("layer", "class", "layer/class")
    if not groups or any(g not in known for g in groups):
        raise ValueError(f"groups of a nested covariance must come from {known}, got {groups}")
    stacked = any(g.startswith("layer") for g in groups)
    block = "joint" if stacked else "concat"
    locals_ = [Product((Same(g), Stationary(block, kernel, f"local-{g.replace('/', '-')}"))) for g in groups]
    return Structure(Sum((Stationary(block, kernel, "global"), *locals_)), layers, stacked, (), groups)
