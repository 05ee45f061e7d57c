"""The plots of the paper's panels draw the numbers they were given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from salgp_study import panel_plots as plots


def test_residuals_are_sorted_by_the_mean() -> None:
    ax = plots.residual_fit(
        torch.tensor([0.1, 0.2, 0.3]),
        torch.tensor([0.5, -0.5, 0.0]),
        torch.full((3,), 0.1),
        Figure().subplots(),
    )
    assert ax.lines[0].get_ydata() == pytest.approx([-0.5, 0, 0.5])
    assert np.asarray(ax.collections[1].get_offsets())[:, 1] == pytest.approx([0.2, 0.3, 0.1])
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((-0.7, 0.7))


def test_confusions_are_shares_of_the_true_class() -> None:
    ax = plots.confusion_matrix([0, 0, 0, 1, -1], [0, 0, 1, 1, 0], ["a", "b"], Figure().subplots())
    assert [t.get_text() for t in ax.texts] == ["0.67", "0.33", "", "1.00", "1.00", ""]
    with pytest.raises(ValueError, match="out of range"):
        plots.confusion_matrix([0], [4], ["a", "b"], Figure().subplots())


def test_unknown_appears_only_where_there_is_one() -> None:
    known = plots.confusion_matrix([0, 1], [0, 1], ["a", "b"], Figure().subplots())
    assert "unknown" not in " ".join(
        t.get_text() for t in [*known.get_yticklabels(), *known.get_xticklabels()]
    )
    rejected = plots.confusion_matrix([0, 1], [0, -1], ["a", "b"], Figure().subplots())
    assert [t.get_text() for t in rejected.get_xticklabels()] == ["a", "b", "unknown"]
