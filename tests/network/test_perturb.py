"""Perturbations and rehearsed features: strength 0 changes nothing, seeds repeat, the network stays as it
was.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from salgp.network.batches import Batch
from salgp.network.extract import extract
from salgp.network.perturb import FAMILIES, KINDS, Family, families_for, layer_change
from salgp.network.reader import Reader
from salgp.network.rehearsal import rehearse
from salgp.network.signals import Spread


def inputs(kind: str, n: int = 6) -> Tensor:
    g = torch.Generator().manual_seed(0)
    shape = {
        "images": (n, 2, 12, 12),
        "sequences": (n, 10, 3),
        "tabular": (n, 5),
        "light-curves": (n, 2, 9, 4),
    }[kind]
    x = torch.randn(shape, generator=g)
    if kind == "light-curves":
        x[..., 0] = torch.arange(9) / 10
        x[..., 2] = 0.1
        x[..., 3] = (torch.arange(9) < 7).float()
        x = x * x[..., 3:]
    return x


PAIRS = [(kind, name) for kind, names in KINDS.items() if kind != "tokens" for name in names] + [
    ("images", "patch-mix"),
    ("images", "speckle"),
]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
class TestEveryFamily:
    def test_strength_zero_leaves_samples_alone(self, kind: str, name: str) -> None:
        x = inputs(kind)
        strength = torch.tensor([0.0, 1.0] * 3)
        out = FAMILIES[name](x, strength, torch.Generator().manual_seed(1))
        assert out.shape == x.shape
        assert out.isfinite().all()
        if name != "dimming":  # dimming rescales to the loader's unit flux
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


@pytest.mark.parametrize("name", ["noise", "gain", "blur", "speckle", "channel-gain", "flux-noise"])
def test_more_strength_moves_further(name: str) -> None:
    x = inputs("light-curves" if name == "flux-noise" else "images", 40)
    moved = [
        (FAMILIES[name](x, torch.full((40,), s), torch.Generator().manual_seed(0)) - x).norm()
        for s in (0.2, 0.8)
    ]
    assert moved[0] < moved[1]


def test_speckle_keeps_the_mean_level() -> None:
    x = torch.rand(8, 1, 40, 40, generator=torch.Generator().manual_seed(1)) + 1.0
    x[0, 0, 0, 0] = 0.0
    out = FAMILIES["speckle"](x, torch.full((8,), 0.5), torch.Generator().manual_seed(0))
    assert abs(float(out.mean() / x.mean()) - 1) < 0.01


def test_lost_epochs_leave_observations_in_front() -> None:
    x = inputs("light-curves", 50)
    out = FAMILIES["epoch-drop"](x, torch.ones(50), torch.Generator().manual_seed(0))
    mask = out[..., 3]
    assert (mask.diff(dim=-1) <= 0).all()
    assert (mask.sum(dim=-1) >= 1).all()
    assert mask.sum() < 0.4 * x[..., 3].sum()
    times = {round(float(t), 4) for t in out[0, 0, :, 0][mask[0, 0] > 0]}
    assert times <= {round(float(t), 4) for t in x[0, 0, :7, 0]}


def test_families_are_found_by_kind_and_name() -> None:
    assert [f.name for f in families_for("auto", inputs("images"))] == list(KINDS["images"])
    assert all(f.inside for f in families_for("auto", torch.zeros(2, 3, dtype=torch.long)))
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
    reader = Reader(layers=("0", "1")).settled(model, batch)
    clean = reader.read(model, batch)
    layer, strength = torch.tensor([0, 1] * 10), torch.tensor([0.0] * 10 + [2.0] * 10)
    spreads = [Spread.of([x], table=False) for x in clean.layers.values()]
    change = layer_change(FAMILIES["layer-noise"], spreads, layer, strength, torch.Generator().manual_seed(0))
    changed = reader.read(model, batch, change=change)
    assert torch.equal(changed.logits[:10], clean.logits[:10])
    assert not torch.isclose(changed.logits[10:], clean.logits[10:]).all(dim=1).any()
    assert torch.equal(changed.layers["0"][11::2], clean.layers["0"][11::2])  # the second layer was disturbed
    assert not any(m._forward_hooks for m in model.modules())


def test_rehearsal_keeps_originals_and_groups() -> None:
    model, loader = network(), labelled()
    plain, labels = extract(model, loader, layers=("0", "1"))
    _, features, repeated = rehearse(
        model, loader, Reader(layers=("0", "1")), ["noise", "layer-noise"], copies=2
    )
    assert len(features) == 5 * len(plain)
    assert torch.equal(features.logits[:40], plain.logits)
    assert torch.equal(features.groups, torch.arange(40).repeat(5))
    assert torch.equal(repeated, labels.repeat(5))
    assert 0.2 < float(features.correct(repeated)[40:].double().mean()) < 0.95


def test_extract_takes_families_by_name() -> None:
    model, loader = network(), labelled()
    features, labels = extract(model, loader, perturb="auto", seed=3)
    again, _ = extract(model, loader, perturb="auto", seed=3)
    assert len(features) == len(labels) == 40 * (1 + len(KINDS["tabular"]))
    assert torch.equal(features.logits, again.logits)
    assert not torch.equal(features.logits, extract(model, loader, perturb="auto", seed=4)[0].logits)


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
    _, features, _ = rehearse(model, labelled(), Reader(layers=("trunk", "side")), ["layer-noise"], copies=1)
    moved = (features.logits[40:] != features.logits[:40]).any(dim=1)
    assert moved.all()


def test_tokens_are_rehearsed_inside() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(20, 6), nn.Flatten(), nn.Sequential(nn.Linear(24, 8), nn.ReLU()), nn.Linear(8, 3)
        )
    x = torch.randint(20, (30, 4), generator=torch.Generator().manual_seed(0))
    _, features, _ = rehearse(model, [(x, model(x).argmax(1))], Reader(layers=("2",)), "auto", copies=1)
    assert len(features) == 30 * (1 + len(KINDS["tokens"]))
    with pytest.raises(ValueError, match="floating-point input"):
        rehearse(model, [(x, model(x).argmax(1))], Reader(layers=("2",)), ["noise"])


def test_labels_are_needed_and_empty_loaders_refused() -> None:
    with pytest.raises(ValueError, match="need labels"):
        rehearse(network(), [inputs("tabular")], Reader())
    with pytest.raises(ValueError, match="no batch"):
        rehearse(network(), [], Reader())


def test_own_family() -> None:
    def flip(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
        return torch.where(strength[:, None] > 0.5, -x, x)

    _, features, _ = rehearse(
        network(), labelled(), Reader(layers=("0",)), [Family("flip", flip, 1.0)], copies=1
    )
    assert len(features) == 80
