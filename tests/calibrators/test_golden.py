"""Results do not move by accident: every calibrator predicts what it did when the golden file was made."""

from __future__ import annotations

import numpy as np
import pytest
from golden import FILE, predictions

from salgp.calibrators.registry import CLASSES

CLOSE = {
    "vector": 1e-7,
    "matrix": 1e-6,
    "dirichlet": 1e-6,
    "perturbed-temperature": 1e-8,
    "layer-evidence": 1e-4,
}
"""How close results are whose search ends a little elsewhere on another processor; all others to 1e-9."""


@pytest.mark.parametrize("name", list(CLASSES))
def test_predictions_are_those_of_the_golden_file(name: str) -> None:
    with np.load(FILE, allow_pickle=False) as kept:
        expected = {key.partition("/")[2]: kept[key] for key in kept.files if key.startswith(f"{name}/")}
    found = predictions(name)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(
            found[key], values, rtol=0, atol=CLOSE.get(name, 1e-9), err_msg=f"{name}: {key}"
        )
