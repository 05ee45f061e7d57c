"""The base of all calibrators: what it warns of, refuses, copies and looks up."""

from __future__ import annotations

import copy
import warnings
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch

import salgp
from salgp import Features, Prediction
from salgp.calibrators import Calibrator, get, names, register
from salgp.calibrators.base import CalibrationWarning
from salgp.calibrators.registry import CLASSES


def world(n: int = 200, c: int = 3, seed: int = 0) -> tuple[Features, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, c, generator=g)
    labels = torch.multinomial(torch.softmax(z, 1), 1, generator=g)[:, 0]
    return Features(z, {"a": torch.randn(n, 4, generator=g)}), labels


class Shrunk(Calibrator):
    """A share of the network's confidence; refuses label 2 when told to."""

    name: ClassVar[str] = "test-shrunk"

    def __init__(self, share: float = 0.9, refuse: bool = False) -> None:
        self.share = share
        self.refuse = refuse

    def _fit(self, features: Features, labels: torch.Tensor, reference: Any) -> None:
        self.accuracy_ = float(features.correct(labels).float().mean())
        if self.refuse and bool((labels == 2).any()):
            raise ValueError("no label 2, please")

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_confidence(features, self.share * features.confidence)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> type[Calibrator]:
    monkeypatch.setattr("salgp.calibrators.registry._REGISTERED", {})
    return register(Shrunk)


# --- what it warns of


def caught(features: Features, labels: torch.Tensor, reference: Any = None) -> list[str]:
    method = "uncalibrated" if reference is None else "deep-knn"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        get(method).fit(features, labels, reference)
    assert all(issubclass(w.category, CalibrationWarning) for w in found)
    return [str(w.message) for w in found]


def test_good_data_are_no_reason_to_warn() -> None:
    assert caught(*world(), reference=world(seed=1)) == []


def test_warns_of_few_samples() -> None:
    assert [m[:30] for m in caught(*world(49))] == ["few calibration samples (49): t"[:30]]
    assert caught(*world(50)) == []


def test_warns_where_there_are_no_errors() -> None:
    features, _ = world()
    (message,) = caught(features, features.label)
    assert message.startswith("no errors")
    one_wrong = features.label.clone()
    one_wrong[0] = (one_wrong[0] + 1) % 3
    assert caught(features, one_wrong) == []
    unknown_only_wrong = features.label.clone()
    unknown_only_wrong[0] = -1
    assert caught(features, unknown_only_wrong)[0].startswith("no errors")


def test_warns_of_classes_without_samples_where_there_could_be_some() -> None:
    features, labels = world()
    (message,) = caught(features, labels.where(labels != 1, 0))
    assert "1 of 3 classes (1)" in message
    many, y = world(n=60, c=100)
    assert caught(many, y) == []  # 60 samples cannot cover 100 classes


def test_warns_of_probabilities_given_as_logits() -> None:
    features, labels = world()
    (message,) = caught(Features(features.probs), labels)
    assert message.startswith("the logits look like probabilities")


def test_warns_of_rows_shared_with_the_reference() -> None:
    features, labels = world()
    other, truth = world(seed=1)
    mixed = Features.concatenate([other, features[:20]]), torch.cat([truth, labels[:20]])
    (message,) = caught(features, labels, mixed)
    assert message.startswith("20 of 200 calibration samples are in the reference too")


def test_copies_are_not_counted_as_samples() -> None:
    features, labels = world(30)
    parts = [
        Features(features.logits, features.layers, torch.arange(30), torch.full((30,), k)) for k in range(3)
    ]
    (message,) = caught(Features.concatenate(parts), labels.repeat(3))
    assert message.startswith("few calibration samples (30)")


def test_originals_in_any_order() -> None:
    z = torch.zeros(6, 2)
    groups, families = torch.tensor([5, 3, 5, 3, 5, 3]), torch.tensor([1, 0, 0, 2, 2, 1])
    assert Features(z).originals[0].tolist() == list(range(6))
    assert Features(z, groups=groups).originals[0].tolist() == [0, 1]
    assert Features(z, groups=groups, families=families).originals[0].tolist() == [1, 2]


# --- what it refuses


@pytest.mark.parametrize("name", ["temperature", "platt", "layer-evidence", "sal-gp"])
def test_one_sample_is_refused_with_a_reason(name: str) -> None:
    features, labels = world()
    with pytest.raises(ValueError, match="only one calibration sample"):
        get(name).fit(features[:1], labels[:1])
    same = Features(
        features.logits[:1].repeat(4, 1), {"a": features.layers["a"][:1].repeat(4, 1)}, torch.zeros(4).long()
    )
    with pytest.raises(ValueError, match="only one calibration sample"):
        get(name).fit(same, labels[:1].repeat(4))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [5, 35, 65],
            r"NaN or infinity in row 5 \(1 rows in all, augmented samples not counted\)",
        ),
        ([37, 67, 9], r"in an augmented sample of row 7 \(2 rows in all"),
        ([70, 9], r"in row 9 \(2 rows in all"),
    ],
)
def test_rows_that_are_no_numbers_are_counted_without_copies(rows: list[int], says: str) -> None:
    """30 samples and two copies of each, as a file of `salgp extract --perturb` has them."""
    features, labels = world(90)
    features.logits[rows, 0] = torch.nan
    copied = Features(features.logits, features.layers, torch.arange(90) % 30, torch.arange(90) // 30)
    with pytest.raises(ValueError, match=says):
        get("layer-evidence").fit(copied, labels)


def test_logits_only_methods_take_any_reference() -> None:
    features, labels = world()
    get("temperature").fit(Features(features.logits), labels, (features, labels))
    with pytest.raises(ValueError, match="scores of 4 classes"):
        get("temperature").fit(features, labels, world(c=4))


def test_reference_may_have_more_layers_but_not_fewer_or_others() -> None:
    features, labels = world(80)
    known, truth = world(80, seed=1)
    more = Features(known.logits, {"extra": known.layers["a"], **known.layers})
    plain = get("layer-evidence").fit(features, labels, (known, truth)).predict(features)
    assert torch.equal(
        get("layer-evidence").fit(features, labels, (more, truth)).predict(features).probs, plain.probs
    )
    for wrong in (Features(known.logits, {"b": known.layers["a"]}), known_wider(known)):
        with pytest.raises(ValueError, match="differ from the calibration layers"):
            get("layer-evidence").fit(features, labels, (wrong, truth))


def known_wider(known: Features) -> Features:
    return Features(known.logits, {"a": known.layers["a"].repeat(1, 2)})


# --- what a failed fit leaves


def test_a_failed_refit_leaves_the_old_fit() -> None:
    features, labels = world()
    calibrator = Shrunk(refuse=True).fit(features, labels.clamp_max(1))
    before, state = calibrator.predict(features), dict(vars(calibrator))
    with pytest.raises(ValueError, match="no label 2"):
        calibrator.fit(features[:80], labels[:80])
    assert vars(calibrator) == state
    assert torch.equal(calibrator.predict(features).probs, before.probs)


def test_a_refit_leaves_nothing_of_the_old_one() -> None:
    features, labels = world()
    calibrator = Shrunk().fit(features, labels)
    calibrator.leftover_ = 1  # type: ignore[attr-defined]
    calibrator.fit(features, labels)
    assert not hasattr(calibrator, "leftover_")
    assert calibrator.get_params() == {"share": 0.9, "refuse": False}


@pytest.mark.parametrize("name", ["temperature", "isotonic", "layer-evidence"])
def test_deep_copies_predict_the_same_and_share_nothing(name: str) -> None:
    features, labels = world()
    calibrator = get(name).fit(features, labels)
    twin = copy.deepcopy(calibrator)
    expected = calibrator.predict(features).probs
    assert torch.equal(twin.predict(features).probs, expected)
    twin.fit(features[:60], labels[:60])
    assert torch.equal(calibrator.predict(features).probs, expected)


def test_a_deep_copy_keeps_what_is_shared_with_its_owner() -> None:
    share: list[float] = [0.9]
    twin, other = copy.deepcopy((Shrunk(share=share), share))
    assert twin.share is other
    assert other is not share


def test_a_sample_is_explained_by_its_number() -> None:
    features, labels = world()
    fitted = get("layer-evidence").fit(features, labels)
    assert fitted.explain(features, -1) == fitted.explain(features, 199) == fitted.explain(features[199:], 0)
    for i in (200, -201):
        with pytest.raises(IndexError, match=f"no sample {i}: the features have 200"):
            fitted.explain(features, i)
    for several in ([1, 2], slice(3), 1.0):
        with pytest.raises(TypeError, match=r"the number of one sample, got a .*one by one"):
            fitted.explain(features, several)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="no sample 0: the features have 0"):
        fitted.explain(features[:0], 0)


# --- names and look-up


def test_a_registered_calibrator_saves_and_loads(registered: type[Calibrator], tmp_path: Any) -> None:
    features, labels = world()
    fitted = get("test-shrunk", share=0.5).fit(features, labels)
    loaded = salgp.load(fitted.save(tmp_path / "kept"))
    assert type(loaded) is Shrunk
    assert torch.equal(loaded.predict(features).confidence, fitted.predict(features).confidence)
    assert names()["test-shrunk"].startswith("A share of the network's confidence")


def test_an_entry_point_is_found_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("test-shrunk", f"{Shrunk.__module__}:Shrunk", "salgp.calibrators")
    monkeypatch.setattr("salgp.calibrators.registry._REGISTERED", {})
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    monkeypatch.setattr(EntryPoint, "load", lambda self: Shrunk)
    assert isinstance(get("test-shrunk"), Shrunk)
    assert "test-shrunk" in names()


def test_names_are_unique_and_classes_are_checked(registered: type[Calibrator]) -> None:
    register(Shrunk)  # the same again is no conflict
    taken = type("Taken", (Shrunk,), {"name": "temperature"})
    with pytest.raises(ValueError, match="there is a calibrator called 'temperature' already"):
        register(taken)
    with pytest.raises(ValueError, match="'test-shrunk' already"):
        register(type("Other", (Shrunk,), {}))
    with pytest.raises(TypeError, match="derived from"):
        register(dict)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("typed", "meant"), [("temprature", "temperature"), ("layer_evidence", "layer-evidence")]
)
def test_a_misspelt_name_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(KeyError, match=f"did you mean '{meant}'"):
        get(typed)


def test_display_names_tell_the_methods_apart() -> None:
    shown = [get(name).display_name for name in CLASSES]
    assert len(set(shown)) == len(shown)
    assert get("layer-evidence").display_name == "layer evidence"
    assert get("sal-gp").display_name == "layerwise GP (sum)"
    assert salgp.SALGP.paper("ml").display_name == "SAL-GP (paper, ml)"
