"""Run ``examples/tutorial.py`` cell by cell and write it, with what it prints and draws, as a page.

``python docs/make_tutorial.py`` writes ``docs/tutorial.md`` and its pictures.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).parent
SOURCE = HERE.parent / "examples" / "tutorial.py"
PICTURES = HERE / "img" / "tutorial"


def main() -> None:
    """Run all cells in a folder of their own."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {"__name__": "tutorial"}
    parts = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, (kind, text) in enumerate(cells(SOURCE.read_text(encoding="utf-8"))):
            parts.append(text if kind == "markdown" else run(text, names, number))
    note = f"*Written by `python docs/make_tutorial.py` from `examples/{SOURCE.name}`, which the tests run.*"
    (HERE / "tutorial.md").write_text("\n\n".join([*parts, note]) + "\n", encoding="utf-8")


def cells(source: str) -> list[tuple[str, str]]:
    """Kind and text of every cell of a script in percent format."""
    found = []
    for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", source, re.MULTILINE):
        kind = "markdown" if "markdown" in head else "code"
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind == "markdown" else body
        found.append((kind, text.strip()))
    return found


def run(code: str, names: dict[str, Any], number: int) -> str:
    """The cell, what it printed, and the picture its last expression stands for."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    value = None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, str(SOURCE), "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(SOURCE), "eval"), names)
    page = f"```py\n{code}\n```"
    if said.getvalue():
        page += f"\n\n```text\n{said.getvalue().rstrip()}\n```"
    figure = _figure_of(value)
    if figure is not None:
        figure.savefig(PICTURES / f"{number}.png", dpi=90, metadata={"Software": None})
        page += f"\n\n![What the cell above draws](img/tutorial/{number}.png)"
    return page


def _figure_of(value: Any) -> Any:
    """The figure a value is or belongs to; of several axes, that of the first."""
    first = value[0] if isinstance(value, tuple | list | np.ndarray) and len(value) else value
    return first if isinstance(first, Figure) else getattr(first, "figure", None)


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    main()
