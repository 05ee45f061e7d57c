"""CIFAR-10 with public ResNets (ResNet-20: 91.73 % on the test images).

The networks were trained on all 50,000 training images, so calibration samples are taken from the test
images: 1,000 by seed from the first 8,500 of a fixed order. The other 9,000 test in domain; the last 1,500 of
the order are corrupted, and are the same for every seed. The reference is 5,000 training images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import TensorDataset

from salgp.io import read_tensors
from salgp_study.sources import data_folder
from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.images import corrupted_sets

__all__ = ["CifarResNet", "cifar10"]

N_CALIBRATION, N_REFERENCE, N_CORRUPTED = 1_000, 5_000, 1_500
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
SPREAD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


class _Block(nn.Module):
    """Two convolutions and a shortcut that halves by slicing and adds channels of zeros (option A)."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.stride, self.extra = stride, (n_out - n_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        short = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra))
        return torch.relu(y + short)


class CifarResNet(nn.Module):
    """The ResNets of He et al. for 32 x 32 images: three stages of ``(depth - 2) / 6`` blocks, 16-32-64
    channels.

    Example:
        >>> CifarResNet(20)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int, n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, 1, (depth - 2) // 6)
        self.layer2 = _stage(16, 32, 2, (depth - 2) // 6)
        self.layer3 = _stage(32, 64, 2, (depth - 2) // 6)
        self.linear = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, c)`` of normalised images ``(n, 3, 32, 32)``."""
        stem = torch.relu(self.bn1(self.conv1(x)))
        maps = self.layer3(self.layer2(self.layer1(stem)))
        logits: Tensor = self.linear(maps.mean(dim=(2, 3)))
        return logits


def cifar10(depth: int) -> Callable[[int, Path | None, Path], Case]:
    """CIFAR-10 with the public ResNet of this depth; a seed is a draw of the calibration images."""
    return partial(_cifar10, depth)


def _cifar10(depth: int, seed: int, data: Path | None, cache: Path) -> Case:
    folder = data_folder(data)
    with np.load(folder / "cifar10.npz", allow_pickle=False) as file:
        test, y_test, train, y_train = (file[k] for k in ("x_test", "y_test", "x_train", "y_train"))
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(2026))
    free, kept = order[:-N_CORRUPTED], order[-N_CORRUPTED:]
    mixed = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))]
    chosen, others = mixed[:N_CALIBRATION], torch.cat([mixed[N_CALIBRATION:], kept])

    def samples(rows: Tensor) -> TensorDataset:
        return TensorDataset(_normalised(_pixels(test[rows.numpy()])), _labels(y_test[rows.numpy()]))

    clean, labels = _pixels(test[kept.numpy()]), _labels(y_test[kept.numpy()])
    return Case(
        f"cifar10-resnet{depth}",
        seed,
        _public_network(folder, depth),
        TensorDataset(_normalised(_pixels(train[:N_REFERENCE])), _labels(y_train[:N_REFERENCE])),
        samples(chosen),
        (TestSet("test", "in", lambda: samples(others)), *corrupted_sets(clean, labels, _normalised)),
        shared=("reference", "shift"),
    )


def _public_network(folder: Path, depth: int) -> nn.Module:
    network = CifarResNet(depth)
    tensors, _ = read_tensors(folder / f"cifar10_resnet{depth}.safetensors")
    network.load_state_dict(tensors, strict=False)
    return network.eval()


def _stage(n_in: int, n_out: int, stride: int, n_blocks: int) -> nn.Sequential:
    more = [_Block(n_out, n_out, 1) for _ in range(n_blocks - 1)]
    return nn.Sequential(_Block(n_in, n_out, stride), *more)


def _pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def _normalised(x: Tensor) -> Tensor:
    return (x - MEAN) / SPREAD


def _labels(y: np.ndarray) -> Tensor:
    return torch.from_numpy(y.astype(np.int64))
