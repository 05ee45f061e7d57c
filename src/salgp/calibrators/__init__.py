"""All calibrators behind one contract, looked up by name.

Each is a thin estimator in its own file; `get` builds one by name, `names` lists them with a line each. A
calibrator of another package becomes one of them by `register`, or without an import by an entry point of the
group ``salgp.calibrators``; it then saves and loads like the others.
"""

import importlib
from typing import TYPE_CHECKING, Any

from salgp.calibrators.registry import CLASSES, get, names, register

if TYPE_CHECKING:
    from salgp.calibrators.base import Calibrator
    from salgp.calibrators.loading import load_calibrator

__all__ = ["Calibrator", "get", "load_calibrator", "names", "register"]

_PATHS = ("base.Calibrator", "loading.load_calibrator", *CLASSES.values())


def __getattr__(attribute: str) -> Any:
    for path in _PATHS:
        module, _, name = path.rpartition(".")
        if name == attribute:
            return getattr(importlib.import_module(f"salgp.calibrators.{module}"), name)
    raise AttributeError(f"module 'salgp.calibrators' has no attribute {attribute!r}")
