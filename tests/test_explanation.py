"""Explanations: points that add up, for every kind of term."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from salgp.explanation import confidence_points, explain_sample, term_points
from salgp.features import Features
from salgp.prediction import LayerTerms, Prediction

G = torch.Generator().manual_seed(0)
FEATURES = Features(torch.randn(8, 4, generator=G, dtype=torch.float64))
CONFIDENCE = torch.linspace(0.05, 0.95, 8, dtype=torch.float64)
STD = torch.linspace(0.0, 0.4, 8, dtype=torch.float64)


def test_points_add_up_and_stay_bounded_where_large_terms_cancel() -> None:
    terms = torch.tensor([4.0, -3.5, -2.0, 0.1])
    points = confidence_points(0.5, terms)
    change = torch.sigmoid(torch.tensor(0.5 + float(terms.sum()))) - torch.sigmoid(torch.tensor(0.5))
    torch.testing.assert_close(float(points.sum()), float(change), atol=1e-6, rtol=0)
    assert (points.abs() < 1).all()
    assert (points.sign() == terms.sign()).all()


def test_points_of_two_sides_are_the_average_over_both_orders() -> None:
    """Rising and falling terms, added side by side in either order; inside a side by size."""
    terms = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = torch.zeros(3, dtype=torch.float64)
    sides = [[0, 2], [1]]
    for order in itertools.permutations(sides):
        at = torch.tensor(0.3, dtype=torch.float64)
        for side in order:
            whole = terms[side].sum()
            change = torch.sigmoid(at + whole) - torch.sigmoid(at)
            expected[side] += change * terms[side] / whole / 2
            at = at + whole
    torch.testing.assert_close(confidence_points(0.3, terms), expected)


@settings(deadline=None, max_examples=200)
@given(st.floats(-20, 20), st.lists(st.floats(-30, 30), min_size=1, max_size=60))
def test_points_add_up_exactly_keep_their_sign_and_stay_below_one(start: float, terms: list[float]) -> None:
    t = torch.tensor(terms, dtype=torch.float64)
    points = confidence_points(start, t)
    change = torch.sigmoid(start + t.sum()) - torch.sigmoid(torch.tensor(start, dtype=torch.float64))
    assert float(points.sum()) == pytest.approx(float(change), abs=1e-12)
    assert bool((points.abs() <= 1 + 1e-12).all())
    assert bool((points * t >= 0).all())
    rows = confidence_points(torch.tensor([start, start], dtype=torch.float64), torch.stack([t, t]))
    assert torch.equal(rows[1], points)


@pytest.mark.parametrize(
    ("scale", "additive"), [("confidence", True), ("confidence", False), ("log-odds", True)]
)
def test_term_points_add_up_to_the_change(scale: str, additive: bool) -> None:
    mean = torch.stack([CONFIDENCE - 0.4, 0.3 * STD, -0.2 + 0 * STD], dim=1)
    for names in (("one", "two", "confidence"), ("one", "two", "three")):
        terms = LayerTerms(names, mean, None, scale, additive)
        p = Prediction.from_confidence(FEATURES, CONFIDENCE, STD, layers=terms)
        found, points = term_points(FEATURES, p)
        assert found[: len(names)] == names
        torch.testing.assert_close(points.sum(dim=1), CONFIDENCE - FEATURES.confidence, rtol=0, atol=1e-9)
    if scale == "confidence" and additive:
        torch.testing.assert_close(points[:, :3], mean)  # points already, not log-odds


def test_line_names_every_term_largest_first_and_leaves_out_a_bar_that_does_not_exist() -> None:
    terms = LayerTerms(("small", "large"), torch.tensor([[0.01, -0.3]]), None, "confidence", True)
    one = Features(torch.tensor([[2.0, 0.0]]))
    p = Prediction.from_confidence(one, one.confidence - 0.29, layers=terms)
    assert str(explain_sample(one, p)) == "0.88 -> 0.59: large -0.30, small +0.01"
    with pytest.raises(ValueError, match="no layer terms"):
        term_points(one, Prediction.from_confidence(one, one.confidence))
