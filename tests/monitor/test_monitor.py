"""The monitor: what it says, what it keeps, kills, two writers, wrong use."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sealing import edit_header, edit_tensors

from salgp import FormatError, Monitor, Prediction
from salgp.estimate import Spread, accuracy, per_class
from salgp.io import ChecksumError
from salgp.monitor import records
from salgp.monitor.martingale import BANDS, CELLS, band_of_cells
from salgp.monitor.rules import with_late_labels
from salgp.prediction import LayerTerms


def batch(n: int, seed: int, shifted: float = 0.0, bias: float = 0.0) -> tuple[Prediction, torch.Tensor]:
    """Three classes; a shift lowers confidence, raises novelty and one layer's term."""
    g = torch.Generator().manual_seed(seed)
    s = torch.sigmoid(1.5 - shifted + torch.randn(n, generator=g, dtype=torch.float64)).clamp_min(0.34)
    right = torch.rand(n, generator=g) < s - bias
    label = torch.randint(0, 3, (n,), generator=g)
    probs = ((1 - s) / 2)[:, None].repeat(1, 3).scatter(1, label[:, None], s[:, None])
    terms = torch.randn(n, 2, generator=g, dtype=torch.float64) - torch.tensor([0.0, 2 * shifted])
    novelty = torch.randn(n, generator=g, dtype=torch.float64) + shifted
    y = torch.where(right, label, (label + 1) % 3)
    return Prediction(label, probs, s, layers=LayerTerms(("early", "late"), terms), novelty=novelty), y


def test_quiet_weeks_do_not_alarm_and_a_shift_does() -> None:
    monitor = Monitor.start(batch(1000, 0)[0], window=3)
    for day in range(10):
        status = monitor.feed(batch(300, 1 + day)[0])
        assert not status.alarm
    assert str(status).startswith("No alarm")
    for day in range(3):
        status = monitor.feed(batch(300, 50 + day, shifted=1.0)[0])
    assert status.alarm == ("shift",)
    assert status.matters
    assert status.features[0].feature == "layer late"
    assert status.features[0].effect < -0.5
    assert {shift.feature: shift.effect for shift in status.features}["novelty"] > 0.4
    assert "the inputs changed (this matters)" in str(status)


def test_the_log_is_a_table(tmp_path: Path) -> None:
    monitor = Monitor.start(batch(1000, 0)[0], state=tmp_path / "w", window=3, class_names=("a", "b", "c"))
    fed, y = batch(300, 1)
    monitor.feed(fed, y, key="monday", time="2026-01-05")
    monitor.feed(batch(300, 2, shifted=2.0)[0], key="tuesday")
    monitor.observe(fed[:50], y[:50], key="late")
    table = Monitor.open(tmp_path / "w").to_frame()
    assert table["key"].tolist() == ["monday", "tuesday", "late"]
    assert table["time"][0] == "2026-01-05"
    assert table["n"].tolist() == [300, 300, 0]
    assert table["accuracy"][0] == pytest.approx(float(fed.confidence.mean()))
    assert table["lower"][0] < table["accuracy"][0] < table["upper"][0]
    assert table[["accuracy", "lower", "upper"]].iloc[2].isna().all()
    assert table["labelled"].tolist() == [300, 0, 50]
    assert table["right"][0] == int((fed.label == y).sum())
    assert table["shift_alarm"].tolist() == [False, True, True]
    assert not table["accuracy_alarm"].any()
    assert table["shift_evidence"][1] > 2.3
    counted = table[["count.a", "count.b", "count.c"]]
    assert counted.iloc[0].tolist() == torch.bincount(fed.label, minlength=3).tolist()
    assert counted.iloc[2].sum() == 0
    table.to_parquet(tmp_path / "history.parquet")


def test_the_table_of_an_empty_log_has_its_columns_and_classes_of_one_name_have_numbers() -> None:
    monitor = Monitor.start(batch(1000, 0)[0], class_names=("a", "a", "c"))
    table = monitor.to_frame()
    assert len(table) == 0
    assert list(table)[-3:] == ["count.0", "count.1", "count.2"]


def test_a_change_too_small_to_matter_says_so() -> None:
    monitor = Monitor.start(batch(3000, 0)[0], tolerance=0.1)
    status = monitor.feed(batch(20000, 1, shifted=0.12)[0])
    assert status.alarm == ("shift",)
    assert not status.matters
    assert "too little to matter" in str(status)


def test_a_wide_interval_does_not_reassure() -> None:
    """What may be anything from fine to terrible is not "too little to matter"."""
    spread = Spread(0.01, 1.0, 0.8, factor=3.0)
    monitor = Monitor.start(batch(3000, 0)[0], tolerance=0.02, spread=spread)
    shifted, y = batch(400, 1, shifted=0.6)
    status = monitor.feed(shifted)
    assert status.alarm == ("shift",)
    assert not Monitor.start(shifted).status().may_matter  # nothing has come yet
    assert (status.matters, status.may_matter) == (False, True)
    assert "whether it matters cannot be told yet" in str(status)
    told = monitor.observe(shifted, y)  # labels tell
    assert told.matters
    assert "this matters" in str(told)


def test_estimates_are_those_of_the_window() -> None:
    spread = Spread(0.01, 0.2, 0.8, factor=2.0)
    monitor = Monitor.start(batch(500, 0)[0], window=2, spread=spread)
    parts = [batch(200, seed)[0] for seed in (1, 2, 3)]
    for part in parts:
        status = monitor.feed(part)
    joined = Prediction.concatenate(parts[1:])
    expected = accuracy(joined, Spread(0.01, 0.2, monitor.settings.reference, factor=2.0))
    assert status.accuracy.value == pytest.approx(expected.value)
    assert status.accuracy.lower == pytest.approx(expected.lower)
    assert status.n == 400
    for shift in status.classes:
        rows = joined.label == shift.label
        assert shift.now == pytest.approx(float(rows.double().mean()))
        assert shift.accuracy.value == pytest.approx(float(joined.confidence[rows].mean()))


def test_a_spread_keeps_the_level_it_was_measured_for(tmp_path: Path) -> None:
    """A factor measured for 90 % says nothing of 99 % as it is."""
    fed, factor = batch(200, 1)[0], 1.645
    found = {}
    for level in (0.9, 0.99):
        spread = Spread(0.02, 0.2, 0.8, factor)
        Monitor.start(batch(500, 0)[0], tmp_path / str(level), level=level, spread=spread)
        monitor = Monitor.open(tmp_path / str(level))
        found[level] = monitor.feed(fed).accuracy
        expected = accuracy(fed, Spread(0.02, 0.2, monitor.settings.reference, factor), level)
        assert found[level].lower == pytest.approx(expected.lower)
    half = {level: found[level].value - found[level].lower for level in found}
    assert half[0.99] / half[0.9] == pytest.approx(2.5758 / 1.64485, rel=1e-4)


def test_reopened_monitor_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plain, kept = Monitor.start(batch(300, 0)[0]), Monitor.start(batch(300, 0)[0], tmp_path / "watch")
    for day in range(4):
        p, y = batch(150, 1 + day, shifted=0.2 * day)
        kept = Monitor.open(tmp_path / "watch")
        assert kept.feed(p, y, key=f"day {day}").evidence == plain.feed(p, y, key=f"day {day}").evidence
    assert [r.key for r in Monitor.open(tmp_path / "watch").log] == [f"day {day}" for day in range(4)]
    with pytest.raises(FileExistsError, match="holds a monitor already"):
        Monitor.start(batch(300, 0)[0], tmp_path / "watch")


def test_a_batch_is_counted_once(tmp_path: Path) -> None:
    monitor = Monitor.start(batch(300, 0)[0], tmp_path)
    first = monitor.feed(batch(150, 1)[0], key="monday")
    assert Monitor.open(tmp_path).feed(batch(150, 1)[0], key="monday").evidence == first.evidence
    assert len(Monitor.open(tmp_path).log) == 1
    p, y = batch(20, 2)
    monitor.observe(p, y, key="monday")
    monitor.observe(p, y, key="monday")
    assert sum(r.labelled for r in Monitor.open(tmp_path).log) == 20


def test_killed_between_state_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor.start(batch(300, 0)[0], tmp_path)
    monitor.feed(batch(150, 1)[0], key="a")

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(records, "append_line", kill)
    with pytest.raises(Killed):
        monitor.feed(batch(150, 2)[0], key="b")
    monkeypatch.undo()
    again = Monitor.open(tmp_path)
    assert [r.key for r in again.log] == ["a", "b"]
    again.feed(batch(150, 2)[0], key="b")
    assert len(Monitor.open(tmp_path).log) == 2

    monkeypatch.setattr(records, "write_tensors", kill)
    with pytest.raises(Killed):
        again.feed(batch(150, 3)[0], key="c")
    monkeypatch.undo()
    after = Monitor.open(tmp_path)
    assert [r.key for r in after.log] == ["a", "b"]
    reference = Monitor.start(batch(300, 0)[0])
    for seed in (1, 2, 3):
        expected = reference.feed(batch(150, seed)[0])
    assert after.feed(batch(150, 3)[0], key="c").evidence == expected.evidence


def _feed(folder: Path, name: str) -> None:
    monitor = Monitor.open(folder)
    for k in range(5):
        monitor.feed(batch(40, k)[0], key=f"{name} {k}")


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    Monitor.start(batch(300, 0)[0], tmp_path)
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_feed, args=(tmp_path, name), daemon=True) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0]
    monitor = Monitor.open(tmp_path)
    assert {r.key for r in monitor.log} == {f"{name} {k}" for name in "ab" for k in range(5)}
    assert [r.number for r in monitor.log] == list(range(1, 11))
    assert int(monitor._state.shift.counts[0].sum()) == 300 + 10 * 40


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no monitor"):
        Monitor.open(tmp_path)
    monitor = Monitor.start(batch(300, 0)[0], tmp_path)
    for k in range(3):
        monitor.feed(batch(50, k)[0])
    log = tmp_path / records.LOG
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(lines[:1]), encoding="utf-8")
    with pytest.raises(FormatError, match="1 records, the state 3"):
        Monitor.open(tmp_path)


def test_changed_settings_are_refused(tmp_path: Path) -> None:
    Monitor.start(batch(300, 0)[0], tmp_path)
    path = tmp_path / records.SETTINGS
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**whole, "false_alarm": 0.5}), encoding="utf-8")
    with pytest.raises(ChecksumError, match=r"monitor\.json is damaged or was edited"):
        Monitor.open(tmp_path)
    path.write_text(json.dumps({**whole, "format": "x"}), encoding="utf-8")
    with pytest.raises(FormatError, match="expected 'salgp-monitor', got 'x'"):
        Monitor.open(tmp_path)


@pytest.mark.parametrize("name", [records.LOG, records.STATE])
def test_files_of_others_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match="is not of a monitor; it is left alone"):
        Monitor.start(batch(300, 0)[0], tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_a_monitor_killed_at_its_start_is_started_again(tmp_path: Path) -> None:
    Monitor.start(batch(300, 0)[0], tmp_path)
    (tmp_path / records.SETTINGS).unlink()  # the state is written first
    assert Monitor.start(batch(300, 0)[0], tmp_path).feed(batch(50, 1)[0]).batches == 1


def test_wrong_use_says_so() -> None:
    p, _ = batch(100, 0)
    with pytest.raises(ValueError, match="at least 50"):
        Monitor.start(p[:10])
    with pytest.raises(ValueError, match="false_alarm"):
        Monitor.start(p, false_alarm=0)
    with pytest.raises(ValueError, match="level must be between 0 and 1, got 90"):
        Monitor.start(p, level=90)
    with pytest.raises(ValueError, match="class names"):
        Monitor.start(p, class_names=["a"])
    monitor = Monitor.start(p)
    with pytest.raises(ValueError, match="calibrator"):
        monitor.feed(Prediction(p.label, p.probs, p.confidence))
    with pytest.raises(ValueError, match="3 classes, got 2"):
        monitor.feed(Prediction(p.label, p.probs[:, :2], p.confidence))
    with pytest.raises(ValueError, match="Invalid isoformat"):
        monitor.feed(p, time="yesterday")
    bad = Prediction(p.label, p.probs, p.confidence, layers=p.layers, novelty=p.novelty * float("nan"))
    with pytest.raises(ValueError, match="must be finite"):
        monitor.feed(bad)
    assert monitor.feed(p[:0]).batches == 0


def test_a_key_may_be_a_whole_number_and_nothing_but_a_text_or_a_number(tmp_path: Path) -> None:
    """What is fed can be read again: a number as a key once made the whole history unreadable."""
    p, y = batch(100, 0)
    monitor = Monitor.start(p, tmp_path)
    monitor.feed(p, key=5)
    assert monitor.feed(p, key=np.int64(5)).batches == monitor.feed(p, key="5").batches == 1
    monitor.observe(p, y, key=7)
    for wrong in (("2026", 1), b"a", 5.0, True):
        with pytest.raises(TypeError, match="key must be a text or a whole number"):
            monitor.feed(p, key=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="key must be a text or a whole number"):
            monitor.observe(p, y, key=wrong)  # type: ignore[arg-type]
    assert [record.key for record in Monitor.open(tmp_path).log] == ["5", "7"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"seed": -1}, "seed"), ({"calibrator": 5}, "calibrator"), ({"window": 5.0}, "expected int")],
)
def test_what_could_not_be_opened_again_is_not_started(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        Monitor.start(batch(100, 0)[0], tmp_path / "w", **wrong)
    assert not (tmp_path / "w").exists()


def test_settings_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    p, _ = batch(100, 0)
    given = {"window": np.int64(5), "false_alarm": np.float32(0.01), "seed": np.int64(3)}
    monitor = Monitor.start(p, tmp_path, tolerance=torch.tensor(0.02), **given)  # type: ignore[arg-type]
    monitor.feed(p, key="day")
    assert Monitor.open(tmp_path).settings == monitor.settings
    assert type(monitor.settings.window) is int


def test_late_labels_of_a_batch_are_measured_first_and_found_wrong() -> None:
    """Late, partial labels of overconfident answers: counted with their batch, before the estimate."""
    monitor = Monitor.start(batch(1000, 0)[0], window=2)
    fed = [batch(400, 1 + day, bias=0.2) for day in range(4)]
    for day, (p, _) in enumerate(fed):
        assert not monitor.feed(p, key=day).alarm
    for day, (p, y) in enumerate(fed):
        status = monitor.observe(p[::2], y[::2], key=day)
    assert status.alarm == ("accuracy",)
    assert status.measured is not None
    right = np.concatenate([(p.label == y)[::2].numpy() for p, y in fed[2:]])  # the window of two batches
    low, high = binomtest(int(right.sum()), len(right)).proportion_ci(0.9)
    assert status.measured.n == len(right) == 400
    assert status.measured.value == pytest.approx(right.mean())
    assert (status.measured.lower, status.measured.upper) == (pytest.approx(low), pytest.approx(high))
    assert "labels show more errors" in status.headline
    assert status.details.startswith(f"Measured accuracy {status.measured} on 400 labels; expected accuracy")


def test_labels_that_come_before_the_batch_of_their_key_stay_by_themselves() -> None:
    monitor = Monitor.start(batch(1000, 0)[0], window=2)
    p, y = batch(300, 1)
    monitor.observe(p[:40], y[:40], key="monday")
    monitor.feed(p, key="monday")
    first, second = with_late_labels(monitor.log)
    assert (first.n, first.labelled, second.n, second.labelled) == (0, 40, 300, 0)
    monitor.observe(p[40:100], y[40:100], key="tuesday")
    assert [record.labelled for record in with_late_labels(monitor.log)] == [40, 0, 60]


def test_late_labels_without_a_batch_count_from_when_they_came() -> None:
    monitor = Monitor.start(batch(1000, 0)[0], window=2)
    p, y = batch(100, 1)
    monitor.feed(p)
    monitor.observe(p[:40], y[:40])
    monitor.feed(batch(100, 2)[0])
    assert monitor.observe(p[40:], y[40:], key="others").measured.n == 100  # type: ignore[union-attr]
    monitor.feed(batch(100, 3)[0])
    assert monitor.feed(batch(100, 4)[0]).measured is None


def test_labels_decide_whether_a_fall_of_the_estimate_matters() -> None:
    """The estimate says 74 %, 800 labels say 80 %: no fall that matters. A few labels do not decide."""
    reference = batch(3000, 0)[0]
    sure, y = batch(800, 1, bias=-0.15)
    lower = Prediction(
        sure.label, sure.probs, sure.confidence - 0.1, layers=sure.layers, novelty=sure.novelty
    )
    monitor = Monitor.start(reference)
    assert monitor.feed(lower, key="today").matters
    assert monitor.observe(lower[:4], y[:4], key="four").matters
    told = monitor.observe(lower[4:], y[4:], key="today")
    assert told.measured.value > told.reference  # type: ignore[union-attr]
    assert (told.matters, told.may_matter) == (False, False)


def test_an_estimate_that_labels_contradict_does_not_matter() -> None:
    """Labels say 73 to 83 %, the estimate 63 %: the labels leave room for a small fall, not for that one."""
    reference = batch(3000, 0)[0]
    today, truth = batch(200, 1)
    lower = replace(today, confidence=today.confidence - 0.15)
    monitor = Monitor.start(reference)
    assert monitor.feed(lower, key="today").matters
    told = monitor.observe(lower, truth, key="today")
    assert told.measured is not None
    assert told.accuracy.upper < told.measured.lower < told.reference - 0.02
    assert (told.matters, told.may_matter) == (False, True)


def test_files_of_another_monitor_are_refused(tmp_path: Path) -> None:
    """Of the same shape and with good checksums: their numbers would be mixed without a word."""
    for name in ("mine", "other"):
        monitor = Monitor.start(batch(300, 0)[0], tmp_path / name)
        monitor.feed(batch(50, 1 if name == "mine" else 2)[0])
    for name in (records.SETTINGS, records.STATE, records.LOG):
        whole = (tmp_path / "mine" / name).read_bytes()
        shutil.copy(tmp_path / "other" / name, tmp_path / "mine" / name)
        with pytest.raises(FormatError, match="another monitor"):
            Monitor.open(tmp_path / "mine")
        (tmp_path / "mine" / name).write_bytes(whole)
    assert len(Monitor.open(tmp_path / "mine").log) == 1


def test_a_copy_of_a_monitor_that_went_another_way_is_another_one(tmp_path: Path) -> None:
    Monitor.start(batch(300, 0)[0], tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    for seed, name in enumerate(("mine", "copy")):
        Monitor.open(tmp_path / name).feed(batch(50, 1 + seed)[0])
    for name in (records.STATE, records.LOG):
        whole = (tmp_path / "mine" / name).read_bytes()
        shutil.copy(tmp_path / "copy" / name, tmp_path / "mine" / name)
        with pytest.raises(FormatError, match="different records"):
            Monitor.open(tmp_path / "mine")
        (tmp_path / "mine" / name).write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"false_alarm": 2.0},
        {"level": 1.5},
        {"window": 0},
        {"window": "20"},
        {"class_share": [1.0]},
        {"class_names": ["a", "b"]},
        {"seed": -1},
        {"reference": 1.5},
        {"n_reference": 0},
        {"features": ["confidence"]},
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    Monitor.start(batch(300, 0)[0], tmp_path)
    edit_header(tmp_path / records.SETTINGS, lambda value: {**value, **change})
    with pytest.raises(FormatError):
        Monitor.open(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"last": 0}, {"last": 5}, {"shift": [-1, 0.0]}, {"shift": [1, math.nan]}, {"accuracy": [10**400, 0]}],
)
def test_states_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    monitor = Monitor.start(batch(300, 0)[0], tmp_path)
    for seed in (1, 2):
        monitor.feed(batch(50, seed)[0])

    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata["numbers"] = json.dumps({**json.loads(metadata["numbers"]), **wrong})

    edit_tensors(tmp_path / records.STATE, change)
    with pytest.raises(FormatError, match=str(tmp_path)):
        Monitor.open(tmp_path)


def test_metrics_are_plain_numbers_and_prometheus_reads_them() -> None:
    monitor = Monitor.start(batch(500, 0)[0], class_names=('a"b', "line\nbreak", "c"), window=3)
    assert "measured_accuracy" not in monitor.metrics()
    p, y = batch(300, 1, shifted=2.0)
    status = monitor.feed(p, y)
    found = monitor.metrics()
    assert found == json.loads(json.dumps(found))
    assert found["alarm"] == {"shift": 1, "accuracy": 0}
    assert found["measured_accuracy"] == pytest.approx(float((p.label == y).double().mean()))
    assert found["expected_accuracy_lower"] == status.accuracy.lower
    assert found["evidence_limit"] == pytest.approx(math.log10(200))
    assert found["predicted_share"]["c"] == pytest.approx(float((p.label == 2).double().mean()))
    text = monitor.prometheus()
    series = dict(
        re.findall(r'^(salgp_\w+(?:\{\w+="(?:[^"\\\n]|\\.)*"\})?) (\S+)$', text, flags=re.MULTILINE)
    )
    assert len(series) + text.count("# TYPE") == len(text.splitlines())
    assert float(series['salgp_effect{feature="novelty"}']) == found["effect"]["novelty"]
    assert r'salgp_predicted_share{class="a\"b"}' in series


def test_the_table_says_how_many_labels_should_have_been_right() -> None:
    monitor = Monitor.start(batch(300, 0)[0])
    p, y = batch(50, 1)
    monitor.feed(p)
    monitor.observe(p[:20], y[:20])
    expected = float(p.confidence[:20].sum())
    assert monitor.history()["right_expected"].tolist() == pytest.approx([0.0, expected])


def test_labels_before_any_batch_are_measured() -> None:
    """A service may learn of old answers before the first new batch, also that they were wrong."""
    monitor = Monitor.start(batch(300, 0)[0])
    told = monitor.observe(*batch(40, 1))
    assert told.measured is not None
    assert told.measured.n == 40
    assert told.accuracy.n == 0
    assert str(told).startswith("Ready: no new data yet. Measured accuracy")
    told = monitor.observe(*batch(600, 2, bias=0.3))
    assert str(told).startswith("Alarm: labels show more errors")


def test_the_last_band_is_that_of_all_larger_values() -> None:
    counts = np.zeros((1, CELLS), dtype=np.int64)
    counts[0, 100:228] = 1
    bands = band_of_cells(counts)[0]
    assert (bands[0], bands[99], bands[-1]) == (0, 0, BANDS - 1)
    assert np.bincount(bands[100:228]).tolist() == [2] * BANDS


@pytest.mark.parametrize("name", ["counts", "reference", "recent"])
@pytest.mark.parametrize("number", [-1, 2**62])
def test_numbers_of_samples_that_cannot_be_are_refused(tmp_path: Path, name: str, number: int) -> None:
    """The sum of a few of 2^62 is negative: the status would end in an error of NumPy."""
    Monitor.start(batch(300, 0)[0], tmp_path).feed(batch(50, 1)[0])

    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[name].view(-1)[:3] = number

    edit_tensors(tmp_path / records.STATE, change)
    with pytest.raises(FormatError, match="numbers of samples"):
        Monitor.open(tmp_path)


def test_a_cell_belongs_to_the_band_of_its_middle() -> None:
    counts = np.zeros((1, CELLS), dtype=np.int64)
    counts[0, [100, 200]] = 50
    bands = band_of_cells(counts)[0]
    assert (bands[100], bands[200]) == (BANDS // 4, 3 * BANDS // 4)


def test_batches_and_deliveries_without_a_key_are_numbered() -> None:
    monitor = Monitor.start(batch(300, 0)[0])
    p, y = batch(50, 1)
    monitor.feed(p)
    monitor.observe(p, y)
    monitor.feed(p, key="monday")
    assert monitor.history()["key"].tolist() == ["batch 1", "labels 2", "monday"]


def test_without_error_bars_the_interval_holds_chance_alone() -> None:
    """That of a batch and that of each class, where every confidence of the class is the same."""
    label = torch.arange(300) % 3
    s = torch.tensor([0.6, 0.7, 0.9], dtype=torch.float64)[label]
    probs = ((1 - s) / 2)[:, None].repeat(1, 3).scatter(1, label[:, None], s[:, None])
    p = Prediction(label, probs, s)
    told = Monitor.start(p).feed(p)
    assert vars(told.accuracy) == pytest.approx(vars(accuracy(p)))
    for shift in told.classes:
        assert vars(shift.accuracy) == pytest.approx(vars(per_class(p)[shift.label]))
