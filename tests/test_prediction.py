"""Predictions: confidence on the label, the rest shared proportionally, intervals, slicing."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from salgp.features import Features
from salgp.prediction import INTERVAL, LayerTerms, Prediction, spread_confidence

G = torch.Generator().manual_seed(0)
FEATURES = Features(torch.randn(8, 4, generator=G, dtype=torch.float64))
CONFIDENCE = torch.linspace(0.05, 0.95, 8, dtype=torch.float64)
STD = torch.linspace(0.0, 0.4, 8, dtype=torch.float64)


def test_confidence_sits_on_the_label_and_rows_sum_to_one() -> None:
    p = Prediction.from_confidence(FEATURES, CONFIDENCE)
    assert torch.equal(p.label, FEATURES.label)
    assert torch.equal(p.probs.gather(1, p.label[:, None])[:, 0], CONFIDENCE)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(8, dtype=torch.float64), rtol=0, atol=1e-14)
    assert p.std is p.lower is p.upper is None


def test_other_classes_keep_their_proportions_where_flips_are_allowed() -> None:
    p = Prediction.from_confidence(FEATURES, CONFIDENCE).with_probs(FEATURES, allow_flips=True)
    for i in range(8):
        others = [j for j in range(4) if j != int(p.label[i])]
        before, after = FEATURES.probs[i, others], p.probs[i, others]
        torch.testing.assert_close(after / after.sum(), before / before.sum())


def test_unchanged_confidence_gives_back_the_softmax() -> None:
    torch.testing.assert_close(
        Prediction.from_confidence(FEATURES, FEATURES.confidence).probs, FEATURES.probs
    )


def test_label_is_kept_where_another_class_overtakes() -> None:
    p = Prediction.from_confidence(FEATURES, CONFIDENCE).with_probs(FEATURES, allow_flips=True)
    overtaken = p.probs.argmax(1) != p.label
    assert bool(overtaken.any())
    assert torch.equal(p.flips, overtaken)
    assert torch.equal(p.label, FEATURES.label)


def test_two_classes_at_a_half_do_not_flip() -> None:
    two = Features(torch.tensor([[3.0, 1.0]], dtype=torch.float64))
    assert not bool(Prediction.from_confidence(two, torch.tensor([0.5], dtype=torch.float64)).flips)


def test_values_outside_are_clipped_and_counted() -> None:
    p = Prediction.from_confidence(FEATURES[:4], torch.tensor([-0.2, 0.5, 1.0, 1.7], dtype=torch.float64))
    torch.testing.assert_close(
        p.confidence, torch.tensor([1e-6, 0.5, 1 - 1e-6, 1 - 1e-6], dtype=torch.float64)
    )
    assert int(p.n_clipped) == 3


@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.0])
def test_interval_is_ninety_percent_inside_the_unit_interval_and_holds_the_confidence(shift: float) -> None:
    p = Prediction.from_confidence(FEATURES, CONFIDENCE + shift, STD)
    assert p.lower is not None
    assert p.upper is not None
    assert bool(
        ((p.lower >= 0) & (p.lower <= p.confidence) & (p.confidence <= p.upper) & (p.upper <= 1)).all()
    )
    if shift == 0.0:
        quantile = torch.distributions.Normal(0.0, 1.0).icdf(
            torch.tensor((1 + INTERVAL) / 2, dtype=torch.float64)
        )
        torch.testing.assert_close(p.upper, (CONFIDENCE + quantile * STD).clamp(0, 1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p.lower, (CONFIDENCE - quantile * STD).clamp(0, 1), rtol=1e-6, atol=1e-6)


def test_given_interval_is_used() -> None:
    low, high = CONFIDENCE - 0.01, CONFIDENCE + 0.02
    p = Prediction.from_confidence(FEATURES, CONFIDENCE, STD, (low, high))
    assert torch.equal(p.lower, low)  # type: ignore[arg-type]
    assert torch.equal(p.upper, high)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_softmax_shares_the_rest_evenly(dtype: torch.dtype) -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0]], dtype=dtype)
    spread = spread_confidence(probs, torch.tensor([1]), torch.tensor([0.4], dtype=dtype))
    torch.testing.assert_close(spread, torch.tensor([[0.3, 0.4, 0.3]], dtype=dtype))


def test_tiny_rest_keeps_its_proportions() -> None:
    probs = torch.tensor([[1.0, 3e-12, 1e-12]], dtype=torch.float64)
    spread = spread_confidence(probs, torch.tensor([0]), torch.tensor([0.6], dtype=torch.float64))
    torch.testing.assert_close(spread, torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64))


@settings(deadline=None, max_examples=200)
@given(
    st.integers(2, 40).flatmap(
        lambda c: st.tuples(
            st.lists(st.floats(-60, 60), min_size=c, max_size=c), st.floats(0, 1), st.floats(0.05, 20)
        )
    ),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_label_stays_on_top_and_rows_sum_to_one(
    row: tuple[list[float], float, float], dtype: torch.dtype
) -> None:
    logits, confidence, temperature = row
    features = Features(torch.tensor([logits], dtype=dtype))
    p = Prediction.from_confidence(features, torch.tensor([confidence], dtype=dtype), temperature=temperature)
    assert float(p.probs.sum()) == pytest.approx(1, abs=1e-6)
    assert float(p.probs.min()) >= 0
    assert float(p.probs[0, p.label[0]]) == float(p.confidence[0])
    if confidence * len(logits) > 1 + 1e-4:
        assert int(p.probs.argmax()) == int(p.label[0])
        assert not bool(p.flips)


def test_others_are_capped_by_the_smallest_share_of_even_ones() -> None:
    """Found by trying every share on a fine grid."""
    probs = torch.tensor([[0.5, 0.4, 0.06, 0.04]], dtype=torch.float64)
    confidence = torch.tensor([0.3], dtype=torch.float64)
    found = spread_confidence(probs, torch.tensor([0]), confidence)[0]
    q = 0.7 * probs[0, 1:] / probs[0, 1:].sum()
    w = next(w for w in torch.linspace(0, 1, 100_001).tolist() if max((1 - w) * q + w * 0.7 / 3) <= 0.3)
    torch.testing.assert_close(found[1:], (1 - w) * q + w * 0.7 / 3, rtol=0, atol=1e-4)


def test_below_one_in_c_the_others_keep_their_order_and_nothing_jumps() -> None:
    probs = torch.tensor([[0.5, 0.4, 0.06, 0.04]], dtype=torch.float64).expand(1001, 4)
    confidence = torch.linspace(0.0, 0.5, 1001, dtype=torch.float64)
    found = spread_confidence(probs, torch.zeros(1001, dtype=torch.long), confidence)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(1001, dtype=torch.float64))
    torch.testing.assert_close(found[0], torch.tensor([0.0, 0.8, 0.12, 0.08], dtype=torch.float64))
    assert float(found.diff(dim=0).abs().max()) < 0.005
    below = found[(confidence < 0.2499)]
    assert bool((below[:, 1] > below[:, 2]).all() and (below[:, 2] > below[:, 3]).all())


def test_the_rest_is_shared_by_the_tempered_softmax() -> None:
    high = CONFIDENCE.clamp_min(0.6)
    p = Prediction.from_confidence(FEATURES, high, temperature=2.5)
    tempered = torch.softmax(FEATURES.logits / 2.5, dim=1)
    for i in range(8):
        others = [j for j in range(4) if j != int(p.label[i])]
        expected = (1 - high[i]) * tempered[i, others] / tempered[i, others].sum()
        torch.testing.assert_close(p.probs[i, others], expected)


def test_from_probs_reads_the_mass_on_the_networks_label() -> None:
    probs = torch.full((8, 4), 0.25, dtype=torch.float64)
    probs[:, 0], probs[:, 1] = 0.4, 0.1
    p = Prediction.from_probs(FEATURES, probs)
    assert torch.equal(p.label, FEATURES.label)
    assert torch.equal(p.confidence, probs.gather(1, FEATURES.label[:, None])[:, 0])
    assert torch.equal(p.flips, FEATURES.label != 0)


def test_slicing_cuts_everything() -> None:
    terms = LayerTerms(
        ("a", "b"), torch.randn(8, 2, generator=G), torch.rand(8, 2, generator=G), "log-odds", True
    )
    p = Prediction.from_confidence(FEATURES, CONFIDENCE, STD, layers=terms, novelty=STD)
    q = p[2:5]
    assert len(q) == 3
    assert torch.equal(q.confidence, CONFIDENCE[2:5])
    assert q.layers is not None
    assert torch.equal(q.layers.mean, terms.mean[2:5])
    assert (q.layers.names, q.layers.scale, q.layers.additive) == (("a", "b"), "log-odds", True)
    assert torch.equal(p[torch.tensor([7, 0])].novelty, STD[[7, 0]])  # type: ignore[arg-type]


def test_concatenate_is_the_inverse_of_slicing() -> None:
    terms = LayerTerms(("a", "b"), torch.randn(8, 2, generator=G), torch.rand(8, 2, generator=G))
    p = Prediction.from_confidence(FEATURES, CONFIDENCE + 0.1, STD, layers=terms)
    q = Prediction.concatenate(
        [
            Prediction.from_confidence(FEATURES[i : i + 3], CONFIDENCE[i : i + 3] + 0.1, STD[i : i + 3])
            for i in (0, 3, 6)
        ]
    )
    assert torch.equal(p.probs, q.probs)
    assert torch.equal(p.upper, q.upper)  # type: ignore[arg-type]
    assert int(p.n_clipped) == int(q.n_clipped)
    whole = Prediction.concatenate([p[:3], p[3:]])
    assert whole.layers is not None
    assert torch.equal(whole.layers.mean, terms.mean)


def test_numpy_leaves_out_what_is_absent() -> None:
    assert set(Prediction.from_confidence(FEATURES, CONFIDENCE).numpy()) == {
        "label",
        "probs",
        "confidence",
        "clipped",
    }
    arrays = Prediction.from_confidence(FEATURES, CONFIDENCE, STD, novelty=STD).numpy()
    assert set(arrays) == {"label", "probs", "confidence", "std", "lower", "upper", "novelty", "clipped"}
    assert arrays["probs"].shape == (8, 4)


def test_log_odds_give_confidence_std_and_interval_of_one_distribution() -> None:
    """The quantiles of a logit-normal distribution, by drawing from it."""
    g = torch.Generator().manual_seed(0)
    f, sd = torch.linspace(-3, 6, 8, dtype=torch.float64), torch.linspace(0.1, 3, 8, dtype=torch.float64)
    p = Prediction.from_log_odds(FEATURES, f, sd**2)
    draws = torch.sigmoid(f + sd * torch.randn(200_000, 8, generator=g, dtype=torch.float64))
    levels = torch.tensor([0.05, 0.158655, 0.5, 0.841345, 0.95], dtype=torch.float64)
    low, below, middle, above, high = (draws.quantile(level, dim=0) for level in levels)
    for found, expected in ((p.lower, low), (p.confidence, middle), (p.upper, high)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    torch.testing.assert_close(p.std, (above - below) / 2, rtol=0, atol=0.01)


def test_frame_has_a_row_per_sample_and_columns_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = LayerTerms(("a", "b"), torch.randn(8, 2, generator=G), None, "log-odds", True)
    p = Prediction.from_confidence(FEATURES, CONFIDENCE, STD, layers=terms)
    expected = ["label", "confidence", "std", "lower", "upper", "clipped"]
    expected += [f"probs.{k}" for k in range(4)] + ["log-odds.a", "log-odds.b"]
    seen, real = [], importlib.import_module
    for hidden in ((), ("pandas",), ("pandas", "pyarrow")):

        def load(name: str, *more: Any, hidden: tuple[str, ...] = hidden) -> Any:
            if name in hidden:
                raise ModuleNotFoundError(name)
            return real(name, *more)

        monkeypatch.setattr(importlib, "import_module", load)
        frame = p.to_frame()
        columns = frame.column_names if hidden == ("pandas",) else list(frame)
        assert columns == expected
        assert np.asarray(frame["confidence"]).tolist() == CONFIDENCE.tolist()
        seen.append(type(frame).__name__)
    assert seen == ["DataFrame", "Table", "dict"]


def test_notebook_table_shows_the_first_samples() -> None:
    many = Features(torch.randn(30, 3, generator=G, dtype=torch.float64))
    page = Prediction.from_confidence(many, many.confidence)._repr_html_()
    assert page.count("<tr>") == 11
    assert "30 samples" in page
    assert f"{float(many.confidence[3]):.3f}" in page


def test_printed_it_is_a_short_table() -> None:
    many = Features(torch.randn(2000, 3, generator=G, dtype=torch.float64))
    terms = LayerTerms(("conv", "fc"), torch.zeros(2000, 2), scale="log-odds", additive=True)
    found = Prediction.from_confidence(many, many.confidence, many.confidence / 10, layers=terms)
    assert repr(found).startswith("Prediction(2,000 samples, 3 classes, mean confidence 0.")
    assert repr(terms) == "LayerTerms(2,000 samples: conv, fc; in log-odds, adding up to the correction)"
    lines = str(found).splitlines()
    assert lines[0].split() == ["label", "confidence", "std", "lower", "upper"]
    assert lines[1].split()[:3] == ["0", str(int(found.label[0])), f"{float(found.confidence[0]):.3f}"]
    assert len({len(line) for line in lines[:11]}) == 1
    assert lines[11:] == ["... 2,000 samples"]
    assert repr(found[:0]) == "Prediction(0 samples, 3 classes)"
    assert len(str(found[:0]).splitlines()) == 1


def test_what_is_given_as_a_function_is_worked_out_once_and_when_read() -> None:
    asked: list[str] = []

    def novelty() -> torch.Tensor:
        asked.append("novelty")
        return torch.ones(len(FEATURES))

    def variance() -> torch.Tensor:
        asked.append("variance")
        return torch.ones(len(FEATURES))

    p = Prediction.from_log_odds(FEATURES, torch.zeros(len(FEATURES)), variance, novelty=novelty)
    assert float(p.confidence[0]) == 0.5
    assert asked == []
    plain = Prediction.from_log_odds(FEATURES, torch.zeros(len(FEATURES)), torch.ones(len(FEATURES)))
    for name in ("std", "lower", "upper", "probs"):
        torch.testing.assert_close(getattr(p, name), getattr(plain, name))
    assert p.novelty is p.novelty
    assert asked == ["variance", "novelty"]
    again = pickle.loads(pickle.dumps(Prediction.from_log_odds(FEATURES, p.confidence, variance)))
    assert again.std is not None
    assert again.probs.shape == p.probs.shape


def test_a_later_change_of_the_features_changes_no_prediction() -> None:
    logits = FEATURES.logits.clone()
    p = Prediction.from_confidence(Features(logits), torch.full((len(logits),), 0.8))
    expected = Prediction.from_confidence(FEATURES, torch.full((len(logits),), 0.8)).probs.clone()
    logits.zero_()
    torch.testing.assert_close(p.probs, expected)
