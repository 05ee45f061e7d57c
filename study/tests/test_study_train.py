"""Training: same weights with and without interruption, the caller's random state untouched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trained import accuracy, predict_logits

from salgp_study.train import Recipe, train_network


def data(n: int = 97) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


class KilledError(Exception):
    pass


def test_killed_and_continued_equals_never_stopped(tmp_path: Path) -> None:
    recipe = Recipe(epochs=6, learning_rate=1e-2, step=3)
    whole = train_network(build, data(), recipe, tmp_path / "whole")

    def kill(line: str) -> None:
        if "epoch 4/" in line:
            raise KilledError

    with pytest.raises(KilledError):
        train_network(build, data(), recipe, tmp_path / "cut", kill)
    assert (tmp_path / "cut" / "checkpoint.safetensors").is_file()
    lines: list[str] = []
    continued = train_network(build, data(), recipe, tmp_path / "cut", lines.append)
    assert len(lines) == 3, (
        "epoch 4 was not checkpointed when the kill came, the first three are not repeated"
    )
    for a, b in zip(whole.state_dict().values(), continued.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == ["train.json", "weights.safetensors"]


def test_finished_training_is_only_loaded(tmp_path: Path) -> None:
    recipe = Recipe(epochs=2)
    first = train_network(build, data(), recipe, tmp_path)
    lines: list[str] = []
    again = train_network(build, data(), recipe, tmp_path, lines.append)
    assert lines == []
    assert torch.equal(predict_logits(first, data()), predict_logits(again, data()))
    assert not again.training


def test_random_state_is_given_back_and_seed_matters(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    nets = [train_network(build, data(), Recipe(epochs=1, seed=s), tmp_path / str(s)) for s in (0, 1)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(nets[0][0].weight, nets[1][0].weight)


def test_it_learns_and_unknown_classes_are_wrong(tmp_path: Path) -> None:
    net = train_network(build, data(), Recipe(epochs=40, learning_rate=1e-2), tmp_path)
    known = data()
    assert accuracy(net, known) > 0.9
    assert accuracy(net, TensorDataset(known.tensors[0], torch.full((len(known),), -1))) == 0.0


def pictures(n: int = 96) -> TensorDataset:
    """Pictures whose class is the quarter with the bright spot."""
    g = torch.Generator().manual_seed(0)
    x, labels = 0.3 * torch.randn(n, 1, 8, 8, generator=g), torch.arange(n) % 4
    for row, label in enumerate(labels.tolist()):
        x[row, 0, 4 * (label // 2) + 1, 4 * (label % 2) + 1] += 4
    return TensorDataset(x, labels)


def build_convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


def test_mixed_precision_killed_and_continued_equals_never_stopped(tmp_path: Path) -> None:
    recipe = Recipe(epochs=5, learning_rate=1e-2, step=3, mixed=True)
    whole = train_network(build_convolutional, pictures(), recipe, tmp_path / "whole")

    def kill(line: str) -> None:
        if "epoch 3/" in line:
            raise KilledError

    with pytest.raises(KilledError):
        train_network(build_convolutional, pictures(), recipe, tmp_path / "cut", kill)
    continued = train_network(build_convolutional, pictures(), recipe, tmp_path / "cut")
    for a, b in zip(whole.state_dict().values(), continued.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_mixed_precision_learns_as_well_and_returns_an_ordinary_network(tmp_path: Path) -> None:
    nets = {
        mixed: train_network(
            build_convolutional,
            pictures(),
            Recipe(20, learning_rate=1e-2, mixed=mixed),
            tmp_path / str(mixed),
        )
        for mixed in (False, True)
    }
    assert accuracy(nets[True], pictures()) == accuracy(nets[False], pictures()) == 1.0
    assert not torch.equal(nets[True][0].weight, nets[False][0].weight), "half precision left no trace"
    for weight in nets[True].parameters():
        assert weight.dtype == torch.float32
        assert weight.is_contiguous()
    loaded = train_network(build_convolutional, pictures(), Recipe(20, mixed=True), tmp_path / "True")
    assert torch.equal(predict_logits(loaded, pictures()), predict_logits(nets[True], pictures()))
