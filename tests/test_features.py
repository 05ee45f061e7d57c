"""Features and labels: what they refuse, slicing, selection, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from salgp.features import Features, load_features
from salgp.io import FormatError, write_tensors
from salgp.labels import as_labels

G = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 3, generator=G)
LAYERS = {"b": torch.randn(6, 4, generator=G), "a.0": torch.randn(6, 2, generator=G)}
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2])
FEATURES = Features(LOGITS, LAYERS, GROUPS)


def same(a: Features, b: Features) -> bool:
    layers = a.layer_names == b.layer_names and all(torch.equal(a.layers[k], b.layers[k]) for k in a.layers)
    groups = a.groups is b.groups is None or (
        a.groups is not None and b.groups is not None and torch.equal(a.groups, b.groups)
    )
    return layers and groups and torch.equal(a.logits, b.logits)


def test_softmax_confidence_and_label() -> None:
    torch.testing.assert_close(FEATURES.probs, LOGITS.softmax(1))
    torch.testing.assert_close(FEATURES.confidence, LOGITS.softmax(1).max(1).values)
    assert torch.equal(FEATURES.label, LOGITS.argmax(1))
    assert (len(FEATURES), FEATURES.n_classes, FEATURES.widths) == (6, 3, {"b": 4, "a.0": 2})


def test_residual_is_correct_minus_confidence_and_unknown_is_never_correct() -> None:
    labels = FEATURES.label.clone()
    labels[0], labels[1] = (labels[0] + 1) % 3, -1
    assert FEATURES.correct(labels).tolist() == [False, False, True, True, True, True]
    torch.testing.assert_close(
        FEATURES.residual(labels), FEATURES.correct(labels).float() - FEATURES.confidence
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_have_single_precision_probabilities(dtype: torch.dtype) -> None:
    half = Features(LOGITS.to(dtype))
    assert half.probs.dtype == torch.float32
    torch.testing.assert_close(half.probs.sum(1), torch.ones(6))


def test_extreme_logits_have_exact_probabilities() -> None:
    f = Features(torch.tensor([[1e4, -1e4], [-1e4, 1e4]]))
    assert f.confidence.tolist() == [1.0, 1.0]
    assert f.residual(torch.tensor([0, 0])).tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    "rows",
    [
        slice(1, 4),
        torch.tensor([1, 2, 3]),
        np.array([1, 2, 3]),
        [1, 2, 3],
        torch.tensor([0, 1, 1, 1, 0, 0]).bool(),
        np.array([0, 1, 1, 1, 0, 0], bool),
    ],
)
def test_slicing(rows: Any) -> None:
    expected = Features(LOGITS[1:4], {k: x[1:4] for k, x in LAYERS.items()}, GROUPS[1:4])
    assert same(FEATURES[rows], expected)


def test_select_reorders_and_names_what_it_does_not_know() -> None:
    assert FEATURES.select(["a.0", "b"]).layer_names == ("a.0", "b")
    assert FEATURES.select([]).layers == {}
    with pytest.raises(KeyError, match=r"no layer named 'c'; known layers: b, a\.0"):
        FEATURES.select(["b", "c"])


def test_concatenate_is_the_inverse_of_slicing() -> None:
    assert same(Features.concatenate([FEATURES[:2], FEATURES[2:3], FEATURES[3:]]), FEATURES)
    assert Features.concatenate([FEATURES, Features(LOGITS, LAYERS)]).groups is None
    with pytest.raises(ValueError, match="empty"):
        Features.concatenate([])
    with pytest.raises(ValueError, match="different layers"):
        Features.concatenate([FEATURES, FEATURES.select(["b"])])


def test_cast_and_move() -> None:
    double = FEATURES.to(torch.float64)
    assert double.logits.dtype == double.layers["b"].dtype == torch.float64
    assert double.groups is not None
    assert double.groups.dtype == torch.int64


def test_numpy_is_taken_and_gradients_are_not() -> None:
    f = Features(LOGITS.numpy(), {"x": LAYERS["b"].numpy()})  # type: ignore[arg-type, dict-item]
    assert torch.equal(f.logits, LOGITS)
    assert not Features(LOGITS.clone().requires_grad_(True)).logits.requires_grad


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Features(torch.zeros(3)), ValueError, r"logits must have shape \(n, width\), got \(3,\)"),
        (lambda: Features(torch.zeros(3, 2, dtype=torch.long)), TypeError, "logits must be floating point"),
        (
            lambda: Features(LOGITS, {"x": torch.zeros(5, 2)}),
            ValueError,
            "layer 'x' has 5 rows, the class scores have 6",
        ),
        (
            lambda: Features(LOGITS, {"x": torch.zeros(6, 2, 2)}),
            ValueError,
            r"layer 'x' must have shape \(n, width\), got \(6, 2, 2\)",
        ),
        (
            lambda: Features(LOGITS, {}, torch.zeros(5)),
            ValueError,
            r"groups must have shape \(6,\), got \(5,\)",
        ),
    ],
)
def test_malformed_input_is_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


# --- labels
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [
        [0, 2, -1],
        (0, 2, -1),
        np.array([0, 2, -1]),
        torch.tensor([0, 2, -1], dtype=torch.int16),
        np.array([[0], [2], [-1]]),
    ],
)
def test_labels_of_any_integer_kind(labels: Any) -> None:
    assert torch.equal(as_labels(labels, 3, 3), torch.tensor([0, 2, -1]))


def test_repr_says_what_is_there_not_the_numbers() -> None:
    many = Features(torch.zeros(2000, 3), {"conv": torch.ones(2000, 4)}, groups=torch.arange(2000))
    assert repr(many) == "Features(2,000 samples, 3 classes, layers: conv (4), with augmented samples)"
    assert repr(Features(torch.zeros(2, 3))) == "Features(2 samples, 3 classes, no layers)"


def test_unsigned_labels() -> None:
    assert as_labels(np.array([0, 2, 1], np.uint8), 3, 3).tolist() == [0, 2, 1]
    with pytest.raises(ValueError, match="label 255 of sample 1 is out of range"):
        as_labels(np.array([0, 255, 1], np.uint8), 3, 3)


def test_labels_that_are_whole_numbers_of_any_type() -> None:
    read_only = np.array([0.0, 2.0, 1.0])
    read_only.setflags(write=False)  # as pandas gives its columns
    for given in (read_only, read_only.tolist(), torch.tensor(read_only.copy())):
        assert as_labels(given, 3, 3).tolist() == [0, 2, 1]
    with pytest.raises(TypeError, match="no whole numbers"):
        as_labels([0.0, float("nan"), 1.0], 3, 3)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([0.0, 1.0, 2.5], TypeError, "no whole numbers"),
        ([True, False, True], TypeError, "integer class indices"),
        (["a", "b", "c"], TypeError, "map class names"),
        ([0, 1], ValueError, r"shape \(3,\), one per sample, got \(2,\)"),
        (np.eye(3, dtype=int), ValueError, r"shape \(3,\), one per sample, got \(3, 3\)"),
        (
            [0, 1, 3],
            ValueError,
            "label 3 of sample 2 is out of range: expected 0..2, or -1 for an unknown class",
        ),
        ([0, -2, 1], ValueError, "label -2 of sample 1 is out of range"),
    ],
)
def test_bad_labels_are_refused(labels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_labels(labels, 3, 3)


# --- files
# -------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_is_the_same_in_the_same_order(tmp_path: Path) -> None:
    labels = torch.tensor([0, 1, 2, -1, 0, 1])
    path = FEATURES.save(tmp_path / "deep" / "f.safetensors", labels, {"network": "small"})
    loaded, again = load_features(path)
    assert same(loaded, FEATURES)
    assert again is not None
    assert torch.equal(again, labels)
    assert same(Features.load(path), FEATURES)
    assert [p.name for p in path.parent.iterdir()] == ["f.safetensors"]


def test_without_labels_groups_or_layers(tmp_path: Path) -> None:
    loaded, labels = load_features(Features(LOGITS).save(tmp_path / "f.safetensors"))
    assert labels is None
    assert loaded.groups is None
    assert loaded.layers == {}


def test_foreign_files_without_metadata_are_read_in_name_order(tmp_path: Path) -> None:
    path = write_tensors(
        tmp_path / "f.safetensors", {"logits": LOGITS, "layers.z": LOGITS, "layers.a": LOGITS}, {}
    )
    assert load_features(path)[0].layer_names == ("a", "z")


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = FEATURES.save(tmp_path / "f.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FormatError, match="not a whole safetensors file"):
        load_features(tmp_path / "cut.safetensors")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_features(tmp_path / "none.safetensors")
    with pytest.raises(FormatError, match="no tensor named 'logits'; found probs"):
        load_features(write_tensors(tmp_path / "p.safetensors", {"probs": LOGITS}, {}))
    with pytest.raises(FormatError, match="newer version"):
        load_features(
            write_tensors(
                tmp_path / "n.safetensors",
                {"logits": LOGITS},
                {"format": "salgp-features", "format_version": "9"},
            )
        )
    with pytest.raises(FormatError, match="layer 'x' is listed but not stored"):
        load_features(
            write_tensors(tmp_path / "m.safetensors", {"logits": LOGITS}, {"layers": json.dumps(["x"])})
        )


def test_strengths_travel_with_their_rows(tmp_path: Path) -> None:
    f = Features(torch.randn(4, 2), groups=[0, 1, 0, 1], families=[0, 0, 1, 1], strengths=[0, 0, 0.5, 1.0])
    back = Features.load(f[[3, 2]].save(tmp_path / "f.safetensors"))
    assert back.strengths is not None
    assert back.strengths.tolist() == [1.0, 0.5]
    joined = Features.concatenate([f, f]).strengths
    assert joined is not None
    assert len(joined) == 8
    with pytest.raises(ValueError, match="strengths must have shape"):
        Features(torch.randn(4, 2), strengths=[1.0])
