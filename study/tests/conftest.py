"""Makes the helpers of the library's tests (``trained``, ...) importable here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
