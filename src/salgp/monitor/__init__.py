"""Monitor a stream of predictions without labels, with few, or with late ones.

`martingale` (evidence valid at any time), `features` (what is monitored), `records` (what is kept, and
where), `monitor` (the `Monitor`), `rules` (from what is kept to a status), `status` (what it says), `page`
(the same as one HTML page), `export` (table, dictionary, Prometheus).
"""

from __future__ import annotations

from salgp.monitor.monitor import Monitor
from salgp.monitor.records import Record
from salgp.monitor.rules import ClassShift, FeatureShift, Status

__all__ = ["ClassShift", "FeatureShift", "Monitor", "Record", "Status"]
