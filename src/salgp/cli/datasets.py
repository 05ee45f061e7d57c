"""Several sets of data for one network: the same columns and class numbers, no sample in two of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from salgp.cli.console import Console
from salgp.cli.options import DataOptions
from salgp.cli.predictions import note_overlap

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.features import Features
    from salgp.io.loader import FileLoader

__all__ = ["check_numbering", "note_guessing", "note_shared_samples", "open_sets"]


def open_sets(data: DataOptions, model: str, paths: Mapping[str, Path | None]) -> dict[str, FileLoader]:
    """Labelled data by the names of their options, all with the same columns and class numbers."""
    from salgp.labels import LABEL_KEYS

    given = {name: path for name, path in paths.items() if path is not None}
    sets = {name: data.open(model, path) for name, path in given.items()}
    numbered = [found.classes for found in sets.values() if found.classes is not None]
    if data.classes is None and numbered:  # by the names of their sub-folders: one set must have them all
        widest = max(numbered, key=len)
        sets = {name: data.open(model, path, widest) for name, path in given.items()}
    first, *others = sets
    for name, found in sets.items():
        if found.labels is None:
            raise ValueError(f"--{name}: no labels there; name them {' or '.join(map(repr, LABEL_KEYS))}")
    for name in others:
        mine, theirs = sets[first].columns, sets[name].columns
        if mine != theirs:
            raise ValueError(
                f"--{name}: the columns of --inputs ({', '.join(theirs[:3])}, ...) are not those of "
                f"--{first} ({', '.join(mine[:3])}, ...) in the same order; the network takes them by place"
            )
    return sets


def check_numbering(data: DataOptions, found: FileLoader, n_classes: int) -> None:
    """Refuse sub-folders as class numbers where the network has more or fewer outputs: some class has no
    folder, and those after it would get wrong numbers.
    """
    if data.classes is None and found.classes is not None and len(found.classes) != n_classes:
        raise ValueError(
            f"{len(found.classes)} sub-folders ({', '.join(found.classes[:5])}) for a network of {n_classes} "
            f"classes: which is which? Name all classes in the order of its outputs: --classes A,B,..."
        )


def note_shared_samples(console: Console, sets: Mapping[str, FileLoader]) -> None:
    """Say that test samples are among those that a calibrator learns from: scores on them are too good."""
    if "test" not in sets:
        return
    tested = _digests(sets["test"])
    for name in [name for name in sets if name != "test"]:
        known = set(_digests(sets[name]))
        shared = sum(digest in known for digest in tested)
        note_overlap(console, shared, len(tested), "--test", f"--{name}")


def _digests(data: FileLoader) -> list[bytes]:
    """One digest per sample, of its inputs without zeros at the end: padding does not count."""
    found = []
    for start in range(0, data.n, data.batch_size):
        inputs = data.take(slice(start, min(start + data.batch_size, data.n)))
        columns = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        for row in zip(*columns, strict=True):
            parts = (x.contiguous().numpy().tobytes().rstrip(b"\0") for x in row)
            found.append(hashlib.sha256(b"|".join(parts)).digest())
    return found


def note_guessing(console: Console, features: Features, labels: Tensor | None) -> float | None:
    """The network's accuracy on the samples themselves; with a note where it is no better than a guess, which
    is what forgotten weights and wrong preprocessing look like.
    """
    from salgp.calibrators.rows import originals

    if labels is None or not len(features):
        return None
    rows = originals(features)[0]
    n, chance = len(rows), 1 / features.n_classes
    accuracy = float(features[rows].correct(labels[rows]).double().mean())
    if accuracy <= chance + 2 * (chance * (1 - chance) / n) ** 0.5:
        console.say(
            f"note: the network is right on {accuracy:.0%} of these samples, no more than a guess among "
            f"{features.n_classes:,} classes; are these its weights, and the inputs it was trained on "
            f"(--weights, --scale, --normalize, --prepare)?"
        )
    return accuracy
