"""Histogram binning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from salgp import Features
from salgp.calibrators.scaling.toplabel import HistogramBinning


def drawn(n: int = 500, c: int = 4, seed: int = 0) -> tuple[Features, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    return Features(z), torch.multinomial(torch.softmax(z / 2, 1), 1, generator=generator)[:, 0]


def test_equal_width_equals_netcal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    binning = pytest.importorskip("netcal.binning")
    f, labels = drawn()
    reference = binning.HistogramBinning(bins=10)
    reference.fit(f.confidence.numpy(), f.correct(labels).numpy().astype(int))
    ours = HistogramBinning(n_bins=10, smoothing=0.0).fit(f, labels)
    at = Features(drawn(300, seed=3)[0].logits)
    np.testing.assert_allclose(
        ours.predict(at).confidence.numpy(), reference.transform(at.confidence.numpy()), atol=1.1e-6
    )  # clipped off 0 and 1


def test_smoothing_by_hand() -> None:
    f, labels = drawn()
    fitted = HistogramBinning(n_bins=5, smoothing=3.0).fit(f, labels)
    for b in range(5):
        inside = (f.confidence >= b / 5) & ((f.confidence < (b + 1) / 5) if b < 4 else torch.tensor(True))
        k, m, centre = int(f.correct(labels)[inside].sum()), int(inside.sum()), (b + 0.5) / 5
        assert float(fitted.values_[b]) == pytest.approx((k + 3 * centre) / (m + 3))


def test_ends_of_the_range_and_empty_bins() -> None:
    f = Features(torch.tensor([[0.0, 0.0], [1e4, 0.0]]))  # confidences of exactly 0.5 and 1
    fitted = HistogramBinning(n_bins=4).fit(f, [0, 0])
    assert float(fitted.values_[0]) == 0.125  # an empty bin keeps its centre
    assert fitted.predict(f).confidence.tolist() == pytest.approx([(1 + 0.625) / 2, (1 + 0.875) / 2])


@pytest.mark.parametrize("arguments", [{"n_bins": 0}, {"smoothing": -1.0}])
def test_bad_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        HistogramBinning(**arguments).fit(*drawn(10))  # type: ignore[arg-type]
