"""Prediction sets: parity with MAPIE, coverage by simulation, groups, streams, storage."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin

from salgp import FormatError, Prediction
from salgp.sets import AdaptiveCoverage, PredictionSets, fit_sets


class Given(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose inputs are its probabilities."""

    def __init__(self, n_classes: int = 4) -> None:
        self.n_classes = n_classes

    @property
    def classes_(self) -> np.ndarray:
        return np.arange(self.n_classes)

    def fit(self, X: Any, y: Any) -> Given:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict_proba(self, X: Any) -> np.ndarray:
        return np.asarray(X)

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(X).argmax(1)


def drawn(n: int, seed: int, sharp: float = 1.5, classes: int = 4) -> tuple[Prediction, torch.Tensor]:
    """Probabilities and true classes drawn from them."""
    g = torch.Generator().manual_seed(seed)
    probs = (sharp * torch.randn(n, classes, generator=g, dtype=torch.float64)).softmax(1)
    y = torch.multinomial(probs, 1, generator=g)[:, 0]
    novelty = -probs.amax(1) + 0.1 * torch.randn(n, generator=g, dtype=torch.float64)
    return Prediction(probs.argmax(1), probs, probs.amax(1), novelty=novelty), y


def mapie(
    score: Any, calibration: Any, new: Prediction, coverage: float, **more: Any
) -> tuple[Any, np.ndarray]:
    from mapie.classification import SplitConformalClassifier

    prediction, y = calibration
    fitted = SplitConformalClassifier(
        Given(), confidence_level=coverage, conformity_score=score, prefit=True, random_state=7
    ).conformalize(prediction.probs.numpy(), y.numpy())
    return fitted, fitted.predict_set(new.probs.numpy(), conformity_score_params=more)[1][:, :, 0]


@pytest.mark.parametrize("coverage", [0.7, 0.9, 0.95])
@pytest.mark.parametrize("n", [101, 500])
def test_lac_is_that_of_mapie(coverage: float, n: int) -> None:
    pytest.importorskip("mapie")
    from mapie.conformity_scores import LACConformityScore

    calibration, (new, _) = drawn(n, 0), drawn(300, 1)
    sets = fit_sets(*calibration, coverage)
    fitted, theirs = mapie(LACConformityScore(), calibration, new, coverage)
    assert float(sets.quantile[0]) == pytest.approx(
        float(fitted._mapie_classifier.conformity_score_function_.quantiles_[0]), abs=1e-12
    )
    assert np.array_equal(sets(new).numpy(), theirs)


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_aps_is_that_of_mapie(coverage: float) -> None:
    """The quantile with MAPIE's own draws, and the sets for that quantile."""
    pytest.importorskip("mapie")
    from mapie.conformity_scores import APSConformityScore

    calibration, (new, _) = drawn(400, 0), drawn(300, 1)
    fitted, theirs = mapie(APSConformityScore(), calibration, new, coverage)
    score = fitted._mapie_classifier.conformity_score_function_
    sets = fit_sets(*calibration, coverage, "aps")
    draws = torch.from_numpy(np.random.RandomState(7).uniform(size=400))
    own = sets._matrix(calibration[0].probs, draws).gather(1, calibration[1][:, None])[:, 0]
    same = PredictionSets("aps", coverage, "all", own, sets.group, sets.edges, 1)
    assert float(same.quantile[0]) == pytest.approx(float(score.quantiles_[0]), abs=1e-12)
    assert np.array_equal(same(new).numpy(), theirs)


def test_raps_is_that_of_mapie_for_its_penalty_and_rank() -> None:
    pytest.importorskip("mapie")
    from mapie.conformity_scores import RAPSConformityScore

    calibration, (new, _) = drawn(500, 0), drawn(300, 1)
    fitted, theirs = mapie(RAPSConformityScore(), calibration, new, 0.8)
    score = fitted._mapie_classifier.conformity_score_function_
    quantile = torch.from_numpy(np.ravel(score.quantiles_))
    rank, penalty = int(np.ravel(score.k_star)[0]), float(np.ravel(score.lambda_star)[0])
    nothing = torch.zeros(0, dtype=torch.float64)
    same = PredictionSets("raps", 0.5, "all", quantile, torch.zeros(1), nothing, 1, penalty, rank)
    assert float(same.quantile[0]) == float(quantile[0])
    assert np.array_equal(same(new).numpy(), theirs)


@pytest.mark.parametrize("score", ["aps", "raps"])
def test_scores_by_a_plain_loop(score: str) -> None:
    prediction, y = drawn(50, 3)
    sets = fit_sets(prediction, y, 0.8, score, penalty=0.07, rank=1, seed=4)
    draws = torch.rand(50, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for i in range(50):
        total = 0.0
        for place, k in enumerate(prediction.probs[i].argsort(descending=True).tolist(), 1):
            total += float(prediction.probs[i, k])
            if k == int(y[i]):
                extra = 0.07 * max(place - 1, 0) if score == "raps" else 0.0
                expected = total - float(draws[i] * prediction.probs[i, k]) + extra
                assert float(sets.scores[i]) == pytest.approx(expected, abs=1e-12)
                break


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("by", ["all", "class", "confidence", "novelty"])
def test_coverage_is_the_promised_one(score: str, by: str) -> None:
    """Mean over 30 draws of 1,000 + 1,000 samples; 3 sd of that mean are below .008."""
    found = []
    for seed in range(30):
        sets = fit_sets(*drawn(1000, seed), 0.9, score, by, seed=seed)
        new, y = drawn(1000, 1000 + seed)
        found.append(
            float(sets(new, torch.Generator().manual_seed(seed))[torch.arange(1000), y].double().mean())
        )
    slack = 0.012 * (0.2 if by == "all" else 1)  # a little above: ceil((n + 1) c) / (n + 1) in every group
    assert 0.9 - 0.008 <= np.mean(found) <= 0.9 + 0.008 + slack


@pytest.mark.parametrize("score", ["aps", "raps"])
@pytest.mark.parametrize("sharp", [10.0, 30.0])
def test_coverage_holds_where_probabilities_round_to_0_and_1(score: str, sharp: float) -> None:
    """Single precision softmax of logits far too large: most classes have no mass. Mean of 20 draws."""
    found = []
    for seed in range(20):
        honest, y = drawn(1500, seed, 4.0, 10)
        logits = honest.probs.log().float()
        probs = (sharp * logits).softmax(1)
        sure = Prediction(probs.argmax(1), probs, probs.amax(1))
        sets = fit_sets(sure[:500], y[:500], 0.95, score)
        found.append(float(sets(sure[500:])[torch.arange(1000), y[500:]].double().mean()))
    assert np.mean(found) >= 0.95 - 0.004


def test_a_generator_goes_on_with_every_call() -> None:
    """One probability for all, as after binning: drawn anew for each sample, alone or in a batch."""
    sets = fit_sets(*drawn(1000, 0), 0.9, "aps")
    same = drawn(1, 1)[0][torch.zeros(400, dtype=torch.long)]
    g = torch.Generator().manual_seed(3)
    alone = torch.cat([sets(same[:1], g) for _ in range(400)])
    assert len(alone.sum(1).unique()) > 1
    assert torch.equal(alone, sets(same, torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_no_coverage_asks_for_nothing_and_all_of_it_for_everything(score: str) -> None:
    """What `AdaptiveCoverage` rests on, also where one class has all the mass."""
    sure = Prediction(torch.tensor([0]), torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1))
    sets = fit_sets(*drawn(100, 0), 0.9, score)
    assert not sets.at(0.0)(sure).any()
    assert sets.at(1.0)(sure).all()


def test_each_class_is_covered() -> None:
    prediction, y = drawn(4000, 0)
    hard = Prediction(
        prediction.label, (prediction.probs * torch.tensor([1, 1, 1, 0.2])), prediction.confidence
    )
    new, truth = drawn(4000, 1)
    harder = Prediction(new.label, new.probs * torch.tensor([1, 1, 1, 0.2]), new.confidence)
    covered = fit_sets(hard, y, 0.9, by="class")(harder)[torch.arange(4000), truth]
    plain = fit_sets(hard, y, 0.9)(harder)[torch.arange(4000), truth]
    assert float(plain[truth == 3].double().mean()) < 0.8
    for k in range(4):
        assert abs(float(covered[truth == k].double().mean()) - 0.9) < 0.04


@pytest.mark.parametrize("by", ["confidence", "novelty"])
def test_novel_samples_get_larger_sets_and_keep_their_coverage(by: str) -> None:
    sets, plain = (fit_sets(*drawn(4000, 0, 4.0), 0.9, by=group, bands=10) for group in (by, "all"))
    new, y = drawn(4000, 1, 1.0)  # all samples are difficult now
    in_domain = sets(drawn(4000, 2, 4.0)[0])
    assert sets(new).sum(1).double().mean() > in_domain.sum(1).double().mean() + 0.5
    covered, before = (float(s(new)[torch.arange(4000), y].double().mean()) for s in (sets, plain))
    assert before < 0.65
    assert covered > before + 0.1


def test_bands_are_fewer_where_samples_are_few() -> None:
    prediction, y = drawn(100, 0)
    assert fit_sets(prediction, y, 0.98, by="confidence").n_groups == 1
    assert fit_sets(*drawn(200, 0), 0.9, by="confidence").n_groups == 5


def test_unknown_classes_are_never_covered_and_count_as_misses() -> None:
    prediction, y = drawn(1000, 0)
    some = torch.where(torch.arange(1000) % 20 == 0, -1, y)
    assert fit_sets(prediction, some, 0.9).quantile > fit_sets(prediction, y, 0.9).quantile


def test_adaptive_coverage_keeps_the_long_run_under_any_shift() -> None:
    sets = fit_sets(*drawn(1000, 0, 4.0), 0.9)
    adaptive, fixed = AdaptiveCoverage(0.9, rate=0.02), 0
    for day in range(120):
        new, y = drawn(50, day + 1, sharp=4.0 if day < 40 else 1.0)
        hit = sets.at(adaptive.coverage)(new)[torch.arange(50), y]
        fixed += int((~sets(new)[torch.arange(50), y]).sum())
        adaptive = adaptive.update(hit)
    assert adaptive.seen == 6000
    assert abs(adaptive.missed / 6000 - 0.1) <= (0.9 + 0.02 * 50) / (0.02 * 6000) + 0.01
    assert fixed / 6000 > 0.2


@pytest.mark.parametrize("waiting", [1, 2, 50, 200])
@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("cruel", [True, False])
def test_adaptive_coverage_keeps_its_bound_with_late_labels(waiting: int, batches: bool, cruel: bool) -> None:
    """The worst of all sequences: misses (or hits) wherever the level does not forbid it."""
    adaptive, queue, ratios = AdaptiveCoverage(0.9, rate=0.05), [], []
    for _ in range(2000):
        queue.append(adaptive.coverage >= 1 if cruel else adaptive.coverage > 0)
        if len(queue) == waiting:
            due = waiting if batches else 1
            adaptive, queue = adaptive.update(queue[:due]), queue[due:]
            off = abs(adaptive.missed / adaptive.seen - 0.1)
            ratios.append([off * 0.05 * adaptive.seen / (0.9 + 0.05 * late) for late in (waiting, 1)])
    worst = np.max(ratios, axis=0)
    assert worst[0] <= 1
    assert not cruel or waiting < 50 or worst[1] > 2, "late labels do cost"


def test_saved_sets_are_the_same(tmp_path: Path) -> None:
    sets = fit_sets(*drawn(300, 0), 0.9, "raps", "novelty")
    sets.save(tmp_path / "sets.safetensors")
    new, _ = drawn(100, 1)
    assert torch.equal(PredictionSets.load(tmp_path / "sets.safetensors")(new), sets(new))
    from salgp.io import write_tensors

    write_tensors(tmp_path / "other.safetensors", {}, {"kind": "x"})
    with pytest.raises(FormatError, match="salgp-sets"):
        PredictionSets.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"score": "best"}, "score must be one of"),
        ({"by": "colour"}, "by must be one of"),
        ({"coverage": 1.0}, "coverage must be"),
        ({"by": "confidence", "bands": 1}, "at least 2"),
        ({"score": "raps", "penalty": -0.1}, "penalty must be 0 or more"),
    ],
)
def test_wrong_arguments_say_so(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_sets(*drawn(20, 0), **arguments)


def test_novelty_is_asked_of_calibrators_that_have_it() -> None:
    prediction, y = drawn(20, 0)
    plain = Prediction(prediction.label, prediction.probs, prediction.confidence)
    with pytest.raises(ValueError, match='by="confidence"'):
        fit_sets(plain, y, by="novelty")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"score": "lad"}, "score 'lad'"),
        ({"by": "weather"}, "by 'weather'"),
        ({"rank": "2"}, "with numbers"),
        ({"coverage": 1.5}, "coverage"),
        ({"n_groups": 7}, "7 groups with 4 edges"),
        ({"penalty": math.inf}, "a penalty of inf"),
        ({"penalty": -0.1}, "a penalty of -0.1"),
        ({"scores": torch.zeros(200, 2)}, "scores of shape"),
        ({"scores": torch.full((200,), math.nan)}, "scores of shape"),
        ({"scores": torch.zeros(200, dtype=torch.long)}, "scores of shape"),
        ({"group": torch.zeros(3, dtype=torch.long)}, "groups \\(3,\\)"),
        ({"group": torch.zeros(200)}, "scores of shape"),
        ({"group": torch.full((200,), 5)}, "groups beyond 5"),
        ({"edges": torch.zeros(2, 2)}, "scores of shape"),
    ],
    ids=str,
)
def test_sets_that_nobody_fitted_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """With checksums that are right."""
    sets = replace(fit_sets(*drawn(200, 0), 0.9, by="confidence"), **change)
    sets.save(tmp_path / "sets.safetensors")
    with pytest.raises(FormatError, match=words) as caught:
        PredictionSets.load(tmp_path / "sets.safetensors")
    assert "sets.safetensors" in str(caught.value)


def test_defaults_and_the_fewest_bands() -> None:
    assert (AdaptiveCoverage().target, AdaptiveCoverage().rate) == (0.9, 0.01)
    assert fit_sets(*drawn(300, 0), 0.9, by="confidence", bands=2).n_groups == 2
    with pytest.raises(ValueError, match="bands must be at least 2, got 1"):
        fit_sets(*drawn(300, 0), 0.9, by="confidence", bands=1)
    sets = fit_sets(*drawn(50, 0), 0.8, "raps")
    assert (sets.penalty, sets.rank) == (0.01, 2)


@pytest.mark.parametrize("nonsense", [[float("nan")], ["x"], [3, 4], torch.tensor([0.3, 0.7]), True])
def test_adaptive_coverage_takes_answers_only(nonsense: object) -> None:
    with pytest.raises(ValueError, match="expected True or False for each set"):
        AdaptiveCoverage(0.9).update(nonsense)  # type: ignore[arg-type]
    kept = AdaptiveCoverage(0.9).update(torch.tensor([True, False])).update([np.True_, 0])
    assert (kept.seen, kept.missed) == (4, 2)


@pytest.mark.parametrize(("coverage", "needed"), [(0.5, 1), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_too_few_samples_are_refused_with_the_number_it_takes(coverage: float, needed: int) -> None:
    p, y = drawn(needed, 0)
    assert torch.isfinite(fit_sets(p, y, coverage).quantile).all()
    if needed > 1:
        with pytest.raises(ValueError, match=f"at least {needed} labelled samples, got {needed - 1}"):
            fit_sets(p[:-1], y[:-1], coverage)


def test_unknown_classes_that_no_set_can_cover_are_refused() -> None:
    """A tenth of the samples is in no set: 95 % coverage would give every class, without a word."""
    p, y = drawn(200, 0)
    unknown = torch.where(torch.arange(200) % 10 == 0, -1, y)
    assert fit_sets(p, unknown, 0.85).quantile.isfinite().all()
    for labels in (unknown, torch.full((200,), -1)):
        with pytest.raises(ValueError, match="label -1"):
            fit_sets(p, labels, 0.95)


def test_classes_with_too_few_samples_are_named() -> None:
    p, y = drawn(200, 0)
    rare = y != 1
    with pytest.warns(UserWarning, match="first: class 1"):
        sets = fit_sets(p[rare], y[rare], 0.9, by="class")
    assert sets(p)[:, 1].all()


def test_the_repr_is_one_line() -> None:
    assert len(repr(fit_sets(*drawn(400, 0)))) < 150
