"""Act or ask: a threshold on the confidence with a guaranteed error rate, or of least cost.

`thresholds` (labelled samples in, rule out), `fixed_sequence` (which thresholds are tested, in which order,
and why the last one that passes may be trusted), `costs` (costs instead of error rates), `rule` (the result).
"""

from salgp.decide.fixed_sequence import samples_needed
from salgp.decide.rule import ALWAYS, NEVER, Rule, RuleModule
from salgp.decide.thresholds import choose_threshold

__all__ = ["ALWAYS", "NEVER", "Rule", "RuleModule", "choose_threshold", "samples_needed"]
