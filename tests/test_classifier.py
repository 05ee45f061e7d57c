"""`calibrate`, `CalibratedClassifier`, save and load: same results, same network, no other network."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import networks
import pytest
import torch
from sealing import edit_value
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import salgp
from salgp.calibrators import Calibrator
from salgp.calibrators.checks import CalibrationWarning
from salgp.calibrators.loading import read_parts
from salgp.classifier import CalibratedClassifier, calibrate, load
from salgp.io import pack
from salgp.network.frozen_copy import fingerprint
from salgp.network.reader import Reader
from salgp.prediction import LayerTerms, Prediction

X = torch.randn(60, 1, 16, 16, generator=torch.Generator().manual_seed(0))


class Shrunk(Calibrator):
    """Shrinks every confidence by how far the layers are from their mean; for tests."""

    name: ClassVar[str] = "shrunk-for-tests"
    needs_layers: ClassVar[bool] = True

    def __init__(self, strength: float = 0.1) -> None:
        self.strength = strength

    def _fit(self, features, labels, reference):
        self.centre_ = {
            k: (reference[0] if reference else features).layers[k].mean(0) for k in features.layers
        }
        self.n_reference_ = 0 if reference is None else len(reference[0])

    def _predict(self, features):
        far = torch.stack([(features.layers[k] - c).square().mean(1) for k, c in self.centre_.items()], dim=1)
        terms = LayerTerms(tuple(self.centre_), -self.strength * far, far)
        return Prediction.from_confidence(
            features, features.confidence * torch.exp(-self.strength * far.sum(1)), far.mean(1), layers=terms
        )


@pytest.fixture
def model() -> nn.Module:
    return networks.randomised(networks.sequential_cnn())


@pytest.fixture
def labels(model) -> Tensor:
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(X)
    return (logits + 2 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))).argmax(1)


@pytest.fixture
def loader(labels) -> DataLoader:
    return DataLoader(TensorDataset(X, labels), batch_size=16)


@pytest.fixture
def shrunk(monkeypatch) -> None:
    """Lets `load` find `Shrunk`, as it finds any calibrator of another package."""
    monkeypatch.setattr("salgp.calibrators.registry._REGISTERED", {Shrunk.name: Shrunk})


def _equal(a: Prediction, b: Prediction) -> bool:
    return all(torch.equal(torch.as_tensor(v), torch.as_tensor(b.numpy()[k])) for k, v in a.numpy().items())


def test_one_call_equals_the_explicit_steps(model, loader):
    classifier = calibrate(model, loader, method=Shrunk())
    features, labels = salgp.extract(model, loader)
    explicit = Shrunk().fit(features, labels)
    prediction = classifier(X)
    torch.testing.assert_close(prediction.probs, explicit.predict(features).probs)
    assert classifier.features(X).layer_names == features.layer_names
    assert torch.equal(prediction.label, features.label)
    assert prediction.layers.names == features.layer_names


@pytest.mark.parametrize("method", [None, "auto"])
def test_the_default_method_is_layer_evidence(model, loader, method):
    classifier = calibrate(model, loader, method=method)
    assert classifier.calibrator.name == "layer-evidence"
    prediction = classifier(X)
    assert torch.equal(prediction.label, classifier.features(X).label)
    assert prediction.std is not None
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones_like(prediction.confidence))


class Bare(nn.Module):
    """A network of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(6, 8, generator=g))
        self.last = nn.Parameter(torch.randn(8, 3, generator=g))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first) @ self.last


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU())), nn.Linear(8, 3))


WITHOUT_LAYERS = {
    "probe": lambda: networks.randomised(nn.Linear(6, 3)),
    "bare": Bare,
    "script": lambda: torch.jit.script(networks.randomised(networks.Wrapped("tensor").body)),
    "trace": lambda: torch.jit.trace(Bare(), torch.zeros(2, 6)),
    "mixed": mixed,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", WITHOUT_LAYERS)
def test_without_layers_temperature_scaling_takes_over_and_says_so(kind, tmp_path):
    g = torch.Generator().manual_seed(0)
    net, x = WITHOUT_LAYERS[kind](), torch.randn(80, 6, generator=g)
    y = torch.multinomial(torch.softmax(net(x).detach(), 1), 1, generator=g)[:, 0]
    with pytest.warns(CalibrationWarning, match="no hidden layer .* temperature scaling is used") as caught:
        classifier = calibrate(net, [(x, y)], reference=[(x[:40], y[:40])])
    assert caught[0].filename == __file__
    with pytest.warns(CalibrationWarning, match="temperature scaling is used"):
        assert calibrate(net, [(x, y)], method="auto").calibrator.name == "temperature"
    expected = calibrate(net, [(x, y)], method="temperature")(x)
    assert classifier.augmentation is None
    assert _equal(classifier(x), expected)
    assert _equal(load(classifier.save(tmp_path / "saved"), net)(x), expected)
    for method in ("layer-evidence", Shrunk()):
        with pytest.raises(ValueError, match=r'no hidden layer .* needs some: use method="temperature"'):
            calibrate(net, [(x, y)], method=method)


def test_nothing_is_rehearsed_for_a_method_that_will_not_be_fitted():
    """Copies take several times as long as the calibration data themselves."""
    passes = []
    net = Bare()
    net.register_forward_pre_hook(lambda *_: passes.append(1))
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    with pytest.warns(CalibrationWarning):
        calibrate(net, [(x, torch.arange(80) % 3)])
    assert len(passes) <= 4  # the trace, which layers lead to the logits, and the data


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_layers_of_torchscript_cannot_be_asked_for():
    with pytest.raises(KeyError, match=r"'0'; it exists but did not run .* TorchScript"):
        salgp.extract(mixed(), [torch.zeros(4, 6)], reader=salgp.Reader(layers=["0"]))


def test_a_method_by_name_reads_no_layers_it_does_not_need(model, loader):
    classifier = calibrate(model, loader, method="temperature")
    assert classifier.features(X).layer_names == ()
    with pytest.raises(KeyError, match="no calibrator called 'nothing'"):
        calibrate(model, loader, method="nothing")
    with pytest.raises(KeyError, match="no calibrator called ''"):
        calibrate(model, loader, method="")
    with pytest.raises(TypeError, match="method must be a Calibrator"):
        calibrate(model, loader, method=3)


def test_the_given_calibrator_is_not_changed(model, loader):
    method = Shrunk(0.2)
    classifier = calibrate(model, loader, method=method)
    assert "n_classes_" not in vars(method)
    assert classifier.calibrator.strength == 0.2


def test_the_reference_reaches_the_calibrator(model, loader, labels):
    seen = calibrate(model, loader, method=Shrunk(), reference=[(X[:30] + 0.1, labels[:30])])
    assert seen.calibrator.n_reference_ == 30


def test_labels_are_needed(model):
    with pytest.raises(ValueError, match="calibration needs labels"):
        calibrate(model, [X], method="uncalibrated")
    with pytest.raises(ValueError, match="the loader gave no batch"):
        calibrate(model, [], method="uncalibrated")
    with pytest.raises(NotFittedError):
        CalibratedClassifier(model, Shrunk())


def test_modes_change_neither_result_nor_network(model, loader):
    model.train()
    model[1].eval()
    modes = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    classifier = calibrate(model, loader, method=Shrunk())
    trained, evaluated = classifier.train()(X), classifier.eval()(X)
    assert _equal(trained, evaluated)
    assert not evaluated.probs.requires_grad
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_it_is_a_module(model, loader):
    classifier = calibrate(model, loader, method=Shrunk())
    assert {id(p) for p in classifier.parameters()} == {id(p) for p in model.parameters()}
    before = classifier(X)
    assert _equal(before, classifier.to("cpu")(X))
    assert _equal(before, nn.Sequential(classifier)(X))
    double = copy.deepcopy(model).double()
    classifier.calibrator.network_ = None  # another precision is another network
    assert (
        CalibratedClassifier(double, classifier.calibrator, classifier.taps)(X).probs.dtype == torch.float64
    )


def test_it_says_what_calibrates_it(model, loader):
    classifier = calibrate(model, loader, method=Shrunk(), reader=salgp.Reader(layers=["0", "2"]))
    shown = repr(classifier)
    assert "calibrated by shrunk for tests; layers read: 0, 2" in shown
    assert "Conv2d" in shown
    page = classifier._repr_html_()
    assert "<td>Sequential</td>" in page
    assert "<td>0 (" in page
    assert "<td>nothing</td>" in page  # no copies were made


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inputs_by_name():
    net = networks.randomised(networks.TransformerClassifier())
    x = torch.randn(30, 7, 8, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(7)[None] < torch.arange(30)[:, None] % 7 + 1).long()
    batch = {"x": x, "attention_mask": mask, "labels": torch.arange(30) % 3}
    classifier = calibrate(net, [batch], method=Shrunk())
    named = classifier(x=x, attention_mask=mask)
    assert _equal(named, classifier(batch))
    assert _equal(named, classifier(x, attention_mask=mask))
    assert not _equal(named, classifier(x))


def test_taps_default_to_the_layers_of_the_calibrator(model, loader):
    features, labels = salgp.extract(model, loader, reader=salgp.Reader(layers=["3", "11"]))
    classifier = CalibratedClassifier(model, Shrunk().fit(features, labels))
    assert classifier.features(X).layer_names == ("3", "11")
    torch.testing.assert_close(classifier(X).probs, classifier.calibrator.predict(features).probs)


def test_reused_and_recurrent_layers_keep_their_names():
    net = networks.randomised(networks.ReusedNet())
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    features, _ = salgp.extract(net, [x], reader=salgp.Reader(layers=["block@2", "block@3"]))
    classifier = CalibratedClassifier(net, Shrunk().fit(features, torch.arange(30) % 3))
    assert classifier.features(x).layer_names == ("block@2", "block@3")


@pytest.mark.usefixtures("shrunk")
@pytest.mark.parametrize("pooling", ["auto", "channel-max", {"3": "flatten", "7": "spatial-max"}])
def test_saved_and_loaded_predicts_bit_for_bit_the_same(model, loader, tmp_path, pooling):
    reader = salgp.Reader(pooling=pooling, seed=7)
    classifier = calibrate(model, loader, method=Shrunk(), reader=reader)
    expected = classifier(X)
    assert classifier.save(tmp_path) == tmp_path
    again = load(tmp_path, copy.deepcopy(model))
    assert isinstance(again, CalibratedClassifier)
    assert _equal(again(X), expected)
    assert torch.equal(again(X).layers.mean, expected.layers.mean)
    alone = salgp.load(tmp_path)
    assert isinstance(alone, Shrunk)
    wrapped = load(tmp_path, nn.DataParallel(model))
    assert _equal(wrapped(X), expected)


@pytest.mark.usefixtures("shrunk")
def test_saving_before_the_first_batch(model, loader, tmp_path):
    features, labels = salgp.extract(
        model, loader, reader=salgp.Reader(layers=["3", "11"], pooling="spatial-max")
    )
    classifier = CalibratedClassifier(
        model, Shrunk().fit(features, labels), Reader(["3", "11"], {"3": "spatial-max"})
    )
    again = load(classifier.save(tmp_path), model)
    assert _equal(again(X), classifier(X))


@pytest.mark.usefixtures("shrunk")
def test_code_is_never_stored(model, loader, tmp_path):
    def middle(x: Tensor) -> Tensor:
        return x.flatten(1)[:, 1:5]

    def doubled(network: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return 2 * network(batch[0])

    classifier = calibrate(
        model, loader, method=Shrunk(), reader=salgp.Reader(pooling={"3": middle}, forward=doubled)
    )
    classifier.save(tmp_path)
    with pytest.raises(ValueError, match="made with a forward function; pass it again"):
        load(tmp_path, model)
    with pytest.raises(ValueError, match="made with a pooling function, and code is never stored"):
        load(tmp_path, model, forward=doubled)
    again = load(tmp_path, model, forward=doubled, pooling={"3": middle})
    assert _equal(again(X), classifier(X))


@pytest.mark.usefixtures("shrunk")
def test_another_network_is_refused(model, loader, tmp_path):
    calibrate(model, loader, method=Shrunk()).save(tmp_path)
    with pytest.raises(ValueError, match="another network"):
        load(tmp_path, networks.sequential_cnn(4))
    with pytest.raises(ValueError, match="another network"):
        load(tmp_path, networks.ResidualNet(), strict=False)
    other = networks.randomised(networks.sequential_cnn(), seed=1)
    with pytest.raises(ValueError, match=r"other weights .* strict=False"):
        load(tmp_path, other)
    assert isinstance(load(tmp_path, other, strict=False), CalibratedClassifier)
    model[1].running_mean += 1
    with pytest.raises(ValueError, match="other weights"):
        load(tmp_path, model)


@pytest.mark.usefixtures("shrunk")
def test_damaged_folders(model, loader, tmp_path):
    classifier = calibrate(model, loader, method=Shrunk())
    folder = classifier.save(tmp_path)
    path = folder / "calibrator.safetensors"
    content, first = path.read_bytes(), read_parts(folder)["network"]["taps"][0]
    for change, message in [
        ({"format_version": 99}, "newer version"),
        ({"format": "else"}, "expected 'salgp-module', got 'else'"),
        ({"taps": [{}]}, "not a whole module"),
        ({"taps": 3}, "not a whole module"),
        ({"fingerprint": None}, "not a whole module"),
        ({"seed": "0"}, "not a whole module .*'seed' is '0', expected int"),
        ({"labels_at": [3]}, "'labels_at' is .*, expected str or int or NoneType"),
        *(
            ({"taps": [{**tap, **wrong}]}, says)
            for tap in [first]
            for wrong, says in [
                ({"name": {}}, "'name' is '{}', expected str"),
                ({"module": [[]]}, "'module' is .*, expected str"),
                ({"call": True}, "'call' is 'True', expected int"),
                ({"module": "nowhere"}, "the network has no module 'nowhere'"),
                ({"layout": {**tap["layout"], "width": "4"}}, "'width' is '4', expected int or NoneType"),
            ]
        ),
    ]:
        path.write_bytes(content)
        edit_value(path, "network", lambda header, change=change: header.update(packed(change)))
        with pytest.raises(salgp.FormatError, match=message):
            load(folder, model)
    classifier.calibrator.save(folder)
    with pytest.raises(FileNotFoundError, match="a calibrator alone"):
        load(folder, model)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(salgp.FormatError, match=r"calibrator\.safetensors: not a whole"):
        load(folder)
    with pytest.raises(FileNotFoundError, match=r"no calibrator\.safetensors"):
        load(tmp_path / "nowhere", model)


@pytest.mark.usefixtures("shrunk")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_used_classifier_survives_copies_and_pickles(model, loader, copied):
    classifier = calibrate(model, loader, method=Shrunk())
    x = next(iter(loader))[0]
    expected = classifier(x).confidence
    assert torch.equal(copied(classifier)(x).confidence, expected)


def packed(value):
    return {name: pack(part, {}) for name, part in value.items()}


def test_fingerprints_see_what_matters(model):
    base = fingerprint(model)
    assert fingerprint(copy.deepcopy(model).train()) == base
    assert fingerprint(nn.DataParallel(model)) == base
    counted = copy.deepcopy(model)
    counted[1].num_batches_tracked += 1
    assert fingerprint(counted) == base
    assert fingerprint(copy.deepcopy(model).double()).structure == base.structure
    assert fingerprint(copy.deepcopy(model).bfloat16()).weights != base.weights
    for place, other in [(2, nn.Tanh()), (3, nn.MaxPool2d(2, 1)), (1, nn.BatchNorm2d(4, eps=0.1))]:
        changed = copy.deepcopy(model)
        changed[place] = other
        assert fingerprint(changed).structure != base.structure
    inplace = copy.deepcopy(model)
    inplace[2] = nn.ReLU()
    assert fingerprint(inplace) == base
    renamed = nn.Sequential(*[nn.Sequential(m) for m in model])
    assert fingerprint(renamed).structure != base.structure


@pytest.mark.slow
def test_the_overhead_is_small():
    """Forward with taps against the bare network, ResNet-18 at 128 x 128."""
    import time

    net = networks.ResidualNet(10, width=64, channels=3).eval()
    x = torch.randn(64, 3, 128, 128)
    classifier = calibrate(net, [(x[:16], torch.arange(16) % 10)], method=Shrunk())

    def seconds(run) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            run(x)
        return time.perf_counter() - start

    pairs = [(seconds(net), seconds(classifier)) for _ in range(7)][1:]
    assert min(b for _, b in pairs) / min(a for a, _ in pairs) < 1.05


def test_an_empty_batch_and_a_sample_without_batch_axis_say_so() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(60, 4)
    y = (network(x) + torch.randn(60, 3)).argmax(1).detach()
    classifier = salgp.calibrate(network, [(x, y)], perturb=False)
    with pytest.raises(ValueError, match="the batch is empty"):
        classifier(x[:0])
    with pytest.raises(ValueError, match=r"needs a batch axis: x\[None\]"):
        classifier(x[0])


def test_labels_may_be_names() -> None:
    """Where the names of the classes are given; else it is said how."""
    model, x = nn.Linear(4, 3), torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(60) % 3
    names = [("ant", "bee", "cat")[k] for k in numbers.tolist()]
    by_name = salgp.calibrate(model, [(x, names)], method="uncalibrated", classes=["ant", "bee", "cat"])
    by_number = salgp.calibrate(model, [(x, numbers)], method="uncalibrated")
    assert torch.equal(by_name(x).confidence, by_number(x).confidence)
    with pytest.raises(TypeError, match="classes="):
        salgp.calibrate(model, [(x, names)], method="uncalibrated")
    with pytest.raises(ValueError, match="names 2 classes, but the network has 3"):
        salgp.calibrate(model, [(x, names)], method="uncalibrated", classes=["ant", "bee"])
    with pytest.raises(ValueError, match="different names, got ant, ant, bee"):
        salgp.calibrate(model, [(x[:2], names[:2])], method="uncalibrated", classes=["ant", "ant", "bee"])
