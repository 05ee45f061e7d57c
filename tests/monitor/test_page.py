"""The monitor's page: complete, escaped, alone; alive in a real browser; and the command that writes it."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import salgp
from salgp import Monitor, Prediction
from salgp.cli import main
from salgp.monitor.page import render_page as _render_page
from salgp.prediction import LayerTerms

EVIL = "<script>alert(1)</script>"


def batch(n: int, seed: int, shifted: float = 0.0) -> tuple[Prediction, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    s = torch.sigmoid(1.5 - shifted + torch.randn(n, generator=g, dtype=torch.float64)).clamp_min(0.5)
    label = torch.randint(0, 2, (n,), generator=g)
    probs = (1 - s)[:, None].repeat(1, 2).scatter(1, label[:, None], s[:, None])
    y = torch.where(torch.rand(n, generator=g) < s, label, 1 - label)
    terms = LayerTerms((f"block {EVIL}",), torch.randn(n, 1, generator=g) - shifted)
    return Prediction(label, probs, s, layers=terms), y


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    monitor = Monitor.start(batch(500, 0)[0], class_names=["ok", EVIL], window=5)
    monitor.feed(batch(100, 99)[0], key="long ago", time="2026-01-01T00:00:00")
    for day in range(20):
        p, y = batch(200, 1 + day, shifted=0.0 if day < 12 else 1.0)
        when = f"2026-05-{day + 1:02d}T00:00:00"
        monitor.feed(p, y if day % 5 == 0 else None, key=f"day {day} {EVIL}", time=when)
    return monitor.page(tmp_path_factory.mktemp("page") / "watch.html", title=f"Watch {EVIL}")


def render_page(monitor: Monitor, title: str) -> str:
    return _render_page(monitor.settings, monitor.status(), monitor.log, title)


class Tags(HTMLParser):
    """Tags and attributes; complains of tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_stands_alone_and_escapes_everything(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    addresses = [v for _, a in tags.seen for k, v in a.items() if k in ("src", "href", "action") and v]
    assert all(address.startswith("data:") for address in addresses)
    assert not re.search(r"https?://|@import", text)
    assert not [a for _, a in tags.seen if any(k.startswith("on") for k in a)]
    assert all(a.get("aria-label") for tag, a in tags.seen if tag == "svg")


def test_page_says_what_happened_and_only_of_the_last_weeks(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "Alarm: the inputs changed (this matters)" in text
    assert "20 batches shown" in text
    raised = re.search(r'Alarm "shift" was raised at day (\d+)', text)
    assert raised is not None
    assert 12 <= int(raised[1]) <= 15
    assert "long ago" not in text
    assert " of 200" in text


def test_page_says_what_the_false_alarm_probability_assumes(page: Path) -> None:
    """With labels, that the calibrator is right to within the tolerance."""
    assert "while the calibration error is below 2 points" in page.read_text(encoding="utf-8")
    unlabelled = Monitor.start(batch(200, 0)[0])
    unlabelled.feed(batch(100, 1)[0])
    text = render_page(unlabelled, "t")
    assert "at most 1\N{NO-BREAK SPACE}% over the life of this monitor." in text


def test_late_labels_have_their_dots_and_their_row() -> None:
    monitor = Monitor.start(batch(500, 0)[0])
    fed = [batch(200, 1 + day) for day in range(3)]
    for day, (p, _) in enumerate(fed):
        monitor.feed(p, key=f"day {day}", time=f"2026-05-{day + 1:02d}T10:00:00")
    assert 'class="dot"' not in render_page(monitor, "t")
    monitor.observe(*fed[1], key="day 1", time="2026-05-09T10:00:00")
    monitor.observe(*fed[2], key="a delivery", time="2026-05-10T10:00:00")
    text = render_page(monitor, "t")
    assert text.count('class="dot"') == 2
    for p, y in fed[1:]:
        assert f"{int((p.label == y).sum())} of 200</td>" in text
    assert 'scope="row">a delivery<' in text
    assert text.count('scope="row">day 1<') == 1
    assert "Measured accuracy" in text
    assert "3 batches shown" in text
    assert re.findall(r'tick below"[^>]*>([^<]*)<', text)[:4:3] == ["May 01", "May 10"]


@pytest.mark.parametrize("name", ["\u202eevil", "\ud800", "\x1b[31m", "\u2066x"])
def test_control_characters_and_lone_surrogates_are_replaced(tmp_path: Path, name: str) -> None:
    monitor = Monitor.start(batch(500, 0)[0], class_names=["ok", name])
    monitor.feed(batch(100, 1)[0], key=f"k{name}", time="2026-05-01")
    text = monitor.page(tmp_path / "p.html", title=name).read_text(encoding="utf-8")
    assert name[0] not in text
    assert "\N{REPLACEMENT CHARACTER}" in text


def numbers(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


def test_everything_is_drawn_where_the_numbers_are() -> None:
    """Pixels of lines, band, dots, limit and marks of both figures, from the table of the same monitor."""
    monitor = Monitor.start(batch(500, 0)[0], window=3)
    for day in range(4):
        fed, y = batch(200, 1 + day, shifted=1.0 * (day == 3))
        monitor.feed(fed, y if day in (1, 3) else None, time=f"2026-05-0{day + 1}")
    table, text = monitor.history(), render_page(monitor, "t")
    low = math.floor(10 * min(table["lower"].min(), 0.5)) / 10
    xs = [66 + 484 * (day + 0.5) / 4 for day in range(4)]

    def at(share: float) -> float:
        return pytest.approx(14 + 186 * (1 - share), abs=0.06)

    def height(accuracy: float) -> float:
        return at((accuracy - low) / (1 - low))

    lines = list(map(numbers, re.findall(r'<polyline points="([^"]*)" class="line"', text)))
    second = numbers(re.findall(r'<polyline points="([^"]*)" class="second"', text)[0])
    band = numbers(re.findall(r'<polygon points="([^"]*)" class="band"', text)[0])
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)" class="(\w+)"', text)
    dots = [(float(x), float(y)) for x, y, _, css in circles if css == "dot"]
    assert lines[0] == [
        (pytest.approx(x, abs=0.06), height(a)) for x, a in zip(xs, table["accuracy"], strict=True)
    ]
    assert band == [
        *((pytest.approx(x, abs=0.06), height(a)) for x, a in zip(xs, table["upper"], strict=True)),
        *(
            (pytest.approx(x, abs=0.06), height(a))
            for x, a in zip(xs[::-1], table["lower"][::-1], strict=True)
        ),
    ]
    right = table["right"] / np.maximum(table["labelled"], 1)
    assert dots == [(pytest.approx(xs[day], abs=0.06), height(right[day])) for day in (1, 3)]
    assert [css for *_, css in circles] == ["expected", "expected", "dot", "expected", "expected", "dot"]
    limit = math.log10(200)
    high = max(limit + 1, min(float(table["shift_evidence"].max()), 3 * limit))
    for drawn, name in ((lines[1], "shift_evidence"), (second, "accuracy_evidence")):
        inside = np.clip(table[name], -3, high)
        assert drawn == [
            (pytest.approx(x, abs=0.06), at((v + 3) / (high + 3))) for x, v in zip(xs, inside, strict=True)
        ]
    across = {
        css: float(y)
        for y, css in re.findall(r'<line x1="66" y1="([\d.]+)"[^>]* class="(reference|limit)"', text)
    }
    assert across["reference"] == height(monitor.settings.reference)
    assert across["limit"] == at((limit + 3) / (high + 3))
    marks = re.findall(r'text-anchor="end">(\N{MINUS SIGN}?\d+)</text>', text)
    step = math.ceil((high + 3) / 6)
    shown = [int(mark.replace("\N{MINUS SIGN}", "-")) for mark in marks]
    assert shown == list(range(-3, math.floor(high) + 1, step))
    days = re.findall(r'<text x="([\d.]+)" y="220" class="tick below"[^>]*>([^<]*)<', text)[:4]
    assert days == [(f"{x:.1f}".removesuffix(".0"), f"May 0{k + 1}") for k, x in enumerate(xs)]


@pytest.mark.parametrize(("fed", "high"), [(1, math.log10(200) + 1), (60, 3 * math.log10(200))])
def test_evidence_that_is_large_does_not_hide_the_limit(fed: int, high: float) -> None:
    """Little of it leaves room above the limit; much of it ends at three times the limit."""
    monitor = Monitor.start(batch(500, 0)[0])
    for day in range(fed):
        monitor.feed(batch(100, 1 + day, shifted=2.0 * (fed > 1))[0], time="2026-05-01")
    text = render_page(monitor, "t")
    y = re.findall(r'<line x1="66" y1="([\d.]+)"[^>]* class="limit"', text)[0]
    limit = math.log10(200)
    assert float(y) == pytest.approx(14 + 186 * (high - limit) / (high + 3), abs=0.06)


def test_the_page_holds_eight_weeks_fourteen_batches_and_ten_classes() -> None:
    """The newest batch first; of the classes those whose share changed most."""
    n, k = 600, 12
    rng = np.random.default_rng(0)

    def of(share: np.ndarray) -> Prediction:
        label = torch.from_numpy(rng.choice(k, n, p=share))
        probs = torch.full((n, k), 0.2 / (k - 1)).scatter(1, label[:, None], 0.8)
        return Prediction(label, probs, torch.full((n,), 0.8))

    even = np.full(k, 1 / k)
    monitor = Monitor.start(of(even), class_names=[f"kind {c:02d}" for c in range(k)])
    monitor.feed(of(even), key="too old", time="2026-03-05T23:59:59")
    monitor.feed(of(even), key="old", time="2026-03-06T00:00:00")
    for day in range(1, 17):
        monitor.feed(of(np.arange(1, k + 1) / 78), key=f"day {day:02d}", time=f"2026-04-{14 + day}T00:00:00")
    monitor.feed(of(even), key="last", time="2026-05-01T00:00:00")
    text = render_page(monitor, "t")
    assert "18 batches shown, 2026-03-06 00:00 to 2026-05-01 00:00" in text
    batches = re.findall(r'scope="row">([^<]*)<small>', text)
    assert batches == ["last", *(f"day {day:02d}" for day in range(16, 3, -1))]
    shown = re.findall(r'scope="row">(kind \d\d)<', text)
    assert shown == [f"kind {shift.label:02d}" for shift in monitor.status().classes[:10]]


def test_records_without_labels_say_so_and_late_ones_their_share() -> None:
    monitor = Monitor.start(batch(500, 0)[0])
    assert "no labels" not in render_page(monitor, "t")
    fed, y = batch(40, 1)
    monitor.feed(fed, time="2026-05-01")
    text = render_page(monitor, "t")
    assert "<td>no labels</td>" in text
    assert "measured nothing" in text
    assert "Measured on" not in text
    monitor.observe(fed, y, time="2026-05-02")
    assert f"Measured on 40 labels in the window: {monitor.status().measured}".replace(
        " %", "\N{NO-BREAK SPACE}%"
    ) in render_page(monitor, "t")


def test_a_large_shift_is_not_green() -> None:
    monitor = Monitor.start(batch(500, 0)[0])
    monitor.feed(batch(300, 1, shifted=2.0)[0])
    text = render_page(monitor, "t")
    assert "<meter" not in text
    assert re.search(r'class="size large"[^>]*><i style="width:\d\d%"', text)


def test_page_of_a_new_monitor() -> None:
    text = render_page(Monitor.start(batch(100, 0)[0]), "New")
    assert "Ready: no new data yet" in text
    assert "nan" not in text
    assert "0 batches shown" in text


def test_browser_shows_it_without_a_complaint(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []
    assert browser.title == f"Watch {EVIL}"
    assert EVIL in browser.find_element("tag name", "body").text
    assert all(svg.size["height"] > 50 for svg in browser.find_elements("tag name", "svg"))


@pytest.mark.parametrize("width", [390, 1440])
def test_browser_nothing_sticks_out(width: int, browser: Any, page: Path) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_browser_dark(browser: Any, page: Path) -> None:
    def ground() -> str:
        return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))

    browser.get(page.as_uri())
    grounds = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        grounds.add(ground())
    assert len(grounds) == 2


def features_file(path: Path, n: int, seed: int, noise: float = 0.0) -> Path:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    z = torch.randn(n, 3, generator=g)
    z[torch.arange(n), y] += 2
    z = z + noise * torch.randn(n, 3, generator=g)
    salgp.Features(2 * z, {"fc": z}).save(path, y)
    return path


@pytest.mark.parametrize(
    ("correct", "marks"),
    [
        (0.97, ["100 %", "95 %", "90 %"]),
        (0.62, ["100 %", "90 %", "80 %", "70 %", "60 %"]),
        (0.1, ["100 %", "80 %", "60 %", "40 %", "20 %", "0 %"]),
    ],
)
def test_marks_of_the_accuracy_are_round(correct: float, marks: list[str]) -> None:
    s = torch.full((4000,), correct, dtype=torch.float64)
    still = Prediction(torch.zeros(4000, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
    monitor = Monitor.start(still)
    monitor.feed(still, time="2026-05-01T10:20:30+00:00")
    text = render_page(monitor, "title")
    drawn = re.findall(r'text-anchor="end">([^<]*)\N{NO-BREAK SPACE}%</text>', text)
    assert [f"{mark} %" for mark in drawn[: len(marks)]] == marks
    assert "2026-05-01 10:20 UTC" in text
    assert "T10:20" not in text
    assert "\N{MINUS SIGN}3</text>" in text


def test_command_starts_feeds_and_fails_on_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cal, state = tmp_path / "cal", tmp_path / "watch"
    fitted = features_file(tmp_path / "fit.safetensors", 200, 0)
    assert main(["fit", str(fitted), "-o", str(cal), "-m", "temperature"]) == 0
    today = features_file(tmp_path / "today.safetensors", 400, 1)
    assert main(["monitor", str(cal), str(today), "--state", str(state)]) == 2
    assert "--reference" in capsys.readouterr().err
    home = features_file(tmp_path / "home.safetensors", 500, 2)
    start = ["monitor", str(cal), "--state", str(state), "--reference", str(home)]
    assert main(start) == 0
    assert "next: salgp monitor" in " ".join(capsys.readouterr().out.split())
    assert main(start) == 2
    capsys.readouterr()
    feed = ["monitor", str(cal), str(today), "--state", str(state), "--json", "--fail"]
    assert main(feed) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["alarm"] == []
    assert first["batches"] == 1
    assert first["labelled_samples"] == 400
    assert main(feed) == 0
    assert json.loads(capsys.readouterr().out)["batches"] == 1
    bad = features_file(tmp_path / "bad.safetensors", 800, 3, noise=4.0)
    page = tmp_path / "watch.html"
    arguments = [
        "monitor",
        str(cal),
        str(bad),
        "--state",
        str(state),
        "-o",
        str(page),
        "--json",
        "--fail",
    ]
    assert main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["alarm"]
    assert "Alarm" in page.read_text(encoding="utf-8")


def test_command_takes_labels_that_come_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cal, state = tmp_path / "cal", tmp_path / "watch"
    fitted = features_file(tmp_path / "fit.safetensors", 200, 0)
    home = features_file(tmp_path / "home.safetensors", 500, 2)
    labelled = features_file(tmp_path / "labels/monday.safetensors", 400, 1)
    features, y = salgp.load_features(labelled)
    monday = tmp_path / "monday.safetensors"
    features.save(monday)
    assert main(["fit", str(fitted), "-o", str(cal), "-m", "temperature"]) == 0
    watch = ["monitor", str(cal), "--state", str(state)]

    def told() -> str:
        said = capsys.readouterr()
        return " ".join((said.err + said.out).split())

    assert main([*watch, str(monday), "--reference", str(home)]) == 0
    assert main([*watch, "--late", str(monday)]) == 1
    assert "has no labels" in told()
    assert main([*watch, str(labelled)]) == 0
    assert "its labels are new: give it as --late" in told()
    assert main([*watch, "--late", str(labelled), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"] == 1
    assert found["measured_accuracy"] == pytest.approx(float((features.label == y).double().mean()))
    other = shutil.copy(labelled, tmp_path / "monday-labelled.safetensors")
    assert main([*watch, "--late", str(other)]) == 0
    assert "labels of monday-labelled.safetensors were counted before" in told()
    assert main([*watch, str(labelled)]) == 0
    assert "--late" not in told()
    assert [record.labelled for record in salgp.Monitor.open(state).log] == [0, 400]


def test_command_writes_the_history_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cal, state = tmp_path / "cal", tmp_path / "watch"
    fitted = features_file(tmp_path / "fit.safetensors", 200, 0)
    home = features_file(tmp_path / "home.safetensors", 500, 2)
    today = features_file(tmp_path / "today.safetensors", 400, 1)
    assert main(["fit", str(fitted), "-o", str(cal), "-m", "temperature"]) == 0
    watch = ["monitor", str(cal), "--state", str(state), "-o"]
    table, sheet = tmp_path / "history.parquet", tmp_path / "history.csv"
    assert main([*watch, str(table), "--reference", str(home)]) == 0
    assert len(pd.read_parquet(table)) == 0
    capsys.readouterr()
    assert main([*watch, str(table), str(today), "--json"]) == 0  # its own file is replaced
    assert str(table) in json.loads(capsys.readouterr().out)["out"]
    assert main([*watch, str(sheet)]) == 0
    for found in (pd.read_parquet(table), pd.read_csv(sheet)):
        assert found["n"].tolist() == [400]
        assert found["labelled"].tolist() == [400]
        assert found["key"][0].startswith("today.safetensors ")
        assert 0.5 < found["accuracy"][0] < 1
    (tmp_path / "mine.csv").write_text("years,of\nwork,1\n")
    assert main([*watch, str(tmp_path / "mine.csv")]) == 1
    assert "left alone" in " ".join(capsys.readouterr().err.split())
    assert main([*watch, str(tmp_path / "history.txt")]) == 2
    assert ".parquet" in " ".join(capsys.readouterr().err.split())


def test_the_colour_says_whether_an_alarm_matters() -> None:
    def tone(monitor: Monitor) -> str:
        found = re.search(r'class="verdict (\w+)"', render_page(monitor, "t"))
        return "" if found is None else found.group(1)

    monitor = Monitor.start(batch(500, 0)[0])
    assert tone(monitor) == "good"
    monitor.feed(batch(500, 1, shifted=2.0)[0])
    assert tone(monitor) == "poor"
    tolerant = Monitor.start(batch(500, 0)[0], tolerance=0.5)
    tolerant.feed(batch(500, 1, shifted=2.0)[0])
    assert tone(tolerant) == "fair"


@pytest.mark.parametrize(
    ("second", "marks"), [("2026-05-02T10:00:00", "May 02"), ("2026-05-01T11:30:00", "11:30")]
)
def test_the_axis_shows_days_or_hours(second: str, marks: str) -> None:
    monitor = Monitor.start(batch(500, 0)[0])
    for seed, time in enumerate(("2026-05-01T10:00:00", second)):
        monitor.feed(batch(100, 1 + seed)[0], time=time)
    assert f">{marks}</text>" in render_page(monitor, "t")
