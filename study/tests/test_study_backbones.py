"""The networks: shapes, tapped layers, and that padding never reaches a recurrent feature."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from salgp_study.backbones import AConvNet, ConvNet, MultiBandGRU, ResNet18, build_backbone

IMAGE = [
    ("convnet", {"size": 64}, (1024, 256, 64, 64)),
    ("aconvnet", {"size": 64}, (1024, 256, 64, 64, 16)),
    ("resnet18", {}, (256, 256, 64, 16, 4)),
]


def tapped(network: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    handles = [
        network.get_submodule(t).register_forward_hook(lambda m, i, o, t=t: seen.__setitem__(t, o))
        for t in network.taps
    ]
    with torch.no_grad():
        network.eval()(*inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("name", "arguments", "pixels"), IMAGE)
def test_image_networks_have_five_taps_of_the_expected_size(
    name: str, arguments: dict[str, int], pixels: tuple[int, ...]
) -> None:
    network = build_backbone(name, n_classes=10, **arguments)
    seen = tapped(network, torch.rand(2, 1, 64, 64))
    assert len(network.taps) == 5
    assert list(seen) == list(network.taps), "hooks fire in the order of the forward pass"
    maps = [x.shape[2] * x.shape[3] for x in seen.values() if x.ndim == 4]
    assert tuple(maps) == pixels


def test_channels_are_the_papers() -> None:
    def channels(network: nn.Module) -> list[int]:
        return [m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d)]

    assert channels(ConvNet(10)) == [16, 32, 64, 128]
    assert channels(AConvNet(10)) == [16, 32, 64, 128, 32, 10]
    assert (
        sum(p.numel() for p in ResNet18(10).parameters()) == 11_175_370
    )  # ResNet-18 with one input channel and ten classes
    assert ResNet18(10).stage4[1].body[0].out_channels == 512


def test_gru_has_one_stack_per_band_and_ignores_padding() -> None:
    network = MultiBandGRU(3, n_bands=2, n_meta=1, hidden=4).eval()
    assert sum(isinstance(m, nn.GRU) for m in network.modules()) == 2 * 5
    curves = torch.zeros(3, 2, 6, 4)
    curves[:, :, :4, :3] = torch.randn(3, 2, 4, 3)
    curves[:, :, :4, 3] = 1
    meta = torch.zeros(3, 1)
    longer = nn.functional.pad(curves, (0, 0, 0, 5))
    junk = longer.clone()
    junk[:, :, 4:, :3] = 99.0
    reference = tapped(network, curves, meta)
    for other in (longer, junk):
        for name, x in tapped(network, other, meta).items():
            torch.testing.assert_close(x, reference[name])
    assert reference["depth5"].shape == (3, 2 * 2 * 4)


def test_gru_depth_is_the_maximum_over_time_of_that_depth() -> None:
    network = MultiBandGRU(3, n_bands=1, n_meta=1, hidden=4).eval()
    curves = torch.randn(2, 1, 5, 4)
    curves[..., 3] = 1
    state = curves[:, 0, :, :3]
    seen = tapped(network, curves, torch.zeros(2, 1))
    for k in range(5):
        state = network.grus[0][k](state)[0]
        torch.testing.assert_close(seen[f"depth{k + 1}"], state.amax(dim=1))


def test_grus_of_all_bands_at_once_equal_packed_sequences_band_by_band() -> None:
    network = MultiBandGRU(3, n_bands=3, n_meta=1, hidden=4).double().eval()
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 10, (8, 3), generator=random)
    curves = torch.randn(8, 3, 12, 4, generator=random).double()  # three steps that no curve reaches
    curves[..., 3] = (torch.arange(12) < lengths[..., None]).double()
    seen = tapped(network, curves, torch.zeros(8, 1).double())
    for band, stack in enumerate(network.grus):
        state = curves[:, band, :, :3]
        for k, gru in enumerate(stack):
            packed = pack_padded_sequence(state, lengths[:, band], batch_first=True, enforce_sorted=False)
            state, _ = pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=12)
            highest = torch.stack(
                [row[:n].amax(dim=0) for row, n in zip(state, lengths[:, band], strict=True)]
            )
            torch.testing.assert_close(seen[f"depth{k + 1}"].unflatten(1, (3, 8))[:, band], highest)


def test_gru_survives_a_band_without_observations() -> None:
    network = MultiBandGRU(3, n_bands=2, n_meta=1, hidden=4).eval()
    assert torch.isfinite(network(torch.zeros(2, 2, 5, 4), torch.zeros(2, 1))).all()


def test_unknown_backbone_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="convnet"):
        build_backbone("vgg")
