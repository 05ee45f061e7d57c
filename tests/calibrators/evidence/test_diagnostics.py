"""The self-check: what is left out really is, and it promises no more than fresh data show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from blobs import augmented_world, fitted, world

from salgp.calibrators.evidence import diagnostics
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.diagnostics import (
    HeldOut,
    _missed,
    _window_numbers,
    answers_of,
    check_fit,
    family_variance,
    held_out,
    verdict,
)
from salgp.calibrators.evidence.layer_spaces import layer_evidence
from salgp.features import Features
from salgp.metrics import debiased_ece


def test_families_and_samples_left_out_really_are(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = augmented_world(80, 1, (0.5, 1.0, 1.5, 2.0, 2.5))
    calibrator = fitted()
    evidence = layer_evidence(calibrator.reference_, features)
    trained: list[Features] = []
    scored: list[tuple[int, Features]] = []
    inner = diagnostics._scored

    def learn(some: Features, y: Any, known: Any) -> Any:
        trained.append(some)
        return calibrator.scales_, calibrator.mixture_

    def watched(family: int, some: Features, *rest: Any) -> HeldOut:
        scored.append((len(trained) - 1, some))
        return inner(family, some, *rest)

    monkeypatch.setattr(diagnostics, "_scored", watched)
    parts = held_out(features, labels, evidence, learn)
    assert len(trained) == 4
    assert sorted({part.family for part in parts}) == [0, 1, 2, 3, 4, 5]
    for i, some in scored:
        assert not set(some.groups.tolist()) & set(trained[i].groups.tolist())
        seen = set(trained[i].families.tolist()) - {0}
        assert int(some.families[0]) not in seen
    every = [
        row for _, some in scored for row in zip(some.groups.tolist(), some.families.tolist(), strict=True)
    ]
    away = [row for row in every if row[1] > 0]
    assert len(away) == len(set(away)) == 5 * 40


def test_the_promise_is_not_better_than_what_a_fresh_family_shows() -> None:
    """Mean over draws: families of noise left out, against noise between and beyond them on new samples."""
    promised, measured = [], []
    for seed in range(3):
        features, labels = augmented_world(150, 10 + seed, (0.4, 0.8, 1.2, 1.6))
        calibrator = LayerEvidence().fit(features, labels, reference=world(300, 0))
        promised.append(calibrator.check_["left-out families"]["layer evidence"]["ece"])
        for noise in (0.6, 1.4):
            new, truth = world(600, 90 + seed, noise)
            p = calibrator.predict(new)
            measured.append(debiased_ece(p.confidence, new.correct(truth).double()))
    assert sum(promised) / len(promised) > 0.8 * sum(measured) / len(measured)


def test_the_table_has_every_situation_method_and_score() -> None:
    check = dict(fitted().check_)
    assert set(check.pop("answers")) == {"network", "nearest class"}
    assert list(check) == ["in domain", "left-out families", "left-out families, in context"]
    for table in check.values():
        assert list(table) == ["uncalibrated", "temperature", "layer evidence"]
        for scores in table.values():
            assert set(scores) == {"ece", "nll", "auroc", "low", "high"}
            assert scores["low"] <= scores["ece"] <= scores["high"] + 1e-12
    alone = check["left-out families"]
    assert alone["layer evidence"]["nll"] < alone["temperature"]["nll"] < alone["uncalibrated"]["nll"]
    assert list(LayerEvidence().fit(*world(100, 1)).check_) == ["in domain", "answers"]


def test_scores_of_families_are_means_of_their_scores() -> None:
    right, wrong = torch.ones(50).double(), torch.zeros(50).double()
    f = torch.zeros(50).double()
    parts = [HeldOut(k, y, f, f, f, f, f, f) for k, y in ((1, right), (2, wrong))]
    parts.append(HeldOut(0, right, f, f, f, f, f, f))
    table = check_fit(parts, "ours")
    assert table["left-out families"]["ours"]["ece"] == pytest.approx(
        0.5, abs=1e-6
    )  # not 0, as taken together
    assert table["in domain"]["ours"]["ece"] == pytest.approx(0.5, abs=1e-6)


def test_what_is_missed_makes_the_mean_right() -> None:
    f, correct = torch.tensor([2.0, 1.0, 3.0, 0.5]).double(), torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    delta = _missed(f, correct)
    assert float(torch.sigmoid(f + delta).mean()) == pytest.approx((2 + 0.5) / 5, abs=1e-9)


def test_variance_over_families_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    f, k = torch.randn(2, 200, generator=g).double(), torch.full((2, 200), 0.5).double()
    y = torch.bernoulli(torch.sigmoid(f + torch.tensor([[1.0], [-0.5]])), generator=g)
    parts = [HeldOut(j + 1, y[j], f[j], f[j], f[j], f[j], k[j], k[j]) for j in range(2)]
    missed = [_missed(f[j], y[j]) for j in range(2)]
    variance = (missed[0] ** 2 + missed[1] ** 2) / 0.5
    assert family_variance(parts) == pytest.approx((variance, variance))
    assert family_variance([*parts, parts[0]])[1] == pytest.approx(family_variance([*parts, parts[0]])[0] / 2)
    assert family_variance(parts[:1])[1] == 0.0  # of one family it is not known how families differ
    in_domain = HeldOut(0, y[0], f[0], f[0], f[0], f[0], k[0], k[0])
    assert family_variance([in_domain]) == (0.0, 0.0)


def test_what_is_promised_is_moderated_like_a_prediction() -> None:
    f, k = torch.tensor([2.0, -1.0]).double(), torch.tensor([0.0, 1.0]).double()
    part = HeldOut(1, f, f, f, f, f, k, k.flip(0)).moderated(8 / math.pi)
    torch.testing.assert_close(part.single, torch.tensor([2.0, -(0.5**0.5)]).double())
    torch.testing.assert_close(part.context, torch.tensor([2 * 0.5**0.5, -1.0]).double())
    torch.testing.assert_close(part.temperature, f)


def test_windows_hold_rows_of_one_strength() -> None:
    strength = torch.tensor([0.1, 0.5, 0.1, 0.5, 0.1]).double()
    features = Features(torch.zeros(5, 2), {}, torch.arange(5), torch.ones(5).long(), strength)
    number = _window_numbers(features)
    assert number.unique(return_inverse=True)[1].tolist() == [0, 1, 0, 1, 0]
    many = Features(torch.zeros(120, 2))
    assert torch.bincount(_window_numbers(many)).tolist() == [50, 50, 20]


SCORES = {"ece": 0.05, "nll": 0.3, "auroc": 0.9, "low": 0.03, "high": 0.08}
TABLE = dict.fromkeys(("uncalibrated", "temperature", "ours"), SCORES)


def test_the_verdict_says_what_was_found() -> None:
    alone = {"in domain": TABLE}
    both = {**alone, "left-out families": TABLE, "left-out families, in context": TABLE}
    assert "temperature scaling" in verdict(alone, 0.0, "ours", errors=3)
    assert "3 errors" in verdict(alone, 0.0, "ours", errors=3)
    assert "1 error " in verdict(alone, 0.0, "ours", errors=1)
    assert "help" in verdict(alone, 0.5, "ours", errors=30)
    assert "nothing is known about shift" in verdict(alone, 0.5, "ours", errors=30)
    text = verdict(both, 0.5, "ours", errors=30)
    assert "0.030 to 0.080" in text
    assert "nothing is known" not in text
    assert verdict(both, 0.5, "ours", errors=30, warning="labels are shuffled").endswith(
        "labels are shuffled"
    )


@pytest.mark.parametrize(
    ("n", "network", "nearest", "said"),
    [(1000, 800, 900, True), (1000, 900, 800, False), (40, 36, 38, False), (100_000, 90_000, 91_000, False)],
)
def test_a_certain_and_worthwhile_gain_is_said(n: int, network: int, nearest: int, said: bool) -> None:
    """Two more of forty are chance, and one per cent is certain there but no reason for another head."""
    rank = torch.arange(n)
    answers = answers_of(rank < network, rank < nearest)
    assert answers["network"]["accuracy"] == pytest.approx(network / n)
    assert answers["nearest class"]["accuracy"] == pytest.approx(nearest / n)
    gain = (nearest - network) / n
    spread = (abs(gain) - gain**2) ** 0.5
    assert answers["nearest class"]["low"] == pytest.approx(gain - 2 * spread / n**0.5)
    text = verdict({"in domain": TABLE, "answers": answers}, 0.5, "ours", errors=30)
    assert ("last layer" in text) == said


def test_a_vote_of_the_layers_that_beats_the_network_is_said() -> None:
    """A network whose last layer spoils what the layer before knows."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (400,), generator=g)
    x = 3.0 * torch.eye(3, 5)[y] + 0.5 * torch.randn(400, 5, generator=g)
    logits = x[:, :3] + 2.0 * torch.randn(400, 3, generator=g)
    features = Features(logits, {"a": x})
    calibrator = LayerEvidence().fit(features[:200], y[:200], reference=(features[200:], y[200:]))
    answers = calibrator.check_["answers"]
    right = features[:200].correct(y[:200]).double().mean()
    assert answers["network"]["accuracy"] == pytest.approx(float(right))
    assert answers["nearest class"]["accuracy"] > 0.95
    assert "last layer" in calibrator.verdict_
    assert "last layer" not in fitted().verdict_


@pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")
def test_labels_of_other_samples_are_not_to_be_relied_on() -> None:
    features, labels = world(300, 1)
    assert LayerEvidence().fit(features, labels.roll(1)).verdict_.startswith("Not to be relied on")
