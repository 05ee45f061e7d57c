"""The prior of Bayesian binning, chosen on the calibration set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salgp import Features
from salgp.calibrators.scaling.bbq import binnings, log_evidence, sorted_by_confidence
from salgp.calibrators.scaling.toplabel import top_label
from salgp.metrics import ece, mce, nll_correct
from salgp_study.selected_bbq import SelectedBBQ


def drawn(n: int = 300, seed: int = 0, temperature: float = 2.0) -> tuple[Features, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return Features(z), torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=generator)[:, 0]


def test_empirical_bayes_has_the_most_evidence() -> None:
    f, labels = drawn(400)
    fitted = SelectedBBQ(select="empirical-bayes").fit(f, labels)
    bins = binnings(*sorted_by_confidence(top_label(f), f.correct(labels)))

    def evidence(alpha: float, beta: float) -> float:
        return float(np.logaddexp.reduce(log_evidence(bins, (alpha, beta))))

    assert fitted.alpha_ is not None
    assert fitted.beta_ is not None
    best = evidence(fitted.alpha_, fitted.beta_)
    assert all(best >= evidence(a, b) - 1e-3 for a in (0.1, 0.3, 1, 3, 10) for b in (0.1, 0.3, 1, 3, 10))


@pytest.mark.parametrize(("criterion", "score"), [("nll", nll_correct), ("ece", ece), ("mce", mce)])
def test_cross_validation_picks_from_the_grid(
    criterion: str, score: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, labels = drawn(300)
    monkeypatch.setattr("salgp_study.selected_bbq.GRID", (0.1, 100.0))
    fitted = SelectedBBQ(select="cross-validation", criterion=criterion).fit(f, labels)  # type: ignore[arg-type]
    assert fitted.alpha_ in (0.1, 100.0)
    assert (fitted.alpha_, fitted.beta_) != (100.0, 100.0)  # a prior that drowns 300 samples


@pytest.mark.parametrize("arguments", [{"select": "best"}, {"criterion": "auc"}])
def test_bad_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        SelectedBBQ(**arguments).fit(*drawn(20))  # type: ignore[arg-type]
