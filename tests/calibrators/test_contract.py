"""What every calibrator promises, checked on all of them by name."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elsewhere import Away, Elsewhere
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch.utils._python_dispatch import TorchDispatchMode

import salgp
from salgp import Features
from salgp.calibrators import get
from salgp.calibrators.registry import CLASSES
from salgp.metrics import ece, nll, nll_correct

pytestmark = [
    pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning"),
    pytest.mark.filterwarnings("ignore::salgp.gp.optimise.NotConvergedWarning"),
]

QUICK: dict[str, dict[str, Any]] = {
    "density-aware": {"k": 10},
    "latent-gp": {"n_inducing": 6},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("histogram", {"smoothing": 0.0}),
    ("bbq", {"alpha": 0.1, "beta": 1.0}),
    ("sal-gp", {"covariance": "ml", "max_steps": 10}),
]
KEEPS_ORDER = {
    "uncalibrated",
    "temperature",
    "perturbed-temperature",
    "ensemble-temperature",
    "density-aware",
}
"""Methods that promise more than to keep the label: it also stays the largest class."""
NO_COPY = [
    "uncalibrated",
    "temperature",
    "perturbed-temperature",
    "ensemble-temperature",
    "vector",
    "platt",
    "beta",
    "isotonic",
    "histogram",
    "bbq",
]
"""Methods that read nothing but the logits, and in chunks."""


def importable(name: str) -> bool:
    try:
        importlib.import_module(f"salgp.calibrators.{CLASSES[name].rpartition('.')[0]}")
    except ImportError:
        return False
    return True


CASES = [(name, QUICK.get(name, {})) for name in CLASSES if importable(name)] + VARIANTS


def label_of(case: Any) -> str:
    return (
        "-".join([case[0], *map(str, case[1].values())])
        if isinstance(case, tuple) and case in VARIANTS
        else case[0]
    )


every = pytest.mark.parametrize("case", CASES, ids=map(label_of, CASES))
LEARNERS = [case for case in CASES if hasattr(get(case[0], **case[1]), "update")]
learners = pytest.mark.parametrize("case", LEARNERS, ids=map(label_of, LEARNERS))
"""Methods that learn further samples once they are fitted."""


def world(
    n: int = 120, c: int = 4, seed: int = 0, temperature: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Features, torch.Tensor]:
    """Logits with labels drawn from ``softmax(z / temperature)``: perfectly calibrated at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, c, generator=generator)
    labels = torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=generator)[:, 0]
    layers = {
        "first": torch.randn(n, 3, generator=generator),
        "last": z[:, :2] + 0.5 * torch.randn(n, 2, generator=generator),
    }
    return Features(
        z.to(dtype), {k: x.to(dtype) for k, x in layers.items()}, torch.arange(n) // 2, torch.arange(n) % 2
    ), labels


def build(case: tuple[str, dict[str, Any]]) -> salgp.calibrators.Calibrator:
    return get(case[0], **case[1])


def check(prediction: salgp.Prediction, features: Features, labels: torch.Tensor) -> None:
    """The promises every prediction keeps."""
    assert torch.equal(prediction.label, features.label)
    assert prediction.probs.shape == features.logits.shape
    torch.testing.assert_close(
        prediction.probs.sum(dim=1), torch.ones_like(prediction.confidence), atol=2e-5, rtol=0
    )
    assert bool((prediction.probs >= 0).all())
    torch.testing.assert_close(
        prediction.probs.gather(1, prediction.label[:, None])[:, 0], prediction.confidence
    )
    assert bool(((prediction.confidence >= 0) & (prediction.confidence <= 1)).all())
    if len(features):
        assert math.isfinite(nll_correct(prediction.confidence, prediction.label == labels))
    if bool((labels >= 0).any()):
        assert math.isfinite(nll(prediction.probs, labels))
        assert math.isfinite(float(-prediction.probs.gather(1, labels.clamp_min(0)[:, None]).log().mean()))
    if prediction.std is not None:
        assert bool((prediction.std >= 0).all())
        assert bool(
            ((prediction.lower >= 0) & (prediction.lower <= prediction.upper) & (prediction.upper <= 1)).all()
        )


@every
def test_prediction_keeps_its_promises(case: Any) -> None:
    features, labels = world(temperature=2.0)
    new, truth = world(seed=1, temperature=2.0)
    calibrator = build(case)
    assert calibrator.fit(features, labels) is calibrator
    check(calibrator.predict(new), new, truth)
    assert len(calibrator.predict(new[:0])) == 0


@every
def test_saved_and_loaded_predicts_bit_for_bit_the_same(case: Any, tmp_path: Any) -> None:
    features, labels = world(n=60)
    saved = build(case).fit(features, labels)
    loaded = salgp.load(saved.save(tmp_path))
    a, b = saved.predict(features), loaded.predict(features)
    assert torch.equal(a.probs, b.probs)
    assert torch.equal(a.confidence, b.confidence)
    assert (a.std is None and b.std is None) or torch.equal(a.std, b.std)


@every
def test_clone_and_not_fitted(case: Any) -> None:
    calibrator = build(case)
    again = clone(calibrator)
    assert again.get_params() == calibrator.get_params()
    assert again is not calibrator
    with pytest.raises(NotFittedError, match="not fitted"):
        calibrator.predict(world(n=3)[0])
    assert pickle.loads(pickle.dumps(calibrator)).get_params() == calibrator.get_params()


@every
@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_copies_and_pickles_predict_the_same(case: Any, copied: Callable[[Any], Any]) -> None:
    features, labels = world(n=60)
    fitted = build(case).fit(features, labels)
    again = copied(fitted)
    assert type(again) is type(fitted)
    assert torch.equal(again.predict(features).probs, fitted.predict(features).probs)


@every
@pytest.mark.parametrize("copies", [False, True])
def test_order_of_samples_changes_nothing_but_order(case: Any, copies: bool) -> None:
    features, labels = world(dtype=torch.float64)
    features = features if copies else Features(features.logits, features.layers)
    new = world(seed=1, dtype=torch.float64)[0]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    plain = build(case).fit(features, labels).predict(new)
    shuffled = build(case).fit(features[order], labels[order]).predict(new[order])
    torch.testing.assert_close(shuffled.probs, plain.probs[order], atol=1e-5, rtol=1e-4)


@every
def test_order_of_classes_changes_nothing_but_order(case: Any) -> None:
    features, labels = world(dtype=torch.float64)
    new = world(seed=1, dtype=torch.float64)[0]
    order = torch.tensor([2, 0, 3, 1])  # new column j is old column order[j]
    moved = order.argsort()
    plain = build(case).fit(features, labels).predict(new)
    renamed = build(case).fit(
        Features(features.logits[:, order], features.layers, features.groups), moved[labels]
    )
    permuted = renamed.predict(Features(new.logits[:, order], new.layers))
    torch.testing.assert_close(permuted.probs, plain.probs[:, order], atol=1e-4, rtol=1e-3)


@every
def test_calibrated_data_stay_calibrated(case: Any) -> None:
    features, labels = world(n=2000)
    new, truth = world(n=4000, seed=1)
    features = Features(features.logits, features.layers)
    prediction = get(case[0], **case[1]).fit(features, labels).predict(new)
    assert (
        ece(prediction.confidence, prediction.label == truth) < 0.05
    )  # noise of one set of 2000: about 0.02
    if case[0] not in (
        "trust-score",
        "deep-knn",
    ):  # their confidence is no function of the network's, and sees less
        assert nll(prediction.probs, truth) < nll(new.probs, truth) + 0.02


@every
@pytest.mark.parametrize("c", [2, 1000])
def test_two_and_a_thousand_classes(case: Any, c: int) -> None:
    features, labels = world(n=60, c=c)
    arguments = {**case[1], **({"max_iterations": 5} if case[0] in ("matrix", "dirichlet") and c > 2 else {})}
    check(get(case[0], **arguments).fit(features, labels).predict(features), features, labels)


@every
def test_the_label_stays_the_largest_class_where_promised(case: Any) -> None:
    features, labels = world(temperature=3.0)
    prediction = build(case).fit(features, labels).predict(world(seed=1, temperature=3.0)[0])
    if case[0] in KEEPS_ORDER:
        assert not bool(prediction.flips.any())
    overtaken = prediction.probs.argmax(dim=1) != prediction.label
    assert bool(
        (prediction.flips | ~overtaken | (prediction.probs.amax(dim=1) - prediction.confidence < 1e-5)).all()
    )


@every
def test_prediction_stays_on_the_device_of_its_input(case: Any) -> None:
    """Fitted on the processor, it predicts elsewhere: whatever it makes by hand must follow its input."""
    features, labels = world(n=60)
    calibrator = build(case).fit(features, labels)
    with Elsewhere():
        away = Features(features.logits.to("meta"), {k: x.to("meta") for k, x in features.layers.items()})
        prediction = calibrator.predict(away)
        assert all(isinstance(x, Away) for x in (prediction.probs, prediction.confidence, prediction.label))
        found = prediction.probs.to("cpu")
    torch.testing.assert_close(found, calibrator.predict(features).probs, atol=1e-4, rtol=0)


@learners
def test_labels_from_another_device_are_learned(case: Any) -> None:
    features, labels = world(n=60)
    new, truth = world(n=20, seed=1)
    expected = build(case).fit(features, labels).update(new, truth)
    calibrator = build(case).fit(features, labels)
    with Elsewhere():
        away, there = new.to("meta"), truth.to("meta")
        calibrator.update(away, there)
    found = calibrator.predict(features).confidence
    torch.testing.assert_close(found, expected.predict(features).confidence, atol=1e-6, rtol=0)


@learners
def test_learning_before_fitting_is_refused(case: Any) -> None:
    features, labels = world(n=10)
    calibrator = build(case)
    with pytest.raises(NotFittedError, match="not fitted"):
        calibrator.update(features, labels)
    with pytest.raises(NotFittedError, match="not fitted"):
        calibrator.suggest(features, 2)


@learners
def test_samples_of_another_network_are_not_learned(case: Any) -> None:
    features, labels = world(n=40)
    calibrator = build(case).fit(features, labels)
    before = calibrator.predict(features).confidence
    other = Features(torch.zeros(3, 7), {k: x[:3] for k, x in features.layers.items()})
    wide = Features(features.logits[:3], {k: torch.zeros(3, 9) for k in features.layers})
    with pytest.raises(ValueError, match="fitted on 4 classes, got class scores of 7"):
        calibrator.update(other, labels[:3])
    with pytest.raises(ValueError, match="has width 9, fitted on 3"):
        calibrator.update(wide, labels[:3])
    assert torch.equal(calibrator.predict(features).confidence, before)


@every
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_fit_and_prediction_on_a_gpu_are_those_of_the_processor(case: Any) -> None:
    features, labels = world(n=60, dtype=torch.float64)
    there = Features(
        features.logits.cuda(), {k: x.cuda() for k, x in features.layers.items()}, features.groups
    )
    prediction = build(case).fit(there, labels.cuda()).predict(there)
    assert prediction.probs.device.type == "cuda"
    torch.testing.assert_close(
        prediction.probs.cpu(),
        build(case).fit(features, labels).predict(features).probs,
        atol=1e-4,
        rtol=1e-3,
    )


class Largest(TorchDispatchMode):
    """Size of the largest tensor made, views of ``given`` aside."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given, self.size = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.given:
            self.size = max(self.size, out.numel())
        return out


@pytest.mark.parametrize("name", NO_COPY)
def test_fit_makes_no_second_matrix_of_logits(name: str) -> None:
    features, labels = world(n=11_000, c=200)  # two million logits
    calibrator = get(name, **({"max_iterations": 3} if name == "vector" else {}))
    with Largest(features.logits) as largest:
        calibrator.fit(Features(features.logits), labels)
    assert largest.size <= 2**20


def degenerate() -> dict[str, tuple[Features, torch.Tensor]]:
    features, labels = world(n=40)
    wild = features.logits * 1e4
    repeated = Features(
        features.logits[:1].repeat(40, 1), {k: x[:1].repeat(40, 1) for k, x in features.layers.items()}
    )
    constant = Features(torch.zeros(40, 4), {k: torch.zeros_like(x) for k, x in features.layers.items()})
    return {
        "all correct": (features, features.label),
        "all wrong": (features, (features.label + 1) % 4),
        "all unknown": (features, torch.full_like(labels, -1)),
        "some unknown": (features, labels.where(torch.arange(40) % 3 > 0, -1)),
        "five samples": (features[:5], labels[:5]),
        "duplicates": (repeated, labels),
        "constant logits": (constant, labels),
        "one class present": (features, torch.zeros_like(labels)),
        "huge logits": (Features(wild, features.layers), labels),
        "huge logits, all correct": (Features(wild, features.layers), features.label),
        "half precision": (
            Features(features.logits.half(), {k: x.half() for k, x in features.layers.items()}),
            labels,
        ),
        "largest logits": (Features(features.logits / 10 * 3.4e38, features.layers), labels),
        "largest doubles": (Features(features.logits.double() * 1e300, features.layers), labels),
    }


@every
@pytest.mark.parametrize("what", degenerate())
def test_degenerate_sets(case: Any, what: str) -> None:
    features, labels = degenerate()[what]
    calibrator = build(case).fit(features, labels)
    check(calibrator.predict(features), features, labels)
    new, truth = world(n=30, seed=5)
    check(calibrator.predict(new), new, truth)
    certain = Features(
        torch.tensor([[1e4, -1e4, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
        {k: 1e3 * x[:2] for k, x in new.layers.items()},
    )
    check(calibrator.predict(certain), certain, torch.tensor([1, 2]))


@pytest.mark.parametrize("name", ["temperature", "platt", "density-aware"])
def test_wrong_input_is_refused_with_a_reason(name: str) -> None:
    features, labels = world(n=30)
    calibrator = get(name).fit(features, labels)
    with pytest.raises(ValueError, match="fitted on 4 classes"):
        calibrator.predict(Features(torch.zeros(2, 3), {k: x[:2] for k, x in features.layers.items()}))
    with pytest.raises(ValueError, match="at least 2 columns"):
        get(name).fit(Features(torch.zeros(2, 1), {k: x[:2] for k, x in features.layers.items()}), [0, 0])
    with pytest.raises(TypeError, match=r"expected salgp\.Features"):
        calibrator.predict(features.probs)


def test_names_have_a_line_each() -> None:
    known = [name for name in CLASSES if importable(name)]
    for name in known:
        cls = type(get(name))
        assert cls.name == name
        assert len((cls.__doc__ or "").strip().splitlines()[0]) > 20
    with pytest.raises(KeyError, match="known: adaptive-ensemble, bbq"):
        get("no such method")
