"""Optional libraries, and what to install where one is missing."""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["EXTRAS", "as_frame", "hint", "require"]

EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "jinja2": "report",
    "matplotlib": "plots",
    "pyarrow": "parquet",
    "ray": "ray",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "PIL": "images",
    "transformers": "hf",
    "pandas": "pandas",
}
"""Library -> the extra of salgp that brings it."""


def require(*libraries: str) -> None:
    """Refuse to go on where a library is missing, and say what to install.

    Example:
        >>> require("math")
        >>> require("no_such_library")
        Traceback (most recent call last):
        ...
        ModuleNotFoundError: this needs no_such_library, which is not installed; pip install no_such_library
    """
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(hint(name), name=name)


def hint(library: str) -> str:
    """Message where ``library`` is missing.

    Example:
        >>> hint("pyarrow")
        'this needs pyarrow, which is not installed; pip install "salgp[parquet]"'
    """
    what = f'"salgp[{EXTRAS[library]}]"' if library in EXTRAS else library
    return f"this needs {library}, which is not installed; pip install {what}"


def as_frame(columns: "Mapping[str, NDArray[Any]]") -> Any:
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
