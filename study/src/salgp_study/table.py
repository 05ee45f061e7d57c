"""A table: its cells as text, written as Markdown or LaTeX, and how numbers over seeds become a cell."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salgp.io import write_whole

__all__ = ["Record", "Table", "grouped", "mean_std", "values_of", "write_table"]

Record = Mapping[str, Any]
"""One scored row of a study."""


@dataclass(frozen=True)
class Table:
    """A table that can be written as Markdown or LaTeX.

    Args:
        name: file name without ending.
        title: heading.
        notes: sentences below the heading.
        columns: column names.
        rows: cells as text.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        odd = [row for row in self.rows if len(row) != len(self.columns)]
        if odd:
            raise ValueError(f"table {self.name!r} has {len(self.columns)} columns, but a row is {odd[0]}")

    def markdown(self) -> str:
        """The table as GitHub Markdown.

        Example:
            >>> print(Table("t", "T", (), ("a", "b"), (("1", "2"),)).markdown())
            ### T
            <BLANKLINE>
            | a | b |
            |---|---|
            | 1 | 2 |
            <BLANKLINE>
        """
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        body = [
            "|---" * len(cells) + "|" if cells[0] == "---" else "| " + " | ".join(cells) + " |"
            for cells in lines
        ]
        return "\n".join([f"### {self.title}", "", *(f"{note}\n" for note in self.notes), *body, ""])

    def latex(self) -> str:
        """The table as a LaTeX ``tabular``."""
        lines = [" & ".join(map(_escape, cells)) + r" \\" for cells in (self.columns, *self.rows)]
        head = (
            rf"\begin{{table}}[htbp]\centering\caption{{{_escape(self.title)}}}"
            + "\n"
            + rf"\begin{{tabular}}{{{'l' * len(self.columns)}}}\hline"
        )
        return "\n".join(
            [
                head,
                lines[0],
                r"\hline",
                *lines[1:],
                r"\hline\end{tabular}",
                *map(_escape, self.notes),
                r"\end{table}",
                "",
            ]
        )


def write_table(table: Table, folder: Path) -> Path:
    """Write a table as ``NAME.tex`` and ``NAME.md`` into a folder; return the latter."""
    for suffix, text in ((".tex", table.latex()), (".md", table.markdown())):
        path = folder / f"{table.name}{suffix}"
        write_whole(path, lambda part, text=text: part.write_text(text) and None)  # type: ignore[misc]
    return path


def mean_std(values: Iterable[float | None], digits: int = 4) -> str:
    """``mean ± std`` over seeds, ``mean`` of a single one, ``-`` of none.

    Example:
        >>> mean_std([0.1, 0.3]), mean_std([0.5]), mean_std([None])
        ('0.2000 ± 0.1414', '0.5000', '-')
    """
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    mean = _number(statistics.fmean(known), digits)
    return mean if len(known) == 1 else f"{mean} ± {_number(statistics.stdev(known), digits)}"


def grouped(records: Iterable[Record], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Record]]:
    """Records by the values they have under some keys, in the order met.

    Example:
        >>> grouped([{"a": 1, "b": 2}, {"a": 1, "b": 3}], ["a"])
        {(1,): [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}]}
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[k] for k in keys), []).append(record)
    return groups


def values_of(records: Sequence[Record], key: str) -> list[Any]:
    """The different values under a key, in the order met."""
    return list(dict.fromkeys(r[key] for r in records))


def _number(value: float, digits: int) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"


def _escape(text: str) -> str:
    return text.replace("%", r"\%").replace("_", r"\_").replace("±", r"$\pm$").replace("&", r"\&")
