"""The report's numbers and sentences, apart from the page."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from salgp import Features, Prediction
from salgp.prediction import LayerTerms
from salgp.report.keeping import Keep, acceptable_levels, cuts, nice_error, nice_step
from salgp.report.shift import shift
from salgp.report.summary import layer_shares, metric_changes, most_corrected, side
from salgp.report.thumbnails import encode_png, to_pixels
from salgp.report.words import verdict


def made(
    confidence: list[float] | torch.Tensor, correct: list[bool] | torch.Tensor
) -> tuple[Features, torch.Tensor, Prediction]:
    """Two classes, always predicting 0, with the given confidence and correctness."""
    s = torch.as_tensor(confidence, dtype=torch.float64)
    features = Features(torch.stack([torch.logit(s.clamp(0.501, 1 - 1e-9)), torch.zeros_like(s)], 1))
    labels = torch.where(torch.as_tensor(correct), 0, 1)
    return features, labels, Prediction.from_confidence(features, s)


@pytest.mark.parametrize("ties", [False, True])
def test_kept_predictions_by_a_double_loop(ties: bool) -> None:
    """The most that a limit on the confidence can keep: what is equally sure is kept together."""
    g = np.random.default_rng(0)
    s, c = g.random(60), g.random(60) < 0.7
    s = np.round(s, 1) if ties else s
    found = cuts(s, c)
    for error in (0.0, 0.05, 0.2, 0.3, 1.0):
        best = 0
        for limit in s:
            kept = [hit for value, hit in zip(s, c, strict=True) if value >= limit]
            if sum(not hit for hit in kept) / len(kept) <= error:
                best = max(best, len(kept))
        chosen = found.choose(error)
        assert (0 if chosen < 0 else found.kept[chosen]) == best
        if best:
            assert found.at(found.limit[chosen]) == (best, int((~c[s >= found.limit[chosen]]).sum()))
    assert found.at(2.0) == (0, 0)


def test_limits_are_checked_on_the_half_they_were_not_chosen_on() -> None:
    """By two loops; and where the confidence says nothing, the check finds more errors than the limit
    promises.
    """
    g = torch.Generator().manual_seed(0)
    s = 0.5 + 0.5 * torch.rand(300, generator=g)
    _, labels, prediction = made(s, torch.rand(300, generator=g) < 0.7)
    one = side(prediction, labels)
    order = np.random.default_rng(0).permutation(300)
    promised = found = 0.0
    for keep in acceptable_levels(one, one):
        kept = wrong = 0
        for here, there in ((order[:150], order[150:]), (order[150:], order[:150])):
            fine = [
                t
                for t in one.confidence[here]
                if np.mean(~one.correct[here][one.confidence[here] >= t]) <= keep.error + 1e-12
            ]
            above = one.confidence[there] >= (min(fine) if fine else 2)
            kept, wrong = kept + int(above.sum()), wrong + int((~one.correct[there][above]).sum())
        assert keep.tried is not None
        assert (keep.tried.kept, keep.tried.wrong) == (kept, wrong)
        promised, found = promised + keep.error * kept, found + wrong
    assert found > 1.05 * promised


def test_too_few_predictions_are_not_split() -> None:
    _, labels, prediction = made([0.9, 0.8, 0.7], [True, False, True])
    one = side(prediction, labels)
    assert {k.tried for k in acceptable_levels(one, one)} == {None}


@given(st.floats(1e-4, 1.0))
@settings(max_examples=60, deadline=None)
def test_levels_are_round_and_hold_the_default(rate: float) -> None:
    step = nice_step(rate / 100)
    assert step >= rate / 100 * (1 - 1e-6)
    assert nice_error(rate) <= rate / 2 * (1 + 1e-6)
    ratio = nice_error(rate) / step
    assert abs(ratio - round(ratio)) < 1e-6


def test_levels_grow_with_the_acceptable_error() -> None:
    g = torch.Generator().manual_seed(0)
    s = 0.5 + 0.5 * torch.rand(300, generator=g)
    _, labels, prediction = made(s, torch.rand(300, generator=g) < s)
    one = side(prediction, labels)
    levels = acceptable_levels(one, one)
    assert [k.after for k in levels] == sorted(k.after for k in levels)
    assert levels[0].error == 0
    assert levels[-1].after == 300
    for keep in levels:
        kept = one.confidence >= (keep.threshold or 2)
        assert kept.sum() == keep.after
        if keep.after:
            assert 1 - one.correct[kept].mean() <= keep.error + 1e-9


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((0.9, 0.8), (0.8, 0.8), "overconfident by 10 points; after M it is within 1 point."),
        ((0.7, 0.8), (0.8, 0.8), "underconfident by 10 points; after M it is within 1 point."),
        ((0.8, 0.8), (0.8, 0.8), "already right to within 1 point; after M it still is."),
        (
            (0.85, 0.8),
            (0.95, 0.8),
            "overconfident by 5 points; M does not help here: it is off by 15 points.",
        ),
        ((0.9, 0.8), (0.83, 0.8), "overconfident by 10 points; after M it is within 3 points."),
    ],
)
def test_verdict(before: tuple[float, float], after: tuple[float, float], words: str) -> None:
    sides = []
    for stated, right in (before, after):
        _, labels, prediction = made([stated] * 100, [i < round(100 * right) for i in range(100)])
        sides.append(side(prediction, labels))
    found = verdict(sides[0], sides[1], "M", Keep(0.1, 50, 63, 0.8))
    assert found.headline.endswith(words)
    assert (
        found.action == "If at most 10 % of the automatic answers may be wrong, 37 of 100 predictions should "
        "go to a human."
    )


def test_verdict_where_both_directions_cancel() -> None:
    _, labels, prediction = made(
        [0.95] * 50 + [0.6] * 50, [i % 10 < 8 for i in range(50)] + [i % 10 < 8 for i in range(50)]
    )
    one = side(prediction, labels)
    assert "too high in places and too low in others" in verdict(one, one, "M", Keep(0.1, 5, 5, 0.9)).headline


@pytest.mark.parametrize(
    ("kept", "words"), [(100, "no prediction needs a human"), (0, "all 100 predictions should go to a human")]
)
def test_action_at_the_ends(kept: int, words: str) -> None:
    _, labels, prediction = made([0.8] * 100, [i < 80 for i in range(100)])
    one = side(prediction, labels)
    assert words in verdict(one, one, "M", Keep(0.1, kept, kept, 0.5)).action


def test_changes_are_paired_and_never_touch_accuracy() -> None:
    g = torch.Generator().manual_seed(0)
    s = 0.55 + 0.4 * torch.rand(400, generator=g)
    correct = torch.rand(400, generator=g) < s
    features, labels, good = made(s, correct)
    wild = Prediction.from_confidence(features, (s + 0.3 * torch.rand(400, generator=g)).clamp(max=0.999))
    changes = {
        c.name.split(" (")[-1].rstrip(")"): c
        for c in metric_changes(side(wild, labels), side(good, labels), labels)
    }
    assert changes["accuracy"].verdict == "unchanged"
    assert changes["ECE"].verdict == "better"
    back = {
        c.name.split(" (")[-1].rstrip(")"): c
        for c in metric_changes(side(good, labels), side(wild, labels), labels)
    }
    assert back["ECE"].verdict == "worse"
    for change in changes.values():
        value, low, high = change.before
        assert low <= value <= high


def test_changes_without_errors_or_known_classes() -> None:
    _, labels, prediction = made([0.9, 0.8, 0.7], [True, True, True])
    one = side(prediction, labels)
    found = {c.name: c for c in metric_changes(one, one, labels)}
    assert math.isnan(found["Spotting errors (AUROC)"].before[0])
    unknown = torch.full((3,), -1)
    assert not [
        c
        for c in metric_changes(side(prediction, unknown), side(prediction, unknown), unknown)
        if "Brier" in c.name
    ]


def test_layer_shares_and_most_corrected() -> None:
    features, labels, _ = made([0.9, 0.8, 0.7], [True, False, True])
    mean = torch.tensor([[0.1, -0.2], [-0.4, 0.0], [0.0, 0.05]], dtype=torch.float64)
    terms = LayerTerms(("a", "b"), mean, None, "confidence", True)
    prediction = Prediction.from_confidence(features, features.confidence + mean.sum(1), layers=terms)
    shares = layer_shares(prediction)
    assert [(s.name, round(s.lowers, 4), round(s.raises, 4)) for s in shares] == [
        ("a", 0.1333, 0.0333),
        ("b", 0.0667, 0.0167),
    ]
    top = most_corrected(features, labels, prediction, 2)
    assert [s.row for s in top] == [1, 0]
    assert top[1].layers == (("b", -0.2), ("a", 0.1))
    named = Features(features.logits, {"b": torch.zeros(3, 1)})
    assert most_corrected(named, labels, prediction, 2)[1].layers == (("b", -0.2),)
    assert [s.name for s in layer_shares(prediction, ["b"])] == ["a alone", "b"]


def test_shift_says_what_to_expect() -> None:
    known = made([0.9] * 50, [True] * 50)
    features, _, _ = made([0.95] * 40, [True] * 40)
    new = Prediction.from_confidence(features, torch.full((40,), 0.6, dtype=torch.float64))
    found = shift((known[0], known[2]), (features, new), Keep(0.05, 10, 10, 0.8))
    assert "expect about 60 of 100 answers to be right, instead of 90" in found.sentence
    assert (found.tone, found.human) == ("poor", 1.0)
    same = shift((known[0], known[2]), (known[0], known[2]), Keep(0.05, 10, 10, 0.8))
    assert (same.tone, same.human) == ("good", 0.0)


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7), (5, 7, 3), (5, 7, 1), (300, 200)])
def test_png_reads_back(shape: tuple[int, ...]) -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    x = np.random.default_rng(0).normal(size=shape)
    pixels = to_pixels(x)
    assert max(pixels.shape[:2]) <= 96
    np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(encode_png(pixels)))), pixels)


def test_odd_pictures() -> None:
    with pytest.raises(ValueError, match="an image must have shape"):
        to_pixels(np.zeros((2, 3, 4, 5)))
    assert to_pixels(np.full((2, 2), np.nan)).max() == 0
    assert to_pixels(np.array([[0.0, np.inf], [1.0, -np.inf]])).tolist() == [[0, 255], [255, 0]]
