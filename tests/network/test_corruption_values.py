"""Perturbations once more, sample by sample in NumPy, with the same draws."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import correlate1d

from salgp.network.augment import corruptions, text
from salgp.network.augment.corruptions import Spread
from salgp.network.augment.families import FAMILIES
from salgp.network.augment.text import Tokens
from salgp.network.batches import are_texts

STRENGTH = torch.tensor([0.0, 0.4, 1.0, 1.7], dtype=torch.float64)
N, C, H, W = 4, 2, 6, 8


def images(n: int = N, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(n, C, H, W, generator=g, dtype=torch.float64)


SPREAD = Spread(
    centre=torch.tensor([2.0, 5.0]).reshape(1, C, 1, 1),
    scale=torch.tensor([0.5, 3.0]).reshape(1, C, 1, 1),
    low=torch.tensor([-1.0, 0.25]).reshape(1, C, 1, 1),
    high=torch.tensor([7.0, 9.0]).reshape(1, C, 1, 1),
)


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def normal(*shape: int, g: torch.Generator) -> np.ndarray:
    return torch.randn(shape, generator=g).double().numpy()


def uniform(*shape: int, g: torch.Generator) -> np.ndarray:
    return torch.rand(shape, generator=g).double().numpy()


def noise(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    e = normal(*x.shape, g=g)
    return [x[i] + s[i] * np.array([0.5, 3.0])[:, None, None] * e[i] for i in range(N)]


def gain(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    u = uniform(N, g=g)
    e = normal(N, g=g)
    middle = x.mean(axis=(2, 3), keepdims=True)
    return [
        (x[i] - middle[i]) * math.exp(1.8 * s[i] * (2 * u[i] - 1))
        + middle[i]
        + 0.7 * s[i] * e[i] * np.array([0.5, 3.0])[:, None, None]
        for i in range(N)
    ]


def channel_gain(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    e = normal(N, C, 1, 1, g=g)
    return [x[i] * np.exp(s[i] * e[i]) for i in range(N)]


def mixup(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    other = torch.randperm(N, generator=g).numpy()
    share = 0.5 * np.minimum(s, 1)
    return [(1 - share[i]) * x[i] + share[i] * x[other[i]] for i in range(N)]


def blur(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    offset = np.arange(-3, 4)  # three tenths of the width, rounded up
    found = []
    for i in range(N):
        bell = np.exp(-0.5 * (offset / max(s[i] * W / 8, 1e-3)) ** 2)
        once = correlate1d(x[i], bell / bell.sum(), axis=1, mode="nearest")
        found.append(correlate1d(once, bell / bell.sum(), axis=2, mode="nearest"))
    return found


def pixelate(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    found = []
    for i in range(N):
        new = x[i].copy()
        sizes = [max(round(side / (1 + 3 * s[i])), 1) for side in (H, W)]
        if sizes != [H, W]:
            cells = [
                [(math.floor(k * side / m), math.ceil((k + 1) * side / m)) for k in range(m)]
                for side, m in zip((H, W), sizes, strict=True)
            ]
            coarse = np.array(
                [[x[i][:, a:b, c:d].mean(axis=(1, 2)) for c, d in cells[1]] for a, b in cells[0]]
            )
            for r in range(H):
                for q in range(W):
                    new[:, r, q] = coarse[r * sizes[0] // H, q * sizes[1] // W]
        found.append(new)
    return found


def rectangle(s: float, u: np.ndarray) -> np.ndarray:
    inside = np.zeros((H, W), dtype=bool)
    ends = []
    for side, chance in zip((H, W), u, strict=True):
        covered = min(0.5 * s, 0.95) * side
        start = chance * (side - covered)
        ends.append((start, start + covered))
    for r in range(H):
        for q in range(W):
            inside[r, q] = ends[0][0] <= r + 0.5 < ends[0][1] and ends[1][0] <= q + 0.5 < ends[1][1]
    return inside


def occlude(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    u = uniform(N, 2, g=g)
    centre = np.array([2.0, 5.0])[:, None, None]
    return [np.where(rectangle(s[i], u[i]), centre, x[i]) for i in range(N)]


def quantise(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    u = uniform(N, g=g)
    step = 0.5 * np.array([8.0, 8.75])[:, None, None]
    return [
        x[i] if s[i] == 0 else (np.round(x[i] / (s[i] * step) + u[i]) - u[i]) * s[i] * step for i in range(N)
    ]


def affine(x: np.ndarray, s: np.ndarray, g: torch.Generator) -> list[np.ndarray]:
    """Every pixel looks up its place in the original, between four neighbours, the edge going on outside."""
    chance = (2 * uniform(N, 5, g=g) - 1) * s[:, None]
    found = []
    for i, (angle, growth, shear, right, down) in enumerate(chance):
        new, scale = np.zeros_like(x[i]), math.exp(0.5 * growth)
        cos, sin = scale * math.cos(angle), scale * math.sin(angle)
        for r in range(H):
            for q in range(W):
                a, b = (2 * q + 1) / W - 1, (2 * r + 1) / H - 1
                u = cos * a + (0.5 * shear - sin) * b + 0.3 * right
                v = sin * a + cos * b + 0.3 * down
                column = min(max(((u + 1) * W - 1) / 2, 0), W - 1)
                row = min(max(((v + 1) * H - 1) / 2, 0), H - 1)
                c0, r0 = math.floor(column), math.floor(row)
                c1, r1 = min(c0 + 1, W - 1), min(r0 + 1, H - 1)
                fc, fr = column - c0, row - r0
                new[:, r, q] = (1 - fr) * ((1 - fc) * x[i][:, r0, c0] + fc * x[i][:, r0, c1]) + fr * (
                    (1 - fc) * x[i][:, r1, c0] + fc * x[i][:, r1, c1]
                )
        found.append(new)
    return found


PLAIN = (blur, pixelate, affine)


@pytest.mark.parametrize(
    "reference",
    [noise, gain, channel_gain, mixup, blur, pixelate, occlude, quantise, affine],
)
def test_images_by_the_formula(reference: Callable[..., list[np.ndarray]]) -> None:
    x = images()
    given = () if reference in PLAIN else (SPREAD,)
    found = getattr(corruptions, reference.__name__)(x, STRENGTH, draws(), *given)
    expected = reference(x.numpy(), STRENGTH.numpy(), draws())
    np.testing.assert_allclose(found.numpy(), np.stack(expected), atol=1e-6)


def test_sequences_are_shown_faster_or_slower_by_the_formula() -> None:
    x = torch.arange(4 * 9 * 2.0).reshape(4, 9, 2)
    found = corruptions.time_warp(x, STRENGTH.float(), draws())
    u = uniform(4, g=draws())
    for i in range(4):
        rate = math.exp((2 * u[i] - 1) * float(STRENGTH[i]))
        places = [min(round(k * rate), 8) for k in range(9)]
        assert torch.equal(found[i], x[i, places])


def test_contrast_of_sequences_and_tables_has_its_own_middle() -> None:
    """Of a sequence the mean over time, of a table the typical value of each column."""
    spread = Spread(*(torch.tensor([1.0, 4.0]) for _ in range(4)), axis=2)
    u, e = uniform(4, g=(g := draws())), normal(4, g=g)
    factor = np.exp(1.8 * STRENGTH.numpy() * (2 * u - 1))
    step = 0.7 * STRENGTH.numpy() * e
    series = torch.randn(4, 5, 2, generator=draws(), dtype=torch.float64)
    middle = series.numpy().mean(axis=1, keepdims=True)
    expected = (series.numpy() - middle) * factor[:, None, None] + middle + step[:, None, None] * [1.0, 4.0]
    np.testing.assert_allclose(corruptions.gain(series, STRENGTH, draws(), spread), expected, atol=1e-6)
    table = Spread(*(torch.tensor([[1.0, 4.0]]) for _ in range(4)))
    rows = series[:, 0]
    expected = (rows.numpy() - [1.0, 4.0]) * factor[:, None] + [1.0, 4.0] + step[:, None] * [1.0, 4.0]
    np.testing.assert_allclose(corruptions.gain(rows, STRENGTH, draws(), table), expected, atol=1e-6)


@pytest.mark.parametrize("n", [30, 60])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_spread_of_images_by_quantiles(n: int, parts: int) -> None:
    x = images(n)
    found, a = Spread.of(list(x.tensor_split(parts))), x.numpy()
    mean, variance = a.mean(axis=(2, 3)), a.var(axis=(2, 3))
    tail, width = (0.05, 3.2897) if n >= 40 else (0.25, 1.3490)  # of a normal distribution
    between = (np.quantile(mean, 1 - tail, axis=0) - np.quantile(mean, tail, axis=0)) / width
    middle = np.sort(variance, axis=0)[(n - 1) // 2]
    expected = {
        "centre": np.sort(mean, axis=0)[(n - 1) // 2],
        "scale": np.sqrt(between**2 + middle),
        "low": np.quantile(a.min(axis=(2, 3)), 0.05, axis=0),
        "high": np.quantile(a.max(axis=(2, 3)), 0.95, axis=0),
    }
    for name, value in expected.items():
        assert getattr(found, name).shape == (1, C, 1, 1)
        np.testing.assert_allclose(getattr(found, name).reshape(-1), value, err_msg=name)
    assert (found.axis, found.discrete, found.donors) == (1, (), None)


@pytest.mark.parametrize(("shape", "axis"), [((50, 3), 1), ((50, 7, 3), 2), ((50, 3, 4, 4), 1), ((50,), 0)])
def test_the_channels_are_the_last_axis_but_of_images(shape: tuple[int, ...], axis: int) -> None:
    found = Spread.of([torch.randn(shape, generator=draws())])
    assert found.axis == axis
    expected = [1] * len(shape)
    if len(shape) > 1:
        expected[axis] = 3
    assert list(found.scale.shape) == expected


def test_columns_of_few_values_stand_together_where_they_are_one_code() -> None:
    g = torch.Generator().manual_seed(0)
    n = 100
    kind = torch.randint(3, (n,), generator=g)
    table = torch.cat(
        [
            torch.randn(n, 1, generator=g),
            torch.nn.functional.one_hot(kind, 3).float(),
            torch.randint(2, (n, 1), generator=g).float(),
            (torch.arange(n)[:, None] % 10).float(),
            (torch.arange(n)[:, None] % 11).float(),
        ],
        dim=1,
    )
    found = Spread.of([table])
    assert found.discrete == ((1, 2, 3), (4,), (5,))  # of 100 rows up to 10 values are few
    assert torch.equal(found.donors, table)  # type: ignore[arg-type]
    assert Spread.of([table[:4]]).discrete == ()
    assert Spread.of([table], table=False).donors is None
    many = Spread.of([table.repeat(11, 1)])
    assert many.discrete == ((1, 2, 3), (4,), (5,), (6,))  # of 1,100 rows up to 20
    assert torch.equal(many.donors, table.repeat(11, 1)[::3])  # type: ignore[arg-type]


def test_discrete_columns_are_taken_from_other_rows_by_chance() -> None:
    table = torch.stack([torch.arange(200.0) % 3, torch.randn(200, generator=draws())], dim=1)
    spread = Spread.of([table])
    old, strength = table[:50], torch.full((50,), 0.8)
    new = spread.swapped(old, old + 1, strength, draws())
    u, g = uniform(50, g=(g := draws())), g
    row = torch.randint(200, (50,), generator=g)
    expected = torch.where(torch.from_numpy(u) < 1 - math.exp(-0.8), table[row, 0], old[:, 0])
    assert torch.equal(new[:, 0], expected)
    assert torch.equal(new[:, 1], old[:, 1] + 1)


def test_how_strong_each_family_becomes_at_most() -> None:
    assert {name: family.largest for name, family in FAMILIES.items()} == {
        **dict.fromkeys(("noise", "layer-noise", "layer-gain"), 4.0),
        **dict.fromkeys(("gain", "affine", "blur", "channel-gain", "pixelate", "quantise"), 2.0),
        **dict.fromkeys(("time-warp", "typos"), 2.0),
        "occlude": 1.8,
        **dict.fromkeys(("token-drop", "token-swap", "token-replace"), 1.5),
        **dict.fromkeys(("words-dropped", "words-swapped", "words-unknown"), 1.5),
        **dict.fromkeys(("mixup", "layer-mixup"), 1.0),
    }


def frame(n: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Tokens]:
    """Texts ``1 w ... w 2 0 0`` of 3 to 8 words out of 10 to 19."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((n, 10), dtype=np.int64)
    for row in ids:
        k = rng.integers(3, 9)
        row[: k + 2] = [1, *rng.integers(10, 20, k), 2]
    found = torch.from_numpy(ids)
    return found, found != 0, Tokens.of([found], [found != 0])


def test_what_tokens_are_like_is_counted() -> None:
    _, _, tokens = frame()
    assert tokens.special.tolist() == [0, 1, 2]
    assert tokens.words.tolist() == list(range(10, 20))
    assert (tokens.padding, tokens.left, tokens.head, tokens.tail) == (0, False, 1, 1)
    nothing = Tokens.of([torch.zeros(2, 3, dtype=torch.long)], [torch.zeros(2, 3)])
    assert (nothing.words.tolist(), nothing.special.tolist()) == ([], [0])


@pytest.mark.parametrize("strength", [0.2, 0.5, 1.0, 3.0])
def test_six_in_ten_tokens_change_per_unit_of_strength(strength: float) -> None:
    """By the same draws: those below the share, at most nine in ten, and always the one drawn lowest."""
    ids, real, tokens = frame()
    u = uniform(*ids.shape, g=draws())
    chosen = np.zeros(ids.shape, dtype=bool)
    for i, row in enumerate(ids.tolist()):
        own = [j for j, token in enumerate(row) if token >= 10]
        chosen[i, own] = u[i, own] < min(0.6 * strength, 0.9)
        chosen[i, min(own, key=lambda j: u[i, j])] = True
    s = torch.full((len(ids),), strength)
    new, left = text.drop(ids, s, draws(), tokens, real)
    for i, row in enumerate(ids.tolist()):
        kept = [token for j, token in enumerate(row) if token and not chosen[i, j]]
        assert new[i].tolist() == kept + [0] * (10 - len(kept))
        assert left[i].tolist() == [True] * len(kept) + [False] * (10 - len(kept))


def test_replaced_tokens_are_those_drawn_or_the_next() -> None:
    ids, real, tokens = frame()
    new, same = text.replace(ids, torch.full((len(ids),), 9.0), g := draws(), tokens, real)
    assert torch.equal(same, real)
    g = draws()
    drawn = torch.randint(10, ids.shape, generator=g) + 10
    u = uniform(*ids.shape, g=g)
    for i, row in enumerate(ids.tolist()):
        own = [j for j, token in enumerate(row) if token >= 10]
        for j, token in enumerate(row):
            changed = j in own and (u[i, j] < 0.9 or u[i, j] == u[i, own].min())
            other = int(drawn[i, j]) if drawn[i, j] != token else 10 + (int(drawn[i, j]) - 10 + 1) % 10
            assert int(new[i, j]) == (other if changed else token)


def test_no_token_moves_twice() -> None:
    ids, real, tokens = frame()
    new, _ = text.swap(ids, torch.full((len(ids),), 0.7), draws(), tokens, real)
    u = uniform(*ids.shape, g=draws())
    for i, row in enumerate(ids.tolist()):
        own = [j for j in range(9) if row[j] >= 10 and row[j + 1] >= 10]
        first = {j for j in own if u[i, j] < 0.42 or u[i, j] == u[i, own].min()}
        expected, moved = list(row), -1
        for j in sorted(first):
            if j > moved:
                expected[j], expected[j + 1] = row[j + 1], row[j]
                moved = j + 1
        assert new[i].tolist() == expected


@pytest.mark.parametrize(("change", "share"), [(text.misspell, 0.2), (text.unknown_words, 0.6)])
def test_shares_of_words_and_letters(change: Any, share: float) -> None:
    """Letters mistyped, or words made unknown: by the strength, and at most nine in ten."""
    words = " ".join(["abcdefgh"] * 3000)
    for strength in (0.5, 1.0, 9.0):
        new = change(words, strength, random.Random(0))
        if change is text.unknown_words:
            found = np.mean([word != "abcdefgh" for word in new.split(" ")])
        else:  # a fourth of the errors lose a letter, and a fourth double one
            found = 1 - np.mean([word == "abcdefgh" for word in new.split(" ")]) if strength < 9 else None
        expected = min(share * strength, 0.9)
        if change is text.misspell:
            expected = 1 - (1 - expected) ** 8
        assert found is None or found == pytest.approx(expected, abs=0.03)


def test_lost_and_swapped_words_by_their_share() -> None:
    words = " ".join(f"w{k}" for k in range(3000))
    for strength, expected in ((0.5, 0.3), (1.0, 0.6), (9.0, 0.9)):
        left = text.lose_words(words, strength, random.Random(0)).split()
        assert 1 - len(left) / 3000 == pytest.approx(expected, abs=0.03)
        assert left == sorted(left, key=lambda word: int(word[1:]))
        swapped = text.swap_words(words, strength, random.Random(0)).split(" ")
        pairs = np.mean([word != f"w{k}" for k, word in enumerate(swapped)]) / 2
        assert pairs == pytest.approx(expected / (1 + expected), abs=0.03)
        assert sorted(swapped) == sorted(words.split(" "))


@pytest.mark.parametrize(
    ("item", "texts"), [(["one"], True), (("a", "b"), True), ([], False), (["a", 1], False), ("a", False)]
)
def test_raw_texts_are_a_list_of_at_least_one(item: Any, texts: bool) -> None:
    assert are_texts(item) == texts
