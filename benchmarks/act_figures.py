"""Pictures of the pages on deciding, sets, estimating and watching.

python benchmarks/act_figures.py decide sets estimate monitor --cache CACHE
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from act_data import plain, predictions, read_suite, unshared
from act_estimate import POINTS
from act_guarantee import _naive
from act_sets import _tried

from salgp import Monitor
from salgp.decide import choose_threshold
from salgp.sets import fit_sets

IMAGES = Path(__file__).parents[1] / "docs" / "img"
SET = "cifar10-resnet20-0"
BLUE, ORANGE, GREY = "#0b62a8", "#b3560b", "#55606e"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", nargs="+", choices=sorted(PICTURES))
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    arguments = parser.parse_args()
    for name in arguments.pictures:
        PICTURES[name](arguments.cache, IMAGES / f"act-{name}.png")


def decide(cache: Path, path: Path) -> None:
    suite = read_suite(cache, SET)
    prediction = unshared(suite.temperature().predict(plain(suite.test[0])))
    labels, error = suite.test[1], 0.03
    s, wrong = prediction.confidence.numpy(), (prediction.label != labels).numpy()
    rng = np.random.default_rng(0)
    found = {"naive": [], "rule": []}
    for _ in range(300):
        rows = torch.from_numpy(rng.integers(0, len(s), 1000))
        some = (prediction[rows], labels[rows])
        limits = {"naive": _naive(*some, error), "rule": choose_threshold(*some, error).threshold[0]}
        for key, limit in limits.items():
            acted = s > limit
            found[key].append((acted.mean(), wrong[acted].mean() if acted.any() else 0.0))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    order = np.argsort(-s)
    rate = np.cumsum(wrong[order]) / np.arange(1, len(s) + 1)
    left.plot(np.arange(1, len(s) + 1) / len(s), 100 * rate, color=GREY)
    left.axhline(100 * error, color="black", ls="--", lw=1)
    for (key, values), colour, mark in zip(found.items(), (ORANGE, BLUE), "s^", strict=True):
        x, y = np.array(values).T
        left.plot(x[:40], 100 * y[:40], mark, color=colour, ms=4, alpha=0.6, label=key)
        right.hist(100 * y, bins=np.linspace(1, 5, 33), color=colour, alpha=0.6, label=key)
    left.set(xlabel="share acted on", ylabel="wrong among those, %", xlim=(0.6, 1), ylim=(0, 8.5))
    right.axvline(100 * error, color="black", ls="--", lw=1)
    broken = {key: np.mean([e > error for _, e in values]) for key, values in found.items()}
    words = ", ".join(f"{key} {share:.0%}" for key, share in broken.items())
    right.set(
        xlabel="true error of the threshold, %", ylabel="thresholds of 300", title=f"promise broken: {words}"
    )
    left.legend(frameon=False)
    _save(figure, path)


def sets(cache: Path, path: Path) -> None:
    found = predictions(cache, SET)
    labels = found["test"].labels
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))[:4500]

    def both(one):
        return one.tempered, one.classes

    fits = [
        fit_sets(p[rows], labels[rows], 0.95, by=by)
        for p, by in zip(both(found["test"]), ("all", "novelty"), strict=True)
    ]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    groups: dict[str, list] = {"none": [found["test"]]}
    for name, one in found.items():
        if name not in ("home", "test"):
            groups.setdefault(name.rsplit("-", 1)[-1], []).append(one)
    severities = sorted(groups, key=lambda name: (name != "none", name))
    for which, (colour, name) in enumerate(((ORANGE, "temperature"), (BLUE, "layer evidence, by novelty"))):
        tried = [
            np.mean([_tried(fits[which], both(one)[which], one.labels) for one in groups[key]], axis=0)
            for key in severities
        ]
        for axis, values in zip(axes, np.array(tried).T, strict=True):
            axis.plot(severities, values, "o-" if which else "s--", color=colour, label=name)
    axes[0].axhline(0.95, color="black", lw=1, ls=":")
    axes[0].set(ylabel="contains the true class", xlabel="severity of the shift", ylim=(0.4, 1))
    axes[1].set(ylabel="mean size", xlabel="severity of the shift", ylim=(0.9, None))
    axes[1].legend(frameon=False)
    _save(figure, path)


def estimate(cache: Path, path: Path) -> None:
    points = json.loads(POINTS.read_text(encoding="utf-8"))
    methods = [m for m in ("average confidence", "COTT") if m in points[0]["estimates"]]
    ours = (
        "layer evidence, context" if "layer evidence, context" in points[0]["estimates"] else "layer evidence"
    )
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.4), sharex=True, sharey=True, layout="constrained")
    for axis, method, colour in zip(axes, [*methods, ours], (ORANGE, ORANGE, BLUE), strict=True):
        value = np.array([p["estimates"][method] for p in points])
        truth = np.array([p["truth_all" if method == ours else "truth"] for p in points])
        axis.plot([0, 1], [0, 1], color="black", lw=1)
        axis.plot(truth, value, ".", color=colour, ms=5, alpha=0.6)
        axis.set(title=f"{method}\nmean error {np.abs(value - truth).mean():.3f}", xlabel="true accuracy")
    axes[0].set(ylabel="estimated without labels", xlim=(0, 1), ylim=(0, 1))
    _save(figure, path)


def monitor(cache: Path, path: Path) -> None:
    suite = read_suite(cache, SET)
    model = suite.evidence()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(suite.test[1])))
    quiet, labels = suite.test[0][order], suite.test[1][order]
    noisy = suite.shifted["gaussian-noise-1"][0]
    names = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    watching = Monitor.start(model.predict(plain(quiet[:2000])), class_names=names, window=7)
    for day in range(56):
        shifted, rows = day >= 44, slice(2000 + 100 * day, 2100 + 100 * day)
        batch = noisy[100 * (day - 44) : 100 * (day - 43)] if shifted else quiet[rows]
        y = labels[rows] if day % 7 == 0 and not shifted else None
        when = f"2026-{3 + day // 28:02d}-{1 + day % 28:02d}T02:00:00"
        watching.feed(model.predict(plain(batch)), y, key=f"night {day + 1}", time=when)
    with tempfile.TemporaryDirectory() as folder:
        page = watching.page(Path(folder, "page.html"), "Object recognition, gate 4")
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        flags = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--window-size=1000,1076",
            f"--user-data-dir={folder}/p",
        ]
        subprocess.run(
            [chromium, *flags, f"--screenshot={path}", page.as_uri()], check=True, capture_output=True
        )


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


PICTURES = {"decide": decide, "sets": sets, "estimate": estimate, "monitor": monitor}

if __name__ == "__main__":
    main()
