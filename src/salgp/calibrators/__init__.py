"""All calibrators behind one contract, looked up by name.

Each is a thin estimator in its own file; `get` builds one by name, `names` lists them with a line each. A
calibrator of another package becomes one of them by `register`, or without an import by an entry point of the
group ``salgp.calibrators``; it then saves and loads like the others.
"""

from __future__ import annotations

import importlib
from typing import Any

from salgp.calibrators.base import Calibrator
from salgp.calibrators.loading import load_calibrator
from salgp.calibrators.registry import get, names, register
from salgp.methods import CLASSES

__all__ = ["Calibrator", "get", "load_calibrator", "names", "register"]


def __getattr__(attribute: str) -> Any:
    for path in CLASSES.values():
        if path.endswith(f".{attribute}"):
            return getattr(importlib.import_module(f"salgp.calibrators.{path.rpartition('.')[0]}"), attribute)
    raise AttributeError(f"module 'salgp.calibrators' has no attribute {attribute!r}")
