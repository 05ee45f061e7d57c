"""Bayesian binning into quantiles."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from salgp import Features
from salgp.calibrators.scaling.bbq import BBQ


def drawn(n: int = 300, seed: int = 0, temperature: float = 2.0) -> tuple[Features, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return Features(z), torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=generator)[:, 0]


def by_hand(score: list[float], hit: list[bool], at: float, prior: tuple[float, float] | None) -> float:
    """The published formula, one bin at a time."""
    pairs = sorted(zip(score, hit, strict=True))
    n = len(pairs)
    logs, values = [], []
    for bins in range(max(1, int(n ** (1 / 3) / 10)), min(n, math.ceil(10 * n ** (1 / 3))) + 1):
        cuts = [round(b * n / bins) for b in range(1, bins)]
        edges = [0.0, *((pairs[k - 1][0] + pairs[k][0]) / 2 for k in cuts), 1.0]
        log_evidence, value = 0.0, math.nan
        for b, (low, high) in enumerate(itertools.pairwise(edges)):
            members = [h for s, h in pairs if (s >= low or b == 0) and (s < high or b == bins - 1)]
            centre = (low + high) / 2
            alpha, beta = prior or (2 / bins * centre, 2 / bins * (1 - centre))
            m, size = sum(members), len(members)
            log_evidence += math.lgamma(alpha + beta) - math.lgamma(size + alpha + beta)
            log_evidence += (
                math.lgamma(m + alpha) - math.lgamma(alpha) + math.lgamma(size - m + beta) - math.lgamma(beta)
            )
            if (at >= low or b == 0) and (at < high or b == bins - 1):
                value = (m + alpha) / (size + alpha + beta)
        logs.append(log_evidence)
        values.append(value)
    weights = [math.exp(x - max(logs)) for x in logs]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("prior", [None, (1.0, 1.0), (0.1, 1.0)])
def test_equals_the_published_formula(prior: tuple[float, float] | None) -> None:
    f, labels = drawn(40)
    fitted = BBQ(*(prior or (None, None))).fit(f, labels)
    new = drawn(25, seed=1)[0]
    got = fitted.predict(new).confidence.tolist()
    expected = [
        by_hand(f.confidence.tolist(), f.correct(labels).tolist(), s, prior) for s in new.confidence.tolist()
    ]
    assert got == pytest.approx(expected, abs=1e-9)


def test_ties_are_never_parted() -> None:
    f = Features(torch.tensor([[1.0, 0.0], [2.0, 0.0]]).double().repeat(20, 1))
    labels = torch.tensor([1, 0]).repeat(20)
    p = BBQ(alpha=1.0, beta=1.0).fit(f, labels).predict(f[:2]).confidence
    assert float(p[0]) < 0.1
    assert float(p[1]) > 0.9


def test_number_of_binnings() -> None:
    fitted = BBQ().fit(*drawn(1000))
    assert (int(fitted.n_bins_[0]), int(fitted.n_bins_[-1])) == (1, 100)
    assert float(fitted.weights_.sum()) == pytest.approx(1.0)


def test_close_to_netcal_on_much_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """netcal averages equal-width bins with BIC scores and an elbow, so it agrees where the data decide, not
    in detail.
    """
    monkeypatch.chdir(tmp_path)
    binning = pytest.importorskip("netcal.binning")
    f, labels = drawn(6000)
    reference = binning.BBQ(score_function="BIC")
    reference.fit(f.confidence.numpy(), f.correct(labels).numpy().astype(int))
    assert (
        np.abs(
            reference.transform(f.confidence.numpy()) - BBQ().fit(f, labels).predict(f).confidence.numpy()
        ).mean()
        < 0.05
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"alpha": 1.0},
        {"alpha": 0.0, "beta": 1.0},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        BBQ(**arguments).fit(*drawn(20))  # type: ignore[arg-type]
