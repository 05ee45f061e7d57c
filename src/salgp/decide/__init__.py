"""Act or ask: a threshold on the confidence that keeps a promise, or that costs least.

Rooms: `choosing` (labelled samples in, rule out), `testing` (which thresholds are tested, in which order, and
why the last one that passes may be trusted), `prices` (cost instead of a promise), `rule` (what comes out).
"""

from __future__ import annotations

from salgp.decide.choosing import choose_threshold
from salgp.decide.rule import ALWAYS, NEVER, Rule, RuleModule
from salgp.decide.testing import samples_needed

__all__ = ["ALWAYS", "NEVER", "Rule", "RuleModule", "choose_threshold", "samples_needed"]
