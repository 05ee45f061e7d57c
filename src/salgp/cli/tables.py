"""Tables for people: scores of several methods, and the reasons behind single corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from salgp.metrics import Comparison

__all__ = ["SHOWN", "explanation_table", "score_table"]

SHOWN = {
    "accuracy": "acc.",
    "mean_confidence": "conf.",
    "ece": "ECE↓",
    "nll_correct": "NLLc↓",
    "nll": "NLL↓",
    "brier": "Brier↓",
    "auroc": "AUROC↑",
}
_NOT_RANKED = ("accuracy", "mean_confidence")


def score_table(comparison: Comparison, title: str) -> Table:
    """One row per method; the best of each column in bold, and the mean error bar last."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=_CAPTION,
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    for heading in (*SHOWN.values(), "± std"):
        table.add_column(heading, justify="right", no_wrap=True)
    best = {key: _best(comparison, key) for key in SHOWN}
    for name, scores in comparison.as_dict().items():
        cells = ["-" if scores[key] is None else f"{scores[key]:.3f}" for key in SHOWN]
        spread = "-" if scores["mean_variance"] is None else f"{scores['mean_variance'] ** 0.5:.3f}"
        table.add_row(
            name,
            *(f"[bold green]{c}[/]" if best[key] == name else c for key, c in zip(SHOWN, cells, strict=True)),
            spread,
        )
    return table


_CAPTION = (
    "conf.: mean confidence; NLLc: of being correct; AUROC: of spotting errors; ↓ small is good, "
    "↑ large is good"
)


def explanation_table(explained: Sequence[Mapping[str, Any]]) -> Table:
    """One row per sample: confidence before and after, and the layers by size of their correction."""
    scale = next((e["scale"] for e in explained if e["scale"]), None)
    table = Table(
        "row",
        "predicted",
        "network",
        "calibrated",
        f"layers, by size of their correction ({scale})" if scale else "layers",
    )
    for e in explained:
        bar = "" if e["std"] is None else f" ± {e['std']:.3f}"
        layers = ", ".join(f"{escape(name)} {value:+.3f}" for name, value in list(e["layers"].items())[:4])
        table.add_row(
            str(e["row"]),
            escape(e["class"]),
            f"{e['network_confidence']:.3f}",
            f"{e['confidence']:.3f}{bar}",
            layers or "-",
        )
    return table


def _best(comparison: Comparison, key: str) -> str | None:
    if (
        key in _NOT_RANKED
        or len(comparison.rows) < 2
        or all(getattr(s, key) is None for s in comparison.rows.values())
    ):
        return None
    return comparison.best(key)
