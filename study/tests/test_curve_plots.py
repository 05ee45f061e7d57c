"""Plots of light curves: each point in its band, densities that integrate to what they were drawn from."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from salgp_study import curve_plots as plots


def test_light_curves_put_each_point_in_its_band() -> None:
    axes = plots.light_curves(
        {"x": ([1.0, 2.0, 3.0], [0, 1, 1], [5.0, 6.0, 7.0], [0.1, 0.1, 0.1])}, ["g", "r", "i"]
    )
    assert [list(ax.lines[1].get_ydata()) for ax in axes[:, 0]] == [[5.0], [6.0, 7.0], []]
    with pytest.raises(ValueError, match="flux must have 2 values"):
        plots.light_curves({"x": ([1.0, 2.0], [0, 0], [1.0], [1.0])}, ["g"])


def test_flux_density_recovers_a_normal() -> None:
    grid, density = plots.flux_density(np.random.default_rng(0).normal(0, 2, 50_000))
    assert density == pytest.approx(np.exp(-((grid / 2) ** 2) / 2) / np.sqrt(8 * np.pi), abs=0.008)
    assert np.isfinite(plots.flux_density(np.ones(5))[1]).all()


def test_flux_distributions_bear_an_empty_band() -> None:
    axes = plots.flux_distributions(np.arange(50.0), np.zeros(50), ["g", "r", "i", "z"])
    assert [ax.get_yscale() for ax in axes] == ["log"] * 4
