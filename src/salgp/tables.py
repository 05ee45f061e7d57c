"""Columns as the table a person works with."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

__all__ = ["as_frame"]


def as_frame(columns: Mapping[str, NDArray[Any]]) -> Any:
    """The columns as the first kind of table that is installed: a pandas data frame, a pyarrow table, or a
    mapping from column name to NumPy array.

    Example:
        >>> import numpy as np
        >>> list(as_frame({"n": np.array([1, 2]), "key": np.array(["a", "b"])}))
        ['n', 'key']
    """
    for library, make in (("pandas", "DataFrame"), ("pyarrow", "table")):
        try:
            return getattr(importlib.import_module(library), make)(columns)
        except ImportError:
            continue
    return dict(columns)
