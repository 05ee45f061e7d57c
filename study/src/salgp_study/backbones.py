"""The four networks of the paper, with their tapped layers.

`ConvNet` and `AConvNet` read ``(n, 1, 128, 128)`` chips and are tapped after each convolutional block,
`ResNet18` after the stem and its four stages, `MultiBandGRU` after each of its five recurrent depths.
``network.taps`` names the tapped submodules in the order of the forward pass, ready for `salgp.extract`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["AConvNet", "ConvNet", "MultiBandGRU", "ResNet18", "build_backbone"]


class ConvNet(nn.Module):
    """Four convolutions (16-32-64-128), dropout, Linear(128), classifier.

    Args:
        n_classes: number of classes ``c``.
        size: height and width of the input chips.
        dropout: probability after the last convolution.

    Example:
        >>> ConvNet(10, size=32)(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 10])
    """

    taps: ClassVar[tuple[str, ...]] = ("conv1", "conv2", "conv3", "conv4", "fc")

    def __init__(self, n_classes: int = 10, size: int = 128, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = _conv_block(1, 16, 3, padding=1)
        self.conv2 = _conv_block(16, 32, 3, padding=1)
        self.conv3 = _conv_block(32, 64, 3, padding=1)
        self.conv4 = _conv_block(64, 128, 3, padding=1, pool=False)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Sequential(nn.Linear(128 * (size // 8) ** 2, 128), nn.ReLU())
        self.classifier = nn.Linear(128, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, c)`` of chips ``(n, 1, size, size)``."""
        maps = self.dropout(self.conv4(self.conv3(self.conv2(self.conv1(x)))))
        logits: Tensor = self.classifier(self.fc(maps.flatten(1)))
        return logits


class AConvNet(nn.Module):
    """Modified all-convolutional network: 16-32-64-128-32, dropout, and a last convolution to the classes.

    Args:
        n_classes: number of classes ``c``.
        size: height and width of the input chips.
        dropout: probability before the last convolution.
        head: ``whole``: the last convolution covers the whole remaining map, so that flattening gives one
            logit per class. ``1x1``: "a 1x1 convolution over the feature map", averaged over the map.

    Example:
        >>> AConvNet(10)(torch.zeros(2, 1, 128, 128)).shape
        torch.Size([2, 10])
    """

    taps: ClassVar[tuple[str, ...]] = ("conv1", "conv2", "conv3", "conv4", "conv5")

    def __init__(
        self, n_classes: int = 10, size: int = 128, dropout: float = 0.5, head: str = "whole"
    ) -> None:
        super().__init__()
        if head not in ("whole", "1x1"):
            raise ValueError(f"head must be 'whole' or '1x1', got {head!r}")
        self.conv1 = _conv_block(1, 16, 5, padding=2)
        self.conv2 = _conv_block(16, 32, 5, padding=2)
        self.conv3 = _conv_block(32, 64, 5, padding=2)
        self.conv4 = _conv_block(64, 128, 5, padding=2, pool=False)
        self.conv5 = _conv_block(128, 32, 3, stride=2, padding=1, pool=False)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Conv2d(32, n_classes, size // 16 if head == "whole" else 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, c)`` of chips ``(n, 1, size, size)``."""
        maps = self.conv5(self.conv4(self.conv3(self.conv2(self.conv1(x)))))
        logits: Tensor = self.classifier(self.dropout(maps)).mean(
            dim=(2, 3)
        )  # one position, or their average
        return logits


class ResNet18(nn.Module):
    """ResNet-18 with a one-channel stem; tapped after the stem and the four stages.

    Args:
        n_classes: number of classes ``c``.
        width: channels of the first stage; 64 is the published network.
        pre_activation: tap the maps before the last ReLU of the stem and of each stage. The weights and the
            logits are the same.

    Example:
        >>> ResNet18(10, width=8)(torch.zeros(2, 1, 64, 64)).shape
        torch.Size([2, 10])
    """

    taps: ClassVar[tuple[str, ...]] = ("stem", "stage1", "stage2", "stage3", "stage4")

    def __init__(self, n_classes: int = 10, width: int = 64, pre_activation: bool = False) -> None:
        super().__init__()
        if pre_activation:
            stages = tuple(f"stage{k}.1.before_relu" for k in range(1, 5))
            self.taps = ("stem.1", *stages)  # type: ignore[misc]
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.stage1 = _stage(width, width, 1)
        self.stage2 = _stage(width, 2 * width, 2)
        self.stage3 = _stage(2 * width, 4 * width, 2)
        self.stage4 = _stage(4 * width, 8 * width, 2)
        self.classifier = nn.Linear(8 * width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, c)`` of chips ``(n, 1, h, w)``."""
        maps = self.stage4(self.stage3(self.stage2(self.stage1(self.stem(x)))))
        logits: Tensor = self.classifier(maps.mean(dim=(2, 3)))
        return logits


class MultiBandGRU(nn.Module):
    """One stack of bidirectional GRUs per passband, max over time, metadata, two Linear-BN-ReLU layers,
    classifier.

    Each depth is a GRU of its own per band, and ``depth{k}`` joins the bands' hidden states of that depth,
    maximum over time with the padding left out, so that forward hooks see every depth as a ``(n, n_bands * 2
    * hidden)`` feature.

    Args:
        n_classes: number of classes ``c``.
        n_bands: passbands; 6 for ugrizy, 4 for griz.
        n_meta: metadata features per object.
        hidden: width of each direction of each GRU.
        depth: number of stacked GRUs per band.
        n_inputs: values per time step, without the mask.

    Example:
        >>> net = MultiBandGRU(3, n_bands=2, n_meta=1, hidden=4)
        >>> curves = torch.zeros(5, 2, 7, 4)
        >>> curves[:, :, :3, 3] = 1  # the last channel is the mask
        >>> net(curves, torch.zeros(5, 1)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        n_classes: int,
        n_bands: int = 6,
        n_meta: int = 6,
        hidden: int = 32,
        depth: int = 5,
        n_inputs: int = 3,
    ) -> None:
        super().__init__()
        widths = [n_inputs] + [2 * hidden] * (depth - 1)
        self.grus = nn.ModuleList(
            nn.ModuleList(nn.GRU(w, hidden, batch_first=True, bidirectional=True) for w in widths)
            for _ in range(n_bands)
        )
        self.taps = tuple(f"depth{k + 1}" for k in range(depth))
        for name in self.taps:
            self.add_module(name, _JoinBands())
        self.head = nn.Sequential(
            nn.Linear(n_bands * 2 * hidden + n_meta, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(64, n_classes)

    def forward(self, curves: Tensor, meta: Tensor) -> Tensor:
        """Logits ``(n, c)``.

        Args:
            curves: ``(n, n_bands, T, n_inputs + 1)``, steps left-aligned; the last channel is 1 where
                observed, 0 where padded.
            meta: ``(n, n_meta)`` metadata features.
        """
        mask = curves[..., -1]  # (n, n_bands, T)
        lengths = mask.sum(dim=2).long().clamp(min=1)
        states = curves[:, :, : int(lengths.max()), :-1]
        for k, name in enumerate(self.taps):
            states = _run_grus([stack[k] for stack in self.grus], states, lengths)  # type: ignore[index]
            pooled = self.get_submodule(name)(states, lengths)
        logits: Tensor = self.classifier(self.head(torch.cat([pooled, meta], dim=1)))
        return logits


def build_backbone(name: str, **arguments: Any) -> nn.Module:
    """Build a backbone by the name used in the study.

    Example:
        >>> build_backbone("convnet", n_classes=4, size=32).taps
        ('conv1', 'conv2', 'conv3', 'conv4', 'fc')
    """
    known: dict[str, type[nn.Module]] = {
        "aconvnet": AConvNet,
        "convnet": ConvNet,
        "resnet18": ResNet18,
        "rnn": MultiBandGRU,
    }
    if name not in known:
        raise KeyError(f"no backbone called {name!r}; known: {', '.join(known)}")
    return known[name](**arguments)


class _BasicBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        same = stride == 1 and n_in == n_out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))
        )
        self.before_relu = nn.Identity()  # a place to tap the sum

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.before_relu(self.body(x) + self.shortcut(x)))


class _JoinBands(nn.Module):
    def forward(self, states: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.arange(states.shape[2], device=states.device)
        padded = steps[None, None] >= lengths[..., None]  # (n, n_bands, T)
        return states.masked_fill(padded[..., None], -torch.inf).amax(dim=2).flatten(1)


def _conv_block(
    n_in: int, n_out: int, kernel: int, stride: int = 1, padding: int = 0, pool: bool = True
) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(n_in, n_out, kernel, stride, padding), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def _stage(n_in: int, n_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_BasicBlock(n_in, n_out, stride), _BasicBlock(n_out, n_out, 1))


def _run_grus(grus: list[nn.GRU], x: Tensor, lengths: Tensor) -> Tensor:
    """Hidden states ``(n, n_bands, T, 2 * hidden)`` of a bidirectional GRU per band, in one loop over time.

    What `nn.GRU` gives for packed sequences, band by band: a state does not move where there is nothing to
    read, so that the backward direction starts at the last observation. One product for all bands and
    directions is several times faster than small products one after the other.

    Args:
        grus: one per band, bidirectional, of the same width.
        x: ``(n, n_bands, T, w)`` inputs.
        lengths: ``(n, n_bands)`` observed steps.
    """
    n, n_bands, n_steps, _ = x.shape
    observed = torch.arange(n_steps, device=x.device) < lengths[..., None]  # (n, n_bands, T)
    read = [_stacked(grus, f"{name}_l0") for name in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]
    weight_in, bias_in, weight, bias = read  # (2, n_bands, 3 * hidden, ...)
    rows = x.permute(1, 2, 0, 3).reshape(n_bands, n_steps * n, -1)
    gates = rows @ weight_in.mT + bias_in[:, :, None]  # (2, n_bands, T * n, 3 * hidden)
    gates = _both_ways(gates.unflatten(2, (n_steps, n)))
    moves = _both_ways(observed.permute(1, 2, 0)[None, ..., None].expand(2, -1, -1, -1, 1))
    states = _gru_states(gates, moves, weight.mT, bias[:, :, None])
    forward, backward = _both_ways(states)
    return torch.cat([forward, backward], dim=-1).permute(2, 0, 1, 3)


def _gru_states(gates: Tensor, moves: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The recurrence: states ``(2, n_bands, T, n, hidden)`` from the inputs' share of the gates."""
    hidden = weight.shape[-2]
    state = gates.new_zeros(*gates.shape[:2], gates.shape[3], hidden)
    states = []
    parts = (2 * hidden, hidden)
    switches, proposals = (part.unbind(2) for part in gates.split(parts, dim=-1))
    for switch, proposal, moved in zip(switches, proposals, moves.unbind(2), strict=True):
        own_switch, own_proposal = (state @ weight + bias).split(parts, dim=-1)
        reset, update = torch.sigmoid(switch + own_switch).chunk(2, dim=-1)
        candidate = torch.tanh(proposal + reset * own_proposal)
        state = torch.where(moved, torch.lerp(candidate, state, update), state)
        states.append(state)
    return torch.stack(states, dim=2)


def _stacked(grus: list[nn.GRU], name: str) -> Tensor:
    """A parameter of both directions and all bands as one tensor."""
    ways = (name, f"{name}_reverse")
    return torch.stack([torch.stack([gru.get_parameter(way) for gru in grus]) for way in ways])


def _both_ways(x: Tensor) -> Tensor:
    """Turn the time (dimension 2) of the second direction round."""
    return torch.stack([x[0], x[1].flip(1)])
