"""The table of the prior on lengthscales under shift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from salgp_study.prior import ARCHIVE, MODELS, PAGE, keep, prior_page
from salgp_study.store import read_archive

ROOT = Path(__file__).parents[2]


def line(step: str, kind: str, ece: float, name: str = "digits") -> dict[str, Any]:
    return {"set": name, "seed": 0, "step": step, "kind": kind, "ece": ece, "nll": 0.5, "auroc": 0.75}


def test_means_are_over_test_sets_and_then_over_data_sets() -> None:
    records = [line("ML", "shift", e) for e in (0.1, 0.3)] + [line("ML", "shift", 0.4, "wine")]
    records += [line("ML", "in", 0.05)]
    row = next(r for r in prior_page(records).splitlines() if r.startswith("| ML |"))
    assert row == "| ML | 0.050 | 0.500 | 0.750 | 0.300 | 0.500 | 0.750 |"
    assert "| digits, draw 0 | - | 0.200 |" in prior_page(records)


def test_records_of_a_fit_take_the_place_of_older_ones(tmp_path: Path) -> None:
    archive, page = tmp_path / "prior.jsonl.gz", tmp_path / "prior.md"
    keep([line("ML", "in", 0.1), line("HL", "in", 0.2)], archive, page)
    keep([line("ML", "in", 0.3)], archive, page)
    assert [(r["step"], r["ece"]) for r in read_archive(archive)] == [("HL", 0.2), ("ML", 0.3)]
    assert page.read_text(encoding="utf-8") == prior_page(read_archive(archive))


def test_every_model_stands_with_and_without_the_prior() -> None:
    assert [m.name for m in MODELS[1:]] == [
        name + end for name in ("ML", "HL", "sum") for end in ("", ", scaled prior")
    ]
    made = {m.name: m.build() for m in MODELS[1:]}
    assert {made[n].prior for n in ("ML", "HL", "sum")} == {None}
    assert made["sum, scaled prior"].prior == "dimension-scaled"
    assert {(m.objective, m.exact_limit) for m in made.values()} == {("evidence", 3000)}


def test_the_committed_page_is_made_from_the_committed_records() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == prior_page(read_archive(ROOT / ARCHIVE))
