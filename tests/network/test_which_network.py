"""Features know which network they come from, and a calibrator refuses those of another."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.network import frozen_copy
from salgp.network.extract import read_calibration_data
from salgp.network.frozen_copy import FrozenCopy, fingerprint

G = torch.Generator
X = torch.randn(200, 4, generator=G().manual_seed(0))
Y = (X[:, :3] + 0.5 * torch.randn(200, 3, generator=G().manual_seed(1))).argmax(1)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


def calibrated(model: nn.Module) -> salgp.CalibratedClassifier:
    return salgp.calibrate(model, [(X, Y)], method="density-aware", perturb=False)


def fine_tune(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()


def fine_tune_fused(model: nn.Module) -> None:
    """Fused optimizers do not count the versions of the weights that they change."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    before = model[0].weight._version
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert model[0].weight._version == before


def move_statistics(model: nn.Module) -> None:
    model.train()(X)
    model.eval()


def replace_weight(model: nn.Module) -> None:
    model[3].weight = nn.Parameter(torch.zeros_like(model[3].weight))


@pytest.mark.parametrize("change", [fine_tune, fine_tune_fused, move_statistics, replace_weight])
def test_a_network_trained_further_is_refused(change: object, tmp_path: Path) -> None:
    model = network()
    classifier = calibrated(model)
    classifier(X)
    change(model)  # type: ignore[operator]
    for refused in (
        lambda: classifier(X),
        lambda: classifier.predict([X]),
        lambda: classifier.save(tmp_path),
    ):
        with pytest.raises(ValueError, match="other weights"):
            refused()
    classifier.calibrator.network_ = None
    assert len(classifier(X)) == len(X)
    classifier.save(tmp_path / "kept")


def test_what_does_not_change_the_weights_is_accepted(tmp_path: Path) -> None:
    model = network()
    classifier = calibrated(model)
    before = classifier(X).probs
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same numbers, written again
    model.requires_grad_(False)
    model.train()
    assert torch.equal(classifier(X).probs, before)
    assert torch.equal(classifier.to("cpu")(X).probs, before)
    again = salgp.load(classifier.save(tmp_path), model)
    assert torch.equal(again(X).probs, before)


def test_the_weights_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hashed = network(), []
    real = fingerprint
    monkeypatch.setattr(frozen_copy, "fingerprint", lambda m: hashed.append(m) or real(m))
    classifier = calibrated(model)
    for _ in range(5):
        classifier(X)
    assert len(hashed) == 1
    fine_tune(model)
    with pytest.raises(ValueError):
        classifier(X)
    assert len(hashed) == 2


def test_features_of_a_sibling_are_refused() -> None:
    classifier = calibrated(network())
    own, _ = salgp.extract(network(), [X])
    sibling, _ = salgp.extract(network(1), [X])
    classifier.calibrator.predict(own)
    with pytest.raises(ValueError, match="other weights"):
        classifier.calibrator.predict(sibling)
    with pytest.raises(ValueError, match="reference"):
        salgp.calibrators.get("density-aware").fit(own, Y, (sibling, Y))
    arrays = salgp.Features(own.logits, own.layers)
    assert len(classifier.calibrator.predict(arrays)) == len(X)
    by_arrays = salgp.calibrators.get("density-aware").fit(arrays, Y)
    assert len(by_arrays.predict(sibling)) == len(X)


def test_the_fingerprint_travels(tmp_path: Path) -> None:
    features, _ = salgp.extract(network(), [X])
    name = fingerprint(network()).weights
    both = salgp.Features.concatenate([features, features[:5]])
    for kept in (features[:5], features[[7, 9]], features.select([]), features.to(torch.float64), both):
        assert kept.network == name
    assert salgp.Features.load(features.save(tmp_path / "f.safetensors")).network == name
    with pytest.raises(ValueError, match="different networks"):
        salgp.Features.concatenate([features, salgp.extract(network(1), [X])[0]])
    assert (
        salgp.Features.concatenate([features, salgp.Features(features.logits, features.layers)]).network
        is None
    )


def test_a_calibrator_keeps_its_network(tmp_path: Path) -> None:
    classifier = calibrated(network())
    again = salgp.load(classifier.calibrator.save(tmp_path))
    assert again.network_ == fingerprint(network()).weights
    with pytest.raises(ValueError, match="other weights"):
        again.predict(salgp.extract(network(1), [X])[0])


def test_other_weights_are_accepted_where_load_is_told_so(tmp_path: Path) -> None:
    calibrated(network()).save(tmp_path)
    with pytest.raises(ValueError, match="other weights"):
        salgp.load(tmp_path, network(1))
    assert len(salgp.load(tmp_path, network(1), strict=False)(X)) == len(X)


def test_a_weight_written_behind_the_counter_is_seen_when_saved(tmp_path: Path) -> None:
    """``.data`` does not count versions: the look before a prediction is cheap, that before saving is not."""
    model = network()
    classifier = calibrated(model)
    model[0].weight.data.add_(1.0)
    with pytest.raises(ValueError, match="other weights"):
        classifier.save(tmp_path)


def test_tensors_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = network()
    assert FrozenCopy(model).weights == fingerprint(model).weights


class Outputs(nn.Module):
    """Scores of the first columns, through a last function."""

    def __init__(self, last: nn.Module, columns: int) -> None:
        super().__init__()
        self.columns, self.last = columns, last

    def forward(self, x: Tensor) -> Tensor:
        z = 3 * x[:, : self.columns]
        return self.last(z)


@pytest.mark.parametrize(("last", "columns"), [(nn.Softmax(1), 3), (nn.Softmax(1), 2), (nn.Sigmoid(), 1)])
def test_probabilities_must_be_declared(last: nn.Module, columns: int) -> None:
    y = X[:, :columns].argmax(1) if columns > 1 else (X[:, 0] > 0).long()
    for call in (salgp.calibrate, salgp.extract):
        with pytest.raises(ValueError, match="output='probabilities'"):
            call(Outputs(last, columns), [(X, y)])
    features, _ = salgp.extract(Outputs(last, columns), [(X, y)], output="probabilities")
    assert float(features.correct(y).double().mean()) > 0.7
    features, _ = salgp.extract(Outputs(last, columns), [(X, y)], output="logits")
    assert len(features) == len(X)


def test_a_regression_on_zero_and_one_is_no_log_odds() -> None:
    """Accuracy .64 instead of .91, read as log-odds."""
    y = (X[:, 0] + 0.3 * X[:, 1] > 0).long()
    design = torch.cat([X, torch.ones(len(X), 1)], dim=1)
    weights = torch.linalg.lstsq(design, y[:, None].float()).solution
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(weights[:4].T)
        model.bias.copy_(weights[4])
    with pytest.raises(ValueError, match="regression"):
        salgp.calibrate(model, [(X, y)], method="temperature")
    reader = salgp.Reader(forward=lambda model, batch: model(batch[0]) - 0.5)
    features, labels = salgp.extract(model, [(X, y)], reader=reader)
    assert float(features.correct(labels).double().mean()) > 0.9
    salgp.extract(model, [(X, y)], output="logits")


@pytest.mark.parametrize("scale", [0.2, 1.0, 8.0])
def test_log_odds_of_any_scale_are_accepted(scale: float) -> None:
    z = scale * torch.randn(400, 1, generator=G().manual_seed(0))
    y = (torch.rand(400, generator=G().manual_seed(1)) < torch.sigmoid(z[:, 0])).long()
    assert len(salgp.extract(nn.Identity(), [(z, y)])[0]) == 400


def test_segmentation_is_calibrated_by_position() -> None:
    images = torch.randn(20, 1, 6, 6, generator=G().manual_seed(0))
    model = nn.Conv2d(1, 3, 1)
    z = model(images).detach()
    labels = (z + torch.randn(z.shape, generator=G().manual_seed(1))).argmax(1)
    with pytest.raises(ValueError, match=r"several positions .*calibrate_outputs\(scores\.movedim"):
        salgp.calibrate(model, [(images, labels)])
    found = salgp.calibrate_outputs(z.movedim(1, -1).flatten(0, -2), labels.flatten(), method="temperature")
    assert len(found.predict(z.movedim(1, -1).flatten(0, -2))) == 20 * 36


def test_several_mappings_are_no_batch() -> None:
    classifier = calibrated(network())
    with pytest.raises(TypeError, match=r"expected one batch, .*\.predict\(loader\)"):
        classifier([{"input": X[:2]}, {"input": X[2:4]}])


class Slow(nn.Module):
    """Takes a millisecond for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1e-3 * len(x))
        return self.last(self.first(x).relu())


@pytest.mark.parametrize(("budget", "enough"), [(0.3, False), (60.0, True)])
def test_a_budget_decides_how_many_samples_are_augmented(budget: float, enough: bool) -> None:
    x, y = X.repeat(4, 1), Y.repeat(4)
    loader = [(x[i : i + 50], y[i : i + 50]) for i in range(0, len(x), 50)]
    options: dict[str, Any] = {"reference": loader * 2, "perturb": ["noise", "gain"], "budget": budget}
    found = read_calibration_data(Slow(), loader, salgp.Reader(), **options)
    assert found.augmentation is not None
    assert found.reference is not None
    families, groups = found.features.families, found.features.groups
    assert families is not None
    assert groups is not None
    if enough:
        assert found.augmentation.per_sample == 3
        assert int((families == 2).sum()) == 3 * len(x)
        assert len(found.reference[1]) == 2 * len(x)
        assert "reference" not in str(found.augmentation)
    else:
        assert found.augmentation.per_sample < 0.5
        assert 0 < int((families == 1).sum()) < len(x)
        assert len(found.reference[1]) == 50  # one of its 32 batches
        assert "read of the reference: 3%" in str(found.augmentation)
    assert torch.equal(found.labels, y[groups])
    with pytest.raises(ValueError, match="positive"):
        read_calibration_data(Slow(), loader, salgp.Reader(), budget=0.0)


@pytest.mark.parametrize("change", [nn.Tanh(), nn.LeakyReLU(0.5)])
def test_a_module_replaced_after_calibration_is_refused(tmp_path: Path, change: nn.Module) -> None:
    """Its weights are the same, so their fingerprint does not tell."""
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    model = networks.randomised(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.1), nn.Linear(8, 3)))
    y = torch.where(torch.arange(80) % 4 > 0, model(x).argmax(1), 0)
    classifier = salgp.calibrate(model, [(x, y)], method="temperature")
    before, model[1] = model[1], change
    for use in (
        lambda: classifier(x),
        lambda: classifier.predict([x]),
        lambda: classifier.save(tmp_path / "c"),
    ):
        with pytest.raises(ValueError, match="calibrate again"):
            use()
    model[1] = before
    model.register_forward_hook(lambda *_: None)  # not a part of what it computes
    assert len(classifier(x)) == 80
    classifier.save(tmp_path / "c")


def test_what_was_calibrated_for_inference_follows_outside_of_it() -> None:
    model = network()
    with torch.inference_mode():
        classifier = calibrated(model)
        before = classifier(X[:3]).confidence
    torch.testing.assert_close(classifier(X[:3]).confidence, before)
    model[1].running_mean += 1.0
    with pytest.raises(ValueError, match="trained further"):
        classifier(X[:3])
