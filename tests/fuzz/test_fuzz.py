"""Every reader against mutants: nothing but the same value or one sentence that names the file.

``FUZZ=100000`` in the environment (or ``make fuzz``) sets the number of mutants per reader. Edits that renew
the checksums are fewer in the ordinary run, since each may cost a prediction.
"""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path

import pytest
from targets import TARGETS, Target, outcome

COUNT = int(os.environ.get("FUZZ", "2000"))
EDITED = COUNT if "FUZZ" in os.environ else 150


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutants_are_refused_or_harmless(target: Target, tmp_path: Path) -> None:
    folder = target.prepare(tmp_path)
    counts: collections.Counter[str] = collections.Counter()
    bad: list[str] = []
    for seed in range(COUNT if target.edit == "bytes" else EDITED):
        found, said = outcome(target, folder, seed)
        counts[found] += 1
        if found == "raw" or (found == "other" and target.checked):
            bad.append(f"seed {seed}: {found} {said[:300]}")
    _report(target, counts)
    assert bad == [], f"{len(bad)} of {sum(counts.values())}: " + "\n".join(bad[:10])
    assert counts["refused"] > 0


def _report(target: Target, counts: collections.Counter[str]) -> None:
    """Append one line of figures to the file that ``FUZZ_REPORT`` names."""
    if path := os.environ.get("FUZZ_REPORT"):
        line = {"reader": target.name, "edit": target.edit, "checksums": target.checked, **counts}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
