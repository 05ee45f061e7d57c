"""The six steps from the paper's model to layer evidence run on a made case and end in one row each."""

from __future__ import annotations

from pathlib import Path

import torch

from salgp.features import Features
from salgp_study.steps import ARCHIVE, STEPS, measure, steps_table
from salgp_study.store import read_archive
from salgp_study.suite.cache import CachedCase, CachedTest


def samples(n: int, seed: int, shift: float = 0.0) -> tuple[Features, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, 3, (n,), generator=g)
    x = 2.0 * torch.nn.functional.one_hot(truth, 3).float() + torch.randn(n, 3, generator=g)
    x = x + shift * torch.randn(n, 3, generator=g)
    return Features(2.0 * x, {"a": x, "b": x.tanh()}), truth


def case() -> CachedCase:
    tests = [
        CachedTest(name, kind, None, severity, *samples(120, seed, shift))
        for name, kind, severity, seed, shift in (
            ("test", "in", 0, 2, 0.0),
            ("noise", "shift", 1, 3, 1.0),
            ("strange", "unknown", 0, 4, 2.0),
        )
    ]
    return CachedCase("made", 0, samples(80, 0), samples(70, 1), tests)


def test_first_steps_are_measured_in_domain_and_under_shift() -> None:
    chosen = [s for s in STEPS if s.name.startswith(("temperature", "2", "3", "4"))]
    records = [r for step in chosen for r in measure(case(), step)]
    assert {(r["step"], r["kind"]) for r in records} == {
        (s.name, kind) for s in chosen for kind in ("in", "shift")
    }
    table = steps_table(records)
    assert [row[0] for row in table.rows] == [s.name for s in chosen]
    raw = [r["ece"] for r in records if r["step"] == chosen[0].name and r["kind"] == "shift"]
    assert table.rows[0][5] == f"{raw[0]:.3f}"


def test_the_table_of_the_documents_is_made_from_the_committed_records() -> None:
    root = Path(__file__).parents[2]
    made = steps_table(read_archive(root / ARCHIVE))
    text = (root / "docs" / "paper-model.md").read_text(encoding="utf-8")
    lines = [f"| {' | '.join(cell.strip() for cell in row)} |" for row in (made.columns, *made.rows)]
    assert len(lines) == 1 + len(STEPS)
    assert all(line in text.splitlines() for line in lines)
