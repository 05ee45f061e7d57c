"""From a laptop to a survey: feature stores on disk, out-of-core fitting, batch scoring, on threads or on
Ray.

`FeatureStore` is the sibling of `salgp.Features` for data that does not fit into memory. `extract_to_store`
and `write_store` make one, `fit_store` fits any calibrator to it, `score` applies a saved calibrator to it.
Writing and scoring continue with the missing shards when called again after a kill.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "ChecksumError": "manifest",
    "FeatureStore": "store",
    "Scoring": "scoring",
    "extract_parts": "extraction",
    "extract_to_store": "extraction",
    "fit_store": "fit",
    "read_scores": "scoring",
    "score": "scoring",
    "subset_of": "sampling",
    "write_store": "store",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'salgp.store' has no attribute {name!r}")
    return getattr(importlib.import_module(f"salgp.store.{_WHERE[name]}"), name)
