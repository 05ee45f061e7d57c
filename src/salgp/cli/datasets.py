"""The data sets of one calibration: opened alike, so that columns and class numbers mean the same in all, and
kept apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from salgp.cli.given import DataOptions
from salgp.cli.inputs import Inputs
from salgp.cli.shell import Shell

if TYPE_CHECKING:
    from salgp.features import Features

__all__ = ["note_shared", "open_sets"]


def open_sets(data: DataOptions, paths: Mapping[str, Path | None]) -> dict[str, Inputs]:
    """Labelled data by the names of their options, where one is given."""
    sets = _of_same_classes(data, {name: path for name, path in paths.items() if path is not None})
    for name, found in sets.items():
        if found.labels is None:
            raise ValueError(f"--{name}: no labels there; name them {_label_names()}")
    first, *others = sets
    for name in others:
        mine, theirs = sets[first].columns, sets[name].columns
        if mine != theirs:
            raise ValueError(
                f"--{name}: the columns of --inputs ({', '.join(theirs[:3])}, ...) are not those of "
                f"--{first} ({', '.join(mine[:3])}, ...) in the same order; the network takes them by place"
            )
    return sets


def _label_names() -> str:
    from salgp.network.batches import LABEL_KEYS

    return " or ".join(map(repr, LABEL_KEYS))


def note_shared(shell: Shell, test: tuple[str, Features], others: Mapping[str, Features]) -> None:
    """Say that test samples are among those that a calibrator learns from: it looks better than it is.

    Args:
        shell: to say it.
        test: name and features of the test data.
        others: features it is fitted on, by the names of their options.
    """
    from salgp.calibrators.checks import SHARED, rows_in
    from salgp.calibrators.copies import originals

    name, tested = test
    for other, known in others.items():
        shared = rows_in(tested.logits, known[originals(known)[0]].logits)
        if shared > SHARED * len(tested):
            shell.say(
                f"note: {shared:,} of {len(tested):,} samples of {name} are in {other} too: what is checked "
                f"on them looks better than it is; keep the sets apart (where a table has few values, "
                f"equal rows are harmless)"
            )


def _of_same_classes(data: DataOptions, paths: Mapping[str, Path]) -> dict[str, Inputs]:
    """The sets, all with the same class numbers: where sub-folders give these, one set must have them all."""
    sets = {name: data.open(path) for name, path in paths.items()}
    numbered = {name: found.classes or [] for name, found in sets.items() if found.numbered}
    if not numbered:
        return sets
    widest = max(numbered, key=lambda name: len(numbered[name]))
    for name, classes in numbered.items():
        missing = [each for each in classes if each not in numbered[widest]]
        if missing:
            raise ValueError(
                f"--{name} has a sub-folder {missing[0]!r} that --{widest} has not, so that neither shows "
                f"all classes; name all in the order of the network's outputs: --classes A,B,..."
            )
    again = {name: data.open(paths[name], numbered[widest]) for name in numbered}
    return sets | {name: replace(found, numbered=True) for name, found in again.items()}
