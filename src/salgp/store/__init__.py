"""From a laptop to a survey: feature stores on disk, out-of-core fitting, batch scoring, on threads or on
Ray.

`FeatureStore` is the sibling of `salgp.Features` for data that does not fit into memory. `extract_to_store`
and `write_store` make one, `fit_store` fits any calibrator to it, `score` applies a saved calibrator to it.
Writing and scoring continue with the missing shards when called again after a kill.
"""

from salgp.store.extraction import extract_parts, extract_to_store
from salgp.store.fit import fit_store
from salgp.store.scoring import read_scores, score
from salgp.store.store import FeatureStore, write_store

__all__ = [
    "FeatureStore",
    "extract_parts",
    "extract_to_store",
    "fit_store",
    "read_scores",
    "score",
    "write_store",
]
