"""``python -m salgp``: the command line, where the ``salgp`` script is not on the path."""

import sys

from salgp.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
