"""Features, the input of every calibrator: logits and the pooled output of each tapped layer.

`Features` is all a calibrator may see of a network. Logits are logits: probabilities never travel under
that name, so nobody has to guess what a number means. Notation: ``n`` samples, ``L`` layers, ``c`` classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.io import FormatError, check_kind, read_tensors, refuse_foreign, write_tensors
from salgp.io.files import AnyPath
from salgp.labels import as_labels
from salgp.logits import as_array, as_logits, at_least_single, refuse_masked

__all__ = ["Features", "features_of", "load_features"]

FORMAT = "salgp-features"
FORMAT_VERSION = 1
ORIGIN = {"groups": torch.int64, "families": torch.int64, "strengths": torch.float64}
"""Columns that say where a row came from, and the type of each."""

Layers = Mapping[str, Any] | None
"""Embeddings of the same samples by name."""


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """Logits and pooled layer features of ``n`` samples.

    Args:
        logits: ``(n, c)`` raw network outputs before any softmax.
        layers: ordered mapping from layer name to ``(n, d_l)`` pooled features.
        groups: ``(n,)`` integers; rows made from the same original sample (by perturbation) share one.
        families: ``(n,)`` integers; the family of perturbations that made the row, 0 for an original sample.
        strengths: ``(n,)`` how strong the perturbation was, as a share of the family's scale; 0 for an
            original. Rows of one family and strength are one *environment*.
        network: fingerprint of the weights of the network they were read from, where known. Calibrators
            refuse features of another network than they were fitted on.

    Example:
        >>> import torch
        >>> f = Features(torch.zeros(3, 2), {"conv": torch.ones(3, 4)})
        >>> f
        Features(3 samples, 2 classes, layers: conv (4))
        >>> len(f), f.n_classes, f.layer_names
        (3, 2, ('conv',))
        >>> f[:2].confidence
        tensor([0.5000, 0.5000])
    """

    logits: Tensor
    layers: Mapping[str, Tensor] = field(default_factory=dict)
    groups: Tensor | None = None
    families: Tensor | None = None
    strengths: Tensor | None = None
    network: str | None = None

    @staticmethod
    def from_logits(logits: Any, layers: Layers = None) -> Features:
        """Class scores before any softmax, from any framework.

        Args:
            logits: ``(n, c)`` array or tensor; ``(n,)`` or ``(n, 1)`` are a binary classifier's log-odds of
                class 1.
            layers: embeddings of the same samples by name, ``(n, d)`` each.

        Example:
            >>> Features.from_logits(np.array([2.0, -1.0]), {"embedding": np.ones((2, 8))}).label
            tensor([1, 0])
        """
        return Features(as_logits(as_array(logits)), _layers_of(layers))

    @staticmethod
    def from_probs(probs: Any, layers: Layers = None) -> Features:
        """Class probabilities, from any framework; their logarithms are the logits.

        Args:
            probs: ``(n, c)`` array or tensor whose rows sum to 1; ``(n,)`` or ``(n, 1)`` are the probability
                of class 1.
            layers: embeddings of the same samples by name, ``(n, d)`` each.

        Example:
            >>> Features.from_probs(np.array([[0.9, 0.1]])).confidence
            tensor([0.9000], dtype=torch.float64)
        """
        return Features(as_logits(as_array(probs), "probabilities"), _layers_of(layers))

    def __post_init__(self) -> None:
        logits = _as_tensor(self.logits, "logits")
        layers = {str(name): _as_tensor(x, "layer", name) for name, x in self.layers.items()}
        n = logits.shape[0]
        if any(x.shape[0] != n for x in layers.values()):
            _refuse_rows(layers, n)
        object.__setattr__(self, "logits", logits)
        object.__setattr__(self, "layers", layers)
        for what in ORIGIN:
            x = getattr(self, what)
            if x is not None:
                object.__setattr__(self, what, _origin_column(x, what, n))

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        layers = ", ".join(f"{name} ({width})" for name, width in self.widths.items())
        listed = f"layers: {layers}" if layers else "no layers"
        augmented = ", with augmented samples" if self.groups is not None else ""
        return f"Features({len(self):,} samples, {self.n_classes:,} classes, {listed}{augmented})"

    @property
    def n_classes(self) -> int:
        """Number of classes ``c`` the network knows."""
        return self.logits.shape[1]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the tapped layers, in the order of the forward pass."""
        return tuple(self.layers)

    @property
    def widths(self) -> dict[str, int]:
        """Feature width ``d_l`` of each layer."""
        return {name: x.shape[1] for name, x in self.layers.items()}

    @property
    def origin(self) -> dict[str, Tensor]:
        """Where the rows came from: groups, families, strengths."""
        found = {what: getattr(self, what) for what in ORIGIN}
        return {what: x for what, x in found.items() if x is not None}

    @cached_property
    def originals(self) -> tuple[Tensor, Tensor]:
        """Rows of the original samples, and for every row the position of its original among them.

        The original of a group is its row of family 0; where families are unknown, its first row.

        Example:
            >>> groups = torch.tensor([7, 8, 7, 8])
            >>> Features(torch.zeros(4, 2), groups=groups).originals
            (tensor([0, 1]), tensor([0, 1, 0, 1]))
            >>> Features(torch.zeros(4, 2), groups=groups, families=torch.tensor([1, 0, 0, 1])).originals
            (tensor([1, 2]), tensor([1, 0, 1, 0]))
        """
        n, device = len(self), self.logits.device
        rows = torch.arange(n, device=device)
        if self.groups is None:
            return rows, rows
        groups, group = self.groups.to(device).unique(return_inverse=True)
        late = rows
        if self.families is not None:
            late = rows + n * (self.families.to(device) > 0)
        earliest = torch.full(groups.shape, 2 * n, device=device)
        first = earliest.scatter_reduce(0, group, late, "amin") % n
        rank = first.argsort().argsort()
        return first.sort().values, rank[group]

    @property
    def is_augmented(self) -> Tensor:
        """Mask of the augmented rows, ``(n,)``.

        Example:
            >>> Features(torch.zeros(3, 2), groups=torch.tensor([7, 8, 7])).is_augmented
            tensor([False, False,  True])
        """
        rows, original = self.originals
        return rows[original] != torch.arange(len(self), device=rows.device)

    def without_augmented(self) -> tuple[Features, Tensor]:
        """The original samples alone, and the rows they stood in."""
        rows, _ = self.originals
        if self.groups is None:
            return self, rows
        kept = self[rows]
        return Features(kept.logits, kept.layers), rows

    @property
    def probs(self) -> Tensor:
        """Softmax of the logits, ``(n, c)``, in at least single precision."""
        return torch.softmax(at_least_single(self.logits), dim=1)

    @cached_property
    def label(self) -> Tensor:
        """Predicted class, ``(n,)``."""
        return self.logits.argmax(dim=1)

    @cached_property
    def other_logits(self) -> Tensor:
        """The logits ``(n, c)`` with minus infinity in place of that of the predicted class."""
        return self.logits.scatter(1, self.label[:, None], -torch.inf)

    @property
    def confidence(self) -> Tensor:
        """Network confidence ``s = max softmax(z)``, ``(n,)``."""
        return self.probs.amax(dim=1)

    @property
    def confidence_rank(self) -> Tensor:
        """Rank ``(n,)`` by confidence and, where that is rounded to 1, by the largest logit.

        Example:
            >>> Features(torch.tensor([[90.0, 0.0], [80.0, 0.0], [1.0, 0.0]])).confidence_rank
            tensor([2, 1, 0])
        """
        order = self.logits.amax(dim=1).argsort(stable=True)
        order = order[self.confidence[order].argsort(stable=True)]
        return order.argsort()

    def correct(self, labels: Tensor) -> Tensor:
        """Boolean ``(n,)``: is the predicted label the true one? An unknown class (-1) never is."""
        return self.label == labels.to(self.logits.device)

    def residual(self, labels: Tensor) -> Tensor:
        """Softmax residual ``r = correct - s``, the target of the paper's regression, ``(n,)``."""
        return self.correct(labels).to(self.confidence.dtype) - self.confidence

    def __getitem__(self, rows: slice | Tensor | np.ndarray | Sequence[int]) -> Features:
        index = rows if isinstance(rows, slice) else torch.as_tensor(rows, device=self.logits.device)
        layers = _each(self.layers, lambda x: x[index])
        origin = _each(self.origin, lambda x: _rows(x, index))
        return Features(self.logits[index], layers, network=self.network, **origin)

    def select(self, names: Sequence[str]) -> Features:
        """Keep only the named layers, in the given order."""
        unknown = [repr(name) for name in names if name not in self.layers]
        if unknown:
            known = ", ".join(self.layer_names) or "none"
            raise KeyError(f"no layer named {', '.join(unknown)}; known layers: {known}")
        return replace(self, layers={name: self.layers[name] for name in names})

    def to(self, *args: Any, **kwargs: Any) -> Features:
        """Move or cast every tensor, with the arguments of `torch.Tensor.to`."""
        logits = self.logits.to(*args, **kwargs)
        origin = _each(self.origin, lambda x: x.to(logits.device))
        layers = _each(self.layers, lambda x: x.to(*args, **kwargs))
        return Features(logits, layers, network=self.network, **origin)

    @staticmethod
    def concatenate(parts: Sequence[Features]) -> Features:
        """Stack samples of several `Features` with the same layers."""
        if not parts:
            raise ValueError("nothing to concatenate: the list of Features is empty")
        names = parts[0].layer_names
        if any(p.layer_names != names for p in parts):
            raise ValueError("cannot concatenate Features with different layers")
        network = _one_network({p.network for p in parts})
        logits = torch.cat([p.logits for p in parts])
        layers = {name: torch.cat([p.layers[name] for p in parts]) for name in names}
        origin = {what: _joined([getattr(p, what) for p in parts]) for what in ORIGIN}
        return Features(logits, layers, network=network, **origin)

    def save(
        self, path: AnyPath, labels: Tensor | None = None, metadata: Mapping[str, str] | None = None
    ) -> Path:
        """Write one safetensors file with ``logits``, ``layers.<name>`` and, where known, ``labels``,
        ``groups``, ``families`` and ``strengths``.

        Features that are there already are replaced; any other file is left alone with a `FileExistsError`.
        """
        refuse_foreign(path, "features")
        tensors = {f"layers.{name}": x for name, x in self.layers.items()}
        tensors["logits"] = self.logits
        if labels is not None:
            tensors["labels"] = as_labels(labels, len(self))
        header = {**(metadata or {}), "format": FORMAT, "format_version": str(FORMAT_VERSION)}
        header["layers"] = json.dumps(self.layer_names)
        if self.network is not None:
            header["network"] = self.network
        return write_tensors(path, tensors | self.origin, header)

    @staticmethod
    def load(path: AnyPath) -> Features:
        """Read the features of a file written by `save`; `load_features` also gives its labels."""
        return load_features(path)[0]


Labelled = tuple[Features, Tensor | None]


def load_features(path: AnyPath) -> Labelled:
    """Read features and, where present, labels from a safetensors file.

    Example:
        >>> import tempfile, torch
        >>> f = Features(torch.zeros(2, 3), {"a": torch.ones(2, 4)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f.save(folder + "/f.safetensors", labels=torch.tensor([0, 2]))
        ...     g, labels = load_features(path)
        >>> g.layer_names, labels
        (('a',), tensor([0, 2]))
    """
    return features_of(path, *read_tensors(path))


def features_of(path: AnyPath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Labelled:
    """Features and labels among the tensors of a file, whose metadata say what they are."""
    if "format" in metadata:
        check_kind(path, metadata, FORMAT, FORMAT_VERSION)
    if "logits" not in tensors:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise FormatError(f"{path}: no tensor named 'logits'; found {found}")
    names = _layer_order(path, tensors, metadata.get("layers"))
    layers = {name: tensors[f"layers.{name}"] for name in names}
    origin = {what: tensors[what] for what in ORIGIN if what in tensors}
    labels = tensors.get("labels")
    try:
        features = Features(tensors["logits"], layers, network=metadata.get("network"), **origin)
        return features, None if labels is None else as_labels(labels, len(features))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"{path}: {error}") from error


def _layer_order(path: AnyPath, tensors: Mapping[str, Tensor], order: str | None) -> list[str]:
    """Names of the stored layers, in the order the file gives, or sorted where it gives none."""
    stored = [name.removeprefix("layers.") for name in sorted(tensors) if name.startswith("layers.")]
    names = stored if order is None else _listed(path, order)
    for name in names:
        if name not in stored:
            raise FormatError(f"{path}: layer {name!r} is listed but not stored; the file is incomplete")
    return names


def _listed(path: AnyPath, order: str) -> list[str]:
    try:
        names = json.loads(order)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the order of the layers is not valid JSON ({error})") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{path}: expected a list of layer names, got {order[:80]}")
    return names


def _as_tensor(x: Any, what: str, name: str | None = None) -> Tensor:
    if type(x) is not Tensor:
        refuse_masked(x, what)
    tensor = torch.as_tensor(x)
    if tensor.requires_grad or torch.compiler.is_compiling():
        tensor = tensor.detach()  # outputs of an exported graph must not ask for gradients either
    what = what if name is None else f"{what} {name!r}"
    if not tensor.is_floating_point():
        raise TypeError(f"{what} must be floating point, got {tensor.dtype}")
    if tensor.ndim != 2:
        raise ValueError(f"{what} must have shape (n, width), got {tuple(tensor.shape)}")
    return tensor


def _refuse_rows(layers: Mapping[str, Tensor], n: int) -> None:
    for name, x in layers.items():
        if x.shape[0] != n:
            raise ValueError(
                f"layer {name!r} has {x.shape[0]} rows, the class scores have {n}; they must "
                f"describe the same samples (a sample alone needs a batch axis: x[None])"
            )


def _origin_column(x: Any, what: str, n: int) -> Tensor:
    column = torch.as_tensor(x).to(ORIGIN[what])
    if column.shape != (n,):
        raise ValueError(f"{what} must have shape ({n},), got {tuple(column.shape)}")
    return column


def _layers_of(layers: Layers) -> dict[str, Tensor]:
    return _each(layers or {}, as_array)


def _each(named: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: function(x) for name, x in named.items()}


def _rows(x: Tensor, index: slice | Tensor) -> Tensor:
    return x[index.to(x.device) if isinstance(index, Tensor) else index]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All parts one after another, or nothing where one is missing."""
    known = [x for x in parts if x is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _one_network(found: set[str | None]) -> str | None:
    """The network that all parts were read from, where all know it."""
    if len(found - {None}) > 1:
        raise ValueError("cannot concatenate Features of different networks")
    return None if None in found else found.pop()
