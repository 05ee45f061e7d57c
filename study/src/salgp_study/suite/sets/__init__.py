"""The data sets of the suite by name.

A new one is a function ``build(seed, data, cache)`` that gives a `Case`, named here, and a line in
``protocol.json`` that says whether choices may be made on it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from salgp_study.suite.case import Case
from salgp_study.suite.sets.cifar import cifar10
from salgp_study.suite.sets.sky_and_radar import objects, radar, supernovae
from salgp_study.suite.sets.small import digits, table, tabular_digits, weak_digits
from salgp_study.suite.sets.text import banking77, clinc150

__all__ = ["SETS", "Build"]

Build = Callable[[int, Path | None, Path], Case]
"""``build(seed, data, cache) -> Case``; ``data`` is the folder of the real data (None: ``SALGP_DATA``), and
networks that are trained here are kept below ``cache``.
"""

SETS: dict[str, Build] = {
    "digits": digits,
    "digits-weak": weak_digits,
    "tabular-digits": tabular_digits,
    "tabular-breast-cancer": table("breast_cancer", (250, 150)),
    "tabular-wine": table("wine", (70, 50)),
    "mstar-convnet": radar("mstar-convnet", "mstar-convnet"),
    "spcc-rnn": supernovae,
    "cifar10-resnet32": cifar10(32),
    "banking77-minilm": banking77,
    "cifar10-resnet20": cifar10(20),
    "clinc150-minilm": clinc150,
    "mstar-aconvnet": radar("mstar-aconvnet", "mstar-aconvnet"),
    "plasticc-table": objects,
}
"""Every data set by name."""
