"""The documentation of several versions side by side, with a switch between them; no server is needed.

    python docs/versions.py [SITE]

builds this version into ``SITE/VERSION/`` and lists all versions that are there in ``SITE/versions.js``,
which every page reads. ``SITE/index.html`` leads to the newest. To publish, keep ``SITE`` and add a folder
for each release.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWITCH = """<script src="{up}versions.js"></script>
<script>
(function () {{
  var versions = window.salgpVersions || [], here = {here};
  var title = document.querySelector(".md-header__title");
  if (!title || versions.length === 0) return;
  var choice = document.createElement("select");
  choice.className = "version-switch";
  choice.setAttribute("aria-label", "Version of the documentation");
  versions.forEach(function (version) {{
    choice.add(new Option(version, version, version === here, version === here));
  }});
  choice.addEventListener("change", function () {{ location.href = "{up}" + choice.value + "/index.html"; }});
  title.after(choice);
}})();
</script>
"""
REDIRECT = """<!doctype html>
<meta charset="utf-8"><title>salgp</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">salgp {newest}</a>
"""


def switch(version: str, page_url: str) -> str:
    """What a page of a versioned site ends with: the list of versions, and the choice in its header."""
    return SWITCH.format(up="../" * (page_url.count("/") + 1), here=json.dumps(version))


def version_key(name: str) -> tuple[int, ...]:
    """Versions in their order, not that of the alphabet.

    Example:
        >>> sorted(["0.10.0", "0.9.1"], key=version_key)
        ['0.9.1', '0.10.0']
    """
    return tuple(int(part) for part in re.findall(r"\d+", name))


def list_versions(site: Path) -> list[str]:
    """Write the list of versions and the way to the newest; give them, newest first."""
    found = [path.parent.name for path in site.glob("*/index.html")]
    versions = sorted(found, key=version_key, reverse=True)
    (site / "versions.js").write_text(f"window.salgpVersions = {json.dumps(versions)};\n", encoding="utf-8")
    (site / "index.html").write_text(REDIRECT.format(newest=versions[0]), encoding="utf-8")
    return versions


def main() -> None:
    import salgp

    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    version = salgp.__version__
    environment = {**os.environ, "SALGP_DOCS_VERSION": version, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site / version)]
    subprocess.run(build, cwd=ROOT, env=environment, check=True)
    print(f"{site / version}; versions: {', '.join(list_versions(site))}")


if __name__ == "__main__":
    main()
