"""Software bill of materials of the environment: every installed package, its version, licence and needs.

Read from the packages' own metadata, without a network: ``python tools/sbom.py out/sbom.json`` writes a
CycloneDX 1.5 document and prints a table of licences.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any


def components() -> list[dict[str, Any]]:
    """One entry per installed package, sorted by name."""
    found = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        found[name] = {
            "type": "library",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version}",
            "licenses": [{"license": {"name": licence_of(package.metadata)}}],
        }
    return [found[name] for name in sorted(found)]


def licence_of(metadata: Any) -> str:
    """The licence a package declares: an expression, a classifier, or the first line of its text."""
    if metadata.get("License-Expression"):
        return str(metadata["License-Expression"])
    classified = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    if classified:
        return str(classified[-1].rpartition("::")[2].strip())
    stated = (metadata.get("License") or "").strip().splitlines()
    return stated[0][:80] if stated else "not declared"


def main(path: Path) -> None:
    """Write the document; say how many packages have which licence."""
    listed = components()
    document = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": listed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    licences = collections.Counter(entry["licenses"][0]["license"]["name"] for entry in listed)
    for name, count in licences.most_common():
        print(f"{count:4d}  {name}")
    print(f"{len(listed)} packages in {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/sbom.json"))
