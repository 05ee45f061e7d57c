"""Calibration from arrays alone: logits, probabilities, embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samples import sample

import salgp
from salgp.calibrators.base import CalibrationWarning
from salgp.calibrators.evidence.calibrator import LayerEvidence


def arrays(n: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    features, labels = sample(n, seed=seed)
    return features.logits.numpy(), labels.numpy(), {k: x.numpy() for k, x in features.layers.items()}


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_logits_and_their_probabilities_give_one_result() -> None:
    """Temperature scaling sees differences of logits only; log-softmax keeps them."""
    z, y, _ = arrays()
    by_logits = salgp.calibrate_outputs(z, y, method="temperature")
    by_probs = salgp.calibrate_outputs(labels=y, probs=softmax(z), method="temperature")
    np.testing.assert_allclose(
        by_logits.predict(z).probs.numpy(), by_probs.predict(probs=softmax(z)).probs.numpy(), atol=1e-6
    )
    assert by_logits.calibrator.name == "temperature"


def test_arrays_are_what_the_calibrator_sees() -> None:
    z, y, layers = arrays()
    known = arrays(400, seed=1)
    found = salgp.calibrate_outputs(z, y, layers=layers, reference=(known[2], known[1]))
    assert found.calibrator.name == "layer-evidence"
    features, reference = sample(300)[0], sample(400, seed=1)
    expected = LayerEvidence().fit(features, torch.as_tensor(y), reference).predict(features)
    assert torch.equal(found.predict(z, layers=layers).confidence, expected.confidence)


def test_a_saved_one_is_read_by_load(tmp_path: object) -> None:
    z, y, _ = arrays()
    found = salgp.calibrate_outputs(z, y, method="platt")
    again = salgp.load(found.save(f"{tmp_path}/cal"))
    assert torch.equal(again.predict(salgp.Features.from_logits(z)).probs, found.predict(z).probs)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_one_column_is_the_log_odds_of_class_one(shape: tuple[int, ...]) -> None:
    z = np.array([2.0, -1.0, 0.3])
    found = salgp.Features.from_logits(z.reshape(shape))
    np.testing.assert_allclose(found.probs[:, 1].numpy(), 1 / (1 + np.exp(-z)))
    p = salgp.Features.from_probs((1 / (1 + np.exp(-z))).reshape(shape))
    np.testing.assert_allclose(found.probs.numpy(), p.probs.numpy())


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_any_precision(kind: type) -> None:
    z, y, _ = arrays()
    whole = salgp.calibrate_outputs(z, y).predict(z).confidence
    found = salgp.calibrate_outputs(z.astype(kind), y).predict(z.astype(kind)).confidence
    torch.testing.assert_close(found.double(), whole, atol=2e-3, rtol=0)


def test_read_only_arrays_are_left_alone() -> None:
    z, y, _ = arrays()
    z.flags.writeable = False
    before = z.copy()
    salgp.calibrate_outputs(z, y, method="vector").predict(z)
    np.testing.assert_array_equal(z, before)


def test_probabilities_given_as_logits_are_told() -> None:
    z, y, _ = arrays()
    with pytest.warns(CalibrationWarning, match=r"look like probabilities.*call them probs"):
        salgp.calibrate_outputs(softmax(z), y, method="platt")
    p = 1 / (1 + np.exp(-z[:, 0]))
    with pytest.warns(CalibrationWarning, match="look like probabilities"):
        salgp.calibrate_outputs(p, (y == 0).astype(int), method="platt")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "exactly one of them"),
        ({"logits": np.zeros((3, 2)), "probs": np.full((3, 2), 0.5)}, "exactly one of them"),
        ({"logits": np.zeros((3, 2))}, "labels are missing"),
        ({"probs": np.full((3, 2), 3.0), "labels": [0, 1, 0]}, "are they logits"),
        ({"logits": np.array([["a", "b"]]), "labels": [0]}, "expected numbers"),
        ({"logits": np.zeros((3, 2)), "labels": ["a", "b", "a"]}, "map class names"),
        ({"logits": np.zeros((3, 2)), "labels": np.eye(2)[[0, 1, 0]]}, r"labels.argmax\(1\)"),
        ({"logits": np.zeros((3, 2)), "labels": [True, False, True]}, r"labels.long\(\)"),
        (
            {"logits": np.zeros((3, 2)), "labels": [0, 1, 0], "layers": {"e": np.zeros((2, 4))}},
            "same samples",
        ),
        ({"logits": np.zeros((3, 2)), "labels": [0, 1, 0], "method": 3}, "method must be"),
        (
            {
                "logits": np.zeros((3, 2)),
                "labels": [0, 1, 0],
                "layers": {"e": np.zeros((3, 4))},
                "reference": (np.zeros((5, 4)), np.zeros(5, int)),
            },
            "reference must be",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError), match=says):
        salgp.calibrate_outputs(**arguments)  # type: ignore[arg-type]


def test_the_other_kind_of_numbers_is_refused_at_prediction() -> None:
    z, y, _ = arrays()
    with pytest.raises(ValueError, match="fitted on logits, got probabilities; pass logits="):
        salgp.calibrate_outputs(z, y).predict(probs=softmax(z))


def test_missing_embeddings_and_features_are_refused_with_what_to_pass() -> None:
    z, y, layers = arrays()
    found = salgp.calibrate_outputs(z, y, layers=layers)
    with pytest.raises(ValueError, match=r"pass layers=\{'layer0': array\}"):
        found.predict(z)
    with pytest.raises(TypeError, match=r"\.calibrator\.predict"):
        found.predict(salgp.Features.from_logits(z, layers))


def test_embeddings_alone_serve_as_a_reference_as_well_as_embeddings_with_scores() -> None:
    """A class without training samples gets the usual agreement, whether scores came with them or not."""
    z, y, layers = arrays()
    known = np.where(y == 2, 0, y)
    right = salgp.Features.from_logits(5.0 * np.eye(z.shape[1])[known], layers)
    alone = salgp.calibrate_outputs(z, y, layers=layers, reference=(layers, known))
    scored = salgp.calibrate_outputs(z, y, layers=layers, reference=(right, known))
    expected = scored.predict(z, layers=layers).confidence
    torch.testing.assert_close(alone.predict(z, layers=layers).confidence, expected)


def test_columns_of_tables_stand_for_the_same_classes() -> None:
    """Another order of columns once gave predictions of other classes, without a word."""
    pd = pytest.importorskip("pandas")
    g = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(200, 3, generator=g)
    labels = (logits + torch.randn(200, 3, generator=g)).argmax(1)
    table = pd.DataFrame(logits.numpy(), columns=["a", "b", "c"])
    calibrated = salgp.calibrate_outputs(table, labels)
    with pytest.raises(ValueError, match=r"class scores: the columns .c, a, b, .* are not those of the fit"):
        calibrated.predict(table[["c", "a", "b"]])
    assert torch.equal(calibrated.predict(table).probs, calibrated.predict(logits.numpy()).probs)
    embedded = salgp.calibrate_outputs(logits, labels, layers={"e": table}, method="deep-knn")
    with pytest.raises(ValueError, match="layer 'e'"):
        embedded.predict(logits, layers={"e": table[["c", "a", "b"]]})
