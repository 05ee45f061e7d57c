"""One self-contained HTML page that says, in plain words first, whether confidences can be trusted."""

from __future__ import annotations

from salgp.report.build import build, render

__all__ = ["build", "render"]
