"""The page itself: the template filled in, with its style and script inside, everything escaped.

The script is allowed by its hash, so that nothing else on the page can run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from salgp.extras import require
from salgp.report.text import share
from salgp.svg import without_control_characters

__all__ = ["page", "percent"]


def page(context: Mapping[str, Any]) -> str:
    """The whole page as a string."""
    require("jinja2")
    import jinja2
    from markupsafe import Markup

    folder = files("salgp.report")
    template, css, js = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        percent=percent,
        signed=_signed,
        share=share,
        number=_number,
    )
    digest = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    text = environment.from_string(template).render(
        css=Markup(css), js=Markup(js), script_hash=digest, **context
    )
    return without_control_characters(text.replace(" %", "\N{NO-BREAK SPACE}%"))


def percent(x: float, digits: int = 0) -> str:
    """A share in per cent.

    Example:
        >>> percent(0.125, 1)
        '12.5 %'
    """
    return f"{100 * x:.{digits}f} %"


def _signed(x: float) -> str:
    """Points with their sign; none where they round to nothing.

    Example:
        >>> _signed(0.123), _signed(-0.0001)
        ('+12.3', '0.0')
    """
    text = f"{100 * x:+.1f}"
    return "0.0" if text[1:] == "0.0" else text.replace("-", "\N{MINUS SIGN}")


def _number(x: float | None) -> str:
    return "n/a" if x is None or x != x else f"{x:.3f}"
