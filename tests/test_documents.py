"""Every Python block of the README and of the documentation runs, page by page, in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import sample

import salgp
from salgp.network.batches import LABEL_KEYS, Batch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
NAME = re.compile(r"(?<!from )(?<!import )(?<![\w./-])salgp(?:\.[A-Za-z_]\w*)+")
LOOK_UP = """
import functools, importlib, sys
for name in sys.argv[1:]:
    for loaded in [one for one in sys.modules if one.split(".")[0] == "salgp"]:
        del sys.modules[loaded]
    functools.reduce(getattr, name.split(".")[1:], importlib.import_module("salgp"))
"""


def blocks(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))


def run(arguments: list[str], folder: Path) -> None:
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    for stand_in in (ROOT / "tests" / "documents").glob("*.py"):
        shutil.copy(stand_in, tmp_path)
    script = tmp_path / "page.py"
    script.write_text(blocks(page), encoding="utf-8")
    run([str(script)], tmp_path)


def dotted_names() -> set[str]:
    """Every ``salgp.something`` in the code of a page, save where it is imported."""
    codes = (code for page in PAGES for code in CODE.findall(page.read_text(encoding="utf-8")))
    return {name for code in codes for name in NAME.findall(code)}


def test_dotted_names_need_no_other_import(tmp_path: Path) -> None:
    """What a page calls ``salgp.x.y`` is there after ``import salgp``, each in an interpreter that has loaded
    nothing else of salgp.
    """
    names = dotted_names()
    assert "salgp.sklearn.CalibratedEstimator" in names
    run(["-c", LOOK_UP, *sorted(names)], tmp_path)


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    named = {part for name in re.findall(r"^::: (\S+)", text, re.MULTILINE) for part in name.split(".")}
    assert set(salgp.__all__) <= named | set(salgp.metrics.__all__) | {"__version__"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    if example.name == "mlflow_tracking.py":
        pytest.importorskip("mlflow")
    run([str(example)], tmp_path)


PRIVATE = (
    "rehears[a-z]*|rivals?|strangers?|heard|witness(es)?|opinions?|farewell|farness|strangeness|looseness|"
    "crowding|surroundings|leaning|perturbed cop(y|ies)|at[ _]home|judg(e|es|ed|ing)|careful_temperature|"
    "(says?|said|tells?|told) of"
)
"""Words that only this project would understand; the field has others for what they say."""


def test_the_words_are_the_field_s() -> None:
    read = {".py", ".md", ".html", ".toml", ".yml"}
    folders = ("src", "study", "docs", "tests", "benchmarks", "examples", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in read]
    texts = [*files, *ROOT.glob("[!C]*.md"), ROOT / "CONTRIBUTING.md"]  # the changelog names what is gone
    word = re.compile(rf"\b({PRIVATE})\b", re.IGNORECASE)
    found = {
        str(path.relative_to(ROOT)): word.findall(path.read_text(encoding="utf-8"))
        for path in texts
        if path != Path(__file__).resolve()
    }
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_local_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def intervals() -> dict[str, list[float]]:
    """Per network, how often the 90 % interval held: in domain and in its context, shifted and in context."""
    text = (ROOT / "docs" / "research" / "shift-results.md").read_text(encoding="utf-8")
    table = text.split("## 90 % interval of ours")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if " (0." in line]
    return {name: [float(cell.split()[0]) for cell in cells[:4]] for name, *cells in rows}


def between(shares: list[float]) -> str:
    low, high = (int(100 * share + 0.5 + 1e-9) for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def test_what_the_page_says_of_intervals_is_what_the_table_says() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8").split("What the interval promises")[1]
    home, context, single = (line for line in page.splitlines() if line.startswith("- *"))
    found = intervals()
    assert len(found) == 13
    odd = {"banking77-minilm": "BANKING77", "clinc150-minilm": "CLINC150", "plasticc-table": "PLAsTiCC"}
    usual = [share for name, row in found.items() if name not in odd for share in row[:2]]
    assert f"{between(usual)} of the samples on ten of thirteen" in home
    for name, called in odd.items():
        assert f"{between(found[name][:2])} on {called}" in home
    odd = {"spcc-rnn": "the supernovae", "plasticc-table": "PLAsTiCC"}
    usual = [row[3] for name, row in found.items() if name not in odd]
    assert f"{between(usual)} on eleven of thirteen" in context
    for name, called in odd.items():
        assert f"{between([found[name][3]])} on {called}" in context
    assert f"for {between([row[2] for row in found.values()])}." in single


@pytest.mark.parametrize(("place", "names"), [("deploying.md", LABEL_KEYS), ("start.md", LABEL_KEYS)])
def test_pages_name_every_name_that_labels_may_have(place: str, names: tuple[str, ...]) -> None:
    page = (ROOT / "docs" / place).read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if "`label`" in line and "`y`" in line)
    assert not {name for name in names if f"`{name}`" not in line and f'"{name}"' not in line}


@pytest.mark.parametrize("function", [salgp.extract, Batch.of])
def test_docstrings_name_every_name_that_labels_may_have(function: Callable[..., object]) -> None:
    assert not {name for name in LABEL_KEYS if f"``{name}``" not in (function.__doc__ or "")}


def test_deploying_names_the_files_of_a_calibrator(tmp_path: Path) -> None:
    salgp.calibrators.get("platt").fit(*sample(80)).save(tmp_path / "calibrator")
    said = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8").split("## ")[1]
    assert "one file" in said
    assert {f"`{path.name}`" in said for path in (tmp_path / "calibrator").iterdir()} == {True}
    assert len(list((tmp_path / "calibrator").iterdir())) == 1


def test_sizes_and_times_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8").split("### Size and latency")[1]
    results = (ROOT / "benchmarks" / "results" / "export.md").read_text(encoding="utf-8")
    measured = re.findall(r"\d+\.\d\d\b", page.split("The calibrator alone")[0])
    assert len(measured) >= 9
    assert not [number for number in measured if number not in results]


def test_how_often_lists_are_shorter_is_what_the_table_says() -> None:
    results = (ROOT / "benchmarks" / "results" / "act.md").read_text(encoding="utf-8")
    table = results.split("## 2. Prediction sets")[1].split("Mean of the last column")[0]
    sizes = [float(line.strip("| ").split()[-1]) for line in table.splitlines() if "-0 |" in line]
    shorter, hardly = sum(size < 1 for size in sizes), sum(0.995 < size < 1 for size in sizes)
    assert hardly == 3
    page = " ".join((ROOT / "docs" / "sets.md").read_text(encoding="utf-8").split())
    assert (
        f"shorter in {shorter} of the {len(sizes)} rows, in three of them by less than half a percent" in page
    )
