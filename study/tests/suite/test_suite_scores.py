"""Records, windows, tables and verdicts, on made cases and made records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_case import made_case
from sklearn.metrics import roc_auc_score

from salgp.calibrators import get
from salgp.calibrators.evidence.layer_spaces import layer_evidence
from salgp.features import Features
from salgp.prediction import Prediction
from salgp_study.suite import command, methods, protocol, report, running, sets
from salgp_study.suite.cache import read_case, write_case
from salgp_study.suite.methods import METHODS, OURS, Entry, predict_windows
from salgp_study.suite.protocol import read_protocol
from salgp_study.suite.scoring import score_method, told
from salgp_study.suite.summary import BASE, CONTEXT, PER_SAMPLE, Results, Way
from salgp_study.suite.verdicts import in_domain, under_shift, verdict_table


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    for seed in (0, 1):
        write_case(made_case(seed), folder, say=lambda line: None)
    return folder


class WindowMean:
    """Says the mean confidence of its window, and remembers the windows."""

    takes_context = True

    def __init__(self) -> None:
        self.windows: list[int] = []

    def fit(self, features: Features, labels: Any, reference: Any = None) -> WindowMean:
        self.families = features.families
        return self

    def predict(self, features: Features, context: torch.Tensor | None = None) -> Prediction:
        mean = features.confidence.clone()
        for number in [] if context is None else context.unique():
            rows = context == number
            self.windows.append(int(rows.sum()))
            mean[rows] = features.confidence[rows].mean()
        return Prediction.from_confidence(features, mean.double().clamp(0.01, 0.99))


def test_windows_are_consecutive_and_the_rest_joins_the_last() -> None:
    method = WindowMean()
    logits = torch.randn(47, 3, generator=torch.Generator().manual_seed(0))
    features = Features(logits)
    found = predict_windows(method, features, 10)
    assert method.windows == [10, 10, 10, 17]
    torch.testing.assert_close(found.confidence[:10].float(), features.confidence[:10].mean().expand(10))
    assert predict_windows(method, features[:3], 10).confidence.shape == (3,)


def test_records_say_what_was_measured(cache: Path) -> None:
    case = read_case(cache / "made-0")
    records = list(score_method(case, "temperature", METHODS["temperature"]))
    assert [r["test"] for r in records] == ["test", "wide 2", "wider", "unknown samples"]
    originals = case.calibration[0][:160]
    plain = Features(originals.logits, originals.layers)
    fitted = get("temperature").fit(plain, case.calibration[1][:160])
    test = case.tests[1]
    confidence = fitted.predict(test.features).confidence.double().numpy()
    correct = test.features.correct(test.labels).double().numpy()
    assert records[1]["accuracy"] == pytest.approx(correct.mean(), abs=1e-6)
    likelihood = np.where(correct == 1, confidence, 1 - confidence)
    assert records[1]["nll"] == pytest.approx(-np.log(likelihood).mean(), abs=1e-5)
    assert len(records[0]["ece_replicates"]) == 300
    assert "ece_replicates" not in records[1]


def test_copies_are_given_only_to_whom_they_are_meant_for(cache: Path) -> None:
    case, seen = read_case(cache / "made-0"), []

    def build() -> WindowMean:
        seen.append(WindowMean())
        return seen[-1]

    for entry in (Entry(build), Entry(build, copies=True)):
        next(score_method(case, "x", entry))
    for sees in ("half", "one", "two strengths"):
        next(score_method(case, "x", Entry(build, copies=True, sees=sees)))
    assert seen[0].families is None
    families = [sorted(set(method.families.tolist())) for method in seen[1:]]
    assert families == [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]]
    assert [len(method.families) for method in seen[1:]] == [480, 320, 320, 240]


def test_mixed_windows_score_clean_and_shifted_rows_apart(cache: Path) -> None:
    case = read_case(cache / "made-0")
    records = list(score_method(case, "x", Entry(WindowMean, copies=True)))
    mixed = {r["kind"]: r for r in records if r["kind"].startswith("mixed") and r["test"] == "wide 2"}
    clean, wide = case.tests[0], case.tests[1]
    windows = min(120 // 35, 110 // 15)
    assert (mixed["mixed in"]["n"], mixed["mixed"]["n"]) == (35 * windows, 15 * windows)
    correct = wide.features.correct(wide.labels)[: 15 * windows]
    assert mixed["mixed"]["accuracy"] == pytest.approx(float(correct.double().mean()), abs=1e-6)
    both = [
        torch.cat(
            [clean.features.confidence[35 * i : 35 * i + 35], wide.features.confidence[15 * i : 15 * i + 15]]
        )
        for i in range(windows)
    ]
    wanted = np.mean([float(b.mean().clamp(0.01, 0.99)) for b in both])
    assert mixed["mixed in"]["confidence"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", ["GP on the last layer alone", "GP on the confidence alone", OURS])
def test_methods_see_what_they_may(cache: Path, name: str) -> None:
    records = list(score_method(read_case(cache / "made-0"), name, METHODS[name]))
    assert all(0 <= r["ece"] <= 1 for r in records)


def record(name: str, seed: int, method: str, kind: str, **scores: Any) -> dict[str, Any]:
    about = {"set": name, "seed": seed, "method": method, "window": 0, "test": f"{kind}-t", "kind": kind}
    base = {"like": None, "severity": 0, "accuracy": 0.8, "confidence": 0.85, "fit_seconds": 0.1}
    worth = {
        "ece": 0.05,
        "ece_floor": 0.01,
        "ece_told": 0.02,
        "nll": 0.4,
        "auroc": 0.8,
        "aurc": 0.1,
        "nll_probs": 0.5,
        "brier_probs": 0.2,
    }
    return {**about, **base, **worth, **scores}


def made_records(ours_in: float, ours_shift: float) -> list[dict[str, Any]]:
    found = []
    noise = np.random.default_rng(0).normal(0, 0.005, 300)
    for name in ("a", "b"):
        for method, inside, shifted in (
            (OURS, ours_in, ours_shift),
            ("temperature", 0.02, 0.2),
            ("uncalibrated", 0.03, 0.22),
            ("isotonic", 0.02, 0.15),
        ):
            more = {f"{k}_replicates": (inside + noise).tolist() for k in ("ece", "nll", "auroc")}
            found.append(record(name, 0, method, "in", ece=inside, **more))
            found.append(record(name, 0, method, "shift", ece=shifted))
    return found


def test_told_the_accuracy_only_the_mean_changes() -> None:
    random = np.random.default_rng(0)
    s = random.uniform(0.3, 0.99, 400)
    for accuracy in (0.05, 0.6, 0.97):
        found = told(s, accuracy)
        assert found.mean() == pytest.approx(accuracy)
        step = np.log(found / (1 - found)) - np.log(s / (1 - s))
        np.testing.assert_allclose(step, step[0], atol=1e-6)
    assert (told(s, 0.0) == 0).all()
    assert (told(s, 1.0) == 1).all()
    assert np.isfinite(told(np.array([0.0, 1.0, 0.5]), 0.5)).all()


def test_means_count_every_data_set_once() -> None:
    records = [record("a", 0, "x", "shift", ece=0.1, test=str(i)) for i in range(9)]
    records += [record("b", 0, "x", "shift", ece=0.3)]
    assert Results(records).mean(Way("x"), "shift", "ece") == pytest.approx(0.2)
    assert np.isnan(Results(records).mean(Way("y"), "shift", "ece"))
    assert Results(records).mean_of_tests(Way("x"), "shift", "ece") == pytest.approx(0.12)


def test_novelty_stands_beside_the_best_layer_alone(cache: Path) -> None:
    case = read_case(cache / "made-0")
    records = [r for r in score_method(case, OURS, METHODS[OURS]) if r["window"] == 0]
    test = next(t for t in case.tests if t.kind == "unknown")
    entry, plain = METHODS[OURS], next(r for r in records if r["kind"] == "unknown")
    fitted: Any = entry.build().fit(*case.calibration, case.reference)
    distances = layer_evidence(fitted.reference_, test.features).novelty
    unknown = (test.labels < 0).numpy()
    best = max(roc_auc_score(unknown, column) for column in distances.T)
    assert plain["unknown_layer"] == pytest.approx(best, abs=1e-5)
    assert all("shift_layer" in r for r in records if r["kind"] == "shift")
    assert "in_layer" not in records[0]


@pytest.mark.parametrize(("inside", "kept"), [(0.021, False), (0.02, True), (0.01, True)])
def test_in_domain_verdict_is_a_paired_comparison(inside: float, kept: bool) -> None:
    """Replicates of both share their noise, so that a difference a fifth of it is still seen."""
    verdicts = [v for v in in_domain(Results(made_records(inside, 0.05))) if "ECE" in v.promise]
    assert [v.kept for v in verdicts] == [kept, kept]


def test_shift_verdicts_and_their_order() -> None:
    good = {v.promise: v.kept for v in under_shift(Results(made_records(0.02, 0.05)))}
    bad = {v.promise: v.kept for v in under_shift(Results(made_records(0.02, 0.14)))}
    promise = "under shift, per sample: ECE at most 0.45 of temperature's"
    assert (good[promise], bad[promise]) == (True, False)
    lines = verdict_table(under_shift(Results(made_records(0.02, 0.14))))
    answers = [line.split(" | ")[-1] for line in lines[2:]]
    assert answers == sorted(answers)
    assert answers[0].startswith("**no**")


def test_the_front_table_has_the_best_baselines() -> None:
    results = Results(made_records(0.02, 0.05))
    assert results.best_baselines(3) == [Way("isotonic")]
    text = "\n".join(report.front_table(results))
    assert text.index("temperature") < text.index("isotonic") < text.index(OURS)
    assert str(CONTEXT) == "layer evidence, context of 50"
    assert results.ours == [PER_SAMPLE]


def test_the_page_holds_every_section() -> None:
    page = report.page(Results(made_records(0.02, 0.05)))
    assert page.count("\n## ") == 12
    assert "bound: layer evidence, told the accuracy of every test set | 0.020 | 0.020 | 0.100" in page
    assert "| a | in-t |" in page


def test_protocol_names_sets_there_are_and_keeps_them_apart() -> None:
    said = read_protocol()
    assert sorted(said.sets) == sorted(sets.SETS)
    assert not set(said.development) & set(said.report)
    assert {"cifar10-resnet20", "clinc150-minilm"} <= set(said.report)
    assert set(said.strong) < set(said.sets)
    assert set(said.in_sight) <= set(said.report)


def test_a_report_set_is_scored_by_a_look_that_counts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "looks.jsonl"
    said = replace(read_protocol(), report=("made",), development=())
    monkeypatch.setattr(command, "read_protocol", lambda: said)
    monkeypatch.setattr(command, "log_look", lambda names, tried: protocol.log_look(names, tried, log))
    options = ["--cache", str(cache), "--seeds", "0", "--methods", "temperature"]
    with pytest.raises(SystemExit, match="report set"):
        command.main(["score", "--sets", "made", *options])
    command.main(["look", *options])
    command.main(["look", *options])
    assert protocol.count_looks(log) == {"made": 2}
    assert set(json.loads(log.read_text().splitlines()[0])) == {
        "time",
        "commit",
        "changed",
        "sets",
        "methods",
    }


def test_a_run_continues_and_a_set_from_outside_needs_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sets.SETS, "made", lambda seed, data, cache: made_case(seed))
    options = ["--cache", str(tmp_path), "--sets", "made", "--seeds", "0"]
    command.main(["features", *options])
    command.main(["score", *options, "--methods", "few"])
    first = capsys.readouterr().out
    command.main(["score", *options, "--methods", "few"])
    assert OURS in first
    assert capsys.readouterr().out == ""
    command.main(["score", *options, "1", "--methods", "temperature"])
    assert (
        capsys.readouterr().out
        == "made 1: left out, its features are not complete; write them with `features`\n"
    )
    page = tmp_path / "page.md"
    command.main(["tables", *options, "--out", str(page)])
    assert "| weak | layer evidence |" in capsys.readouterr().out
    assert page.read_text().startswith("# Shift suite")


def test_a_page_is_not_replaced_by_a_smaller_one(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.md"
    options = ["--cache", str(cache), "--sets", "made", "--seeds", "0"]
    command.main(["score", *options, "--methods", "few"])
    command.main(["tables", *options, "--out", str(out)])
    command.main(["tables", *options, "--out", str(out)])  # the same again
    small = out.read_text()
    for more in ("made (1), other (3).", "made (2)."):
        out.write_text(small.replace("made (1).", more))
        kept = out.read_text()
        with pytest.raises(SystemExit, match=r"page.md holds results that are not among the records: "):
            command.main(["tables", *options, "--out", str(out)])
        assert out.read_text() == kept
    capsys.readouterr()
    command.main(["tables", *options[:2], "--sets", "made", "digits", "plasticc-table", "--seeds", "0"])
    said = capsys.readouterr().err
    assert "digits: not in the tables, as it has no records; `score` makes them" in said
    assert "plasticc-table: not in the tables, as it has no records; `look` makes them" in said


def test_the_committed_page_is_read_for_what_it_holds() -> None:
    committed = (Path(__file__).parents[3] / "docs" / "research" / "shift-results.md").read_text()
    gone = report.lost(committed, "")
    n = len(read_protocol().sets)
    assert [name.split(" (")[0] for name in gone[:n]] == list(read_protocol().sets)
    assert {OURS, "temperature"} <= set(gone[n:])
    assert not report.lost(committed, committed)


def test_a_setting_that_layer_evidence_lost_is_an_error() -> None:
    assert set(methods.SETTINGS) <= set(methods.ABLATIONS)
    with pytest.raises(TypeError, match="layer evidence has no setting 'guardd'; known: "):
        methods.ours(guardd=0.9)


def test_wrong_names_are_answered_with_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no data set called 'nonsense'; known: digits"):
        command.main(["features", "--cache", str(tmp_path), "--sets", "nonsense"])
    with pytest.raises(KeyError, match="groups: ours, baselines"):
        running.method_names(["nonsense"])
    with pytest.raises(SystemExit, match="no records here"):
        command.main(["tables", "--cache", str(tmp_path)])
    assert set(methods.GROUPS["few"]) <= set(METHODS)
    assert BASE.method in METHODS
