"""Requirements with the SHA-256 of every file, from pip's own report of what it would install.

``pip install --dry-run --ignore-installed --report out/report.json -c constraints.txt ".[dev]"`` resolves
without installing; ``python tools/hashes.py out/report.json out/requirements-hashed.txt`` writes the
result down for ``pip install --require-hashes -r out/requirements-hashed.txt``. The hashes are those of one
platform's files, so the list is made where it is used and is not kept in the repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def line_of(package: dict[str, Any]) -> str:
    """One requirement: name, version and hash; empty for the checkout itself, which has none."""
    sha256 = package["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    name, version = package["metadata"]["name"], package["metadata"]["version"]
    return f"{name}=={version} --hash=sha256:{sha256}\n" if sha256 else ""


def main(report: Path, out: Path) -> None:
    """Write the list; say how many packages are on it."""
    packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    lines = sorted(filter(None, map(line_of, packages)), key=str.lower)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} packages with hashes in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
