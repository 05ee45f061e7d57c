"""Every reader against mutants: nothing but the same value or one sentence that names the file.

Two thousand each here; ``make fuzz`` (`run.py`) goes on to 100,000. Edits that renew the checksums are fewer,
since each may cost a prediction.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Mutants, Target
from targets import TARGETS

DAMAGED, EDITED = 2000, 150


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutants_are_refused_or_harmless(target: Target, tmp_path: Path) -> None:
    tried = Mutants(target, tmp_path).try_all(range(DAMAGED if target.edit == "bytes" else EDITED))
    assert tried.bad == [], f"{len(tried.bad)} of {tried.counts.total()}: " + "\n".join(tried.bad[:10])
    assert tried.counts["refused"] > 0
