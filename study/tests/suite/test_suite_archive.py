"""The records that the repository keeps, and README's table made from them by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from salgp_study.store import read_archive
from salgp_study.suite import command
from salgp_study.suite.archive import ARCHIVE, BEGIN, END, keep_records, readme_part
from salgp_study.suite.methods import OURS
from salgp_study.suite.summary import Results

ROOT = Path(__file__).parents[3]
FIGURES = {"temperature": 0.2, "isotonic": 0.18, "density-aware": 0.15, OURS: 0.0612345678}


def record(name: str, method: str, ece: float, kind: str, window: int = 0) -> dict[str, Any]:
    scores = {"ece": ece, "nll": 3 * ece, "auroc": 0.95 - ece}
    scores |= {f"{key}_replicates": [value] * 3 for key, value in scores.items()}
    place = {"set": name, "seed": 0, "test": kind, "kind": kind}
    return {**place, "method": method, "window": window, **scores}


RECORDS = [
    record(name, method, ece if kind == "shift" else ece / 4, kind)
    for name in ("digits", "spcc-rnn")
    for kind in ("in", "shift")
    for method, ece in FIGURES.items()
]


def test_the_archive_gives_back_what_the_tables_read(tmp_path: Path) -> None:
    path = keep_records(RECORDS, tmp_path / "records.jsonl.gz")
    first = path.read_bytes()
    read = read_archive(path)
    assert len(read) == len(RECORDS)
    assert read[0]["ece_replicates"] == RECORDS[0]["ece_replicates"]  # of temperature, for the verdicts
    assert "ece_replicates" not in read[1]
    assert read[3]["ece"] == pytest.approx(RECORDS[3]["ece"], rel=1e-5)
    assert keep_records(read, path).read_bytes() == first


def test_the_readme_is_filled_between_its_marks(tmp_path: Path) -> None:
    page, records = tmp_path / "README.md", keep_records(RECORDS, tmp_path / "records.jsonl.gz")
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    options = ["readme", "--records", str(records), "--readme", str(page)]
    command.main(options)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| strong: temperature | .050 | .150 | .900 | .200 | .600 | .750 |" in text
    assert f"| **{OURS}** | **.015** | **.046** | **.935** | **.061** | **.184** | **.889** |" in text
    assert "under shift layer evidence .061, temperature .200, and at best .150 of a baseline" in text
    assert "(in brackets) on: single samples: none; with a context: none." in text
    command.main(options)
    assert page.read_text(encoding="utf-8") == text


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page, records = tmp_path / "README.md", keep_records(RECORDS, tmp_path / "records.jsonl.gz")
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit, match="suite: begin"):
        command.main(["readme", "--records", str(records), "--readme", str(page)])


@pytest.mark.skipif(not (ROOT / ARCHIVE).is_file(), reason="the records of the suite are not committed")
def test_the_readme_says_what_the_committed_records_say() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = text.split(BEGIN)[1].split(END)[0].strip()
    assert said == readme_part(Results(read_archive(ROOT / ARCHIVE)))
