"""A search on a part of the samples, refined on all, is inference on all and ends at the same optimum."""

from __future__ import annotations

import warnings

import pytest
import torch

from salgp.calibrators.gp.salgp import SALGP
from salgp.features import Features
from salgp.gp.optimise import NotConvergedWarning
from salgp_study.methods import methods_of
from salgp_study.refined import RefinedSALGP


def samples(n: int) -> tuple[Features, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 3, (n,), generator=g)
    x = 2.0 * torch.nn.functional.one_hot(truth, 3).double() + torch.randn(n, 3, generator=g).double()
    noisy = x + torch.randn(n, 3, generator=g).double()
    return Features(2.0 * noisy, {"a": x, "b": noisy}), truth


def fit(calibrator: SALGP) -> SALGP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return calibrator.fit(*samples(90))


def test_it_conditions_on_all_samples_and_finds_the_evidence_of_a_whole_search() -> None:
    whole = fit(SALGP.paper("hl", restarts=2))
    refined = fit(RefinedSALGP.paper("hl", restarts=2, n_search=30, refine_steps=100))
    assert refined.fitted_.inference == "exact"
    assert len(refined.fitted_.posterior.alpha) == 180
    assert refined.fitted_.log_evidence >= whole.fitted_.log_evidence - 0.01
    assert refined.predict(samples(5)[0]).std is not None


def test_a_refinement_that_would_go_on_says_so() -> None:
    calibrator = RefinedSALGP.paper("hl", restarts=0, n_search=30, refine_steps=1)
    with pytest.warns(NotConvergedWarning, match="did not converge"):
        calibrator.fit(*samples(90))
    assert not calibrator.fitted_.converged


def test_methods_are_refined_only_where_the_preset_says_so() -> None:
    for group in ("ml", "hl", "sum", "coregionalised", "prior"):
        assert {m.calibrator for m in methods_of(group, 5, {"refine_steps": 7})} == {"refined-sal-gp"}
        assert {m.calibrator for m in methods_of(group, 5, {})} == {"sal-gp"}
    assert {m.calibrator for m in methods_of("single", 5, {"refine_steps": 7})} == {"residual-gp"}
