"""The page itself: complete, escaped, self-contained; and alive in a real browser where there is one."""

from __future__ import annotations

import importlib.metadata
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import salgp
from salgp import Features, Prediction
from salgp.prediction import LayerTerms
from salgp.report import build, render
from salgp.report.page import _versions

EVIL = "<script>alert(1)</script>"
LAYERS = ("conv1", f"block</title>{EVIL}", "confidence")


def made(n: int = 400, seed: int = 0, layered: bool = True) -> tuple[Features, torch.Tensor, Prediction]:
    """An overconfident network and its correction."""
    g = torch.Generator().manual_seed(seed)
    s = (0.4 + 0.6 * torch.rand(n, generator=g)).double()
    y = torch.randint(0, 3, (n,), generator=g)
    correct = torch.rand(n, generator=g) < s
    label = torch.where(correct, y, (y + 1) % 3)
    probs = ((1 - s) / 2)[:, None].repeat(1, 3).scatter(1, label[:, None], s[:, None])
    features = Features(2.5 * probs.log())
    if not layered:
        return features, y, Prediction.from_probs(features, probs)
    share = torch.rand(n, 3, generator=g).double()
    terms = LayerTerms(
        LAYERS,
        (s - features.confidence)[:, None] * share / share.sum(1, keepdim=True),
        None,
        "confidence",
        True,
    )
    return (
        features,
        y,
        Prediction.from_confidence(
            features, s, torch.full((n,), 0.05, dtype=torch.float64), layers=terms, novelty=s
        ),
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    features, labels, prediction = made()
    new, _, moved = made(120, 1)
    return build(
        tmp_path_factory.mktemp("report") / "report.html",
        features,
        labels,
        prediction,
        title=f"Title {EVIL}",
        method="SAL-GP",
        class_names=["cat", EVIL, "o'\"&"],
        images=np.random.default_rng(0).random((400, 1, 8, 8)),
        others={f"other {EVIL}": made(layered=False)[2]},
        slices={f"camera {EVIL}": [f"{k % 3} {EVIL}" for k in range(400)]},
        new_data=(new, moved),
        settings={"file": EVIL, "path": "</dd><img src=x onerror=alert(1)>"},
    )


class Outline(HTMLParser):
    """Tags, headings and attributes of a page; complains about tags that are not closed."""

    VOID = frozenset({"meta", "link", "img", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def test_page_is_well_formed_and_stands_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 3_000_000
    found = outline(text)
    addresses = [
        v
        for _, attributes in found.tags
        for k, v in attributes.items()
        if k in ("src", "href", "action", "data", "poster") and v
    ]
    assert all(a.startswith(("data:", "#")) for a in addresses)
    ids = {attributes.get("id") for _, attributes in found.tags}
    assert {a[1:] for a in addresses if a.startswith("#")} <= ids
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text
    assert "@import" not in text


def test_everything_from_data_is_escaped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<script") == 2  # the data of the slider, and the page's own script
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    found = outline(text)
    assert not [attributes for _, attributes in found.tags if any(k.startswith("on") for k in attributes)]
    assert not [attributes for tag, attributes in found.tags if tag == "img" and attributes.get("src") == "x"]


@pytest.mark.parametrize("name", ["\u202eevil", "\ud800", "\x1b[31m", "\u2066x"])
def test_control_characters_and_lone_surrogates_are_replaced(tmp_path: Path, name: str) -> None:
    features, labels, prediction = made(60)
    names = ["cat", name, "owl"]
    path = build(tmp_path / "r.html", features, labels, prediction, title=name, class_names=names)
    text = path.read_text(encoding="utf-8")
    assert name[0] not in text
    assert "\N{REPLACEMENT CHARACTER}" in text


def test_bars_end_where_the_accuracy_is_before_and_after(page: Path) -> None:
    """The top of every bar is the accuracy of its words; what was stated is a mark of its own."""
    text = page.read_text(encoding="utf-8")
    bars = re.findall(r'<rect x="[^"]+" y="([^"]+)"[^>]+class="right[^"]*"><title>([^<]*)</title>', text)
    assert len(bars) > 10
    for top, words in bars:
        right = int(re.search(r"are right (\d+)", words)[1])  # type: ignore[index]
        assert 12 + 216 * (1 - right / 100) == pytest.approx(float(top), abs=1.2)
    assert len(re.findall('class="stated', text)) == len(bars)


def test_page_is_accessible(page: Path) -> None:
    found = outline(page.read_text(encoding="utf-8"))
    assert all(attributes.get("alt") for tag, attributes in found.tags if tag == "img")
    assert all(a.get("aria-label") or a.get("aria-hidden") for tag, a in found.tags if tag == "svg")
    assert all(a.get("scope") for tag, a in found.tags if tag == "th")
    headings = [int(tag[1]) for tag, _ in found.tags if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(headings))
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_colours_have_contrast() -> None:
    """Text colours against the card in both modes: at least 4.5 to 1 (WCAG AA)."""
    css = (Path(__file__).parents[2] / "src/salgp/report/page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]
    for block in (light, dark):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for name in ("ink", "soft", "green", "red", "amber", "blue", "orange"):
            assert _contrast(colours[name], colours["card"]) >= 4.5, name
        for chip in ("blue-soft", "orange-soft"):
            assert _contrast(colours["ink"], colours[chip]) >= 4.5


def test_sections_appear_only_where_there_is_something_to_say(page: Path) -> None:
    features, labels, prediction = made(layered=False)
    plain = render(features, labels, prediction, method="temperature scaling")
    assert 'id="shift"' not in plain
    assert 'id="methods"' not in plain
    assert 'id="slices"' not in plain
    assert "no layer to name" in plain
    assert "<img" not in plain
    full = page.read_text()
    assert all(
        f'id="{name}"' in full
        for name in (
            *("verdict", "shift", "methods", "layers", "samples", "keep", "reliability", "figures"),
            *("classes", "slices", "glossary", "settings"),
        )
    )


def test_every_method_has_a_reliability_diagram(page: Path) -> None:
    words = [
        a["aria-label"] or ""
        for tag, a in outline(page.read_text()).tags
        if tag == "svg" and "aria-label" in a
    ]
    assert [w.split(":")[0] for w in words if w.startswith("Reliability")] == [
        "Reliability diagram, before",
        "Reliability diagram, after",
        f"Reliability diagram, other {EVIL}",
    ]


def test_verdict_comes_first(page: Path) -> None:
    text = page.read_text()
    assert re.search(
        r'class="headline">The model is overconfident by \d+ points; after SAL-GP it is '
        r"right to within \d+ points?(, [a-z ]+)?\.<",
        text,
    )
    assert re.search(
        r'class="action">Send \d+ of 400 predictions to a human; of the others, at most \S+\s% are '
        r"wrong, with 95\s% assurance",
        text,
    )
    assert text.index("headline") < text.index("ECE")


def test_same_input_same_bytes() -> None:
    features, labels, prediction = made()
    assert render(features, labels, prediction) == render(features, labels, prediction)


@pytest.mark.parametrize("labels", [[0], [-1, -1]], ids=["one right sample", "only unknown classes"])
def test_tiny_and_odd_data(labels: list[int]) -> None:
    features = Features(torch.tensor([[3.0, 0.0]] * len(labels)))
    outline(render(features, labels, Prediction.from_probs(features, features.probs)))


def test_all_points_of_a_sample_are_shown_and_add_up(page: Path) -> None:
    text = page.read_text()
    row = re.search(r'<td data-label="model" data-value="([^"]+)".*?</tr>', text, re.DOTALL)
    assert row is not None
    after = float(re.search(r'data-label="corrected" data-value="([^"]+)"', row.group(0)).group(1))  # type: ignore[union-attr]
    found = re.findall(r'class="chip[^>]*>[^<]*: ([+\N{MINUS SIGN}][0-9.]+)</span>', row.group(0))
    chips = [float(x.replace("\N{MINUS SIGN}", "-")) for x in found]
    assert len(chips) == len(LAYERS)
    assert sum(chips) == pytest.approx(100 * (after - float(row.group(1))), abs=0.05 * len(chips) + 1e-6)


def test_methods_of_one_name_are_refused() -> None:
    features, labels, prediction = made(50)
    for name in ("M", "model alone"):
        with pytest.raises(ValueError, match=f"two methods are called '{name}'"):
            render(features, labels, prediction, method="M", others={name: prediction})
    with pytest.raises(ValueError, match="two methods are called 'model alone'"):
        render(features, labels, prediction, method="model alone")
    with pytest.raises(ValueError, match=r"slices\['camera'\] has 3 values for 50 samples"):
        render(features, labels, prediction, slices={"camera": [1, 2, 3]})


def test_mistakes_are_named(tmp_path: Path) -> None:
    features, labels, prediction = made(50)
    with pytest.raises(ValueError, match="20 images for 50 samples"):
        render(features, labels, prediction, images=np.zeros((20, 8, 8)))
    with pytest.raises(ValueError, match="the prediction has 10 samples, the features 50"):
        render(features, labels, prediction[:10])
    with pytest.raises(ValueError, match="nothing to report on"):
        render(features[:0], labels[:0], prediction[:0])
    path = build(tmp_path / "r.html", features, labels, prediction)
    with pytest.raises(FileExistsError, match="force=True"):
        build(path, features, labels, prediction)
    assert build(path, features, labels, prediction, force=True) == path
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="left alone"):
        build(path, features, labels, prediction, force=True)


def text_of(browser: Any, name: str) -> str:
    return str(browser.find_element("id", name).text)


def test_browser_opens_without_a_complaint(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []
    assert browser.title == f"Title {EVIL}"
    shown = browser.find_element("tag name", "body").text
    assert EVIL in shown  # as text
    assert "o'\"&" in shown


def test_browser_slider_changes_the_figures(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    slider = browser.find_element("id", "error")
    assert slider.is_displayed()
    found = []
    last = int(slider.get_attribute("max"))
    for position in (last * 6 // 10, last * 8 // 10, last):
        browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
            slider,
            position,
        )
        values = {
            name: text_of(browser, f"out-{name}")
            for name in ("error", "after", "before", "human", "threshold", "wrong")
        }
        tile = browser.find_element("css selector", ".tile [data-out=human]").text
        assert tile == values["human"]  # tile and slider move together
        dot = float(browser.find_element("id", "dot-after").get_attribute("cx"))
        found.append((dot, values))
        assert int(values["after"].replace(",", "")) + int(values["human"].replace(",", "")) == 400
    kept = [int(values["after"].replace(",", "")) for _, values in found]
    assert kept[0] < kept[1] < kept[2]
    assert found[0][0] < found[1][0] < found[2][0]
    assert len({values["error"] for _, values in found}) == 3
    assert len({values["threshold"] for _, values in found}) == 3


def test_browser_contents_lead_to_sections_and_open_them(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    details = browser.find_element("css selector", "#glossary details")
    assert details.get_attribute("open") is None
    link = browser.find_element("css selector", "nav a[href='#glossary']")
    browser.execute_script("arguments[0].click()", link)
    assert details.get_attribute("open") is not None
    assert "Confidence error" in details.text


@pytest.mark.parametrize("width", [390, 1440])
def test_browser_contents_say_where_one_is(width: int, browser: Any, page: Path) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    marked = "return [...document.querySelectorAll('nav a[aria-current]')].map(a => a.hash)"
    assert browser.execute_script(marked) == ["#verdict"]
    browser.execute_script("document.querySelector('#figures').scrollIntoView({ behavior: 'instant' })")
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert browser.execute_script(marked) == ["#figures"]
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_browser_bars_and_curves_have_words_for_the_pointer(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    words = browser.execute_script(
        "return [...document.querySelectorAll('svg title')].map((title) => title.textContent)"
    )
    assert any("predictions say" in w and " to " in w for w in words)


def test_browser_page_is_at_most_four_screens_until_opened(browser: Any, page: Path) -> None:
    size = {"width": 1440, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollHeight") <= 4 * 1000
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_browser_keyboard_moves_the_slider(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    before = text_of(browser, "out-error")
    browser.find_element("id", "error").send_keys("\ue014")  # right arrow
    assert text_of(browser, "out-error") != before


def test_browser_sorts_tables(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())

    def rows() -> list[float]:
        return [
            float(c.get_attribute("data-value"))
            for c in browser.find_elements("css selector", "#samples td[data-label=model]")
        ]

    for row in browser.find_elements("css selector", "#samples details td[data-label=model]"):
        browser.execute_script("arguments[0].removeAttribute('data-label')", row)
    button = browser.find_element("xpath", "//section[@id='samples']//th/button[text()='model']")
    browser.execute_script("arguments[0].click()", button)
    up = rows()
    browser.execute_script("arguments[0].click()", button)
    assert up == sorted(up)
    assert rows() == sorted(up, reverse=True)


@pytest.mark.parametrize("width", [390, 1440])
def test_browser_nothing_sticks_out(width: int, browser: Any, page: Path) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_browser_dark_mode_and_no_script(browser: Any, page: Path) -> None:
    def ground() -> str:
        return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))

    browser.get(page.as_uri())
    light = ground()
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert ground() != light
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get(page.as_uri())
    assert not browser.find_element("id", "error").is_displayed()
    assert text_of(browser, "out-after")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def _contrast(one: str, two: str) -> float:
    high, low = sorted((_luminance(one), _luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_knows_its_version_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from a folder of sources, the package has no metadata."""
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "salgp":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _versions()["salgp"] == salgp.__version__
