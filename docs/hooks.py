"""Hooks of MkDocs: formulas become MathML while the site is built.

So a browser loads nothing from elsewhere. Where several versions stand side by side (`versions.py`), every
page gets a switch between them.
"""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter

sys.path.insert(0, str(Path(__file__).parent))
import versions

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """MkDocs calls this with the HTML of every page."""
    return FORMULA.sub(_mathml, content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with every page as it is written."""
    version = os.environ.get("SALGP_DOCS_VERSION")
    if version is None:
        return output
    return output.replace("</body>", f"{versions.switch(version, page.url)}</body>")


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    return latex2mathml.converter.convert(html.unescape(found[3]).strip(), display=display)
