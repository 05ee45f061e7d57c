"""The report's numbers and sentences, apart from the page."""

from __future__ import annotations

import base64
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from salgp import Features, Prediction
from salgp.decide import choose_threshold
from salgp.metrics import METRICS
from salgp.prediction import LayerTerms
from salgp.report import render
from salgp.report.page import data_uri, to_pixels
from salgp.report.selective import (
    ASSURANCE,
    OperatingPoint,
    acceptable_levels,
    chosen_level,
    least_promise,
    nice_step,
)
from salgp.report.slices import confusions, holm, shift, slices
from salgp.report.summary import (
    Change,
    Scored,
    metric_changes,
    most_corrected,
    scored,
    term_shares,
)
from salgp.report.text import verdict


def made(
    confidence: list[float] | torch.Tensor, correct: list[bool] | torch.Tensor
) -> tuple[Features, torch.Tensor, Prediction]:
    """Two classes, always predicting 0, with the given confidence and correctness."""
    s = torch.as_tensor(confidence, dtype=torch.float64)
    features = Features(torch.stack([torch.logit(s.clamp(0.501, 1 - 1e-9)), torch.zeros_like(s)], 1))
    labels = torch.where(torch.as_tensor(correct), 0, 1)
    return features, labels, Prediction.from_confidence(features, s)


@given(st.floats(1e-4, 1.0))
@settings(max_examples=60, deadline=None)
def test_steps_are_round(least: float) -> None:
    step = nice_step(least)
    assert least * (1 - 1e-6) <= step <= 2.5 * least * (1 + 1e-6)
    assert f"{step:e}"[0] in "125"


def test_levels_are_the_rules_of_decide_and_grow_with_the_acceptable_error() -> None:
    g = torch.Generator().manual_seed(0)
    s = 0.5 + 0.5 * torch.rand(600, generator=g)
    _, labels, prediction = made(s, torch.rand(600, generator=g) < s)
    one = scored(prediction, labels)
    levels = acceptable_levels(one, one, labels)
    kept = [k.after for k in levels]
    assert levels[-1].after == 600
    assert levels[-1].everything
    assert levels[0].threshold is None
    assert np.mean(np.diff(kept) >= 0) > 0.9
    for keep in levels[::10]:
        rule = choose_threshold(prediction, labels, keep.error, ASSURANCE)
        assert (keep.after, keep.before, keep.wrong) == (rule.kept, rule.kept, rule.wrong)
    with_promise = [k for k in levels if k.after]
    default = chosen_level(levels, None, 600)
    assert default.after >= 480
    assert all(level.after < 480 for level in levels if level.error < default.error)
    assert least_promise(levels, levels[0]) == with_promise[0].error


@pytest.mark.parametrize("wanted", [0.0123, 0.125, 0.7])
def test_an_error_that_is_asked_for_is_taken_as_it_is(wanted: float) -> None:
    """Also where nothing can be kept, between the round steps, and above where everything is kept."""
    g = torch.Generator().manual_seed(0)
    s = 0.5 + 0.5 * torch.rand(300, generator=g)
    _, labels, prediction = made(s, torch.rand(300, generator=g) < s)
    one = scored(prediction, labels)
    levels = acceptable_levels(one, one, labels, wanted)
    keep = chosen_level(levels, wanted, 300)
    rule = choose_threshold(prediction, labels, wanted, ASSURANCE)
    assert (keep.error, keep.after, keep.wrong) == (wanted, rule.kept, rule.wrong)
    assert [level.error for level in levels] == sorted({level.error for level in levels})


@pytest.mark.parametrize("wanted", [0.0, 1.0, -0.1])
def test_an_error_that_no_rule_can_promise_is_refused(wanted: float) -> None:
    _, labels, prediction = made([0.8] * 100, [i < 80 for i in range(100)])
    one = scored(prediction, labels)
    with pytest.raises(ValueError, match="above 0 and below 1"):
        acceptable_levels(one, one, labels, wanted)


def test_the_page_says_that_the_error_asked_for_cannot_be_promised_and_what_can() -> None:
    g = torch.Generator().manual_seed(0)
    s = 0.5 + 0.5 * torch.rand(200, generator=g)
    features, labels, prediction = made(s, torch.rand(200, generator=g) < s)
    text = render(features, labels, prediction, acceptable_error=0.001)
    one = scored(prediction, labels)
    least = least_promise(acceptable_levels(one, one, labels), OperatingPoint(0.001, 0, 0, None))
    assert least is not None
    no_promise = "allow no promise of at most 0.1 % wrong answers"
    said = f"{no_promise}; the least that can be promised here is about {100 * least:.3g} %."
    assert text.replace("\N{NO-BREAK SPACE}", " ").count(said) == 3  # verdict, tile and slider


def changes(**verdicts: str) -> list[Change]:
    nothing = (0.0, 0.0, 0.0)
    return [Change(METRICS[key], nothing, nothing, verdict) for key, verdict in verdicts.items()]


def eighty(stated: float, n: int = 100) -> Scored:
    """Of which 80 % are right."""
    _, labels, prediction = made([stated] * n, [i < 0.8 * n for i in range(n)])
    return scored(prediction, labels)


USED = OperatingPoint(0.1, 50, 63, 0.8)


@pytest.mark.parametrize(
    ("before", "after", "change", "words", "tone"),
    [
        (0.9, 0.8, "better", "overconfident by 10 points; after M it is right to within 1 point.", "good"),
        (0.7, 0.8, "better", "underconfident by 10 points; after M it is right to within 1 point.", "good"),
        (0.8, 0.8, "unchanged", "already right to within 1 point; after M it still is.", "good"),
        (0.85, 0.95, "worse", "M makes it worse here: it is then off by 15 points.", "poor"),
        (0.96, 0.957, "no clear change", "M makes no clear difference here", "fair"),
        (0.9, 0.83, "better", "right to within 3 points, still too sure.", "good"),
        (0.9, 0.76, "better", "right to within 4 points, on the careful side.", "good"),
    ],
)
def test_verdict(before: float, after: float, change: str, words: str, tone: str) -> None:
    found = verdict(eighty(before), eighty(after), "M", USED, changes(ece=change))
    assert words in found.headline
    assert found.tone == tone
    assert "Send 37 of 100 predictions to a human; of the others, at most 10 %" in found.action


@pytest.mark.parametrize(
    ("others", "words", "tone"),
    [
        ({"nll": "better", "brier": "better"}, "M improves NLL, Brier, with no clear change", "good"),
        ({"nll": "better", "auroc": "worse"}, "M improves NLL, but worsens AUROC, with no clear", "fair"),
        ({"nll": "unchanged"}, "M makes no clear difference", "fair"),
    ],
)
def test_the_verdict_does_not_follow_the_confidence_error_alone(
    others: dict[str, str], words: str, tone: str
) -> None:
    found = verdict(eighty(0.85), eighty(0.84), "M", USED, changes(ece="no clear change", **others))
    assert words in found.headline
    assert found.tone == tone
    worse = verdict(eighty(0.9), eighty(0.8), "M", USED, changes(ece="better", nll="worse"))
    assert "but NLL gets worse" in worse.headline


def test_few_samples_come_with_a_caveat() -> None:
    few, enough = eighty(0.9, 3), eighty(0.9, 50)
    found = verdict(few, few, "M", OperatingPoint(0.1, 3, 3, 0.8), changes(ece="better"))
    assert found.headline.startswith("Only 3 labelled predictions: too few for a verdict.")
    assert found.tone == "fair"
    assert "too few" not in verdict(enough, enough, "M", USED, changes(ece="better")).headline


def test_verdict_is_red_where_nearly_everything_goes_to_a_human() -> None:
    one, better = eighty(0.8), changes(ece="better")
    assert verdict(one, one, "M", OperatingPoint(0.1, 5, 9, 0.8), better).tone == "poor"
    assert verdict(one, one, "M", OperatingPoint(0.1, 5, 11, 0.8), better).tone == "good"


def test_verdict_is_red_where_most_answers_that_are_used_may_be_wrong() -> None:
    """A network no better than chance is no good because it knows that."""
    one, better = eighty(0.8), changes(ece="better")
    assert verdict(one, one, "M", OperatingPoint(0.5, 90, 100, 0.2), better).tone == "poor"
    assert verdict(one, one, "M", OperatingPoint(0.49, 90, 100, 0.2), better).tone == "good"


def test_verdict_where_both_directions_cancel() -> None:
    _, labels, prediction = made([0.95] * 50 + [0.6] * 50, [i % 10 < 8 for i in range(100)])
    one = scored(prediction, labels)
    assert "too high in places" in verdict(one, one, "M", USED, changes(ece="unchanged")).headline


@pytest.mark.parametrize(
    ("kept", "words"),
    [(100, "Used without asking, at most 10 % of the answers are wrong"), (0, "All should go to a human")],
)
def test_action_at_the_ends(kept: int, words: str) -> None:
    one = eighty(0.8)
    point = OperatingPoint(0.1, kept, kept, 0.5)
    assert words in verdict(one, one, "M", point, changes(ece="unchanged")).action


def test_slices_are_tested_together_and_by_a_simulation() -> None:
    """Where all confidences are right, any of many parts is called off in at most about 5 % of the worlds."""
    g = torch.Generator().manual_seed(0)
    called = 0
    for _ in range(200):
        s = 0.5 + 0.5 * torch.rand(400, generator=g)
        _, labels, prediction = made(s, torch.rand(400, generator=g) < s)
        one = scored(prediction, labels)
        found = slices(one, one, {"camera": [i % 10 for i in range(400)]})
        assert [part.n for part in found] == [40] * 10
        called += any(part.verdict.endswith("confident") for part in found)
    assert called <= 20


def test_slices_find_the_part_that_is_off() -> None:
    g = torch.Generator().manual_seed(2)
    s = torch.full((300,), 0.8)
    right = torch.rand(300, generator=g) < torch.where(torch.arange(300) < 100, 0.5, 0.8)
    _, labels, prediction = made(s, right)
    one = scored(prediction, labels)
    camera = ["bad"] * 100 + ["good"] * 195 + ["rare"] * 5
    parts = {part.value: part for part in slices(one, one, {"camera": camera})}
    assert all(
        type(part.n) is int and type(part.before) is type(part.after) is float for part in parts.values()
    )
    assert parts["bad"].verdict == "overconfident"
    assert parts["good"].verdict == "right"
    assert parts["rare"].verdict == "too few to say"
    accuracy, low, high = parts["bad"].accuracy
    assert low < accuracy < high
    assert parts["bad"].after == pytest.approx(0.8)


def test_holm_by_its_definition() -> None:
    p = np.random.default_rng(0).random(20) ** 3
    adjusted = holm(p.tolist())
    order = np.argsort(p)
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, (20 - rank) * p[i])
        assert adjusted[i] == pytest.approx(min(running, 1.0))


def test_confusions_are_counted() -> None:
    features = Features(torch.eye(3)[torch.tensor([0, 0, 0, 1, 1, 2])])
    labels = torch.tensor([0, 1, 1, 1, 2, -1])
    found = confusions(scored(Prediction.from_probs(features, features.probs), labels), labels.numpy())
    assert all(
        type(pair.count) is int and type(pair.share) is type(pair.confidence) is float for pair in found
    )
    assert [(c.true, c.predicted, c.count) for c in found] == [(1, 0, 2), (2, 1, 1)]
    assert found[0].share == pytest.approx(2 / 3)


def test_changes_are_paired_and_never_touch_accuracy() -> None:
    g = torch.Generator().manual_seed(0)
    s = 0.55 + 0.4 * torch.rand(400, generator=g)
    correct = torch.rand(400, generator=g) < s
    features, labels, good = made(s, correct)
    wild = Prediction.from_confidence(features, (s + 0.3 * torch.rand(400, generator=g)).clamp(max=0.999))
    changes = {
        c.metric.title.split(" (")[-1].rstrip(")"): c
        for c in metric_changes(scored(wild, labels), scored(good, labels), labels)
    }
    assert changes["accuracy"].verdict == "unchanged"
    assert changes["ECE"].verdict == "better"
    back = {
        c.metric.title.split(" (")[-1].rstrip(")"): c
        for c in metric_changes(scored(good, labels), scored(wild, labels), labels)
    }
    assert back["ECE"].verdict == "worse"
    for change in changes.values():
        value, low, high = change.before
        assert low <= value <= high


def test_changes_without_errors_or_known_classes() -> None:
    _, labels, prediction = made([0.9, 0.8, 0.7], [True, True, True])
    one = scored(prediction, labels)
    found = {c.metric.title: c for c in metric_changes(one, one, labels)}
    assert math.isnan(found["Spotting errors (AUROC)"].before[0])
    unknown = torch.full((3,), -1)
    assert not [
        c
        for c in metric_changes(scored(prediction, unknown), scored(prediction, unknown), unknown)
        if c.metric.name == "brier"
    ]


def test_term_shares_and_most_corrected() -> None:
    features, labels, _ = made([0.9, 0.8, 0.7], [True, False, True])
    mean = torch.tensor([[0.1, -0.2], [-0.4, 0.0], [0.0, 0.05]], dtype=torch.float64)
    terms = LayerTerms(("a", "b"), mean, None, "confidence", True)
    prediction = Prediction.from_confidence(features, features.confidence + mean.sum(1), layers=terms)
    shares = term_shares(features, prediction)
    assert [(s.name, round(s.lowers, 4), round(s.raises, 4), round(s.size, 4)) for s in shares] == [
        ("a", 0.1333, 0.0333, 0.1667),
        ("b", 0.0667, 0.0167, 0.0833),
    ]
    top = most_corrected(features, labels, prediction, 2)
    assert [(row, true) for row, true, _ in top] == [(1, 1), (0, 0)]
    assert list(top[1][2].points) == ["b", "a"]
    for _, _, one in top:
        assert sum(one.points.values()) == pytest.approx(one.confidence - one.network_confidence, abs=1e-9)


def test_shift_says_what_to_expect() -> None:
    known = made([0.9] * 50, [True] * 50)
    features, _, _ = made([0.95] * 40, [True] * 40)
    new = Prediction.from_confidence(features, torch.full((40,), 0.6, dtype=torch.float64))
    found = shift((known[0], known[2]), (features, new), OperatingPoint(0.05, 10, 10, 0.8))
    assert "the model still says 95 %, but expect about 60 of 100 answers to be right (" in found.sentence
    assert found.sentence.endswith("), instead of 90.")
    assert found.tone == "poor"
    assert ("would go to a human, by the same limit", "0.0 %", "100.0 %") in found.rows
    right = shift((known[0], known[2]), (features, new), OperatingPoint(0.05, 10, 10, 0.8), measured=0.89)
    assert right.sentence == found.sentence
    off = shift((known[0], known[2]), (features, new), OperatingPoint(0.05, 10, 10, 0.8), measured=0.7)
    assert off.sentence.endswith("care: of the labelled data it expects 90, and 70 are right.")
    assert "instead of" not in off.sentence
    same = shift((known[0], known[2]), (known[0], known[2]), OperatingPoint(0.05, 10, 10, 0.8))
    assert same.tone == "good"


def test_a_few_new_samples_are_not_said_to_differ() -> None:
    known, found = made([0.9] * 50, [True] * 50), {}
    for n in (9, 10):
        features, _, _ = made([0.95] * n, [True] * n)
        new = Prediction.from_confidence(features, torch.full((n,), 0.6, dtype=torch.float64))
        found[n] = shift((known[0], known[2]), (features, new), OperatingPoint(0.05, 10, 10, 0.8))
    assert found[9].sentence.startswith("Only 9 new samples, too few to compare: expect about 60 of 100")
    assert found[9].tone == "fair"
    same = shift((known[0], known[2]), (known[0][:9], known[2][:9]), OperatingPoint(0.05, 10, 10, 0.8))
    assert same.tone == "fair"
    assert found[10].sentence.startswith("The new data differ")
    assert found[10].tone == "poor"


def test_shift_says_still_only_where_the_network_does_not_notice() -> None:
    known = made([0.9] * 50, [True] * 50)
    features, _, _ = made([0.55] * 40, [True] * 40)
    new = Prediction.from_confidence(features, torch.full((40,), 0.5, dtype=torch.float64))
    found = shift((known[0], known[2]), (features, new), OperatingPoint(0.05, 10, 10, 0.8))
    assert "still" not in found.sentence
    easier = shift((features, new), (known[0], known[2]), OperatingPoint(0.05, 10, 10, 0.8))
    assert easier.sentence.startswith("The new data look easier: expect about 90 of 100")


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7), (5, 7, 3), (5, 7, 1), (300, 200)])
def test_thumbnails_read_back(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape)
    pixels = to_pixels(x)
    assert max(pixels.shape[:2]) <= 96
    content = base64.b64decode(data_uri(x).partition(",")[2])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)


def test_odd_pictures() -> None:
    with pytest.raises(ValueError, match="an image must have shape"):
        to_pixels(np.zeros((2, 3, 4, 5)))
    assert to_pixels(np.full((2, 2), np.nan)).max() == 0
    assert to_pixels(np.array([[0.0, np.inf], [1.0, -np.inf]])).tolist() == [[0, 255], [255, 0]]
