"""What a monitor says: alarms, accuracy, and which features and classes shifted."""

from __future__ import annotations

from dataclasses import dataclass

from salgp.estimate.accuracy import Estimate

__all__ = ["ClassShift", "FeatureShift", "Status"]

CAUSES = {"shift": "the inputs changed", "accuracy": "labels show more errors than the confidences say"}


@dataclass(frozen=True)
class FeatureShift:
    """How far one feature has shifted.

    Args:
        feature: ``"confidence"``, ``"novelty"``, ``"class"`` or ``"layer ..."``.
        effect: Cliff's delta of the window against the reference, from -1 to 1.
        evidence: log10 of the capital of the bets on it.
    """

    feature: str
    effect: float
    evidence: float

    @property
    def size(self) -> str:
        """The effect in words, by the usual limits of Cliff's delta (Romano et al. 2006)."""
        limits = {"negligible": 0.147, "small": 0.33, "medium": 0.474}
        return next((word for word, limit in limits.items() if abs(self.effect) < limit), "large")


@dataclass(frozen=True)
class ClassShift:
    """Share of a predicted class, in the reference and in the window, and its expected accuracy there."""

    label: int
    reference: float
    now: float
    accuracy: Estimate


@dataclass(frozen=True)
class Status:
    """How things stand.

    Args:
        alarm: ``"shift"`` (the inputs changed), ``"accuracy"`` (labels show more errors than the confidences
            say), both or none.
        false_alarm: probability of ever seeing an alarm though nothing changed; where labels are given, if
            the calibrator is right to within the tolerance.
        accuracy: of the window, estimated without labels.
        measured: of the labelled samples of the window; None without labels.
        reference: mean confidence of the reference.
        matters: did accuracy fall by more than the tolerance, and certainly by something? Measured accuracy
            decides where there is enough of it.
        may_matter: could it have fallen by more than the tolerance? The interval does not exclude it.
        evidence: log10 of the capital of the bets for each alarm, which needs ``log10(2 / false_alarm)``.
        features: those that shifted most first.
        classes: those whose share changed most first.
        n: samples in the window.
        batches: batches so far.
    """

    alarm: tuple[str, ...]
    false_alarm: float
    accuracy: Estimate
    measured: Estimate | None
    reference: float
    matters: bool
    may_matter: bool
    evidence: dict[str, float]
    features: tuple[FeatureShift, ...]
    classes: tuple[ClassShift, ...]
    n: int
    batches: int

    def __str__(self) -> str:
        return f"{self.headline} {self.details}"

    @property
    def headline(self) -> str:
        """The alarm in one sentence."""
        if not self.batches:
            return "Ready: no new data yet."
        if not self.alarm:
            return "No alarm."
        return f"Alarm: {' and '.join(CAUSES[name] for name in self.alarm)} ({self._weight})."

    @property
    def details(self) -> str:
        """Accuracy, measured before expected, and the largest shift where there is an alarm."""
        reference = f"{100 * self.reference:.1f} % on the reference"
        if not self.batches:
            return f"Expected accuracy {reference}."
        expected = f"xpected accuracy {self.accuracy} of the last {self.n:,} samples, {reference}."
        said = f"E{expected}"
        if self.measured is not None:
            said = f"Measured accuracy {self.measured} on {self.measured.n:,} labels; e{expected}"
        most = self.features[0]
        return f"{said} Largest shift: {most.feature} ({most.size})." if self.alarm else said

    @property
    def _weight(self) -> str:
        if self.matters:
            return "this matters"
        return "whether it matters cannot be told yet" if self.may_matter else "too little to matter so far"
