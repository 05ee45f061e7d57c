"""Tables for people: scores of several methods, and the reasons behind single corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from salgp.metrics import Comparison, Metric

__all__ = ["explanation_table", "score_table"]


def score_table(comparison: Comparison, title: str) -> Table:
    """One row per method; the best of each column in bold, and the mean error bar last.

    Calibration changes no label, so the accuracy of all methods is one number and stands below the table.
    """
    from salgp.metrics import METRICS

    rows = comparison.as_dict()
    accuracy = next(iter(rows.values()))["accuracy"]
    shown = {name: metric for name, metric in METRICS.items() if metric.heading and name != "accuracy"}
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=f"accuracy {accuracy:.3f} for every method; {_CAPTION}",
        caption_justify="left",
    )
    arrows = {None: "", True: "↑", False: "↓"}
    table.add_column("method", no_wrap=True)
    for metric in shown.values():
        table.add_column(metric.heading + arrows[metric.larger_is_better], justify="right", no_wrap=True)
    table.add_column("± std", justify="right", no_wrap=True)
    best = {key: _best(comparison, key, metric) for key, metric in shown.items()}
    for name, scores in rows.items():
        cells = ["-" if scores[key] is None else f"{scores[key]:.3f}" for key in shown]
        spread = "-" if scores["mean_variance"] is None else f"{scores['mean_variance'] ** 0.5:.3f}"
        table.add_row(
            name,
            *(_emphasised(c, best[key] == name) for key, c in zip(shown, cells, strict=True)),
            spread,
        )
    return table


_CAPTION = (
    "conf.: mean confidence; NLLc: of being correct; AUROC: of spotting errors; ↓ small is good, "
    "↑ large is good"
)


def explanation_table(explained: Sequence[Mapping[str, Any]]) -> Table:
    """One row per sample: confidence before and after, and the points of every term, which add up to the
    change.
    """
    from salgp.explanation import shown_term

    table = Table("row", "predicted", "network", "calibrated", "points, which add up to the change")
    for e in explained:
        bar = "" if e["lower"] is None else f" ({e['lower']:.2f} to {e['upper']:.2f})"
        points = ", ".join(f"{shown_term(name)} {value + 0.0:+.2f}" for name, value in e["points"].items())
        table.add_row(
            str(e["row"]),
            e["class"],
            f"{e['network_confidence']:.2f}",
            f"{e['confidence']:.2f}{bar}",
            points or "-",
        )
    return table


def _best(comparison: Comparison, key: str, metric: Metric[...]) -> str | None:
    """The best method, where there are several, the metric has a better side, and they differ."""
    values = {scores[key] for scores in comparison.as_dict().values()} - {None}
    return comparison.best(key) if metric.larger_is_better is not None and len(values) > 1 else None


def _emphasised(cell: str, best: bool) -> Text:
    return Text(cell, style="bold green" if best else "")
