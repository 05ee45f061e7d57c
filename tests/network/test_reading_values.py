"""What is read of batches and layers, and how strong perturbations get: values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.isotonic import isotonic_regression
from torch import Tensor, nn

import salgp
from salgp.network.augment.families import (
    Family,
    perturbed_batch,
    real_tokens,
)
from salgp.network.batches import Batch, KnownInputs, _parameters_of, first_rows, in_pieces, rebatched
from salgp.network.extract import LEVELS, _Augmenter, _doubled, _falling, augment
from salgp.network.layers import (
    _batch_axis,
    _matches,
    _own_layout,
    ancestors,
    auto_layers,
    thinned,
    trace,
)
from salgp.network.reader import Reader
from salgp.network.taps import Layout, Tap, activation, hidden_state


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# batches


class Takes(nn.Module):
    """A network whose forward takes what a test gives it."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.forward = forward


@pytest.mark.parametrize(
    ("forward", "names", "most"),
    [
        (lambda x: x, ("x",), 1),
        (lambda x, y=0, *, z, w=1: x, ("x", "y", "z", "w"), 2),
        (lambda x, /, y: x, ("y",), 2),
        (lambda x, *more, z: x, ("x", "z"), math.inf),
        (lambda x, **named: x, None, 1),
        (lambda *more, **named: 0, None, math.inf),
    ],
)
def test_what_a_network_takes(forward: Any, names: Any, most: float) -> None:
    assert _parameters_of(Takes(forward)) == (names, most)


def batches(*sizes: int, width: int = 3) -> list[Batch]:
    rows = iter(range(10**6))
    made = [[next(rows) for _ in range(n)] for n in sizes]
    return [
        Batch((torch.tensor(own)[:, None].repeat(1, width).float(),), labels=torch.tensor(own))
        for own in made
    ]


@pytest.mark.parametrize(
    ("sizes", "width", "joined"),
    [
        ((100, 100, 56, 1), 1, [256, 1]),
        ((256, 256), 1, [256, 256]),
        ((300, 10), 1, [300, 10]),
        ((10,) * 5, 5000, [40, 10]),  # 20 kB a sample, and 8 bytes of its label: 49 of them in a megabyte
        ((7,), 1, [7]),
    ],
)
def test_neighbouring_batches_are_joined_up_to_256_rows_and_a_megabyte(
    sizes: tuple[int, ...], width: int, joined: list[int]
) -> None:
    found = list(rebatched(batches(*sizes, width=width)))
    assert [len(batch.labels) for batch in found] == joined
    assert torch.cat([batch.labels for batch in found]).tolist() == list(range(sum(sizes)))
    assert torch.cat([batch.inputs[0][:, -1] for batch in found]).tolist() == list(range(sum(sizes)))


def test_batches_that_differ_are_not_joined() -> None:
    a, b = batches(2, 2)
    for other in (
        Batch((random(2, 4),), labels=b.labels),
        Batch((b.inputs[0], random(2, 1)), labels=b.labels),
        Batch((), {"x": b.inputs[0]}, b.labels),
        Batch(b.inputs, labels=b.labels, extra=(b.labels,)),
        Batch(b.inputs, labels=b.labels, form="tuple"),
        Batch((torch.tensor(1.0),), labels=b.labels),
        Batch((random(3, 3),), labels=b.labels),
    ):
        assert list(map(id, rebatched([a, other]))) == [id(a), id(other)]


@pytest.mark.parametrize(("rows", "taken"), [(0, []), (3, [3]), (5, [5]), (7, [5, 2]), (99, [5, 4])])
def test_the_first_rows_are_cut_where_they_end(rows: int, taken: list[int]) -> None:
    found = [batch.labels.tolist() for batch in first_rows(batches(5, 4), rows)]
    assert [len(own) for own in found] == taken
    assert [row for own in found for row in own] == list(range(sum(taken)))


def test_raw_texts_are_cut_into_pieces_of_32() -> None:
    texts = [f"t{k}" for k in range(70)]
    (one, two, three) = in_pieces([(texts, list(range(70)))])
    assert [len(piece[0]) for piece in (one, two, three)] == [32, 32, 6]
    assert three == (texts[64:], list(range(64, 70)))
    assert in_pieces([texts]) == [texts[:32], texts[32:64], texts[64:]]
    uneven = [(texts, [1, 2])]
    assert in_pieces(uneven) == uneven


def test_masks_and_types_are_no_tokens_and_masks_no_inputs() -> None:
    ids, mask, x = torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]), random(2, 3)
    named = {"attention_mask": mask, "token_type_ids": 0 * mask, "x": x, "input_ids": ids}
    assert Batch((), named).tokens[0] == "input_ids"
    assert Batch((x, ids.int())).tokens[0] == 1
    assert Batch((x, ids[:, 0], ids.short())).tokens[0] is None
    assert Batch((), {"mask": x, **named}).numbers[0] == "x"
    assert Batch((ids, x)).numbers[0] == 1
    assert Batch((ids,)).numbers[0] is None


@pytest.mark.parametrize(
    ("mask", "real"),
    [
        ([[1, 1, 0], [1, 0, 0]], [[1, 1, 0], [1, 0, 0]]),
        ([[0, 0, 1], [0, 1, 1]], [[1, 1, 0], [1, 0, 0]]),  # marks padding
        ([[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]]),
        ([[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_a_mask_tells_what_is_real_or_what_is_padding(mask: Any, real: Any) -> None:
    ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
    for batch in (Batch((ids, torch.tensor(mask))), Batch((ids,), {"mask": torch.tensor(mask).bool()})):
        assert real_tokens(batch, ids).int().tolist() == real  # type: ignore[union-attr]
    assert real_tokens(Batch((ids, ids + 1)), ids) is None


def test_numbers_beside_an_image_get_noise_of_the_same_strength() -> None:
    """Those of two axes; whole numbers and the image's own batch stay as they are."""
    image, meta, other = random(50, 1, 4, 4), 5 * random(50, 2), torch.arange(50)[:, None]
    strength = torch.linspace(0, 1, 50)
    family = Family("same", lambda x, strength, generator: x + 1)
    new = perturbed_batch(
        Batch((other, image, meta)), family, strength, torch.Generator().manual_seed(0), None
    )
    assert torch.equal(new.inputs[0], other)
    torch.testing.assert_close(new.inputs[1], image + 1)
    noise = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    scale = salgp.network.augment.corruptions.Spread.of([meta], table=False).scale
    torch.testing.assert_close(new.inputs[2], meta + strength[:, None] * scale * noise)


def test_what_is_known_of_inputs_tells_that_labels_are_missing() -> None:
    x = random(2, 3)
    known = KnownInputs.of(Batch.of((x, x, torch.tensor([0, 1]))), nn.Bilinear(3, 3, 2))
    assert known == KnownInputs(2, ("input1", "input2"), 2)
    assert Batch.of((x, x), known=known).labels is None
    assert Batch.of((x, x, torch.tensor([1, 0])), known=known).labels.tolist() == [1, 0]


# layers


@pytest.mark.parametrize(
    ("shape", "first", "axis"),
    [
        ((5, 3), True, 0),
        ((3, 5), True, 0),
        ((5, 7, 3), True, 0),
        ((7, 5, 3), True, 1),
        ((5, 5, 3), True, 0),
        ((5, 5, 3), False, 1),
        ((7, 8, 3), True, 0),
        ((7, 8, 3), False, 1),
    ],
)
def test_the_batch_is_the_axis_as_long_as_it(shape: tuple[int, ...], first: bool, axis: int) -> None:
    """Where both are, as the recurrent layer or attention inside says."""
    assert _batch_axis(shape, 5, nn.Sequential(nn.GRU(3, 3, batch_first=first))) == axis
    assert _batch_axis(shape, 5, nn.MultiheadAttention(4, 2, batch_first=first)) == axis


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (nn.Conv2d(1, 6, 3), Layout("first", 6)),
        (nn.ConvTranspose1d(1, 5, 3), Layout("first", 5)),
        (nn.BatchNorm2d(7), Layout("first", 7)),
        (nn.GRU(3, 4), Layout("last", 4, recurrent=True)),
        (nn.LSTM(3, 4, bidirectional=True), Layout("last", 8, recurrent=True)),
        (nn.LSTM(3, 4, proj_size=2), Layout("last", 2, recurrent=True)),
        (nn.Linear(3, 9), Layout("last", 9)),
        (nn.LayerNorm((5, 8)), Layout("last", 8)),
        (nn.Embedding(11, 6), Layout("last", 6)),
        (nn.MultiheadAttention(12, 3), Layout("last", 12)),
        (nn.ReLU(), None),
    ],
)
def test_what_modules_say_of_their_channels(module: nn.Module, layout: Layout | None) -> None:
    assert _own_layout(module) == layout


@pytest.mark.parametrize(
    ("layout", "shape", "axis"),
    [
        (Layout("last"), (2, 5, 7), 2),
        (Layout("last", 5), (2, 5, 7), 2),
        (Layout("first"), (2, 5, 7), 1),
        (Layout("first", 7), (2, 5, 7), 2),
        (Layout("first", 5), (2, 5, 5), 1),
        (Layout("first", 3), (2, 5, 7), 1),
        (Layout("last"), (2, 5, 6, 7), 1),
        (Layout("last", 7), (2, 5, 6, 7), 3),
        (Layout("first", 7), (2, 5, 6, 7), 3),
        (Layout("first", 5), (2, 5, 6, 5), 1),
    ],
)
def test_where_the_channels_are(layout: Layout, shape: tuple[int, ...], axis: int) -> None:
    assert layout.channel_axis(torch.zeros(shape)) == axis


def test_a_tap_is_of_the_first_call_and_leads_to_the_logits_unless_told() -> None:
    assert Tap("a", "b") == Tap("a", "b", 1, None, "auto", Layout("last", None, False, 0), True)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("both", [False, True])
def test_the_state_of_a_depth_is_read_and_replaced_alone(kind: type, both: bool) -> None:
    layer = kind(3, 4, num_layers=3, bidirectional=both, batch_first=True)
    with torch.no_grad():
        output = layer(random(5, 6, 3))
    states = output[1][0] if kind is nn.LSTM else output[1]
    d = 2 if both else 1
    for depth in range(3):
        rows, put = hidden_state(output, layer, depth)
        assert torch.equal(rows, torch.cat([states[depth * d + k] for k in range(d)], dim=1))
        new = put(rows + 1)
        changed = new[1][0] if kind is nn.LSTM else new[1]
        moved = (changed - states).flatten(1).abs().amax(1) > 0.5
        assert moved.tolist() == [k // d == depth for k in range(3 * d)]
        assert torch.equal(new[0], output[0])
        assert kind is nn.GRU or torch.equal(new[1][1], output[1][1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_packed_and_nested_sequences_carry_their_mask() -> None:
    rows = [random(n, 2) for n in (3, 5, 1)]
    packed = nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
    nested = torch.nested.nested_tensor(rows)
    for output in (packed, nested, {"last_hidden_state": packed, "other": random(3, 9)}, (None, nested)):
        x, mask, put = activation(output)
        assert mask.sum(1).tolist() == [3, 5, 1]  # type: ignore[union-attr]
        assert x.shape == (3, 5, 2)  # type: ignore[union-attr]
        for i, row in enumerate(rows):
            assert torch.equal(x[i, : len(row)], row)  # type: ignore[index]
        again = activation(put(x + 1))[0]  # type: ignore[operator]
        assert torch.equal(again[1], rows[1] + 1)  # type: ignore[index]


def test_layers_are_thinned_evenly_to_twelve() -> None:
    assert thinned(range(5), 5) == (0, 1, 2, 3, 4)  # type: ignore[arg-type]
    assert thinned(range(23), 12) == tuple(range(0, 23, 2))  # type: ignore[arg-type]
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(34)), nn.Linear(2, 3))
    found = auto_layers(trace(deep, lambda network: network(torch.zeros(2, 2))))
    assert found == tuple(str(k) for k in range(0, 34, 3))


@pytest.mark.parametrize(
    ("label", "pattern", "match"),
    [
        ("a.b", "a.b", True), ("a.b@2", "a.b", True), ("a.b@2", "a.b@2", True), ("a.b", "a.b@2", False),
        ("a.b", "a.*", True), ("a.b.c", "a.*", False), ("a.b.c", "a.**", True), ("ab", "a?", True),
        ("a.b", "a?b", False), ("a.b", "A.b", False), ("axb", "a.b", False), ("a.b@2", "a.*", True),
    ],
)  # fmt: skip
def test_names_and_globs(label: str, pattern: str, match: bool) -> None:
    assert _matches(label, pattern) == match


def test_ancestors_come_innermost_first() -> None:
    assert ancestors("a.b") == ["a", ""]
    assert ancestors("") == []


# strengths


def test_strengths_that_are_tried_double_up_to_the_largest() -> None:
    assert _doubled(4.0) == [0.25, 0.5, 1, 2, 4]
    assert _doubled(1.8) == [0.25, 0.5, 1, 1.8]
    assert _doubled(0.1) == [0.1]
    assert pytest.approx([0.04 * 25 ** (k / 7) for k in range(8)]) == LEVELS


def test_accuracy_that_falls_with_the_strength() -> None:
    g = torch.Generator().manual_seed(0)
    which = torch.randint(0, 4, (200,), generator=g)
    which[which == 2] = 3  # one strength was not tried
    right = (torch.rand(200, generator=g) < torch.tensor([0.7, 0.9, 0.0, 0.4])[which]).double()
    tried = [0, 1, 3]
    means = [float(right[which == k].mean()) for k in tried]
    weights = np.array([int((which == k).sum()) for k in tried])
    smooth = isotonic_regression(means, sample_weight=weights, increasing=False)
    assert _falling(right, which, 4) == pytest.approx([smooth[0], smooth[1], smooth[2], smooth[2]])
    assert smooth[0] == smooth[1] > smooth[2]


def linear() -> tuple[nn.Module, Reader, list[Batch], Any, Tensor]:
    """A network of two classes, always right; one layer that leads to the scores."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(2))
    x = random(320, 2)
    y = x.argmax(1)
    made = [Batch((x[i : i + 40],), labels=y[i : i + 40]) for i in range(0, 320, 40)]
    reader = Reader().resolved(model, made[0])
    features, _ = salgp.extract(model, [(x, y)], reader=Reader())
    return model, reader, made, features, y


def test_a_family_is_scaled_to_where_it_costs_three_quarters_of_the_accuracy_above_chance() -> None:
    augmenter = _Augmenter(*linear())
    for enough in (0.25, 0.5, 1.0, 2.0):
        flips = Family("flips", lambda x, s, g, e=enough: torch.where(s[:, None] >= e, -x, x))
        assert augmenter.scale_of(flips) == enough
    some = Family("some", lambda x, s, g: torch.where((s[:, None] >= 1) & (x[:, :1] > -0.3), -x, x), 3.0)
    cost = float((augmenter.original.logits[:160, 0] > -0.3).double().mean())
    assert 0.375 < cost < 0.75  # of the accuracy, which is .5 above chance
    assert augmenter.scale_of(some) == 1.0
    few = Family("few", lambda x, s, g: torch.where(x[:, :1] > 1.5, -x, x), 3.0)
    assert augmenter.scale_of(few) == 3.0  # never enough: its bound
    harmless = Family("harmless", lambda x, s, g: x, 3.0, inside=True)
    assert augmenter.scale_of(harmless) == 0.25  # inside the network: where accuracy stops falling


def test_augmented_samples_have_every_level_equally_often() -> None:
    model, reader, made, features, y = linear()
    more, labels, told = augment(model, reader, made, features, y, ["noise", "gain"])
    assert len(more) == 960
    assert torch.equal(labels, y.repeat(3))
    assert torch.equal(more.groups, torch.arange(320).repeat(3))  # type: ignore[arg-type]
    assert torch.equal(more.families.long(), torch.arange(3).repeat_interleave(320))  # type: ignore[union-attr]
    for k in (1, 2):
        strengths = more.strengths[320 * k : 320 * (k + 1)]  # type: ignore[index]
        values, counts = strengths.unique(return_counts=True)
        assert values.tolist() == pytest.approx(list(LEVELS))
        assert counts.tolist() == [40] * 8
        right = (more.logits[320 * k : 320 * (k + 1)].argmax(1) == y).double()
        under = [float(right[strengths == level].mean()) for level in values]
        assert told.under[k - 1] == pytest.approx(under)
    assert told.accuracy == 1.0
    assert told.families == ("noise", "gain")


def test_layers_may_be_projected_to_a_single_number() -> None:
    features, _ = salgp.extract(nn.Linear(4, 3), [random(5, 4)], reader=Reader(layers=[]))
    assert features.widths == {}
    deep = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert salgp.extract(deep, [random(5, 4)])[0].widths == {"1": 6}
