"""Run the demo for the site: ``python docs/make_example.py`` writes the example report and the picture."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.figure import Figure

from salgp.demo import NETWORK, OURS, TEMPERATURE, DemoResult, run_demo

HERE = Path(__file__).parent
COLOURS = {NETWORK: "#CC3311", TEMPERATURE: "#777777", OURS: "#0072B2"}


def main() -> None:
    """Report, picture and table of the demo with its default seed."""
    with tempfile.TemporaryDirectory() as folder:
        result = run_demo(folder)
        (HERE / "example").mkdir(exist_ok=True)
        shutil.copy(result.report, HERE / "example" / "report.html")
    picture(result).savefig(HERE / "img" / "landing.png", dpi=110, metadata={"Software": None})
    page = (HERE / "index.md").read_text(encoding="utf-8")
    page = replaced(replaced(page, "table", table(result)), "words", sentences(result))
    (HERE / "index.md").write_text(page, encoding="utf-8")
    print(table(result), sentences(result), sep="\n\n")


def replaced(page: str, name: str, text: str) -> str:
    """The page with what stands between the marks ``<!-- name -->`` and ``<!-- end -->`` replaced."""
    start, _, rest = page.partition(f"<!-- {name} -->")
    return f"{start}<!-- {name} -->\n{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def sentences(result: DemoResult) -> str:
    """What the demo says in words, for the landing page."""
    return result.words.replace("\n", " ").replace("these", "2,000 photographed digits", 1)


def picture(result: DemoResult) -> Figure:
    """Some photographed digits with both confidences, and what the confidences are worth."""
    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.75))
    _digits(above, result)
    _curves(below.subplots(), result)
    return figure


def _digits(figure: Any, result: DemoResult) -> None:
    shown = result.predictions["photographed"]
    data = result.sets["photographed"]
    right = (shown[NETWORK].label == data.labels).numpy()
    before, after = shown[NETWORK].confidence.numpy(), shown[OURS].confidence.numpy()
    wrong = [i for i in np.argsort(after) if not right[i] and before[i] > 0.9][:3]
    good = [i for i in range(len(right)) if right[i] and before[i] > 0.9 and after[i] > 0.9][:2]
    axes = figure.subplots(1, 5)
    for ax, i in zip(axes, [*wrong, *good], strict=True):
        ax.imshow(data.images[i, 0], cmap="gray")
        ax.set_axis_off()
        verdict = "right" if right[i] else f"wrong, is a {int(data.labels[i])}"
        ax.set_title(f"says {int(shown[NETWORK].label[i])} ({verdict})", fontsize=9)
        said = f"{before[i]:.0%} $\\rightarrow$ {after[i]:.0%}"
        ax.text(
            0.5, -0.12, said, transform=ax.transAxes, ha="center", va="center", fontsize=10, weight="bold"
        )


def _curves(ax: Any, result: DemoResult) -> None:
    right = (result.predictions["photographed"][NETWORK].label == result.sets["photographed"].labels).numpy()
    ax.plot([0, 1], [0, 1], color="#bbbbbb", lw=1, zorder=0)
    for name, style in ((NETWORK, "o--"), (TEMPERATURE, "s:"), (OURS, "D-")):
        confidence = result.predictions["photographed"][name].confidence.numpy()
        groups = np.array_split(np.argsort(confidence), 10)
        x, y = ([float(v[g].mean()) for g in groups] for v in (confidence, right.astype(float)))
        ax.plot(x, y, style, color=COLOURS[name], label=name, ms=5)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence it states", ylabel="share that is right")
    ax.set_title("2,000 photographed digits, in ten groups by confidence", fontsize=10)
    ax.legend(frameon=False, loc="upper left", fontsize=9)


def table(result: DemoResult) -> str:
    """Scores of all methods on both sets, as Markdown."""
    lines = ["| digits | method | ECE | NLL of being right | AUROC of errors |", "|---|---|---|---|---|"]
    for name, comparison in result.scores.items():
        for method, scores in comparison.rows.items():
            cells = (f"{x:.3f}".lstrip("0") for x in (scores.ece, scores.nll_correct, scores.auroc))
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
