"""Corruptions keep shapes and ranges, grow with severity, and give the same numbers for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salgp.network.augment.families import KINDS
from salgp_study.suite.columns import TABLE_CORRUPTIONS, corrupted_tables
from salgp_study.suite.images import IMAGE_CORRUPTIONS, SEVERITIES, corrupted_sets
from salgp_study.suite.words import WORD_CORRUPTIONS, drop_words, swap_words, typos


def photographs(channels: int) -> torch.Tensor:
    """Smooth random images in [0, 1]."""
    coarse = torch.rand(6, channels, 5, 5, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", IMAGE_CORRUPTIONS)
def test_an_image_corruption_grows_with_severity(name: str, channels: int) -> None:
    x = photographs(channels)
    distances = []
    for severity in SEVERITIES:
        y = IMAGE_CORRUPTIONS[name](x, severity, seed=1)
        assert y.shape == x.shape
        assert 0 <= float(y.min()) <= float(y.max()) <= 1
        distances.append(float((y - x).square().mean()))
    assert 0 < distances[0] < distances[2]


@pytest.mark.parametrize("name", IMAGE_CORRUPTIONS)
def test_a_seed_fixes_an_image_corruption(name: str) -> None:
    x = photographs(3)
    assert torch.equal(IMAGE_CORRUPTIONS[name](x, 0.6, 3), IMAGE_CORRUPTIONS[name](x, 0.6, 3))


def test_blur_agrees_with_scipy() -> None:
    from scipy.ndimage import gaussian_filter

    x = photographs(1)
    found = IMAGE_CORRUPTIONS["gaussian blur"](x, 1.0, 0)
    width = 1.3 * 16 / 32
    wanted = gaussian_filter(x[0, 0].numpy(), width, mode="nearest", radius=int(np.ceil(3 * width)))
    np.testing.assert_allclose(found[0, 0].numpy(), wanted, atol=1e-5)


def test_likeness_names_rehearsed_families() -> None:
    families = set(KINDS["images"])
    assert {c.like for c in IMAGE_CORRUPTIONS.values()} - {None} <= families
    unlike = {name for name, c in IMAGE_CORRUPTIONS.items() if c.like is None}
    assert unlike == {"impulse noise", "fog", "saturate", "elastic"}


def test_every_corruption_and_severity_is_a_test_set() -> None:
    x, y = photographs(1), torch.arange(6)
    sets = corrupted_sets(x, y, prepare=lambda images: images - 0.5)
    assert len(sets) == 18 * 3
    inputs, labels = sets[0].make().tensors
    assert torch.equal(labels, y)
    assert float(inputs.min()) < 0


@pytest.mark.parametrize("name", TABLE_CORRUPTIONS)
def test_a_table_corruption_grows_with_severity(name: str) -> None:
    x = torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    corrupt, _ = TABLE_CORRUPTIONS[name]
    moved = [float((corrupt(x, s, torch.Generator().manual_seed(1)) - x).square().mean()) for s in (0.3, 1.0)]
    assert 0 < moved[0] < moved[1]


def test_swapped_values_keep_the_columns() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    made = {t.name: t for t in corrupted_tables(x, torch.zeros(50).long())}
    swapped = made["swapped values 3"].make().tensors[0]
    for j in range(3):
        assert set(swapped[:, j].tolist()) <= set(x[:, j].tolist())


def test_words_are_dropped_and_swapped() -> None:
    sentence = " ".join(f"word{i}" for i in range(400))
    random = np.random.default_rng(0)
    kept = drop_words(sentence, random, 0.4).split()
    assert 0.5 * 400 < len(kept) < 0.7 * 400
    assert sorted(swap_words(sentence, random).split()) == sorted(sentence.split())


def test_typos_change_about_their_share_of_the_letters() -> None:
    sentence = "abcdefghij" * 200
    changed = typos(sentence, np.random.default_rng(0), 0.12)
    lost = sum(1 for letter in sentence if letter) - len(changed)
    assert changed != sentence
    assert abs(lost) < 0.12 * len(sentence)
    assert typos("1234 5678", np.random.default_rng(0), 1.0) == "1234 5678"


def test_every_word_corruption_gives_a_sentence() -> None:
    random = np.random.default_rng(0)
    for corrupt, severity, like in WORD_CORRUPTIONS.values():
        assert like is None or like in KINDS["tokens"]
        assert corrupt("how do i ask about the weather", random).strip()
        assert severity in (1, 2, 3)
