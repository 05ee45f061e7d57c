"""Rules: the promise against simulation and double loops, refusals, costs, classes, storage, graphs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sealing import edit_header

from salgp import FormatError, Prediction
from salgp.decide import ALWAYS, NEVER, Rule, choose_threshold, samples_needed
from salgp.export import LOWEST_TORCH, export_head
from salgp.io import ChecksumError


def answers(
    n: int, seed: int = 0, sharp: float = 0.3, classes: int = 2
) -> tuple[Prediction, torch.Tensor, torch.Tensor]:
    """Calibrated confidences, true labels, and which answers are right."""
    g = torch.Generator().manual_seed(seed)
    s = 0.5 + 0.5 * torch.rand(n, generator=g, dtype=torch.float64) ** sharp
    right = torch.rand(n, generator=g) < s
    label = torch.randint(0, classes, (n,), generator=g)
    probs = ((1 - s) / (classes - 1))[:, None].repeat(1, classes).scatter(1, label[:, None], s[:, None])
    truth = torch.where(right, label, (label + 1) % classes)
    return Prediction(label, probs, s), truth, right


def tail(wrong: int, kept: int, error: float) -> float:
    """P(Binomial(kept, error) <= wrong), term by term."""
    return sum(math.comb(kept, k) * error**k * (1 - error) ** (kept - k) for k in range(wrong + 1))


def test_rule_passes_its_own_test_and_the_counts_are_those_of_the_samples() -> None:
    prediction, truth, _ = answers(2000, 1)
    rule = choose_threshold(prediction, truth, 0.1)
    acted = rule(prediction)
    assert int(acted.sum()) == rule.kept
    assert rule.coverage == pytest.approx(float(acted.double().mean()))
    assert tail(rule.wrong, rule.kept, 0.1) <= 0.05


def test_promise_is_kept_as_often_as_stated() -> None:
    """True error rate of each rule by numerical integration; binomial noise of 400 draws: 3 sd = .033."""
    grid = torch.linspace(0, 1, 20001, dtype=torch.float64)
    level = 0.5 + 0.5 * grid**0.3
    broken = reached = 0
    for seed in range(400):
        prediction, truth, _ = answers(400, seed)
        rule = choose_threshold(prediction, truth, 0.1)
        if rule.reachable:
            reached += 1
            above = level[level > rule.threshold[0]]
            broken += float((1 - above).mean()) > 0.1
    assert reached > 200
    assert broken <= 400 * (0.05 + 0.033)


def test_promise_holds_where_the_best_threshold_is_at_the_very_start() -> None:
    """An error rate of just above the promise at every threshold: nothing may pass more often than 5 %."""
    g = torch.Generator().manual_seed(0)
    passed = 0
    for _ in range(400):
        s = torch.rand(500, generator=g, dtype=torch.float64)
        wrong = torch.rand(500, generator=g) < 0.1001
        prediction = Prediction(torch.zeros(500, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        passed += choose_threshold(prediction, wrong.long(), 0.1).reachable
    assert passed <= 400 * (0.05 + 0.033)


def test_too_few_samples_are_counted() -> None:
    prediction, truth, _ = answers(40)
    rule = choose_threshold(prediction, truth, 0.05)
    assert not rule.reachable
    assert not rule(prediction).any()
    assert rule.needed == 59
    assert "No rule" in rule.promise
    assert "59 labelled samples would be needed" in rule.promise


def test_hopeless_confidences_are_told_apart_from_too_few_samples() -> None:
    n = 3000
    s = torch.linspace(0.5, 1, n, dtype=torch.float64)
    wrong = torch.arange(n) % 3 == 0
    prediction = Prediction(torch.zeros(n, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
    rule = choose_threshold(prediction, wrong.long(), 0.05)
    assert rule.needed is None
    assert "accept a larger error" in rule.promise


def test_samples_needed_is_the_smallest_number() -> None:
    n = samples_needed(0.05, 0.95)
    assert tail(0, n, 0.05) <= 0.05 < tail(0, n - 1, 0.05)
    with pytest.raises(ValueError, match="can never show"):
        samples_needed(0.05, observed=0.05)


def test_nothing_wrong_acts_on_everything() -> None:
    prediction, _, _ = answers(500)
    rule = choose_threshold(prediction, prediction.label, 0.05)
    assert rule.threshold == (ALWAYS,)
    assert bool(rule(prediction).all())
    assert rule.promise.startswith("Act always")


def test_ties_are_never_split() -> None:
    n = 1000
    s = torch.where(torch.arange(n) < 700, 0.9, 0.6).double()
    wrong = torch.arange(n) % 10 == 0
    wrong[:700] = torch.arange(700) % 50 == 0
    prediction = Prediction(torch.zeros(n, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
    rule = choose_threshold(prediction, wrong.long(), 0.04)
    assert rule.kept == 700
    assert 0.6 <= rule.threshold[0] < 0.9


def test_each_class_keeps_its_own_promise() -> None:
    prediction, truth, right = answers(6000, 5, classes=3)
    truth = torch.where((prediction.label == 2) & right & (torch.arange(6000) % 2 == 0), 0, truth)
    rule = choose_threshold(prediction, truth, 0.1, per_class=True)
    assert len(rule.threshold) == 3
    assert rule.threshold[2] == NEVER
    acted = rule(prediction)
    for number in range(2):
        rows = acted & (prediction.label == number)
        wrong = int((prediction.label != truth)[rows].sum())
        assert tail(wrong, int(rows.sum()), 0.1) <= 0.05 / 3
    assert "of each class" in rule.promise
    assert "never for 1 of 3" in rule.promise
    with pytest.raises(ValueError, match="each of 3 classes"):
        rule(answers(5)[0])


def test_cost_is_the_least_of_the_thresholds_tried_and_below_its_bound() -> None:
    prediction, truth, right = answers(5000, 2)
    rule = choose_threshold(prediction, truth, cost_wrong=10, cost_ask=1)
    assert abs(rule.threshold[0] - 0.9) < 0.05  # calibrated: 1 - ask / wrong
    acted = rule(prediction)
    cost = (10 * (acted & ~right).double() + (~acted).double()).mean()
    assert float(cost) <= rule.cost_bound
    assert float(cost) <= min(1.0, float(10 * (~right).double().mean()))
    assert "mean cost per sample" in rule.promise


def test_overconfident_answers_ask_more_than_their_confidence_suggests() -> None:
    prediction, truth, _ = answers(5000, 2)
    bold = Prediction(prediction.label, prediction.probs, prediction.confidence**0.25)
    rule = choose_threshold(bold, truth, cost_wrong=10, cost_ask=1)
    assert rule.threshold[0] > 0.93


def test_unknown_classes_are_wrong() -> None:
    prediction, _, _ = answers(500)
    rule = choose_threshold(prediction, torch.full((500,), -1), 0.05)
    assert not rule.reachable


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"error": 0.0}, "error must be"),
        ({"assurance": 0.3}, "assurance must be"),
        ({"cost_wrong": 2.0}, "both"),
        ({"cost_wrong": 1.0, "cost_ask": 2.0}, "0 < cost_ask"),
    ],
)
def test_wrong_arguments_say_so(arguments: dict[str, float], words: str) -> None:
    prediction, truth, _ = answers(50)
    with pytest.raises(ValueError, match=words):
        choose_threshold(prediction, truth, **arguments)


def test_saved_rule_is_the_same_and_other_files_are_refused(tmp_path: Path) -> None:
    prediction, truth, _ = answers(2000, 1)
    rule = choose_threshold(prediction, truth, 0.1)
    rule.save(tmp_path / "rule.json")
    assert Rule.load(tmp_path / "rule.json") == rule
    (tmp_path / "other.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(FormatError, match="expected a JSON object of 'salgp-rule'"):
        Rule.load(tmp_path / "other.json")


def test_changed_rules_are_refused(tmp_path: Path) -> None:
    """A threshold lowered by hand keeps no promise."""
    path = tmp_path / "rule.json"
    prediction, truth, _ = answers(2000, 1)
    choose_threshold(prediction, truth, 0.1).save(path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**whole, "threshold": [0.1]}), encoding="utf-8")
    with pytest.raises(ChecksumError, match=r"rule\.json is damaged or was edited"):
        Rule.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threshold": ["x"]}, "'threshold' of Rule is \\['x'\\], expected tuple"),
        ({"threshold": []}, "needs a threshold"),
        ({"threshold": [float("nan")]}, "expected tuple"),
        ({"kept": 3000}, "cannot act on 3000"),
        ({"wrong": -1}, "err on -1"),
        ({"assurance": "high"}, "expected float"),
        ({"error": None}, "promises an error or a cost"),
        ({"extra": 1}, "no field 'extra'"),
    ],
)
def test_rules_that_nobody_chose_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    prediction, truth, _ = answers(2000, 1)
    choose_threshold(prediction, truth, 0.1).save(tmp_path / "rule.json")
    edit_header(tmp_path / "rule.json", lambda value: {**value, **change})
    with pytest.raises(FormatError, match=words):
        Rule.load(tmp_path / "rule.json")


def test_rule_lives_beside_its_calibrator(tmp_path: Path) -> None:
    from salgp import Features
    from salgp.calibrators import get, load_calibrator

    prediction, truth, _ = answers(500, 1)
    features = Features(prediction.probs.log())
    get("temperature").fit(features, truth).save(tmp_path / "cal")
    rule = choose_threshold(prediction, truth, 0.2)
    rule.save(tmp_path / "cal" / "rule.json")
    assert load_calibrator(tmp_path / "cal").predict(features).label.shape == (500,)
    assert Rule.load(tmp_path / "cal" / "rule.json") == rule


def test_no_other_calibrator_is_saved_beside_a_rule(tmp_path: Path) -> None:
    from salgp import Features
    from salgp.calibrators import get, load_calibrator

    prediction, truth, _ = answers(500, 1)
    features, folder = Features(prediction.probs.log()), tmp_path / "cal"
    first = get("temperature").fit(features, truth)
    first.save(folder)
    choose_threshold(prediction, truth, 0.2).save(folder / "rule.json")
    with pytest.raises(FileExistsError, match="rule"):
        get("temperature").fit(features[:400], truth[:400]).save(folder)
    assert load_calibrator(folder).temperature_ == first.temperature_
    (folder / "rule.json").unlink()
    get("temperature").fit(features[:400], truth[:400]).save(folder)
    assert load_calibrator(folder).temperature_ != first.temperature_


def test_rule_goes_into_a_graph() -> None:
    pytest.importorskip("torch", LOWEST_TORCH)
    prediction, truth, _ = answers(2000, 1, classes=3)
    rule = choose_threshold(prediction, truth, 0.2, per_class=True)
    graph = torch.export.export(rule.module(3), (prediction.label, prediction.confidence)).module()
    assert torch.equal(graph(prediction.label, prediction.confidence), rule(prediction))


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_rule_is_exported_with_the_calibrator(suffix: str, tmp_path: Path) -> None:
    from salgp import Features
    from salgp.calibrators import get

    pytest.importorskip("torch", LOWEST_TORCH)
    prediction, truth, _ = answers(2000, 1, classes=3)
    features = Features(prediction.probs.float().log())
    calibrator = get("temperature").fit(features, truth)
    here = calibrator.predict(features)
    rule = choose_threshold(here, truth, 0.2, per_class=True)
    path = export_head(calibrator, tmp_path / f"head{suffix}", rule)
    if suffix == ".pt2":
        found = torch.export.load(path).module()(features.logits)[-1]
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(str(path))
        assert session.get_outputs()[-1].name == "act"
        found = torch.from_numpy(session.run(["act"], {"logits": features.logits.numpy()})[0])
    clear = (here.confidence - torch.tensor(rule.threshold)[here.label]).abs() > 1e-5
    assert clear.double().mean() > 0.99
    assert torch.equal(found[clear], rule(here)[clear])


def crossing(n: int, share: float, g: torch.Generator) -> tuple[Prediction, torch.Tensor]:
    """Errors as frequent as promised (10 %) down to a share of the samples, far more frequent below."""
    place = torch.rand(n, generator=g, dtype=torch.float64)
    wrong = torch.rand(n, generator=g) < torch.where(place < share, 0.1, 0.4)
    s = 1 - place / 2
    return Prediction(torch.zeros(n, dtype=torch.long), torch.stack([s, 1 - s], 1), s), wrong.long()


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2, 0.4, 0.7])
def test_promise_is_kept_wherever_the_error_crosses_it(share: float) -> None:
    """The worst case: no error rate is below the promise, and the crossing lies behind each start in turn.
    Binomial noise of 300 draws: 3 sd = .038.
    """
    g = torch.Generator().manual_seed(int(1000 * share))
    limit = 1 - share / 2
    rules = [choose_threshold(*crossing(1500, share, g), error=0.1) for _ in range(300)]
    broken = sum(rule.reachable and rule.threshold[0] < limit - 1e-9 for rule in rules)
    assert broken <= 300 * (0.05 + 0.038)


@pytest.mark.parametrize("sharp", [0.05, 1.0])
def test_few_and_many_trustworthy_answers_are_found(sharp: float) -> None:
    """Of a tenth or of nearly all answers that could be acted on, a good part is."""
    prediction, truth, _ = answers(6000, 7, sharp=sharp)
    rule = choose_threshold(prediction, truth, 0.1)
    level = prediction.confidence.sort(descending=True).values
    mean_error = (1 - level).cumsum(0) / torch.arange(1, len(level) + 1)
    possible = float((mean_error <= 0.1).double().mean())
    assert rule.coverage > 0.75 * possible


def test_samples_said_to_be_needed_are_enough() -> None:
    few = torch.linspace(0.99, 0.9, 40, dtype=torch.float64)
    small = Prediction(torch.zeros(40, dtype=torch.long), torch.stack([few, 1 - few], 1), few)
    needed = choose_threshold(small, torch.zeros(40, dtype=torch.long), 0.05).needed
    s = torch.linspace(0.99, 0.9, needed, dtype=torch.float64)
    enough = Prediction(torch.zeros(needed, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
    assert choose_threshold(enough, torch.zeros(needed, dtype=torch.long), 0.05).reachable


def test_classes_with_too_few_samples_say_how_many_would_do() -> None:
    prediction, truth, _ = answers(3000, 5, sharp=0.05, classes=3)
    rare = (prediction.label != 2) | (torch.arange(3000) % 40 == 0)
    rule = choose_threshold(prediction[rare], truth[rare], 0.1, per_class=True)
    assert rule.threshold[2] == NEVER
    assert rule.needed is not None
    assert rule.needed > rule.n
    assert f"all classes would need about {rule.needed:,}" in rule.promise


def test_costs_refuse_what_they_would_ignore() -> None:
    prediction, truth, _ = answers(100)
    with pytest.raises(ValueError, match="leave error and per_class"):
        choose_threshold(prediction, truth, cost_wrong=10, cost_ask=1, per_class=True)


def test_an_error_rate_and_costs_are_two_rules() -> None:
    s = torch.linspace(0.5, 0.99, 200, dtype=torch.float64)
    p = Prediction(torch.zeros(200, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
    y = torch.zeros(200, dtype=torch.long)
    with pytest.raises(ValueError, match="leave error and per_class out"):
        choose_threshold(p, y, error=0.05, cost_wrong=10, cost_ask=1)
    assert choose_threshold(p, y) == choose_threshold(p, y, error=0.05)
