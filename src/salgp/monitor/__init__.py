"""Monitor a stream of predictions without labels, with few, or with late ones.

`martingale` (what is monitored, and evidence valid at any time), `records` (what is kept, and where),
`monitor` (the `Monitor`), `rules` (from what is kept to what it says), `page` (the same as one HTML page),
`export` (table, dictionary, Prometheus).
"""

from salgp.monitor.monitor import Monitor
from salgp.monitor.records import Record
from salgp.monitor.rules import ClassShift, FeatureShift, Status

__all__ = ["ClassShift", "FeatureShift", "Monitor", "Record", "Status"]
