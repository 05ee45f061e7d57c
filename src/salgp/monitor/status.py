"""What a monitor says: alarm, accuracy, what moved and how far."""

from __future__ import annotations

from dataclasses import dataclass

from salgp.estimate.accuracy import Estimate

__all__ = ["ClassMove", "Move", "Status"]


@dataclass(frozen=True)
class Move:
    """How far one channel has moved.

    Args:
        channel: ``"confidence"``, ``"novelty"``, ``"class"`` or ``"layer ..."``.
        effect: from -1 to 1: how much more often a value from the window is larger than one from home.
        evidence: logarithm (base 10) of the money that bets on it have made.
    """

    channel: str
    effect: float
    evidence: float


@dataclass(frozen=True)
class ClassMove:
    """Share of a predicted class, at home and in the window, and its expected accuracy there."""

    label: int
    home: float
    now: float
    accuracy: Estimate


@dataclass(frozen=True)
class Status:
    """How things stand.

    Args:
        alarm: ``"shift"`` (the inputs changed), ``"promise"`` (labels show more errors than promised), both
            or none.
        false_alarm: chance of ever seeing an alarm though nothing changed; where labels are given, if the
            calibrator is right to within the tolerance.
        accuracy: of the window, estimated without labels.
        measured: of the samples whose labels came within the window; None without labels.
        home: mean confidence of the reference.
        matters: did accuracy, expected or measured, fall by more than was declared to matter, and surely by
            something?
        may_matter: could it have fallen by more than that? The interval does not exclude it.
        evidence: logarithms (base 10) of the money against "nothing changed" and "as right as promised"; an
            alarm needs ``log10(2 / false_alarm)``.
        moves: channels, those that moved most first.
        classes: classes whose share changed most first.
        n: samples in the window.
        batches: batches so far.
    """

    alarm: tuple[str, ...]
    false_alarm: float
    accuracy: Estimate
    measured: Estimate | None
    home: float
    matters: bool
    may_matter: bool
    evidence: tuple[float, float]
    moves: tuple[Move, ...]
    classes: tuple[ClassMove, ...]
    n: int
    batches: int

    def __str__(self) -> str:
        home = f"{100 * self.home:.1f} %"
        if not self.batches:
            return f"Ready: no new data yet; the accuracy expected at home is {home}."
        fall = f"expected accuracy {self.accuracy} of the last {self.n:,} samples, at home {home}"
        if not self.alarm:
            return f"No alarm: {fall}."
        most = self.moves[0]
        why = {"shift": "the inputs changed", "promise": "labels show more errors than promised"}
        causes = " and ".join(why[name] for name in self.alarm)
        return f"Alarm: {causes} ({self._weight}); {fall}; moved most: {most.channel} ({most.effect:+.2f})."

    @property
    def _weight(self) -> str:
        if self.matters:
            return "this matters"
        return "whether it matters cannot be told yet" if self.may_matter else "too little to matter so far"
