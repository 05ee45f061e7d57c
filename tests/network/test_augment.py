"""Perturbations and augmented features: strength 0 changes nothing, seeds repeat, the network stays as it
was.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from salgp.features import Features
from salgp.network.augment.corruptions import Spread, quantise
from salgp.network.augment.families import FAMILIES, KINDS, Family, families_for, layer_change
from salgp.network.batches import Batch
from salgp.network.extract import LEVELS, Augmentation, extract, read_calibration_data
from salgp.network.reader import Reader


def inputs(kind: str, n: int = 6) -> Tensor:
    g = torch.Generator().manual_seed(0)
    shape = {
        "images": (n, 2, 12, 12),
        "sequences": (n, 10, 3),
        "tabular": (n, 5),
    }[kind]
    return torch.randn(shape, generator=g)


PAIRS = [
    (kind, name)
    for kind, names in KINDS.items()
    if kind not in ("tokens", "text", "strings", "other")
    for name in names
] + []


@pytest.mark.parametrize(("kind", "name"), PAIRS)
class TestEveryFamily:
    def test_strength_zero_leaves_samples_alone(self, kind: str, name: str) -> None:
        x = inputs(kind)
        strength = torch.tensor([0.0, 1.0] * 3)
        out = FAMILIES[name](x, strength, torch.Generator().manual_seed(1))
        assert out.shape == x.shape
        assert out.isfinite().all()
        torch.testing.assert_close(out[::2], x[::2], atol=2e-6, rtol=1e-5)
        assert not torch.allclose(out[1::2], x[1::2])

    def test_seed_fixes_the_result(self, kind: str, name: str) -> None:
        x, s = inputs(kind), torch.ones(6)
        first, again, other = (FAMILIES[name](x, s, torch.Generator().manual_seed(k)) for k in (3, 3, 4))
        assert torch.equal(first, again)
        if name not in ("blur", "pixelate"):
            assert not torch.equal(first, other)

    def test_global_random_state_is_untouched(self, kind: str, name: str) -> None:
        before = torch.get_rng_state()
        FAMILIES[name](inputs(kind), torch.ones(6), torch.Generator().manual_seed(0))
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["noise", "gain", "blur", "channel-gain"])
def test_more_strength_moves_further(name: str) -> None:
    x = inputs("images", 40)
    moved = [
        (FAMILIES[name](x, torch.full((40,), s), torch.Generator().manual_seed(0)) - x).norm()
        for s in (0.2, 0.8)
    ]
    assert moved[0] < moved[1]


def test_families_are_found_by_kind_and_name() -> None:
    assert [f.name for f in families_for("auto", inputs("images"))] == list(KINDS["images"])
    assert [f.name for f in families_for("auto", torch.zeros(2, 3, dtype=torch.long))] == list(
        KINDS["tokens"]
    )
    assert all(f.inside for f in families_for("auto", torch.zeros(2, 3, 4, 4, dtype=torch.uint8)))
    assert all(f.inside for f in families_for("auto", None))
    with pytest.raises(ValueError, match="one of images"):
        families_for("nonsense")
    with pytest.raises(KeyError, match="no family of perturbations called 'nonsense'"):
        families_for(["nonsense"])


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(nn.Linear(5, 16), nn.ReLU()),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
            nn.Linear(16, 3),
        )


def labelled(n: int = 40) -> list[tuple[Tensor, Tensor]]:
    x = inputs("tabular", n)
    y = network()(x).argmax(dim=1)
    return [(x[: n // 2], y[: n // 2]), (x[n // 2 :], y[n // 2 :])]


def test_layer_families_change_only_the_chosen_rows() -> None:
    model, loader = network(), labelled()
    batch = Batch.of(loader[0])
    reader = Reader(layers=("0", "1")).resolved(model, batch)
    clean = reader.read(model, batch)
    layer, strength = torch.tensor([0, 1] * 10), torch.tensor([0.0] * 10 + [2.0] * 10)
    spreads = [Spread.of([x], table=False) for x in clean.layers.values()]
    change = layer_change(FAMILIES["layer-noise"], spreads, layer, strength, torch.Generator().manual_seed(0))
    changed = reader.read(model, batch, change=change)
    assert torch.equal(changed.logits[:10], clean.logits[:10])
    assert not torch.isclose(changed.logits[10:], clean.logits[10:]).all(dim=1).any()
    assert torch.equal(changed.layers["0"][11::2], clean.layers["0"][11::2])  # the second layer was disturbed
    assert not any(m._forward_hooks for m in model.modules())


def read(*arguments: Any, **options: Any) -> tuple[Features, torch.Tensor]:
    found = read_calibration_data(*arguments, **options)
    return found.features, found.labels


def test_augmentation_keeps_originals_and_groups() -> None:
    model, loader = network(), labelled()
    plain, labels = extract(model, loader, reader=Reader(layers=("0", "1")))
    reader = Reader(layers=("0", "1"))
    features, repeated = read(model, loader, reader, ["noise", "layer-noise"])
    assert len(features) == 3 * len(plain)
    assert torch.equal(features.logits[:40], plain.logits)
    assert torch.equal(features.groups, torch.arange(40).repeat(3))
    assert torch.equal(repeated, labels.repeat(3))
    assert 0.2 < float(features.correct(repeated)[40:].double().mean()) < 0.95


def test_extract_takes_families_by_name() -> None:
    model, loader = network(), labelled()
    features, labels = extract(model, loader, perturb="auto", reader=Reader(seed=3))
    again, _ = extract(model, loader, perturb="auto", reader=Reader(seed=3))
    assert len(features) == len(labels) == 40 * (1 + len(KINDS["tabular"]))
    assert torch.equal(features.logits, again.logits)
    assert not torch.equal(
        features.logits, extract(model, loader, perturb="auto", reader=Reader(seed=4))[0].logits
    )


def test_layers_that_lead_nowhere_are_not_disturbed() -> None:
    class DeadEnd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.side, self.head = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.trunk(x).relu()
            self.side(h)
            return self.head(h)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DeadEnd()
    features, _ = read(model, labelled(), Reader(layers=("trunk", "side")), ["layer-noise"])
    moved = (features.logits[40:] != features.logits[:40]).any(dim=1)
    assert moved.all()


def test_tokens_are_augmented_inside() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(20, 6), nn.Flatten(), nn.Sequential(nn.Linear(24, 8), nn.ReLU()), nn.Linear(8, 3)
        )
    x = torch.randint(20, (30, 4), generator=torch.Generator().manual_seed(0))
    features, _ = read(model, [(x, model(x).argmax(1))], Reader(layers=("2",)), "auto")
    assert len(features) == 30 * (1 + len(KINDS["tokens"]))
    with pytest.raises(ValueError, match="floating-point input"):
        read_calibration_data(model, [(x, model(x).argmax(1))], Reader(layers=("2",)), ["noise"])


def test_labels_are_needed_and_empty_loaders_refused() -> None:
    with pytest.raises(ValueError, match="needs labels"):
        read_calibration_data(network(), [inputs("tabular")], Reader(), "auto")
    with pytest.raises(ValueError, match="no batch"):
        read_calibration_data(network(), [], Reader(), "auto")


def test_own_family() -> None:
    def flip(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
        return torch.where(strength[:, None] > 0.5, -x, x)

    features, _ = read(network(), labelled(), Reader(layers=("0",)), [Family("flip", flip, 1.0)])
    assert len(features) == 80


def table(n: int = 200) -> Tensor:
    """Columns of scale 1 and 1e5, a binary one, a one-hot code of three, a count."""
    g = torch.Generator().manual_seed(0)
    one_hot = torch.eye(3)[torch.arange(n) % 3]
    small, large = torch.randn(n, 1, generator=g), 1e5 * torch.randn(n, 1, generator=g)
    binary = (torch.arange(n) % 4 == 0).float()[:, None]
    count = (torch.arange(n) % 7).float()[:, None]
    return torch.cat([small, large, binary, one_hot, count], dim=1)


@pytest.mark.parametrize("name", ["noise", "gain", "mixup", "channel-gain"])
def test_tables_are_disturbed_feature_by_feature(name: str) -> None:
    """Each column moves in its own unit, and discrete columns keep their values."""
    x = table()
    family = FAMILIES[name].on(Spread.of([x[:100], x[100:]]))
    new = family(x, torch.full((200,), 0.5), torch.Generator().manual_seed(0))
    moved = (new - x).std(dim=0)
    assert 0.05 < float(moved[0]) < 1.5
    assert 0.05 < float(moved[1]) / 1e5 < 1.5
    assert set(new[:, 2].tolist()) == {0.0, 1.0}
    assert set(new[:, 6].tolist()) <= set(range(7))
    assert torch.equal(new[:, 3:6].sum(dim=1), torch.ones(200))
    assert set(new[:, 3:6].flatten().tolist()) == {0.0, 1.0}
    assert not torch.equal(new[:, 2:], x[:, 2:])


def test_one_outlier_changes_nobody_elses_noise() -> None:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    wild = x.clone()
    wild[0] = 1e6
    scales = [Spread.of([data]).scale for data in (x, wild)]
    torch.testing.assert_close(scales[0], scales[1], rtol=0.15, atol=0)
    torch.testing.assert_close(scales[0], x.std(dim=0)[None], rtol=0.25, atol=0)
    images = (
        torch.randn(60, 2, 8, 8, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 50.0])[:, None, None]
    )
    spread = Spread.of([images[:30], images[30:]]).scale
    torch.testing.assert_close(spread[0, :, 0, 0], torch.tensor([1.0, 50.0]), rtol=0.1, atol=0)


@pytest.mark.parametrize("name", [f.name for f in FAMILIES.values() if f.measured and not f.tokens])
def test_one_sample_and_one_feature(name: str) -> None:
    shape = (1, 1, 4, 4) if name in ("occlude", "quantise") else (1, 1)
    new = FAMILIES[name](torch.ones(shape), torch.ones(1), torch.Generator().manual_seed(0))
    assert bool(new.isfinite().all())


def test_what_a_batch_gets_does_not_depend_on_its_company() -> None:
    """Scales are measured once: a batch of one sample is disturbed as strongly as a batch of many."""
    x = inputs("tabular", 64)
    family = FAMILIES["noise"].on(Spread.of([x]))
    alone = torch.cat(
        [family(row[None], torch.ones(1), torch.Generator().manual_seed(i)) for i, row in enumerate(x)]
    )
    assert 0.6 < float((alone - x).std()) < 1.6


def test_strengths_make_balanced_environments() -> None:
    found = read_calibration_data(
        network(), labelled(80), Reader(layers=("0", "1"), seed=1), ["noise", "layer-noise"]
    )
    features, n = found.features, 80
    assert features.strengths[:n].abs().max() == 0
    for family in (1, 2):
        own = features.strengths[features.families == family]
        levels, counts = own.unique(return_counts=True)
        torch.testing.assert_close(levels, torch.tensor(LEVELS, dtype=torch.float64))
        assert counts.tolist() == [10] * 8
    ratios = torch.tensor(LEVELS[1:]) / torch.tensor(LEVELS[:-1])
    torch.testing.assert_close(ratios, ratios[:1].expand(7))
    assert found.augmentation.families == ("noise", "layer-noise")
    correct = features.correct(found.labels)
    at = (features.families == 1) & torch.isclose(features.strengths, torch.tensor(LEVELS[-1]).double())
    assert found.augmentation.under[0][-1] == pytest.approx(float(correct[at].double().mean()))
    assert found.augmentation.accuracy == float(correct[:n].double().mean())
    again = Augmentation.from_json(json.loads(json.dumps(dataclasses.asdict(found.augmentation))))
    assert again == found.augmentation
    assert "layer-noise: scale" in str(again)


def test_layer_families_stop_where_accuracy_stops_falling() -> None:
    """A disturbance that does no harm however strong is not scaled up to its bound."""
    harmless = Family("harmless", lambda x, strength, generator: x, 4.0, inside=True)
    found = read_calibration_data(network(), labelled(160), Reader(layers=("0",)), [harmless])
    assert found.augmentation.scales == (0.25,)
    outside = Family("harmless", lambda x, strength, generator: x, 4.0)
    assert read_calibration_data(
        network(), labelled(160), Reader(layers=("0",)), [outside]
    ).augmentation.scales == (4.0,)


def test_batches_of_copies_are_large_and_in_order() -> None:
    """Loaders of tiny batches: copies run in few passes, and every row is still its original's."""
    x, y = inputs("tabular", 60), network()(inputs("tabular", 60)).argmax(1)
    calls: list[int] = []

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(len(batch[0]))
        return model(batch[0])

    loader = [(x[i : i + 1], y[i : i + 1]) for i in range(60)]
    same = Family("same", lambda x, strength, generator: x, 1.0)
    features, labels = read(network(), loader, Reader(layers=("0",), forward=forward), [same])
    torch.testing.assert_close(features.logits[60:], features.logits[:60])
    assert torch.equal(labels, y.repeat(2))
    assert calls[-1] == 60


def test_the_global_random_state_is_untouched_by_augmentation() -> None:
    state = torch.get_rng_state()
    loader = DataLoader(TensorDataset(*labelled()[0]), batch_size=5, shuffle=True)
    read_calibration_data(network(), loader, Reader(), "auto")
    assert torch.equal(torch.get_rng_state(), state)


class Exposed(nn.Module):
    """An image and how long it was exposed; brighter images were exposed longer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor, exposure: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(torch.cat([image, exposure], dim=1)).relu())
        return logits


def longer(inputs: Any, strength: Tensor, generator: torch.Generator) -> Any:
    """Both inputs grow by the same factor."""
    factor = (1 + strength)[:, None]
    if isinstance(inputs, dict):
        return {key: x * factor for key, x in inputs.items()}
    return tuple(x * factor for x in inputs)


class TestTogether:
    family = Family("longer", longer, 1.0, together=True)

    @staticmethod
    def exposed(n: int = 24) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(0)
        return torch.randn(n, 4, generator=g), torch.rand(n, 1, generator=g), torch.arange(n) % 3

    @pytest.mark.parametrize("named", [False, True], ids=["tuple", "names"])
    def test_all_inputs_change_by_one_function(self, named: bool) -> None:
        seen: list[Any] = []

        def watch(inputs: Any, strength: Tensor, generator: torch.Generator) -> Any:
            found = longer(inputs, strength, generator)
            seen.append((inputs, strength, found))
            return found

        image, exposure, labels = self.exposed()
        batch = (
            {"image": image, "exposure": exposure, "labels": labels} if named else (image, exposure, labels)
        )
        family = Family("longer", watch, 1.0, together=True)
        found = read_calibration_data(Exposed(), [batch], Reader(), [family], progress=False)
        assert found.augmentation.families == ("longer",)
        assert type(seen[-1][0]) is (dict if named else tuple)
        old, strength, new = seen[-1]
        for key in ("image", "exposure") if named else (0, 1):
            torch.testing.assert_close(new[key], old[key] * (1 + strength)[:, None])

    def test_copies_are_what_the_network_makes_of_all_inputs(self) -> None:
        network = Exposed()
        image, exposure, labels = self.exposed()
        found = read_calibration_data(
            network, [(image, exposure, labels)], Reader(), [self.family], progress=False
        )
        copies = found.features[found.features.families == 1]
        assert copies.strengths is not None
        factor = (1 + found.augmentation.scales[0] * copies.strengths.float())[:, None]
        with torch.no_grad():
            torch.testing.assert_close(copies.logits, network(image * factor, exposure * factor))

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda inputs, s, g: inputs[0], r"as it got them, .*; got \(24, 4\)"),
            (lambda inputs, s, g: inputs[:1], r"got \[\(24, 4\)\]"),
            (lambda inputs, s, g: (inputs[0][:, :2], inputs[1]), r"got \[\(24, 2\), "),
            (lambda inputs, s, g: None, "got NoneType"),
        ],
    )
    def test_what_comes_back_is_checked(self, wrong: Any, said: str) -> None:
        family = Family("wrong", wrong, 1.0, together=True)
        with pytest.raises(ValueError, match=said):
            read_calibration_data(Exposed(), [self.exposed()], Reader(), [family], progress=False)

    def test_a_missing_name_is_named(self) -> None:
        image, exposure, labels = self.exposed()
        family = Family("wrong", lambda inputs, s, g: {"image": image, "e": exposure}, 1.0, together=True)
        batch = {"image": image, "exposure": exposure, "labels": labels}
        with pytest.raises(ValueError, match=r"got {'image': .*, 'e': "):
            read_calibration_data(Exposed(), [batch], Reader(), [family], progress=False)


def test_quantised_values_stay_within_half_a_step_wherever_the_range_begins() -> None:
    """A range from 10 to 12: strength 1 leaves steps of 1, two over the range."""
    x = torch.linspace(10, 12, 64).reshape(1, 1, 8, 8).repeat(20, 1, 1, 1)
    one = torch.ones(1, 1, 1, 1)
    spread = Spread(11 * one, 0.6 * one, 10 * one, 12 * one)
    found = quantise(x, torch.ones(20), torch.Generator().manual_seed(0), spread)
    assert float((found - x).abs().max()) <= 0.5 + 1e-5
    assert {len(sample.unique()) for sample in found} <= {3, 4}
