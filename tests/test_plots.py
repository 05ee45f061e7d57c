"""Plots draw the numbers they were given, on the axes they were given, and leave matplotlib as it was."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from salgp import LayerTerms, metrics, plots

GALLERY = Path(__file__).parents[1] / "docs" / "make_gallery.py"


def load_gallery():
    spec = importlib.util.spec_from_file_location("make_gallery", GALLERY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    s = rng.random(n)
    return s, rng.random(n) < s**2


def test_gallery_script_draws_every_plot(tmp_path: Path) -> None:
    settings = dict(matplotlib.rcParams)
    written = load_gallery().main(tmp_path)
    assert dict(matplotlib.rcParams) == settings
    assert len(written) == 4
    for path in written:
        image = matplotlib.image.imread(path)
        assert 100 < image.shape[0] < 1200
        assert image[..., :3].std() > 0.05  # something was drawn
        assert path.stat().st_size < 120_000


def test_gallery_page_shows_every_picture() -> None:
    page = GALLERY.with_name("gallery.md").read_text()
    for name in load_gallery().PLOTS:
        assert f"img/gallery/{name}.png" in page


def test_importing_plots_does_not_import_matplotlib() -> None:
    code = "import sys, salgp.plots; raise SystemExit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reliability_bars_are_the_bins() -> None:
    s, c = sample()
    upper, lower = plots.reliability_diagram(s, c, n_bins=10)
    bins = metrics.reliability_bins(s, c, 10)
    assert [bar.get_height() for bar in upper.patches] == pytest.approx(bins.share)
    blue = lower.containers[0]
    assert [bar.get_height() for bar in blue] == pytest.approx(bins.accuracy)
    tops = {
        round(bar.get_x(), 6): bar.get_y() + bar.get_height() for gap in lower.containers[1:] for bar in gap
    }
    assert [tops[round(x, 6)] for x in bins.edges[:-1]] == pytest.approx(bins.confidence)
    assert all(bar.get_hatch() for gap in lower.containers[1:] for bar in gap)
    lines = sorted(line.get_xdata()[0] for line in upper.lines)
    assert lines == pytest.approx(sorted([s.mean(), c.mean()]))


def test_reliability_draws_where_it_is_told() -> None:
    figure = Figure()
    pair = figure.subplots(2, 1)
    assert plots.reliability_diagram(*sample(), axes=tuple(pair)) == tuple(pair)
    sub = Figure().subfigures(1, 2)[1]
    upper, _ = plots.reliability_diagram(*sample(), figure=sub)
    assert upper.figure is sub


def test_reliability_band_holds_the_accuracy_and_narrows_with_samples() -> None:
    small, large = (metrics.reliability_bins(*sample(n), n_bins=5) for n in (200, 20_000))
    for bins in (small, large):
        lower, upper = metrics.accuracy_band(bins)
        assert (lower <= bins.accuracy + 1e-12).all()
        assert (bins.accuracy <= upper + 1e-12).all()
    width = [np.subtract(*metrics.accuracy_band(bins)[::-1]).mean() for bins in (small, large)]
    assert width[1] < 0.2 * width[0]
    _, ax = plots.reliability_diagram(*sample(), band=0.9)
    assert any("exact interval" in t.get_text() for t in ax.get_legend().get_texts())


def test_one_sample_and_certain_confidence_draw() -> None:
    upper, lower = plots.reliability_diagram([1.0], [1], band=0.9)
    assert len(lower.containers[0]) == 1
    assert upper.patches[-1].get_height() == 1


def test_layer_shares_sum_to_one() -> None:
    terms = LayerTerms(
        ("a", "b"), torch.tensor([[0.1, -0.3], [0.1, 0.3]]), torch.tensor([[0.1, 0.2], [0.1, 0.2]])
    )
    ax = plots.layer_profile(terms, weights=[1.0, 3.0])
    assert [[bar.get_width() for bar in group] for group in ax.containers] == [
        pytest.approx(x) for x in ([0.25, 0.75], [0.25, 0.75], [0.2, 0.8])
    ]
    assert len(plots.layer_profile(LayerTerms(("a",), torch.zeros(2, 1))).containers) == 1
    with pytest.raises(ValueError, match="2 values"):
        plots.layer_profile(terms, weights=[1.0])


def test_risk_coverage_curves_are_told_apart_without_colour() -> None:
    curve = metrics.risk_coverage(*sample())
    ax = plots.risk_coverage_curves({str(k): curve for k in range(7)})
    assert len({str(line._unscaled_dash_pattern) for line in ax.lines}) == 7
    assert f"{curve.area:.3f}" in ax.get_legend().get_texts()[0].get_text()


def test_a_wider_level_draws_wider_intervals() -> None:
    def heights(band: float) -> float:
        _, ax = plots.reliability_diagram(*sample(), band=band)
        ends = [segment for one in ax.collections for segment in one.get_segments()]
        return float(sum(abs(segment[1][1] - segment[0][1]) for segment in ends))

    assert heights(0.99) > heights(0.5) > 0
