"""What MkDocs does beside Markdown: formulas become MathML, words of the glossary become links.

Both happen while the site is built, so that a reader's browser loads nothing from elsewhere. Where several
versions stand side by side (`versions.py`), every page gets a switch between them.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter

sys.path.insert(0, str(Path(__file__).parent))
import versions

GLOSSARY = "glossary.md"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
TAG = re.compile(r"(<[^>]+>)")
UNTOUCHED = ("a", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "math", "svg", "script", "style", "th")
"""Inside these, words stay as they are."""


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with the HTML of every page."""
    content = FORMULA.sub(_mathml, content)
    source = page.file.src_uri
    if source == GLOSSARY or source.startswith(("api", "results/", "research/")):
        return content
    return link_words(content, posixpath.relpath("glossary.html", posixpath.dirname(source) or "."))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with every page as it is written."""
    version = os.environ.get("SALGP_DOCS_VERSION")
    if version is None:
        return output
    return output.replace("</body>", f"{versions.switch(version, page.url)}</body>")


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    return latex2mathml.converter.convert(html.unescape(found[3]).strip(), display=display)


def words() -> dict[str, str]:
    """Every word of the glossary, as written there, and its anchor; longest first."""
    text = (Path(__file__).parent / GLOSSARY).read_text(encoding="utf-8")
    found = re.findall(r"^## (.+)$", text, re.MULTILINE)
    anchors = {word: re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in found}
    return dict(sorted(anchors.items(), key=lambda item: -len(item[0])))


def link_words(content: str, target: str) -> str:
    """Link the first use of every word of the glossary on a page."""
    left = words()
    parts = []
    for part, free in _parts(content):
        parts.append(_linked(part, left, target) if free and left else part)
    return "".join(parts)


def _parts(content: str) -> Iterator[tuple[str, bool]]:
    """Tags and texts in turn; with: may words of this text become links?"""
    inside: list[str] = []
    for part in TAG.split(content):
        if part.startswith("<"):
            name = re.match(r"</?([a-zA-Z0-9]+)", part)
            if name and name[1].lower() in UNTOUCHED:
                inside = inside[:-1] if part.startswith("</") else [*inside, name[1]]
            yield part, False
        else:
            yield part, not inside


def _linked(text: str, left: dict[str, str], target: str) -> str:
    """The words still to be linked, where this text has them; at most one link each."""
    places: list[tuple[int, int, str]] = []
    for word in list(left):
        found = re.search(rf"\b{re.escape(word)}(?:s|es)?\b", text, re.IGNORECASE)
        free = found and not any(a < found.end() and found.start() < b for a, b, _ in places)
        if found and free:
            places.append((found.start(), found.end(), left.pop(word)))
    for start, end, anchor in sorted(places, reverse=True):
        link = f'<a class="word" href="{target}#{anchor}">{text[start:end]}</a>'
        text = text[:start] + link + text[end:]
    return text
