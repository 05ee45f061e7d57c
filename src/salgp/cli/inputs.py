"""Calibrators, features and data of the user's files: read, compared with each other, and noted where odd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import salgp
from salgp.cli import options
from salgp.cli.checks import check_inputs
from salgp.cli.console import Console
from salgp.cli.options import DataOptions

if TYPE_CHECKING:
    from torch import Tensor

    from salgp import Features, Prediction
    from salgp.calibrators import Calibrator
    from salgp.estimate import Correction
    from salgp.files import FeatureFile
    from salgp.io.loader import FileLoader

__all__ = []

Names = Sequence[str] | None


@dataclass(frozen=True, eq=False)
class SavedCalibrator:
    """A fitted calibrator, its folder, and what it remembers of the data it was fitted on."""

    folder: Path
    calibrator: Calibrator
    origin: Mapping[str, Any]

    def predict(self, console: Console, loaded: FeatureFile, context: Any = None) -> Prediction:
        """Predictions for features, which must be like those the calibrator was fitted on."""
        check_alike(self.folder, self.origin, loaded)
        with console.progress(f"predicting {len(loaded.features):,} samples"):
            return self.calibrator.predict(loaded.features, context)


@dataclass(frozen=True)
class PredictionOptions:
    """A calibrator, features, and how the one is used on the other."""

    calibrator: options.CalibratorFolder
    features: options.FeaturesFile
    probs: options.Probs = None
    context: options.Context = None
    field_labels: options.FieldLabels = None

    @property
    def inputs(self) -> tuple[Path | None, ...]:
        """Files that are read."""
        return self.calibrator, self.features, self.field_labels

    def predict(
        self, console: Console, labelled: bool = False, augmented: bool = False
    ) -> tuple[SavedCalibrator, FeatureFile, Prediction]:
        """The calibrator, the features, and its predictions for them.

        Args:
            console: to speak.
            labelled: refuse features without labels.
            augmented: predict augmented samples, too, not only those they were made of.
        """
        check_inputs(*self.inputs)
        context, columns = options.context_of(self.context), options.split_names(self.probs)
        fitted = read_calibrator(self.calibrator)
        loaded = read_samples(console, self.features, columns, labelled, augmented)
        if labelled:
            _note_fitted_on(console, fitted, self.features.name)
        prediction = fitted.predict(console, loaded, context)
        if self.field_labels is None:
            return fitted, loaded, prediction
        known = read_samples(console, self.field_labels, columns, labelled=True)
        if labelled:
            note_shared(console, self.features.name, loaded.features, "--field-labels", known.features)
        around = None if context is None else fitted.calibrator.context(loaded.features)
        correction = _correction(console, known, fitted.predict(console, known, around))
        return fitted, loaded, correction(prediction)


def _note_fitted_on(console: Console, fitted: SavedCalibrator, name: str) -> None:
    if fitted.origin.get("features") == name:
        why = "on the samples of the fit scores are too good and no guarantee holds"
        console.say(f"note: {fitted.folder} was fitted on a file of this name, {name}; {why}")


def _correction(console: Console, known: FeatureFile, prediction: Prediction) -> Correction:
    """What labelled samples of the same place and time correct."""
    correction = salgp.estimate.learn_correction(prediction, known.known_labels)
    console.say(f"{known.path.name}: {correction}")
    return correction


def read_calibrator(folder: Path) -> SavedCalibrator:
    """A fitted calibrator from its folder."""
    from salgp.calibrators.loading import load_parts

    if folder.is_file():
        expected = "the folder of a calibrator was expected; are two arguments swapped?"
        raise ValueError(f"{folder} is a file, but {expected}")
    calibrator, parts = load_parts(folder)
    return SavedCalibrator(folder, calibrator, parts.get("origin", {}))


def read_samples(
    console: Console, path: Path, probs: Names = None, labelled: bool = False, augmented: bool = False
) -> FeatureFile:
    """The samples of a features file; augmented ones are left out, or noted.

    Args:
        console: to speak.
        path: file or folder.
        probs: columns of a table that hold the probabilities.
        labelled: refuse features without labels.
        augmented: keep augmented samples.
    """
    loaded = salgp.files.read_features(path, probs)
    if labelled:
        _ = loaded.known_labels
    plain = loaded.without_augmented()
    more, n = len(loaded.features) - len(plain.features), len(plain.features)
    if more:
        what = "every row is answered" if augmented else "they are left out"
        console.say(f"note: {path.name} holds {more:,} augmented samples beside its {n:,} samples; {what}")
    return loaded if augmented else plain


def read_alike(console: Console, path: Path, probs: Names, known: FeatureFile) -> FeatureFile:
    """Labelled samples of the same network, class scores and classes as the known ones."""
    loaded = read_samples(console, path, probs, labelled=True)
    check_alike(known.path, known.origin, loaded)
    return loaded


def check_alike(of: Path, origin: Mapping[str, Any], loaded: FeatureFile) -> None:
    """Refuse features of another network, of other class scores or of other classes than ``of``."""
    found = loaded.origin
    for key, (what, advice) in _ALIKE.items():
        mine, theirs = origin.get(key), found.get(key)
        if mine and theirs and list(mine) != list(theirs):
            different = f"{_short(theirs)}, not {_short(mine)}"
            raise ValueError(f"{loaded.path} is of {what} than {of} ({different}); {advice}")


_ALIKE = {
    "output": ("other class scores", "read both alike: salgp extract --output, or the names of columns"),
    "network": ("another network", "extract it again, from the same network with the same weights"),
    "classes": ("other classes", "write the same columns in the same order"),
}
"""Properties of the data that are kept with a calibrator and must be the same where it is used."""


def _short(value: Any) -> str:
    return value[:20] if isinstance(value, str) else ", ".join(value[:5])


def note_shared(console: Console, test: str, tested: Features, other: str, known: Features) -> None:
    """Say that test samples are among those that a calibrator learns from: it looks better than it is."""
    from salgp.calibrators.checks import SHARED, rows_in

    samples = known[known.originals[0]]
    shared, n = rows_in(tested.logits, samples.logits), len(tested)
    if shared > SHARED * n:
        advice = "keep the sets apart (where a table has few values, equal rows are harmless)"
        found = f"{shared:,} of {n:,} samples of {test} are in {other} too"
        console.say(f"note: {found}: scores on them are too good; {advice}")


def open_sets(how: DataOptions, model: str, paths: Mapping[str, Path | None]) -> dict[str, FileLoader]:
    """Labelled data by the names of their options, all with the same columns and class numbers."""
    from salgp.labels import LABEL_KEYS

    given = {name: path for name, path in paths.items() if path}
    sets = {name: how.open(model, path) for name, path in given.items()}
    numbered = [found.classes for found in sets.values() if found.classes]
    if how.classes is None and numbered:  # by the names of their sub-folders: one set must have them all
        widest = max(numbered, key=len)
        sets = {name: how.open(model, path, widest) for name, path in given.items()}
    for name, found in sets.items():
        if found.labels is None:
            raise ValueError(f"--{name}: no labels there; name them {' or '.join(map(repr, LABEL_KEYS))}")
    _check_columns({name: found.columns for name, found in sets.items()})
    return sets


def _check_columns(columns: Mapping[str, Sequence[str]]) -> None:
    """Refuse inputs that were stacked from other columns than those of the first set."""
    first, mine = next(iter(columns.items()))
    for name, found in columns.items():
        if found != mine:
            given = f"the columns of --inputs ({', '.join(found[:3])}, ...)"
            others = f"those of --{first} ({', '.join(mine[:3])}, ...) in the same order"
            raise ValueError(f"--{name}: {given} are not {others}; the network takes them by place")


def check_numbering(how: DataOptions, found: FileLoader, n_classes: int) -> None:
    """Refuse sub-folders as class numbers where the network has more or fewer outputs: some class has no
    folder, and those after it would get wrong numbers.
    """
    if how.classes is None and found.classes and len(found.classes) != n_classes:
        folders = f"{len(found.classes)} sub-folders ({', '.join(found.classes[:5])})"
        advice = "Name all classes in the order of its outputs: --classes A,B,..."
        raise ValueError(f"{folders} for a network of {n_classes} classes: which is which? {advice}")


def note_guessing(console: Console, features: Features, labels: Tensor | None) -> float | None:
    """The network's accuracy on the samples themselves; with a note where it is no better than a guess, which
    is what forgotten weights and wrong preprocessing look like.
    """
    if labels is None or not len(features):
        return None
    rows = features.originals[0]
    chance = 1 / features.n_classes
    accuracy = float(features[rows].correct(labels[rows]).double().mean())
    if accuracy <= chance + 2 * (chance * (1 - chance) / len(rows)) ** 0.5:
        guess = f"no more than a guess among {features.n_classes:,} classes"
        options = "(--weights, --scale, --normalize, --prepare)"
        ask = f"are these its weights, and the inputs it was trained on {options}?"
        console.say(f"note: the network is right on {accuracy:.0%} of these samples, {guess}; {ask}")
    return accuracy
