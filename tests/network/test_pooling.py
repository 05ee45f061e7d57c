"""Every pooling against a double loop, layouts, masks and errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from salgp.network.taps import POOLINGS, Layout, pool

FIRST, LAST = Layout("first"), Layout("last")


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("how", "reduce"), [("channel-max", max), ("channel-avg", lambda v: sum(v) / len(v))]
)
def test_paper_pooling_reduces_the_channels_at_each_pixel(how, reduce):
    x = _random(2, 3, 4, 5)
    pooled = pool(x, how, FIRST)
    assert pooled.shape == (2, 20)
    for i in range(2):
        for h in range(4):
            for w in range(5):
                assert float(pooled[i, h * 5 + w]) == pytest.approx(
                    float(reduce([float(x[i, c, h, w]) for c in range(3)])), abs=1e-6
                )


@pytest.mark.parametrize(
    ("how", "reduce"), [("spatial-max", max), ("spatial-avg", lambda v: sum(v) / len(v))]
)
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 2)])
def test_spatial_pooling_reduces_the_positions_of_each_channel(how, reduce, shape):
    x = _random(*shape)
    pooled = pool(x, how, FIRST)
    assert pooled.shape == (2, 3)
    for i in range(2):
        for c in range(3):
            assert float(pooled[i, c]) == pytest.approx(float(reduce(x[i, c].flatten().tolist())), abs=1e-6)


def test_sequences():
    x = _random(2, 5, 3)
    torch.testing.assert_close(
        pool(x, "tokens-avg"), torch.stack([sum(x[i, t] for t in range(5)) / 5 for i in range(2)])
    )
    assert torch.equal(pool(x, "time-max"), x.max(dim=1).values)
    assert torch.equal(pool(x, "first-token"), x[:, 0])
    assert torch.equal(pool(x, "time-last"), x[:, 4])


def test_padding_takes_no_part():
    x, mask = _random(3, 5, 2), torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    spoiled = x.masked_fill(mask[:, :, None] == 0, 1e9)
    torch.testing.assert_close(
        pool(spoiled, "tokens-avg", LAST, mask),
        torch.stack([x[0, :2].mean(0), x[1, 2:].mean(0), torch.zeros(2)]),
    )
    assert torch.equal(
        pool(spoiled, "time-max", LAST, mask),
        torch.stack([x[0, :2].amax(0), x[1, 2:].amax(0), torch.zeros(2)]),
    )
    assert torch.equal(pool(spoiled, "first-token", LAST, mask)[:2], torch.stack([x[0, 0], x[1, 2]]))
    assert torch.equal(pool(spoiled, "time-last", LAST, mask)[:2], torch.stack([x[0, 1], x[1, 4]]))


def test_a_mask_of_another_shape_is_refused():
    x = _random(2, 5, 3)
    for how in ("tokens-avg", "time-last", "time-max", "first-token", "auto"):
        with pytest.raises(ValueError, match=r"mask has shape \(2, 4\)"):
            pool(x, how, LAST, torch.ones(2, 4))
    image = _random(2, 3, 4, 5)
    assert torch.equal(pool(image, "auto", FIRST, torch.ones(2, 4)), pool(image, "auto", FIRST))
    assert torch.equal(pool(x, "channel-max", LAST, torch.ones(2, 4)), pool(x, "channel-max"))


@pytest.mark.parametrize("how", [h for h in POOLINGS if h != "none"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 3), (2, 3, 4, 5)])
def test_all_give_one_row_per_sample(how, shape):
    pooled = pool(_random(*shape), how)
    assert pooled.ndim == 2
    assert len(pooled) == 2


@pytest.mark.parametrize("how", POOLINGS)
def test_vectors_are_used_as_they_are(how):
    x = _random(3, 7)
    assert torch.equal(pool(x, how), x)
    assert torch.equal(pool(x[:, 0], how), x[:, :1])


def test_auto():
    image, sequence = _random(2, 3, 4, 5), _random(2, 4, 3)
    assert torch.equal(pool(image, "auto", FIRST), pool(image, "spatial-avg", FIRST))
    assert torch.equal(pool(sequence, "auto", LAST), sequence.mean(1))
    assert torch.equal(pool(sequence, "auto", Layout("last", recurrent=True)), sequence.amax(1))
    assert torch.equal(pool(sequence, "auto", FIRST), sequence.mean(2))


def test_permuted_outputs_are_recognised_by_their_width():
    assert pool(_random(2, 6, 6, 16), "spatial-avg", Layout("last", 16)).shape == (2, 16)  # (N, H, W, C)
    assert pool(_random(2, 16, 6, 6), "spatial-avg", Layout("last", 16)).shape == (2, 16)
    assert pool(_random(2, 9, 16), "spatial-avg", Layout("first", 16)).shape == (2, 16)
    assert pool(_random(2, 16, 9), "spatial-avg", Layout("last", 16)).shape == (2, 9)  # tokens stay tokens


def test_flatten_and_none():
    x = _random(2, 3, 4)
    assert torch.equal(pool(x, "flatten"), x.reshape(2, 12))
    with pytest.raises(ValueError, match="'none' needs an output of shape"):
        pool(x, "none")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_single(dtype):
    x = torch.full((1, 1, 100, 100), 0.1, dtype=dtype)
    pooled = pool(x, "spatial-avg", FIRST)
    assert pooled.dtype == torch.float32
    assert float(pooled) == pytest.approx(float(x[0, 0, 0, 0]), rel=1e-5)
    assert pool(x, "spatial-max", FIRST).dtype == torch.float32
    assert pool(torch.zeros(1, 2, dtype=torch.float64)).dtype == torch.float64


def test_a_function():
    x = _random(2, 3, 4)
    assert torch.equal(pool(x, lambda t: t[:, 1]), x[:, 1])
    for wrong in (lambda t: t, lambda t: t[:1, 0], lambda t: 3, lambda t: t[:, 0].long()):
        with pytest.raises(ValueError, match=r"must return a floating-point tensor of shape \(2, d\)"):
            pool(x, wrong)


def test_a_function_gets_the_mask_it_asks_for():
    x, mask = _random(2, 3, 4), torch.tensor([[1, 0, 0], [1, 1, 0]])
    seen = []
    pool(x, lambda t, mask: seen.append(mask) or t[:, 0], LAST, mask)
    pool(x, lambda t, mask: seen.append(mask) or t[:, 0], LAST)
    assert torch.equal(seen[0], mask)
    assert seen[1] is None


def test_an_unknown_name():
    with pytest.raises(ValueError, match="unknown pooling 'mean'; choose one of auto, channel-max"):
        pool(_random(2, 3), "mean")
