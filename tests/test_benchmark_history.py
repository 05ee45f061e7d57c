"""The memory of the benchmarks: what is read off a page, and what the page of the last runs shows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType


def history() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "history.py"
    spec = importlib.util.spec_from_file_location("benchmark_history", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = """# Title

| method | log loss | worse |
|---|---|---|
| **auto** | .611 | 2 of 40 |
| raw | 1,000.5 ms | none |
"""


def test_numbers_of_tables_are_figures() -> None:
    assert history().figures_of(PAGE) == {
        "auto: log loss": 0.611,
        "auto: worse": 2.0,
        "raw: log loss": 1000.5,
    }


def test_one_line_for_each_figure_and_a_page_of_the_last_runs(tmp_path: Path) -> None:
    module, file = history(), tmp_path / "history.jsonl"
    for value in (1.0, 2.0):
        module.record("core", {"fit, ms": value}, file)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["value"] for line in lines] == [1.0, 2.0]
    assert lines[0].keys() == {"commit", "date", "machine", "benchmark", "figure", "value"}
    row = next(line for line in module.page(lines).splitlines() if line.startswith("| core |"))
    assert row.index("1 (") < row.index("2 (")
