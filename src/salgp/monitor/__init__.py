"""When to stop trusting it: watch a stream of predictions without labels, with few, or with late ones.

Rooms: `martingale` (evidence that may be looked at any time), `channels` (what is watched), `records` (what
is kept, and where), `watching` (the `Monitor`), `judging` (from what is kept to what it says), `status` (what
it says), `page` (the same as one HTML page), `history` (the log as a table).
"""

from __future__ import annotations

from salgp.monitor.records import Record
from salgp.monitor.status import ClassMove, Move, Status
from salgp.monitor.watching import Monitor

__all__ = ["ClassMove", "Monitor", "Move", "Record", "Status"]
