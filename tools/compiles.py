"""Does every file compile under this Python? ``python -W error tools/compiles.py src tests`` also counts
warnings of the compiler as errors, such as escapes that a later version refuses.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(folders: list[str]) -> None:
    """Compile all files below some folders, without writing anything."""
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    for path in files:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    print(f"Python {sys.version.split()[0]}: {len(files)} files compile")


if __name__ == "__main__":
    main(sys.argv[1:])
