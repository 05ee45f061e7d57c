"""What is read in one go: nothing is kept that is not needed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from salgp.network.extract import extract, read_calibration_data
from salgp.network.reader import Reader


def batches(alive: list[int], seen: list[weakref.ref[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Twenty batches; before each is made, those before it that are still alive are counted."""
    for seed in range(20):
        alive.append(sum(ref() is not None for ref in seen))
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        seen.append(weakref.ref(x))
        yield x, torch.arange(8) % 3
        del x


@pytest.mark.parametrize("layers", [(), "auto"], ids=["logits alone", "layers"])
def test_without_copies_no_batch_is_kept(layers: tuple[str, ...] | str) -> None:
    """Calibrating 50,000 images must not hold them all in memory."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    alive: list[int] = []
    found = read_calibration_data(model, batches(alive, []), Reader(layers=layers))
    assert len(found.features) == 160
    assert max(alive) <= 3  # the first, to compare with, the last, and the one being read


def test_extract_lets_go_of_its_batches() -> None:
    alive: list[int] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert len(extract(model, batches(alive, []))[0]) == 160
    assert max(alive) <= 3


def test_no_copies_are_made_where_no_layer_can_be_read() -> None:
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    how = {"perturb": "auto", "needs_layers": True}
    found = read_calibration_data(nn.Linear(4, 3), [(x, y)], Reader(), **how)  # type: ignore[arg-type]
    assert (len(found.features), found.augmentation) == (8, None)
