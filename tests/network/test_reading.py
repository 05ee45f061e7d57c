"""The one loop over a loader: batches of every form, labels, checks; networks with their own habits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import networks
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import salgp
from salgp.network.extract import read_calibration_data
from salgp.network.layers import NetworkWarning
from salgp.network.reader import Reader, read_batches
from salgp.store import extract_to_store

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


def mlp(c: int = 3) -> nn.Module:
    return networks.randomised(networks.Wrapped("tensor", c)).eval()


def labels_for(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(x)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits + noise).argmax(dim=1)


class Net(nn.Module):
    """Takes an image under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.inner(x)


Y = labels_for(mlp())
EXPECTED = mlp()(X).detach()


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ({"image": X, "label": Y}, {}),
        ({"x": X, "target": Y}, {}),
        ({"x": X, "y": Y}, {}),
        ({"x": X, "truth": Y}, {"labels_at": "truth"}),
        ((X, Y, torch.arange(64)), {"labels_at": 1}),
        ((X, Y, ["name"] * 64), {"labels_at": 1}),
        ((X.numpy(), Y.numpy()), {}),
        ({"x": X.numpy(), "labels": Y.tolist()}, {}),
        ((X.double(), nn.functional.one_hot(Y)), {}),
        ((X, nn.functional.one_hot(Y).float()), {}),
        ({"image": X, "id": np.arange(64), "label": Y}, {"forward": lambda m, batch: m(batch["image"])}),
        ((X, Y, torch.arange(64)), {"labels_at": 1, "forward": lambda m, batch: m(batch[0])}),
    ],
)
def test_batches_of_every_form(batch: Any, options: dict[str, Any]) -> None:
    features, labels = salgp.extract(Net(), [batch], reader=salgp.Reader(**options))
    torch.testing.assert_close(features.logits, EXPECTED)
    assert torch.equal(labels, Y)
    copies, _ = salgp.extract(Net(), [batch], perturb=["noise"], reader=salgp.Reader(**options))
    assert len(copies) == 128
    assert not torch.allclose(copies.logits[64:], copies.logits[:64])


def test_what_is_not_clear_is_said() -> None:
    with pytest.raises(TypeError, match="labels_at=1"):
        salgp.extract(Net(), [(X, Y, torch.arange(64))])
    with pytest.raises(TypeError, match=r"forward=lambda model, batch: model\(batch\['image'\]\)"):
        salgp.extract(Net(), [{"image": X, "id": torch.arange(64), "label": Y}])
    with pytest.raises(KeyError, match="none of the batch's keys: x, y"):
        salgp.extract(Net(), [{"x": X, "y": Y}], reader=salgp.Reader(labels_at="truth"))
    with pytest.raises(ValueError, match="must be one-hot"):
        salgp.extract(Net(), [(X, torch.ones(64, 3))])
    with pytest.raises(IndexError, match="labels_at=5"):
        salgp.extract(Net(), [(X, Y)], reader=salgp.Reader(labels_at=5))
    with pytest.raises(ValueError, match="labels_at="):
        salgp.calibrate(Net(), [{"x": X, "truth": Y}][:0] or [X], method="temperature")


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples one after the other; nobody knows how many."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


def test_a_loader_over_a_stream_has_no_length(tmp_path: Any) -> None:
    loader = DataLoader(Stream(), batch_size=24)
    features, labels = salgp.extract(mlp(), loader, progress=False)
    torch.testing.assert_close(features.logits, EXPECTED)
    assert torch.equal(labels, Y)
    classifier = salgp.calibrate(mlp(), loader, method="temperature")
    assert len(classifier.predict(loader)) == len(X)
    assert len(extract_to_store(mlp(), loader, tmp_path / "store")) == len(X)


def test_empty_batches_are_passed_over() -> None:
    features, labels = salgp.extract(mlp(), [(X[:0], Y[:0]), (X, Y), (X[:0], Y[:0])], perturb=["noise"])
    torch.testing.assert_close(features.logits[:64], EXPECTED)
    assert len(features) == len(labels) == 128
    with pytest.raises(ValueError, match="no batch"):
        salgp.extract(mlp(), [(X[:0], Y[:0])])


def test_one_sample() -> None:
    found = read_calibration_data(mlp(), [(X[:1], Y[:1])], Reader(), "auto")
    assert bool(found.features.logits.isfinite().all())
    assert all(bool(x.isfinite().all()) for x in found.features.layers.values())
    assert len(found.features) == 1 + len(found.augmentation.families)


def test_binary_labels_as_numbers() -> None:
    model = networks.randomised(networks.Wrapped("binary", 1))
    y = (torch.arange(64) % 2).float()
    for labels in (y, y[:, None], y.numpy()):
        assert torch.equal(salgp.extract(model, [(X, labels)])[1], y.long())
    with pytest.raises(TypeError, match="integer class indices"):
        salgp.extract(model, [(X, y + 0.5)])


@pytest.mark.parametrize("form", ["tuple", "mapping", "pair"])
def test_forward_gets_the_same_form_at_prediction(form: str) -> None:
    model = mlp()
    batch: Any = {"tuple": (X, Y), "mapping": {"x": X, "y": Y}, "pair": ({"x": X}, Y)}[form]

    def forward(network: nn.Module, given: Any) -> Tensor:
        x = given["x"] if form == "mapping" else given[0] if form == "tuple" else given[0]["x"]
        return 2 * network(x)

    classifier = salgp.calibrate(
        model, [batch], method="density-aware", perturb=False, reader=salgp.Reader(forward=forward)
    )
    new = X if form == "tuple" else {"x": X}
    expected = classifier.predict([batch]).confidence
    torch.testing.assert_close(classifier(new).confidence, expected)
    torch.testing.assert_close(classifier.predict([new]).confidence, expected)
    torch.testing.assert_close(classifier.features(new).logits, 2 * EXPECTED)


def test_numpy_at_prediction() -> None:
    classifier = salgp.calibrate(mlp(), [(X, Y)], method="density-aware", perturb=False)
    torch.testing.assert_close(classifier(X.double().numpy()).confidence, classifier(X).confidence)


def test_a_classifier_reads_as_it_was_calibrated(tmp_path: Any) -> None:
    """The same pooling, output and forward, which `extract` with layer names does not know."""
    model = networks.randomised(networks.sequential_cnn())
    x = torch.randn(64, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    y = labels_for(model, x)
    reader = salgp.Reader(pooling="spatial-max", seed=3)
    classifier = salgp.calibrate(model, [(x, y)], method="density-aware", reader=reader, perturb=False)
    features, labels = classifier.extract([(x[:30], y[:30]), (x[30:], y[30:])])
    assert torch.equal(labels, y)
    whole = classifier.predict([x[:30], x[30:]])
    torch.testing.assert_close(whole.confidence, classifier.calibrator.predict(features).confidence)
    torch.testing.assert_close(whole.confidence, classifier(x).confidence)
    names = list(classifier.calibrator.layer_widths_)
    plain, _ = salgp.extract(model, [x], reader=salgp.Reader(layers=names))
    assert not torch.equal(features.layers[names[0]], plain.layers[names[0]][:, : features.widths[names[0]]])
    again = salgp.load(classifier.save(tmp_path), model)
    assert torch.equal(again.predict([x]).confidence, classifier.predict([x]).confidence)


def test_context_is_passed_on() -> None:
    given: list[Any] = []
    classifier = salgp.calibrate(mlp(), [(X, Y)], method="density-aware", perturb=False)
    original = classifier.calibrator.predict
    classifier.calibrator.predict = lambda features, context: given.append(context) or original(features)  # type: ignore[method-assign]
    classifier.predict([X])
    classifier.predict([X], context="all")
    assert given == [None, "all"]


def test_calibrate_makes_the_checks_of_extract_and_leaves_random_numbers_alone() -> None:
    model = mlp()
    for bad, kind in [(X, TypeError), ([(X, Y), X], ValueError), ([], ValueError)]:
        for perturb in (["noise"], None):
            with pytest.raises(kind):
                salgp.calibrate(model, bad, method="density-aware", perturb=perturb)
    state = torch.get_rng_state()
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    salgp.calibrate(model, loader, method="density-aware", perturb=["noise"], progress=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_calibrate_shows_progress_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    salgp.calibrate(mlp(), [(X, Y)], method="density-aware", perturb=["noise"], progress=True)
    shown = capsys.readouterr().err
    assert "reading the network" in shown
    assert "augmenting" in shown
    salgp.calibrate(mlp(), [(X, Y)], method="density-aware", perturb=["noise"])
    assert capsys.readouterr().err == ""


def test_how_samples_were_augmented_is_saved(tmp_path: Any) -> None:
    classifier = salgp.calibrate(mlp(), [(X, Y)], method="perturbed-temperature", perturb=["noise", "gain"])
    assert classifier.augmentation.families == ("noise", "gain")
    assert len(classifier.augmentation.under[0]) == len(classifier.augmentation.levels) == 8
    assert salgp.load(classifier.save(tmp_path), mlp()).augmentation == classifier.augmentation
    assert salgp.calibrate(mlp(), [(X, Y)], method="density-aware", perturb=False).augmentation is None


def test_features_stay_on_the_device_where_asked() -> None:
    (reading,) = read_batches(mlp(), [X], Reader(dtype=torch.float64, keep_on_device=True))
    assert reading.features.logits.dtype == torch.float64
    assert {x.dtype for x in reading.features.layers.values()} == {torch.float64}
    augmented_double, _ = salgp.extract(
        mlp(), [(X, Y)], perturb=["noise"], reader=salgp.Reader(dtype=torch.float64)
    )
    assert augmented_double.logits.dtype == torch.float64


def test_calibrators_move() -> None:
    classifier = salgp.calibrate(mlp(), [(X, Y)], method="density-aware", perturb=False)
    features, _ = classifier.extract([X])
    moved = classifier.calibrator.to("cpu")
    assert moved is not classifier.calibrator
    assert torch.equal(moved.predict(features).probs, classifier.calibrator.predict(features).probs)
    elsewhere = classifier.calibrator.to("meta")
    tensors = [v for v in vars(elsewhere).values() if isinstance(v, Tensor)]
    assert all(v.device.type == "meta" for v in tensors)


def test_a_network_in_double_precision_after_calibration() -> None:
    model = mlp()
    classifier = salgp.calibrate(model, [(X, Y)], method="density-aware", perturb=False)
    before = classifier(X).confidence
    model.double()
    with pytest.raises(ValueError, match="precision"):
        classifier(X)
    classifier.calibrator.network_ = None
    torch.testing.assert_close(classifier(X).confidence.float(), before.float())


class Padded(networks.TransformerClassifier):
    """A padding mask of floating-point numbers comes first."""

    def forward(self, attention_mask: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, attention_mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_masks_and_nested_tensors() -> None:
    """Layer noise passes through the nested tensors of an encoder with padding; the mask is no input."""
    x = torch.randn(60, 7, 8, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(7)[None] < torch.arange(60)[:, None] % 6 + 2).float()
    model = networks.randomised(Padded())
    y = torch.arange(60) % 3
    batch = {"attention_mask": mask, "x": x, "labels": y}
    found = read_calibration_data(model, [batch], Reader(), ["noise", "layer-noise"])
    assert found.features.layer_names == ("encoder.layers.0", "encoder.layers.1", "encoder.layers.2")
    for family in (1, 2):
        strong = (found.features.families == family) & (found.features.strengths > 0.5)
        original = found.features.logits[:60][found.features.groups[strong]]
        assert bool((found.features.logits[strong] != original).any(dim=1).all())
    with torch.no_grad():
        torch.testing.assert_close(found.features.logits[:60], copy.deepcopy(model).eval()(mask, x))


class Series(nn.Module):
    """A recurrent layer whose sequence, or whose final state, goes on to the head."""

    def __init__(self, uses: str, layers: int = 2) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 6, num_layers=layers, batch_first=True)
        self.pooler = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        sequence, state = self.gru(x)
        self.pooler(sequence[:, 0])  # leads nowhere
        return self.head(sequence.amax(dim=1) if self.uses == "sequence" else state[-1])


@pytest.mark.parametrize(
    ("uses", "layers", "expected"),
    [
        ("sequence", 2, ("gru.0", "gru")),
        ("state", 2, ("gru.0", "gru.1")),
        ("sequence", 1, ("gru",)),
        ("state", 1, ("gru.0",)),
    ],
)
def test_a_recurrent_layer_is_read_as_it_is_used(uses: str, layers: int, expected: tuple[str, ...]) -> None:
    x = torch.randn(48, 9, 5, generator=torch.Generator().manual_seed(0))
    model = networks.randomised(Series(uses, layers))
    y = labels_for(model, x)
    found = read_calibration_data(model, [(x, y)], Reader(), ["layer-noise"])
    features = found.features
    assert features.layer_names == expected  # and not the pooler
    last = features.layers[expected[-1]]
    moved = (features.logits[48:] != features.logits[:48]).any(dim=1)
    read = (last[48:] != last[:48]).any(dim=1)
    assert bool(moved.all())
    assert torch.equal(moved, read)  # what is disturbed is what is read


def test_layers_behind_no_grad_still_lead_to_the_logits() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.body(x)
            return self.head(h.detach())

    features, _ = salgp.extract(networks.randomised(Frozen()), [X])
    assert features.layer_names == ("body",)


# --- networks that do not take what they are given


def test_a_network_that_refuses_its_inputs_says_what_it_was_given() -> None:
    says = r"does not accept inputs of shape \(n, 7\) of torch\.float32; its own error: mat1 and mat2"
    for layers in ("auto", []):
        with pytest.raises(RuntimeError, match=says) as caught:
            salgp.extract(
                mlp(), [(torch.zeros(8, 7), torch.zeros(8).long())], reader=salgp.Reader(layers=layers)
            )
        assert isinstance(caught.value.__cause__, RuntimeError)
    classifier = salgp.calibrate(mlp(), [(X, Y)], method="temperature")
    with pytest.raises(RuntimeError, match=says):
        classifier(torch.zeros(1, 7))


class Both(nn.Module):
    """Takes an image and what is known about it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, image: Tensor, meta: Tensor) -> Tensor:
        return self.inner(image) + meta


@pytest.mark.parametrize("kind", [tuple, list])
def test_inputs_inside_a_tuple_need_a_forward_function(kind: type) -> None:
    batch = (kind((X, X[:, :3])), Y)
    says = r"of shape a (tuple|list); its own error: .*forward=lambda model, batch: model\(\*batch\[0\]\)"
    with pytest.raises(RuntimeError, match=says):
        salgp.calibrate(Both(), [batch])
    way_out = salgp.Reader(forward=lambda model, batch: model(*batch[0]))
    classifier = salgp.calibrate(Both(), [batch], method="density-aware", perturb=False, reader=way_out)
    torch.testing.assert_close(classifier.features(batch[0]).logits, EXPECTED + X[:, :3])
    torch.testing.assert_close(classifier(batch[0]).confidence, classifier.predict([batch]).confidence)
    with pytest.raises(RuntimeError, match=r"a dict; its own error: .*reader=salgp.Reader\(forward="):
        salgp.extract(Both(), [(X, {"meta": X[:, :3]}, Y)])


class Decided(nn.Module):
    """Returns answers in place of scores, or none at all."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.inner, self.end = mlp(), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.inner(x))


@pytest.mark.parametrize("end", [lambda z: z > 0, lambda z: z.argmax(1), lambda z: z[:, :0]])
def test_answers_in_place_of_scores_are_refused_in_words(end: Any) -> None:
    with pytest.raises(ValueError, match=r"expected logits as floating-point numbers of shape \(n, c\)"):
        salgp.extract(Decided(end), [(X, Y)])


class Dropping(nn.Module):
    """Monte Carlo dropout: it stays on in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.inner.body(x), training=True)
        return self.inner.head(hidden)


def test_a_network_that_is_random_in_evaluation_mode_is_noticed() -> None:
    with pytest.warns(NetworkWarning, match="other scores for the same inputs"):
        salgp.extract(Dropping(), [(X, Y)])
    passes: list[int] = []
    model = mlp()
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    salgp.extract(model, [(X, Y)])
    assert len(passes) == 4  # the trace, one pass as it is, one with its layer disturbed, the data


def test_a_loader_is_no_batch() -> None:
    classifier = salgp.calibrate(mlp(), [(X, Y)], method="temperature")
    dataset = TensorDataset(X, Y)
    for given in (DataLoader(dataset, batch_size=8), dataset, iter([X])):
        with pytest.raises(TypeError, match=r"expected one batch, got a \w+ .* \.predict\(loader\)"):
            classifier(given)
    with pytest.raises(RuntimeError, match=r"inputs of shape a list; its own error"):
        classifier([X, Y])
    torch.testing.assert_close(classifier.predict([[X, Y]]).confidence, classifier(X).confidence)


def test_inputs_by_name_are_named() -> None:
    class Named(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            raise IndexError("index out of range in self")

    says = (
        r"of shape 'ids' \(n, 3\) of torch\.int64 and 'mask' \(n,\) of torch\.bool; its own error: index out"
    )
    batch = {"ids": torch.zeros(4, 3).long(), "mask": torch.ones(4).bool(), "labels": torch.zeros(4).long()}
    with pytest.raises(RuntimeError, match=says):
        salgp.extract(Named(), [batch])


def test_errors_that_are_not_of_the_inputs_stay_what_they_are() -> None:
    def pooling(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    def forward(model: nn.Module, batch: object) -> torch.Tensor:
        raise IndexError("mine, too")

    class Full(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("full")

    with pytest.raises(ValueError, match=r"^layer 'body': mine$"):
        salgp.extract(mlp(), [X], reader=salgp.Reader(pooling=pooling))
    with pytest.raises(IndexError, match=r"^mine, too$"):
        salgp.extract(mlp(), [X], reader=salgp.Reader(forward=forward))
    with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
        salgp.extract(Full(), [X])
