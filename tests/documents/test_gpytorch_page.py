"""The figures of "Why not GPyTorch?" are those of the benchmark it names."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows(page: str) -> dict[str, tuple[str, ...]]:
    """Question -> ours, theirs, ratio, peak memory, of the first table that has it."""
    lines = reversed((ROOT / page).read_text(encoding="utf-8").splitlines())
    asked = [line.strip("|").split("|") for line in lines if line.startswith("| (")]
    cells = [[cell.strip() for cell in line] for line in asked]
    return {name: (ours, theirs, ratio, rest[-1]) for name, ours, theirs, ratio, *rest in cells}


def test_its_table_is_that_of_the_benchmark() -> None:
    said, measured = rows("docs/gpytorch.md"), rows("benchmarks/results/core.md")
    assert len(said) > 5
    assert said.items() <= measured.items()
