"""Read the section ``Example:`` of a docstring as ``Examples:``, which Griffe shows as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Griffe takes only the plural for a section of examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every object it has loaded."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
