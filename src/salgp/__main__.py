"""``python -m salgp``: the command line, where the ``salgp`` script is not on the path."""

from __future__ import annotations

import sys

from salgp.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
