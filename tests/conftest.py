"""Makes ``tests/`` importable (``networks``, ...) from every test file; a browser for those who need one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked process waits for ever for threads it has not got


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Networks that a test makes have the same weights every time."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real browser without a window; what it says and asks for is in its logs."""
    chromium = next(
        (
            found
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (found := shutil.which(name))
        ),
        None,
    )
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and chromedriver on the PATH (apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
        "--window-size=1440,1000",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})

    class Patient(webdriver.Chrome):
        """Goes on only when the page asked for is shown, whole; on a busy machine that may take a while."""

        def get(self, url: str) -> None:
            super().get(url)
            shown = (
                "return document.readyState === 'complete' && location.href.split('#')[0] === arguments[0]"
            )
            wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait(self, 60)
            wait.until(lambda _: self.execute_script(shown, url.split("#")[0]), f"{url} does not open")

    running = Patient(options=options, service=webdriver.ChromeService(driver))
    yield running
    running.quit()
