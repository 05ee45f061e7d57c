"""Calibrators and features of the user's files and what the one says of the other, with notes on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from salgp.cli.console import Console
from salgp.cli.options import (
    CalibratorFolder,
    Context,
    FeaturesFile,
    FieldLabels,
    Probs,
    context_of,
    split_names,
)
from salgp.cli.preflight import check_inputs

if TYPE_CHECKING:
    from salgp.calibrators import Calibrator
    from salgp.features import Features
    from salgp.files import FeatureFile
    from salgp.prediction import Prediction

__all__ = [
    "Predicted",
    "PredictionOptions",
    "SavedCalibrator",
    "check_alike",
    "note_overlap",
    "note_shared",
    "read_calibrator",
    "read_samples",
    "uncalibrated",
]


@dataclass(frozen=True, eq=False)
class SavedCalibrator:
    """A fitted calibrator, its folder, and what it remembers of the data it was fitted on."""

    folder: Path
    calibrator: Calibrator
    origin: Mapping[str, Any]

    def predict(self, console: Console, loaded: FeatureFile, context: Any = None) -> Prediction:
        """What the calibrator says of features, which must be like those it was fitted on."""
        check_alike(str(self.folder), self.origin, loaded)
        with console.progress(f"predicting {len(loaded.features):,} samples"):
            return self.calibrator.predict(loaded.features, context)


class Predicted(NamedTuple):
    """A calibrator, features, and what the one says of the other."""

    fitted: SavedCalibrator
    loaded: FeatureFile
    prediction: Prediction


@dataclass(frozen=True)
class PredictionOptions:
    """A calibrator, features, and how the one is used on the other."""

    calibrator: CalibratorFolder
    features: FeaturesFile
    probs: Probs = None
    context: Context = None
    field_labels: FieldLabels = None

    @property
    def inputs(self) -> tuple[Path | None, ...]:
        """Files that are read."""
        return self.calibrator, self.features, self.field_labels

    def predict(self, console: Console, labelled: bool = False, augmented: bool = False) -> Predicted:
        """Read both and predict.

        Args:
            console: to speak.
            labelled: refuse features without labels.
            augmented: predict augmented samples, too, not only those they were made of.
        """
        check_inputs(*self.inputs)
        context, columns = context_of(self.context), split_names(self.probs)
        fitted = read_calibrator(self.calibrator)
        loaded = read_samples(console, self.features, columns, labelled, augmented)
        if labelled and fitted.origin.get("features") == self.features.name:
            console.say(
                f"note: {self.calibrator} was fitted on a file of this name, {self.features.name}; on the same "
                f"samples scores are too good and no guarantee holds"
            )
        prediction = fitted.predict(console, loaded, context)
        if self.field_labels is None:
            return Predicted(fitted, loaded, prediction)
        known = read_samples(console, self.field_labels, columns, labelled=True)
        if labelled:
            note_shared(console, (self.features.name, loaded.features), {"--field-labels": known.features})
        from salgp.estimate import learn_correction

        around = None if context is None else fitted.calibrator.context(loaded.features)
        correction = learn_correction(fitted.predict(console, known, around), known.known_labels)
        console.say(f"{known.path.name}: {correction}")
        return Predicted(fitted, loaded, correction(prediction))


def read_calibrator(folder: Path) -> SavedCalibrator:
    """A fitted calibrator from its folder."""
    from salgp.calibrators.loading import load_parts

    if folder.is_file():
        raise ValueError(
            f"{folder} is a file, but the folder of a calibrator was expected; are two arguments swapped?"
        )
    calibrator, parts = load_parts(folder)
    return SavedCalibrator(folder, calibrator, parts.get("origin", {}))


def read_samples(
    console: Console,
    path: Path,
    probs: Sequence[str] | None = None,
    labelled: bool = False,
    augmented: bool = False,
) -> FeatureFile:
    """The samples of a features file; augmented ones are left out, or noted.

    Args:
        console: to speak.
        path: file or folder.
        probs: columns of a table that hold the probabilities.
        labelled: refuse features without labels.
        augmented: keep augmented samples.
    """
    from salgp.files import read_features

    loaded = read_features(path, probs)
    if labelled:
        _ = loaded.known_labels
    plain = loaded.without_augmented()
    more, n = len(loaded.features) - len(plain.features), len(plain.features)
    if more:
        what = "every row is answered" if augmented else "they are left out"
        console.say(f"note: {path.name} holds {more:,} augmented samples beside its {n:,} samples; {what}")
    return loaded if augmented else plain


def check_alike(of: str, origin: Mapping[str, Any], loaded: FeatureFile) -> None:
    """Refuse features of another network, of other class scores or of other classes than ``of``."""
    found = loaded.origin
    for key, (what, advice) in _ALIKE.items():
        mine, theirs = origin.get(key), found.get(key)
        if mine and theirs and list(mine) != list(theirs):
            raise ValueError(
                f"{loaded.path} is of {what} than {of} ({_short(theirs)}, not {_short(mine)}); {advice}"
            )


_ALIKE = {
    "output": ("other class scores", "read both alike: salgp extract --output, or the names of columns"),
    "network": ("another network", "extract it again, from the same network with the same weights"),
    "classes": ("other classes", "write the same columns in the same order"),
}
"""What a calibrator remembers of its data, and must be the same where it is used."""


def _short(value: Any) -> str:
    return value[:20] if isinstance(value, str) else ", ".join(value[:5])


def note_shared(console: Console, test: tuple[str, Features], others: Mapping[str, Features]) -> None:
    """Say that test samples are among those that a calibrator learns from: it looks better than it is.

    Args:
        console: to say it.
        test: name and features of the test data.
        others: features it is fitted on, by the names of their options.
    """
    from salgp.calibrators.checks import rows_in
    from salgp.calibrators.rows import originals

    name, tested = test
    for other, known in others.items():
        shared = rows_in(tested.logits, known[originals(known)[0]].logits)
        note_overlap(console, shared, len(tested), name, other)


def note_overlap(console: Console, shared: int, n: int, test: str, other: str) -> None:
    """Say it where more of ``n`` test samples are in another set than chance explains."""
    from salgp.calibrators.checks import SHARED

    if shared > SHARED * n:
        console.say(
            f"note: {shared:,} of {n:,} samples of {test} are in {other} too: scores on them are too good; "
            f"keep the sets apart (where a table has few values, equal rows are harmless)"
        )


def uncalibrated(loaded: FeatureFile) -> Prediction:
    """The network's own confidence as a prediction."""
    from salgp.prediction import Prediction

    return Prediction.from_probs(loaded.features, loaded.features.probs)
