"""The documentation as its readers meet it: built, served, and opened in a browser where there is one."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("index", "start", "tutorial", "how-it-works", "situations", "api/metrics", "report")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs the documentation tools (pip install .[dev])"
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # a browser asks for many files at once; the default of 5 turns some away


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this version beside one of an older version."""
    site = tmp_path_factory.mktemp("site")
    (site / "0.1.0").mkdir()
    (site / "0.1.0" / "index.html").write_text("<title>old</title>", encoding="utf-8")
    command = [sys.executable, str(ROOT / "docs" / "versions.py"), str(site)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("versions: 0.2.0, 0.1.0")
    return site


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_links_inside_the_site_lead_somewhere(folder: Path) -> None:
    for page in sorted((folder / "0.2.0").rglob("*.html")):
        if page.name == "404.html":  # may be shown anywhere, so its links are absolute
            continue
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not parts.path or "${" in link:
                continue
            target = page.parent / unquote(parts.path)
            assert target.exists(), f"{page.relative_to(folder)} leads to {link}"
            if parts.fragment and target.suffix == ".html":
                assert f'id="{unquote(parts.fragment)}"' in target.read_text(encoding="utf-8"), link


def test_no_formula_is_left_raw(folder: Path) -> None:
    for page in (folder / "0.2.0").rglob("*.html"):
        text = re.sub(r"<(code|pre|script)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert "arithmatex" not in text, page
        assert not re.search(r"\\\\[(\[]|\$\$", text), page
        for formula in re.findall(r"<math\b.*?</math>", text, flags=re.DOTALL):
            assert not re.search(r"\\[A-Za-z]", formula), f"{page}: {formula[:200]}"
    assert "<math" in (folder / "0.2.0" / "how-it-works.html").read_text(encoding="utf-8")


def test_examples_of_the_reference_are_code(folder: Path) -> None:
    text = (folder / "0.2.0" / "api" / "calibrating.html").read_text(encoding="utf-8")
    assert "<blockquote>" not in text


@pytest.mark.parametrize("name", PAGES)
def test_pages_open_without_a_complaint_and_ask_nobody_else(name: str, browser: Any, address: str) -> None:
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(f"{address}/0.2.0/{name}.html")
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    said = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in said if m["method"] == "Network.requestWillBeSent"]
    assert asked
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_sticks_out(name: str, width: int, browser: Any, address: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(f"{address}/0.2.0/{name}.html")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_contents_lead_to_headings(browser: Any, address: str) -> None:
    browser.get(f"{address}/0.2.0/start.html")
    links = browser.execute_script(
        "return [...document.querySelectorAll('.md-nav--secondary a[href^=\"#\"]')].map(a => a.hash)"
    )
    assert len(links) >= 4, browser.page_source[:2000]
    for link in links:
        assert browser.execute_script(f"return document.getElementById({json.dumps(link[1:])}) !== null")
    chapters = browser.execute_script(
        "return [...document.querySelectorAll('.md-nav--primary a')].map(a => a.textContent.trim())"
    )
    assert {"Tutorial", "Glossary", "The model on one page"} <= set(chapters)


def test_versions_are_switched_in_the_header(browser: Any, address: str) -> None:
    browser.get(f"{address}/0.2.0/api/metrics.html")
    shown = "document.querySelector('.version-switch')"
    assert browser.execute_script(f"return [...{shown}.options].map(o => o.value)") == ["0.2.0", "0.1.0"]
    assert browser.execute_script(f"return {shown}.value") == "0.2.0"
    browser.execute_script(f"{shown}.value = '0.1.0'; {shown}.dispatchEvent(new Event('change'))")
    for _ in range(100):
        if browser.title == "old":
            break
        threading.Event().wait(0.05)
    assert browser.current_url == f"{address}/0.1.0/index.html"
