"""The one progress bar: what it prints, when, and that those who use it count right."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from salgp import calibrators
from salgp.cli.console import Console as Speaker
from salgp.features import Features
from salgp.progress import progress_bar
from salgp.store import extraction, fit, scoring
from salgp.store.store import write_store


def terminal() -> Console:
    """One that is a terminal, into memory."""
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_bar_that_is_wanted_shows_title_count_and_rate() -> None:
    console = Console(file=io.StringIO(), width=120)
    with progress_bar(
        "counting [red]{x}[/]", 4, wanted=True, done=1, unit="rows", console=console
    ) as advance:
        advance(3)
    assert "counting [red]{x}[/]" in printed(console)
    assert "4/4" in printed(console)
    assert "rows/s" in printed(console)


def test_a_bar_without_unit_has_no_rate_and_one_without_total_the_time_passed() -> None:
    console = Console(file=io.StringIO(), width=120)
    with progress_bar("counting", None, wanted=True, console=console) as advance:
        advance(7, "still counting")
    assert "/s" not in printed(console)
    assert "still counting" in printed(console)
    assert "7/?" in printed(console)
    assert "0:00:0" in printed(console)


@pytest.mark.parametrize(("patience", "seen"), [(0.0, True), (60.0, False)])
def test_a_bar_appears_on_a_terminal_once_patience_ends(patience: float, seen: bool) -> None:
    console = terminal()
    with progress_bar("counting", 3, patience=patience, console=console) as advance:
        advance()
    assert ("counting" in printed(console)) is seen


def test_no_bar_where_it_is_not_wanted_or_nobody_looks() -> None:
    for wanted, console in ((False, terminal()), (None, Console(file=io.StringIO()))):
        with progress_bar("counting", 3, wanted, patience=0, console=console) as advance:
            advance()
        assert printed(console) == ""


def test_a_bar_that_is_wanted_needs_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"salgp\[cli\]"), progress_bar("counting", 3, wanted=True):
        pass
    with progress_bar("counting", 3) as advance:
        advance()


def test_an_error_ends_the_bar() -> None:
    console = terminal()
    with pytest.raises(ZeroDivisionError), progress_bar("counting", 3, patience=0, console=console):
        raise ZeroDivisionError
    assert printed(console).endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, the line is gone


@pytest.mark.parametrize("how", [{"quiet": True}, {"json": True}, {}])
def test_the_command_line_shows_none_where_nobody_looks(
    how: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    with Speaker(**how).progress("fitting", 2) as advance:
        advance(1, "going on")
    assert capsys.readouterr() == ("", "")


Told = dict[str, Any]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What bars of the store were told, instead of showing them."""
    found: list[Told] = []

    @contextmanager
    def listening(title: str, total: float | None, wanted: bool | None, **how: Any) -> Iterator[Any]:
        found.append({"title": title, "total": total, "wanted": wanted, "steps": [], **how})
        yield lambda steps=1, title=None: found[-1]["steps"].append(steps)

    for module in (extraction, fit, scoring):
        monkeypatch.setattr(module, "progress_bar", listening)
    return found


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 5, generator=g), torch.arange(4) % 3) for _ in range(count)]


def test_extraction_counts_every_batch_once(told: list[Told], tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    extraction.extract_to_store(model, batches(7), tmp_path / "a", rows=8, progress=True)
    extraction.extract_to_store(model, iter(batches(7)), tmp_path / "b", rows=8)
    sized, unsized = told
    assert sized == {
        "title": "extracting", "total": 7, "wanted": True, "unit": "batches", "steps": [1] * 7
    }  # fmt: skip
    assert (unsized["total"], unsized["wanted"], len(unsized["steps"])) == (None, False, 7)


def test_extraction_is_silent_unless_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extraction.extract_to_store(nn.Linear(5, 3), batches(3), tmp_path / "a", rows=8)
    assert capfd.readouterr() == ("", "")
    extraction.extract_to_store(nn.Linear(5, 3), batches(3), tmp_path / "b", rows=8, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("3/3") == 1
    assert "reading" not in err, "one bar, not one more for each shard"


def test_parts_count_those_that_were_there(told: list[Told], tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    for progress in (True, False):
        extraction.extract_parts(lambda: model, lambda i: batches(i + 1), 3, tmp_path, progress=progress)
    assert [(t["total"], t["wanted"], t["steps"]) for t in told] == [
        (3, True, [1, 1, 1]),
        (3, False, [1, 1, 1]),
    ]


def test_scoring_counts_rows(told: list[Told], tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    features, labels = Features(torch.randn(50, 3, generator=g)), torch.arange(50) % 3
    store = write_store([(features, labels)], tmp_path / "store", rows=20)
    saved = calibrators.get("temperature").fit(features, labels).save(tmp_path / "cal")
    for progress in (True, False):
        scoring.score(store.folder, saved, tmp_path / "out", workers=1, progress=progress)
    first, again = told
    assert first == {
        "title": "scoring", "total": 50, "wanted": True, "done": 0, "unit": "rows", "steps": [20, 20, 10]
    }  # fmt: skip
    assert (again["done"], again["wanted"], again["steps"]) == (50, False, [])


def test_a_pass_over_a_store_counts_rows(told: list[Told], tmp_path: Path) -> None:
    features = Features(torch.zeros(50, 3))
    store = write_store([(features, torch.arange(50) % 3)], tmp_path / "store", rows=20)
    how = {"engine": "local", "workers": 1}
    source = fit.StoreSource(store, None, how, 10, 0, True)
    assert source.over_rows("count", count_rows, None) == 50
    assert [(t["title"], t["total"], sorted(t["steps"])) for t in told] == [("count", 50, [10, 20, 20])]


def count_rows(state: object, features: Features, labels: object, index: int) -> int:
    return len(features)


def test_where_there_is_no_terminal_a_line_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("salgp.progress.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO())
    for total, said in ((40, "augmenting: 7 of 40, about 50 s left"), (None, "augmenting: 7 after 10 s")):
        now[0] = 0.0
        with progress_bar("augmenting", total, console=console) as advance:
            for step in range(10):
                now[0] = 1.5 * (step + 1)
                advance()
        shown = capsys.readouterr().err.splitlines()
        assert shown == [said]
    with progress_bar("augmenting", 3, wanted=False) as advance:
        now[0] = 100.0
        advance()
    assert capsys.readouterr().err == ""
