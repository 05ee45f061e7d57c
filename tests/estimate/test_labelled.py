"""A few labels from the field: the correction by another optimiser, and what it must never do."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from salgp import Features, Prediction
from salgp.calibrators import get
from salgp.cli import main
from salgp.estimate import Correction, accuracy, learn_correction
from salgp.explanation import term_points
from salgp.metrics import ece, interval_coverage
from salgp.prediction import LayerTerms


def made(
    n: int, slope: float, offset: float, seed: int = 0, variance: float = 0.3
) -> tuple[Features, Prediction, Tensor]:
    """Answers that are right with log-odds ``slope f + offset`` where the prediction says ``f``."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 3, generator=g, dtype=torch.float64)
    features = Features(logits)
    f = 1 + 1.5 * torch.randn(n, generator=g, dtype=torch.float64)
    right = torch.rand(n, generator=g) < torch.sigmoid(slope * f + offset)
    terms = LayerTerms(("confidence", "conv"), torch.zeros(n, 2).double(), None, "log-odds", True)
    prediction = Prediction.from_log_odds(features, f, torch.full_like(f, variance), layers=terms)
    return features, prediction, torch.where(right, features.label, (features.label + 1) % 3)


def line(prediction: Prediction, labels: Tensor) -> np.ndarray:
    """Slope and offset of the largest posterior by a general optimiser."""
    f = torch.logit(prediction.confidence).clamp(-5, 5).numpy()
    right = (prediction.label == labels).double().numpy()

    def loss(w: np.ndarray) -> float:
        x = (1 + w[0]) * f + w[1]
        return float((np.logaddexp(0, x) - right * x).sum() + w[0] ** 2 / 0.2 + w[1] ** 2 / 1.0)

    found = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10})
    return np.asarray(found.x) + np.array([1.0, 0.0])


@pytest.mark.parametrize("n", [1, 7, 60])
def test_the_line_by_another_optimiser(n: int) -> None:
    _, prediction, labels = made(n, 0.6, -0.8)
    correction = learn_correction(prediction, labels)
    np.testing.assert_allclose([correction.slope, correction.offset], line(prediction, labels), atol=1e-4)
    expected = torch.sigmoid(correction.slope * torch.logit(prediction.confidence) + correction.offset)
    torch.testing.assert_close(correction(prediction).confidence, expected)


def test_labels_mend_what_is_wrong_and_leave_what_is_right() -> None:
    _, prediction, labels = made(4000, 0.5, -1.0)
    left = prediction[200:]
    before, *after = (
        ece(p.confidence.numpy(), (p.label == labels[200:]).numpy())
        for p in (left, *(learn_correction(prediction[:k], labels[:k])(left) for k in (20, 200)))
    )
    assert before > 0.25
    assert after[0] < 0.7 * before
    assert after[1] < 0.2 * before
    _, good, truth = made(4000, 1.0, 0.0)
    kept = learn_correction(good[:100], truth[:100])(good[100:])
    assert ece(kept.confidence.numpy(), (kept.label == truth[100:]).numpy()) < 0.06


def test_one_label_changes_little_and_many_have_their_way() -> None:
    _, prediction, labels = made(20000, 0.4, -0.5)
    one = learn_correction(prediction[:1], labels[:1])(prediction)
    assert float((one.confidence - prediction.confidence).abs().max()) < 0.15
    many = learn_correction(prediction, labels)
    assert many.slope == pytest.approx(0.4, abs=0.04)
    assert many.offset == pytest.approx(-0.5, abs=0.06)


def test_one_wrong_label_beside_a_certain_answer_does_not_have_its_way() -> None:
    label, sure = torch.zeros(50).long(), torch.ones(50).double()
    certain = Prediction(label, torch.stack([sure, 1 - sure], 1), sure)
    correction = learn_correction(certain, [1] + [0] * 49)
    shown = Prediction(label[:1], torch.tensor([[0.9, 0.1]]).double(), torch.tensor([0.9]).double())
    assert 0.8 < float(correction(shown).confidence) < 0.9
    assert float(correction(certain).confidence[0]) > 0.98


def test_order_and_labels_stay_and_rows_sum_to_one() -> None:
    _, prediction, labels = made(300, 0.3, -1.0)
    corrected = learn_correction(prediction, labels)(prediction)
    assert torch.equal(corrected.confidence.argsort(), prediction.confidence.argsort())
    assert torch.equal(corrected.label, prediction.label)
    torch.testing.assert_close(corrected.probs.sum(1), torch.ones(300).double())
    own = corrected.probs.gather(1, corrected.label[:, None])[:, 0]
    torch.testing.assert_close(own, corrected.confidence)


def test_confidences_that_rank_the_wrong_way_round_become_even() -> None:
    _, prediction, labels = made(2000, -2.0, 0.0)
    correction = learn_correction(prediction, labels)
    assert correction.slope == 0
    right = float((prediction.label == labels).double().mean())
    assert float(correction(prediction).confidence.std()) < 1e-12
    assert float(correction(prediction).confidence[0]) == pytest.approx(right, abs=0.01)


def test_error_bars_shrink_with_labels_and_still_hold() -> None:
    rng, held, widths = np.random.default_rng(0), [], []
    for seed in range(60):
        _, prediction, labels = made(1030, 1.0, float(rng.normal(0, 0.7)), seed, variance=0.49)
        left = learn_correction(prediction[:30], labels[:30])(prediction[30:])
        assert left.lower is not None
        assert left.upper is not None
        right = (left.label == labels[30:]).numpy()
        ends = left.lower.numpy(), left.upper.numpy()
        held.append(interval_coverage(left.confidence.numpy(), right, *ends))
        widths.append(float((left.upper - left.lower).mean() / (prediction.upper - prediction.lower).mean()))  # type: ignore[operator]
    assert np.mean(widths) < 0.8
    assert np.mean(held) > 0.85


def test_error_bars_of_other_forms() -> None:
    """Ends cut off at 1, a standard deviation without ends, and none at all."""
    features, prediction, labels = made(50, 0.5, -0.5)
    s = prediction.confidence
    cut = Prediction.from_confidence(features, s, torch.full_like(s, 0.2))
    for given in (cut, Prediction(cut.label, cut.probs, s, cut.std)):
        found = learn_correction(given, labels)(given)
        assert found.std is not None
        assert found.lower is not None
        assert found.upper is not None
        assert bool((found.lower <= found.confidence).all() and (found.confidence <= found.upper).all())
        assert bool(found.std.isfinite().all() and (found.std > 0).all())
    bare = learn_correction(cut, labels)(Prediction(cut.label, cut.probs, s))
    assert bare.std is None
    assert bare.lower is None


def test_terms_still_add_up() -> None:
    features, prediction, labels = made(80, 0.5, -0.5)
    corrected = learn_correction(prediction, labels)(prediction)
    assert corrected.layers is not None
    assert corrected.layers.names[-1] == "field labels"
    names, points = term_points(features, corrected)
    torch.testing.assert_close(points.sum(1), corrected.confidence - features.confidence)
    assert float(points[:, names.index("field labels")].abs().max()) > 0.05


def test_an_estimate_follows_the_labels() -> None:
    _, prediction, labels = made(3000, 0.5, -1.0)
    better = learn_correction(prediction[:60], labels[:60])(prediction[60:])
    truth = float((better.label == labels[60:]).double().mean())
    assert abs(accuracy(better).value - truth) < 0.3 * abs(accuracy(prediction).value - truth)


def test_every_kind_of_number_comes_back() -> None:
    _, prediction, labels = made(30, 0.5, -0.5)
    correction = learn_correction(prediction, labels)
    assert correction(prediction).confidence.equal(
        Correction(**json.loads(json.dumps(asdict(correction))))(prediction).confidence
    )
    single = Prediction(prediction.label, prediction.probs.float(), prediction.confidence.float())
    assert learn_correction(single, labels)(single).confidence.dtype == torch.float32


def test_wrong_input_is_refused() -> None:
    _, prediction, labels = made(5, 1.0, 0.0)
    with pytest.raises(ValueError, match="no labelled sample"):
        learn_correction(prediction[:0], labels[:0])
    with pytest.raises(ValueError, match="labels must have shape"):
        learn_correction(prediction, labels[:3])
    with pytest.raises(TypeError, match="Prediction"):
        learn_correction(prediction.confidence, labels)  # type: ignore[arg-type]


def test_apply_and_evaluate_take_field_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(900, 3, generator=g)
    home = (logits + 2 * torch.randn(900, 3, generator=g)).argmax(1)
    field = (logits + 6 * torch.randn(900, 3, generator=g)).argmax(1)
    features = Features(logits)
    calibrator = get("temperature").fit(features[:300], home[:300])
    calibrator.save(tmp_path / "cal")
    features[300:340].save(tmp_path / "few.safetensors", field[300:340])
    features[340:].save(tmp_path / "new.safetensors", field[340:])
    cal, few, new, out = (
        str(tmp_path / name) for name in ("cal", "few.safetensors", "new.safetensors", "p.csv")
    )
    assert main(["apply", cal, new, "-o", out, "--field-labels", few]) == 0
    assert "few.safetensors: 40 labels: " in " ".join(capsys.readouterr().err.split())
    expected = learn_correction(calibrator.predict(features[300:340]), field[300:340])
    got = np.genfromtxt(out, delimiter=",", names=True)["confidence"]
    wanted = expected(calibrator.predict(features[340:])).confidence
    np.testing.assert_allclose(got, wanted.numpy(), atol=1e-5)
    scores = []
    for more in ([], ["--field-labels", few]):
        assert main(["evaluate", cal, new, "--json", *more]) == 0
        scores.append(json.loads(capsys.readouterr().out)["temperature"]["ece"])
    assert scores[1] < 0.6 * scores[0]
    assert main(["evaluate", cal, new, "--field-labels", new]) == 0
    assert "560 of 560 samples of new.safetensors are in --field-labels too" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["apply", cal, new, "-o", out, "--force", "--field-labels", str(tmp_path / "none")]) == 1


@pytest.mark.parametrize("n", [2, 40])
def test_the_variance_that_labels_leave_by_the_formula(n: int) -> None:
    """Plain NumPy, sample by sample: an interval narrower than the error bar, and one cut off at 1."""
    _, labelled, y = made(n, 0.7, -0.5)
    correction = learn_correction(labelled, y)
    p = np.array([0.6, 0.9, 0.99])
    std, low, high = np.array([0.2, 0.02, 0.005]), np.array([0.45, 0.6, 0.9]), np.array([0.7, 1.0, 1.0])
    tensors = [torch.from_numpy(x) for x in (p, std, low, high)]
    probs = torch.stack([tensors[0], 1 - tensors[0]], dim=1)
    found = correction(Prediction(torch.zeros(3).long(), probs, *tensors))
    for i in range(3):
        logit = lambda x: math.log(max(x, 1e-300) / max(1 - x, 1e-7))
        f = logit(p[i])
        variance = std[i] / (p[i] * (1 - p[i]))
        if high[i] < 1:
            variance = min(variance, (logit(high[i]) - logit(low[i])) / (2 * 1.6448536269514722))
        line = np.array([min(f, 5.0), 1.0])
        learned = 1 / (line @ np.array(correction.covariance) @ line) - 1 / (0.1 * line[0] ** 2 + 0.5)
        scaled = correction.slope**2 * variance**2
        left = 0.2 * scaled + 0.8 / (1 / scaled + max(learned, 0.0))
        ends = torch.logit(torch.stack([found.lower[i], found.upper[i]]))  # type: ignore[index]
        assert float(ends[1] - ends[0]) == pytest.approx(2 * 1.6448536269514722 * math.sqrt(left), rel=1e-6)


def test_a_correction_says_what_becomes_of_nine_tenths() -> None:
    p = Prediction(torch.zeros(40).long(), torch.full((40, 2), 0.5), torch.full((40,), 0.9))
    correction = learn_correction(p, [0] * 24 + [1] * 16)
    assert str(correction).endswith(f"A confidence of 0.90 becomes {float(correction(p).confidence[0]):.2f}.")


def test_what_a_correction_rests_on_by_the_formula() -> None:
    """Curvature of the posterior by NumPy; how many answers were right and how many should be."""
    _, labelled, y = made(60, 0.7, -0.5)
    found = learn_correction(labelled, y)
    f = np.clip(torch.logit(labelled.confidence.double()).numpy(), -5, 5)
    p = 1 / (1 + np.exp(-(found.slope * f + found.offset)))
    line = np.stack([f, np.ones(60)])
    curvature = (line * p * (1 - p)) @ line.T + np.diag([1 / 0.1, 1 / 0.5])
    np.testing.assert_allclose(found.covariance, np.linalg.inv(curvature), rtol=1e-6)
    assert found.n == 60
    assert found.right == int((labelled.label == y).sum())
    assert found.expected == pytest.approx(math.fsum(labelled.confidence.tolist()))
