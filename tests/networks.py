"""Small networks for tests: one of each family that features must be taken from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu


def sequential_cnn(n_classes: int = 3) -> nn.Sequential:
    """Plain sequential CNN for ``(N, 1, 16, 16)`` with batch-norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(16, n_classes),
    )


class FunctionalCNN(nn.Module):
    """Attributes conv1, conv2, fc1, fc2 and functional activations, for ``(N, 1, 16, 16)``."""

    def __init__(self, n_classes: int = 3) -> None:
        super().__init__()
        self.fc2 = nn.Linear(10, n_classes)  # defined before it is used: order is that of execution
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc1 = nn.Linear(6 * 25, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.conv1(x))
        x = avg_pool2d(relu(self.conv2(x)), 2, padding=0)[..., :5, :5]
        return self.fc2(relu(self.fc1(x.flatten(1)), inplace=True))


class ResidualBlock(nn.Module):
    """Two convolutions with batch-norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))) + self.downsample(x))


class ResidualNet(nn.Module):
    """A residual net with the module names of ResNet-18; ``width=64`` is its size."""

    def __init__(self, n_classes: int = 3, width: int = 4, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        for i in range(1, 5):
            blocks = (
                ResidualBlock(sizes[i - 1], sizes[i], 1 if i == 1 else 2),
                ResidualBlock(sizes[i], sizes[i], 1),
            )
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class GRUClassifier(nn.Module):
    """Stacked recurrent classifier for ``(N, T, 5)``, pooled by maximum over time."""

    def __init__(
        self,
        n_classes: int = 3,
        num_layers: int = 3,
        bidirectional: bool = True,
        batch_first: bool = True,
        kind: type = nn.GRU,
    ) -> None:
        super().__init__()
        self.gru = kind(5, 6, num_layers=num_layers, bidirectional=bidirectional, batch_first=batch_first)
        self.fc = nn.Linear(12 if bidirectional else 6, n_classes)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x if self.batch_first else x.transpose(0, 1))
        return self.fc(out.amax(dim=1 if self.batch_first else 0))


class TransformerClassifier(nn.Module):
    """``nn.TransformerEncoder`` over ``(N, T, 8)``, optionally with a padding mask."""

    def __init__(self, n_classes: int = 3, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=batch_first)
        self.head = nn.Linear(8, n_classes)
        self.batch_first = batch_first

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        h = self.encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
        return self.head(h.mean(dim=1 if self.batch_first else 0))


class ReusedNet(nn.Module):
    """One block that runs three times, for ``(N, 6)``."""

    def __init__(self, n_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


@dataclass
class Output:
    """A dataclass output."""

    loss: Tensor | None
    logits: Tensor


class Wrapped(nn.Module):
    """Returns the logits of an MLP on ``(N, 6)`` inside a container."""

    def __init__(self, kind: str, n_classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Linear(8, n_classes)
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        h = self.body(x)
        z = self.head(h)
        return {
            "tensor": z,
            "tuple": (z, h[:, None]),
            "scores first": (z, h),
            "scores last": (h, z),
            "list": [torch.zeros(()), z],
            "dict": {"hidden": h, "logits": z},
            "dataclass": Output(None, z),
            "nameless": {"scores": z},
            "binary": z[:, 0],
            "column": z[:, :1],
            "probabilities": z.softmax(1),
            "log-probabilities": z.log_softmax(1),
        }[self.kind]


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same network with seeded weights and buffers, so that tests do not depend on the global random
    state.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        for b in model.buffers():
            if b.is_floating_point():
                b.copy_(torch.rand(b.shape, generator=generator) + 0.5)
    return model
