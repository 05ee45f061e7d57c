"""What a monitor says against the truth of a simulated stream, computed by plain loops."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm
from sealing import edit_tensors

from salgp import FormatError, Monitor, Prediction
from salgp.estimate import Spread
from salgp.monitor import records
from salgp.monitor.martingale import CELLS, ConformalMartingale, Martingale, feature_cells
from salgp.monitor.records import Record
from salgp.monitor.rules import FeatureShift
from salgp.prediction import LayerTerms


def stream(n: int, seed: int, shifted: float = 0.0, classes: int = 3) -> tuple[Prediction, torch.Tensor]:
    """Confidences, novelty and a layer's term of few values each, so that every loop is exact."""
    rng = np.random.default_rng(seed)
    s = rng.choice([0.6, 0.7, 0.8, 0.9], n, p=[0.1 + 0.2 * shifted, 0.2, 0.3, 0.4 - 0.2 * shifted])
    label = rng.choice(classes, n, p=np.arange(1, classes + 1) / (classes * (classes + 1) / 2))
    y = np.where(rng.random(n) < s, label, (label + 1) % classes)
    probs = np.repeat((1 - s)[:, None] / (classes - 1), classes, axis=1)
    probs[np.arange(n), label] = s
    novelty = rng.integers(0, 5, n) + 2 * shifted * (rng.random(n) < 0.5)
    term = rng.integers(-3, 3, (n, 1)) - 1.0 * (shifted > 0)
    std = torch.from_numpy(rng.choice([0.02, 0.04, 0.06], n))
    terms = LayerTerms(("deep",), torch.from_numpy(term))
    found = Prediction(
        *map(torch.from_numpy, (label, probs, s)), std=std, layers=terms, novelty=torch.from_numpy(novelty)
    )
    return found, torch.from_numpy(y)


def cliff(reference: Any, now: Any) -> float:
    """P(now > reference) - P(now < reference), pair by pair."""
    pairs = [(float(a), float(b)) for a in reference for b in now]
    return float(np.mean([(b > a) - (b < a) for a, b in pairs]))


def values_of(prediction: Prediction) -> dict[str, Any]:
    assert prediction.novelty is not None
    assert prediction.layers is not None
    return {
        "confidence": prediction.confidence,
        "class": prediction.label,
        "novelty": prediction.novelty,
        "layer deep": prediction.layers.mean[:, 0],
    }


@pytest.fixture(scope="module")
def fed() -> tuple[Prediction, list[tuple[Prediction, torch.Tensor]], Monitor]:
    """A window of three: four batches, the first of which has left, and labels of two."""
    reference = stream(200, 0)[0]
    parts = [stream(n, 1 + k, shifted=0.5 * (k > 1)) for k, n in enumerate((60, 40, 70, 50))]
    monitor = Monitor.start(reference, window=3)
    for k, (p, y) in enumerate(parts):
        monitor.feed(p, y if k in (0, 2) else None, key=k, time=f"2026-05-0{k + 1}T00:00:00")
    return reference, parts, monitor


def test_expected_and_measured_accuracy_are_those_of_the_window(fed: Any) -> None:
    reference, parts, monitor = fed
    now = Prediction.concatenate([p for p, _ in parts[1:]])
    s, std = now.confidence.numpy(), now.std.numpy()
    status = monitor.status()
    half = norm.ppf(0.95) * math.sqrt((s * (1 - s)).sum() / len(s) ** 2 + std.mean() ** 2)
    assert status.accuracy.value == pytest.approx(s.mean())
    assert status.accuracy.lower == pytest.approx(s.mean() - half)
    assert status.accuracy.upper == pytest.approx(s.mean() + half)
    assert (status.n, status.batches, status.accuracy.n, status.accuracy.level) == (160, 4, 160, 0.9)
    assert status.reference == pytest.approx(float(reference.confidence.mean()))
    p, y = parts[2]
    right = int((p.label == y).sum())
    low, high = binomtest(right, len(y)).proportion_ci(0.9)
    assert vars(status.measured) == pytest.approx(
        {"value": right / len(y), "lower": low, "upper": high, "level": 0.9, "n": len(y)}
    )


def test_classes_are_counted_against_the_reference(fed: Any) -> None:
    reference, parts, monitor = fed
    now = Prediction.concatenate([p for p, _ in parts[1:]])
    found = monitor.status().classes
    for shift in found:
        own = now.label == shift.label
        assert shift.reference == pytest.approx(float((reference.label == shift.label).double().mean()))
        assert shift.now == pytest.approx(float(own.double().mean()))
        mean, n = float(now.confidence[own].mean()), int(own.sum())
        half = norm.ppf(0.95) * math.sqrt(mean * (1 - mean) / n)
        assert (shift.accuracy.value, shift.accuracy.n) == (pytest.approx(mean), n)
        assert shift.accuracy.lower == pytest.approx(mean - half)
        assert shift.accuracy.upper == pytest.approx(min(mean + half, 1))
    changes = [abs(shift.now - shift.reference) for shift in found]
    assert changes == sorted(changes, reverse=True)
    assert sorted(shift.label for shift in found) == [0, 1, 2]


def test_effects_are_those_of_all_pairs(fed: Any) -> None:
    reference, parts, monitor = fed
    now = Prediction.concatenate([p for p, _ in parts[1:]])
    expected = {name: cliff(values_of(reference)[name], x) for name, x in values_of(now).items()}
    found = monitor.status().features
    assert {shift.feature: shift.effect for shift in found} == pytest.approx(expected)
    sizes = [abs(shift.effect) for shift in found]
    assert sizes == sorted(sizes, reverse=True)
    assert expected["layer deep"] < -0.1


def test_evidence_is_that_of_bets_on_every_sample_in_order(fed: Any) -> None:
    """The stream bet on by hand, with the ties that seed and number of the batch draw."""
    reference, parts, monitor = fed
    bets = ConformalMartingale.start(feature_cells(reference))
    totals = []
    for number, (p, _) in enumerate(parts, 1):
        bets = bets.bet(feature_cells(p), np.random.default_rng([0, number]))
        totals.append(bets.log_total / math.log(10))
    table, status = monitor.history(), monitor.status()
    assert table["shift_evidence"].tolist() == pytest.approx(totals)
    assert status.evidence["shift"] == pytest.approx(totals[-1])
    by_feature = {shift.feature: shift.evidence for shift in status.features}
    names = list(values_of(reference))
    assert by_feature == pytest.approx(dict(zip(names, bets.log_features / math.log(10), strict=True)))
    other = Monitor.start(reference, window=3, seed=1)
    assert other.feed(parts[0][0]).evidence["shift"] != pytest.approx(totals[0])


def test_labels_bet_against_the_confidences_by_the_formula(fed: Any) -> None:
    """Two deliveries of less than a block each are two blocks; stakes as they are for a tolerance of 2 %."""
    _, parts, monitor = fed
    gains = []
    for p, y in (parts[0], parts[2]):
        excess = p.confidence.numpy() - 0.02 - (p.label == y).numpy()
        gains.append([math.fsum(np.log1p(x * excess)) for x in (0.05, 0.2, 0.5, 0.9)])
    capital = np.mean([math.exp(a + b) / 2 + math.exp(b) / 6 for a, b in zip(*gains, strict=True)])
    evidence = math.log10(capital + 1 / 3)
    assert monitor.status().evidence["accuracy"] == pytest.approx(evidence)
    assert monitor.history()["accuracy_evidence"][-1] == pytest.approx(evidence)


def test_the_table_holds_the_sums_of_every_batch(fed: Any) -> None:
    _, parts, monitor = fed
    table = monitor.history()
    for k, (p, y) in enumerate(parts):
        labelled = k in (0, 2)
        s = p.confidence.numpy()
        half = norm.ppf(0.95) * math.hypot(math.sqrt((s * (1 - s)).sum()) / len(s), float(p.std.mean()))
        row = {name: column[k] for name, column in table.items()}
        assert row["key"] == str(k)
        assert row["number"] == k + 1
        assert row["n"] == len(s)
        assert (row["accuracy"], row["lower"]) == (pytest.approx(s.mean()), pytest.approx(s.mean() - half))
        assert row["labelled"] == (len(s) if labelled else 0)
        assert row["right"] == (int((p.label == y).sum()) if labelled else 0)
        assert row["right_expected"] == pytest.approx(s.sum() if labelled else 0)
        assert [row[f"count.{c}"] for c in range(3)] == [int((p.label == c).sum()) for c in range(3)]
        evidence = table["shift_evidence"][: k + 1]
        assert row["shift_alarm"] == (evidence.max() >= math.log10(200))
        assert not row["accuracy_alarm"]


def test_the_status_as_numbers_is_the_status(fed: Any) -> None:
    _, _, monitor = fed
    status, found = monitor.status(), monitor.metrics()
    assert found["batches"] == 4
    assert found["window_samples"] == 160
    assert found["alarm"] == {"shift": 1, "accuracy": 0}
    assert status.alarm == ("shift",)
    assert found["matters"] == int(status.matters)
    assert found["labelled_samples"] == 70
    for name, said in (("expected", status.accuracy), ("measured", status.measured)):
        keys = (f"{name}_accuracy", f"{name}_accuracy_lower", f"{name}_accuracy_upper")
        assert [found[key] for key in keys] == [said.value, said.lower, said.upper]
    assert found["reference_accuracy"] == status.reference
    assert found["evidence_limit"] == pytest.approx(math.log10(2 / 0.01))
    assert found["evidence"] == status.evidence
    assert found["effect"] == {shift.feature: shift.effect for shift in status.features}
    assert found["predicted_share"] == {str(shift.label): shift.now for shift in status.classes}


def test_what_a_monitor_does_unless_told_otherwise() -> None:
    reference = stream(50, 0)[0]
    settings = asdict(Monitor.start(reference).settings)
    assert len(settings.pop("id")) == 16
    assert settings.pop("class_share") == pytest.approx((reference.label.bincount() / 50).tolist())
    assert settings.pop("reference") == pytest.approx(float(reference.confidence.mean()))
    assert settings == {
        "features": ("confidence", "class", "novelty", "layer deep"),
        "n_classes": 3,
        "n_reference": 50,
        "false_alarm": 0.01,
        "tolerance": 0.02,
        "window": 20,
        "level": 0.9,
        "spread": None,
        "class_names": None,
        "seed": 0,
        "calibrator": None,
    }
    with pytest.raises(ValueError, match="at least 50 samples, got 49"):
        Monitor.start(reference[:49])


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("false_alarm", (1e-9, 0.999), (0.0, 1.0)),
        ("tolerance", (0.0, 0.999), (-0.001, 1.0)),
        ("level", (1e-9, 0.999), (0.0, 1.0)),
        ("window", (1,), (0,)),
        ("seed", (0,), (-1,)),
        (
            "spread",
            (Spread(0.1, 0, 0.5, level=0.5),),
            (Spread(0.1, 0, 0.5, level=1.0), Spread(0.1, 0, 0.5, level=0)),
        ),
    ],
)
def test_settings_end_where_they_are_said_to(name: str, inside: Any, outside: Any) -> None:
    reference = stream(50, 0)[0]
    for value in inside:
        monitor = Monitor.start(reference, **{name: value})
        assert name == "spread" or getattr(monitor.settings, name) == value
    for value in outside:
        with pytest.raises(ValueError, match=name):
            Monitor.start(reference, **{name: value})


def test_before_any_batch_nothing_is_known() -> None:
    status = Monitor.start(stream(100, 0)[0]).status()
    assert (status.n, status.batches, status.classes, status.measured) == (0, 0, (), None)
    assert (status.accuracy.lower, status.accuracy.upper, status.accuracy.n) == (0, 1, 0)
    assert math.isnan(status.accuracy.value)
    assert [(shift.effect, shift.evidence) for shift in status.features] == [(0, -99)] * 4
    assert status.evidence == {"shift": 0, "accuracy": 0}
    assert (
        str(status)
        == f"Ready: no new data yet. Expected accuracy {100 * status.reference:.1f} % on the reference."
    )


def test_a_batch_says_how_many_samples_and_no_shift_without_an_alarm(fed: Any) -> None:
    reference, parts, _ = fed
    status = Monitor.start(reference).feed(parts[0][0])
    assert str(status) == (
        f"No alarm. Expected accuracy {status.accuracy} of the last 60 samples, "
        f"{100 * status.reference:.1f} % on the reference."
    )


@pytest.mark.parametrize(
    ("effect", "word"),
    [
        (0.0, "negligible"), (-0.146, "negligible"), (0.147, "small"), (-0.329, "small"), (0.33, "medium"),
        (-0.473, "medium"), (0.474, "large"), (-1.0, "large"),
    ],
)  # fmt: skip
def test_sizes_begin_at_the_limits_of_romano(effect: float, word: str) -> None:
    assert FeatureShift("x", effect, 0.0).size == word


def test_an_alarm_stands_from_its_limit_on() -> None:
    """Half of the probability for each alarm: capital of 2 / false_alarm."""
    monitor = Monitor.start(stream(100, 0)[0], false_alarm=0.05)
    state = monitor._state
    for peak, stands in ((math.log(40) - 1e-9, ()), (math.log(40), ("shift",))):
        monitor._state = replace(state, shift=replace(state.shift, peak=peak))
        assert monitor.status().alarm == stands
    monitor._state = replace(state, accuracy=replace(state.accuracy, peak=math.log(40)))
    assert monitor.status().alarm == ("accuracy",)


@pytest.mark.parametrize(
    ("fall", "width", "matters", "may"),
    [
        (0.021, 0.02, True, True),
        (0.021, 0.022, False, True),
        (0.019, 0.0005, False, False),
        (0.019, 0.002, False, True),
    ],
)
def test_a_fall_matters_beyond_the_tolerance_and_where_it_is_certain(
    fall: float, width: float, matters: bool, may: bool
) -> None:
    """Confidences of one value and a spread of known width: the interval is that of many samples."""
    n = 10**6
    s = torch.full((n,), 0.8, dtype=torch.float64)
    at = Prediction(torch.zeros(n, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
    lower = replace(at, confidence=s - fall)
    spread = Spread(width / norm.ppf(0.95), 0.0, 0.8)
    status = Monitor.start(at, spread=spread).feed(lower)
    assert status.accuracy.upper - status.accuracy.value == pytest.approx(width, abs=1e-3)
    assert (status.matters, status.may_matter) == (matters, may)


def test_the_window_forgets_the_oldest_batch() -> None:
    monitor = Monitor.start(stream(100, 0)[0], window=2)
    parts = [stream(20 + k, 1 + k)[0] for k in range(4)]
    sizes = [monitor.feed(part).n for part in parts]
    assert sizes == [20, 41, 43, 45]
    assert monitor._state.recent.sum((1, 2)).tolist() == [22 * 4, 23 * 4]


def test_a_batch_of_one_sample_is_counted_once() -> None:
    monitor = Monitor.start(stream(100, 0)[0])
    one = stream(1, 1)[0]
    assert monitor.feed(one, key="only").n == monitor.feed(one, key="only").n == 1
    assert monitor.observe(one, [int(one.label)], key="only").measured.n == 1  # type: ignore[union-attr]


def test_late_labels_add_to_those_of_their_batch() -> None:
    monitor = Monitor.start(stream(100, 0)[0])
    p, y = stream(90, 1)
    monitor.feed(p[:30], y[:30], key="a")
    monitor.observe(p[30:50], y[30:50], key="b")
    monitor.observe(p[50:], y[50:])
    found = monitor.status().measured
    assert found is not None
    assert (found.n, found.value) == (90, pytest.approx(float((p.label == y).double().mean())))
    again = Monitor.start(stream(100, 0)[0])
    again.feed(p[:30], y[:30], key="a")
    for rows in (slice(30, 60), slice(60, 90)):
        again.observe(p[rows], y[rows], key=f"{'a' if rows.start == 30 else 'x'}")
    told = again.status().measured
    assert told is not None
    assert (told.n, told.value) == (90, found.value)


def test_a_class_beyond_the_last_cell_is_in_the_last_cell() -> None:
    n_classes = CELLS + 10
    label = torch.tensor([3, CELLS - 2, CELLS - 1, CELLS + 5])
    probs = torch.zeros(4, n_classes).scatter(1, label[:, None], 1.0)
    found = feature_cells(Prediction(label, probs, torch.ones(4)))
    assert found[:, 1].tolist() == [3, CELLS - 2, CELLS - 1, CELLS - 1]


def test_confidences_of_one_and_zero_are_cells_of_their_own() -> None:
    s = torch.tensor([0.0, 1e-9, 1e-3, 1.0], dtype=torch.float64)
    found = feature_cells(Prediction(torch.zeros(4, dtype=torch.long), torch.full((4, 2), 0.5), s))[:, 0]
    assert found[0] == found[1] < found[2] < found[3] < CELLS


def test_numbers_of_blocks_end_at_31_bits() -> None:
    assert Martingale(np.zeros(1), 2**31 - 1).blocks == 2**31 - 1
    for wrong in (-1, 2**31):
        with pytest.raises(ValueError, match="blocks"):
            Martingale(np.zeros(1), wrong)
    for capital in (math.nan, math.inf):
        with pytest.raises(ValueError, match="log capital"):
            Martingale(np.array([0.0, capital]))
    with pytest.raises(ValueError, match="log capital"):
        Martingale(np.zeros(1), peak=math.nan)
    assert Martingale(np.full(2, -np.inf), 1).log_total == pytest.approx(math.log(1 / 2))


def test_an_empty_record_holds_nothing() -> None:
    found = asdict(Record("m", 1, None, "2026-05-01"))
    assert found.pop("monitor") == "m"
    assert (found.pop("number"), found.pop("key"), found.pop("time")) == (1, None, "2026-05-01")
    assert set(found) == {
        *("n", "confidence", "variance", "std", "class_count", "class_confidence", "labelled", "right"),
        *("right_expected", "shift", "accuracy", "alarm"),
    }
    assert not any(found.values())


@pytest.mark.parametrize("change", [{"number": 2}, {"class_count": (1, 2)}, {"class_confidence": ()}])
def test_a_record_that_is_not_of_this_monitor_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Also where its checksums are right, and the state ends with the same record."""
    monitor = Monitor.start(stream(100, 0)[0], tmp_path)
    monitor.feed(stream(30, 1)[0])
    wrong = asdict(replace(monitor.log[0], **change))
    (tmp_path / records.LOG).unlink()
    records.append_line(tmp_path / records.LOG, wrong)

    def edit(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata["record"] = records.json.dumps(wrong)

    edit_tensors(tmp_path / records.STATE, edit)
    with pytest.raises(FormatError, match="line 1 is not of this monitor"):
        Monitor.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("counts", "int64"),
        ("shift", "float64"),
        ("accuracy", "float64"),
        ("reference", "int64"),
        ("recent", "int64"),
    ],
)
def test_arrays_of_another_type_or_shape_are_refused(tmp_path: Path, name: str, expected: str) -> None:
    Monitor.start(stream(100, 0)[0], tmp_path)
    whole = (tmp_path / records.STATE).read_bytes()
    for change in (lambda x: x.float() if x.dtype == torch.float64 else x.int(), lambda x: x[..., :1]):
        edit_tensors(
            tmp_path / records.STATE, lambda tensors, _, f=change: tensors.update({name: f(tensors[name])})
        )
        with pytest.raises(FormatError, match=f"{name} is .* expected {expected}"):
            Monitor.open(tmp_path)
        (tmp_path / records.STATE).write_bytes(whole)


def test_counts_of_2_to_the_48_are_the_last_ones(tmp_path: Path) -> None:
    Monitor.start(stream(100, 0)[0], tmp_path)

    def put(number: int) -> None:
        edit_tensors(
            tmp_path / records.STATE, lambda tensors, _: tensors["recent"].view(-1)[:1].fill_(number)
        )

    put(2**48)
    assert Monitor.open(tmp_path).log == ()
    put(2**48 + 1)
    with pytest.raises(FormatError, match="2\\^48"):
        Monitor.open(tmp_path)


def test_two_monitors_of_one_folder_see_what_the_other_wrote(tmp_path: Path) -> None:
    """Whoever feeds next goes on from there: no number twice, no batch lost, none counted twice."""
    Monitor.start(stream(100, 0)[0], tmp_path)
    one, two = Monitor.open(tmp_path), Monitor.open(tmp_path)
    plain = Monitor.start(stream(100, 0)[0])
    for k in range(6):
        told = (one, two)[k % 2].feed(stream(20, 1 + k)[0], key=k)
        assert told.evidence == plain.feed(stream(20, 1 + k)[0], key=k).evidence
        assert told.batches == k + 1
    one.feed(stream(20, 6)[0], key=5)
    assert [record.number for record in Monitor.open(tmp_path).log] == [1, 2, 3, 4, 5, 6]


def test_an_alarm_names_the_largest_shift() -> None:
    monitor = Monitor.start(stream(400, 0)[0])
    status = monitor.feed(stream(400, 1, shifted=0.5)[0])
    sizes = {shift.feature: abs(shift.effect) for shift in status.features}
    most = max(sizes, key=lambda name: sizes[name])
    assert str(status).endswith(f" Largest shift: {most} ({FeatureShift(most, sizes[most], 0).size}).")
