"""The network is sacred; hooks, traces and the choice of layers."""

from __future__ import annotations

from itertools import pairwise

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

from salgp.network.frozen_copy import unwrap
from salgp.network.layers import MAX_LAYERS, Trace, auto_layers, make_taps, trace
from salgp.network.taps import Layout, Probe, Tap, activation, hidden_state

IMAGES = torch.linspace(-1, 1, 2 * 256).reshape(2, 1, 16, 16)
BIG = torch.linspace(-1, 1, 2 * 64 * 64).reshape(2, 1, 64, 64)
SERIES = torch.linspace(-1, 1, 2 * 7 * 5).reshape(2, 7, 5)
TOKENS = torch.linspace(-1, 1, 2 * 7 * 8).reshape(2, 7, 8)
ROWS = torch.linspace(-1, 1, 12).reshape(2, 6)


def _trace(model: nn.Module, *inputs: Tensor) -> Trace:
    return trace(model, lambda network: network(*inputs))


class Deep(nn.Module):
    """More layers than the automatic choice takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(30))
        self.never = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tutorial(nn.Module):
    """Two named sequences and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv2(self.conv1(x)).flatten(1))


class Vgg(nn.Module):
    """One long sequence of convolutions and a classifier with a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        ]
        self.features = nn.Sequential(*convolutions)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


class ConvRecurrent(nn.Module):
    """Convolutions over time, two recurrent layers, a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.ReLU()) for _ in range(2))
        self.gru = nn.GRU(5, 4)
        self.lstm = nn.LSTM(4, 4, num_layers=2)
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x, _ = self.lstm(self.gru(x.permute(2, 0, 1))[0])
        return self.fc2(self.fc1(x[-1]).relu())


AUTOMATIC = [
    (networks.sequential_cnn, IMAGES, ("3", "7", "11")),
    (networks.FunctionalCNN, IMAGES, ("conv1", "conv2", "fc1")),
    (networks.ResidualNet, BIG, ("layer1", "layer2", "layer3", "layer4")),
    (networks.GRUClassifier, SERIES, ("gru.0", "gru.1", "gru")),
    (lambda: networks.GRUClassifier(num_layers=1), SERIES, ("gru",)),
    (networks.TransformerClassifier, TOKENS, ("encoder.layers.0", "encoder.layers.1", "encoder.layers.2")),
    (networks.ReusedNet, ROWS, ("block", "block@2", "block@3")),
    (lambda: networks.Wrapped("dict"), ROWS, ("body",)),
    (lambda: networks.Wrapped("probabilities"), ROWS, ("body",)),
    (lambda: networks.Wrapped("binary", 1), ROWS, ("body",)),
    (Tutorial, IMAGES, ("conv1", "conv2")),
    (Vgg, IMAGES, ("features.1", "features.4", "features.7", "classifier.1")),
    (ConvRecurrent, SERIES, ("blocks.0", "blocks.1", "gru", "lstm.0", "lstm", "fc1")),
    (lambda: nn.Sequential(nn.Linear(6, 3)), ROWS, ()),
    (lambda: nn.Linear(6, 3), ROWS, ()),
    (
        lambda: nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.ReLU(), weight_norm(nn.Linear(6, 3))),
        ROWS,
        ("1",),
    ),
    (lambda: nn.Sequential(networks.sequential_cnn()), IMAGES, ("0.3", "0.7", "0.11")),
    (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 14), nn.Flatten()), IMAGES, ("1",)),
]


@pytest.mark.parametrize(("make", "x", "expected"), AUTOMATIC)
def test_automatic_layers(make, x, expected):
    assert auto_layers(_trace(make(), x)) == expected


def test_automatic_layers_are_thinned_evenly():
    names = auto_layers(_trace(Deep(), ROWS))
    assert len(names) == MAX_LAYERS
    assert (names[0], names[-1]) == ("blocks.0", "blocks.29")
    steps = [int(b.split(".")[1]) - int(a.split(".")[1]) for a, b in pairwise(names)]
    assert set(steps) <= {2, 3}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("layer3", ["layer3"]),
        (["layer4", "layer1"], ["layer1", "layer4"]),
        ([0, -1], ["layer1", "layer4"]),
        (2, ["layer3"]),
        ("layer*", ["layer1", "layer2", "layer3", "layer4"]),
        (
            "layer2.**",
            [
                "layer2.0.conv1",
                "layer2.0.bn1",
                "layer2.0.conv2",
                "layer2.0.bn2",
                "layer2.0.downsample.0",
                "layer2.0.downsample.1",
                "layer2.0.downsample",
                "layer2.0",
                "layer2.1.conv1",
                "layer2.1.bn1",
                "layer2.1.conv2",
                "layer2.1.bn2",
                "layer2.1.downsample.0",
                "layer2.1.downsample.1",
                "layer2.1.downsample",
                "layer2.1",
            ],
        ),
        (
            ["layer?.1", "maxpool", -1, "fc"],
            ["maxpool", "layer1.1", "layer2.1", "layer3.1", "layer4.1", "layer4", "fc"],
        ),
        ([], []),
        (["auto", "maxpool"], ["maxpool", "layer1", "layer2", "layer3", "layer4"]),
    ],
)
def test_names_positions_and_globs_in_order_of_execution(layers, expected):
    assert [t.name for t in make_taps(_trace(networks.ResidualNet(), BIG), layers)] == expected


def test_reused_modules_by_name_and_call():
    found = _trace(networks.ReusedNet(), ROWS)
    assert [t.name for t in make_taps(found, "block")] == ["block", "block@2", "block@3"]
    assert [(t.name, t.call) for t in make_taps(found, ["block@2"])] == [("block@2", 2)]
    with pytest.raises(KeyError, match="ran less often"):
        make_taps(found, ["block@4"])


def test_unknown_names_list_close_and_known_ones():
    found = _trace(networks.ResidualNet(), BIG)
    with pytest.raises(
        KeyError,
        match=r"no layer matches 'layer11'; did you mean .*'layer1' .*known layers: conv1, bn1, relu",
    ):
        make_taps(found, ["layer11"])
    with pytest.raises(KeyError, match="no layer matches 'stage"):
        make_taps(found, "stage*")
    with pytest.raises(IndexError, match="there are 4 automatic layers"):
        make_taps(found, 4)
    with pytest.raises(KeyError, match="'never'; it exists but did not run"):
        make_taps(_trace(Deep(), ROWS), ["never"])


def test_poolings_by_name_and_glob():
    found = _trace(networks.ResidualNet(), BIG)
    taps = make_taps(found, "auto", {"layer1": "flatten", "layer*": "channel-max"})
    assert [t.pooling for t in taps] == ["flatten", "channel-max", "channel-max", "channel-max"]
    assert {t.pooling for t in make_taps(found, "auto", {"layer2": "flatten"})} == {"auto", "flatten"}
    with pytest.raises(
        KeyError, match="pooling given for 'stage1', which is none of the tapped layers: layer1"
    ):
        make_taps(found, "auto", {"stage1": "flatten"})


def test_layouts_follow_the_forward_pass():
    layouts = {t.name: t.layout for t in make_taps(_trace(ConvRecurrent(), SERIES), ["auto", "lstm.1"])}
    assert layouts["blocks.0"] == Layout("first", 5)
    assert layouts["gru"] == Layout("last", 4, recurrent=True, batch_axis=1)
    assert layouts["fc1"] == Layout("last", 8)


@pytest.mark.parametrize("length", [7, 2])  # also where time and batch are equally long
@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_axis_of_recurrent_and_attention_layers(length, batch_first):
    model = networks.GRUClassifier(batch_first=batch_first)
    taps = make_taps(_trace(model, SERIES[:, :length]), "gru")
    assert taps[-1].layout.batch_axis == (0 if batch_first else 1)
    model = networks.TransformerClassifier(batch_first=batch_first)
    taps = make_taps(_trace(model, TOKENS[:, :length]))
    assert [t.layout.batch_axis for t in taps] == [0 if batch_first else 1] * 3


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_hidden_states_per_depth_equal_a_stack_of_single_layers(kind, bidirectional, batch_first):
    """The final state of depth d, from a hand-run of the layers below one by one."""
    x = SERIES if batch_first else SERIES.transpose(0, 1)
    stack = networks.randomised(
        kind(5, 6, num_layers=3, bidirectional=bidirectional, batch_first=batch_first)
    )
    with torch.no_grad():
        output = stack(x)
        below = x
        for depth in range(3):
            single = kind(below.shape[-1], 6, bidirectional=bidirectional, batch_first=batch_first)
            for name, p in single.named_parameters():
                p.copy_(getattr(stack, name.replace("l0", f"l{depth}")))
            below, _ = single(below)
            sequence = below if batch_first else below.transpose(0, 1)  # (N, T, D)
            expected = (
                torch.cat([sequence[:, -1, :6], sequence[:, 0, 6:]], dim=1)
                if bidirectional
                else sequence[:, -1]
            )
            torch.testing.assert_close(hidden_state(output, stack, depth)[0], expected)


def test_packed_sequences():
    gru = networks.randomised(nn.GRU(5, 6, batch_first=True))
    packed = pack_padded_sequence(SERIES, torch.tensor([3, 7]), batch_first=True, enforce_sorted=False)
    x, mask, _ = activation(gru(packed))
    assert x is not None
    assert mask is not None
    assert mask.sum(1).tolist() == [3, 7]
    pooled = Tap("gru", "gru", layout=Layout("last", recurrent=True, batch_axis=1)).read(gru(packed), gru)
    torch.testing.assert_close(pooled[0], gru(SERIES[:1, :3])[0].amax(dim=1)[0])
    torch.testing.assert_close(
        hidden_state(gru(packed), gru, 0)[0],
        torch.stack([gru(SERIES[:1, :3])[1][0, 0], gru(SERIES[1:])[1][0, 0]]),
    )


def test_first_tensor_of_any_output():
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    for output in (
        (x, y),
        [x, y],
        {"a": x, "b": y},
        {"b": y, "last_hidden_state": x},
        (None, (torch.tensor([1]), x)),
        networks.Output(None, x),
    ):
        assert activation(output)[0] is x
    for output in (None, (), {}, "text", torch.tensor([1, 2])):
        assert activation(output)[:2] == (None, None)


def test_two_probes_at_once():
    model = networks.randomised(networks.sequential_cnn()).eval()
    outer = Probe(model, [Tap("a", "3", layout=Layout("first"))])
    inner = Probe(model, [Tap("a", "3", layout=Layout("first"), pooling="channel-max")])
    with torch.no_grad(), outer.reading() as mean, inner.reading() as top:
        model(IMAGES)
    assert mean["a"].shape == (2, 4)
    assert top["a"].shape == (2, 64)
    model(IMAGES)  # nobody reads: nothing is kept
    assert len(mean) == 1


def test_what_is_disturbed_is_what_is_read():
    """Every tap of a pass: changing it by one moves what it reads, and by nothing else."""
    for make, x in [
        (networks.GRUClassifier, SERIES),
        (lambda: networks.GRUClassifier(batch_first=False), SERIES),
        (networks.TransformerClassifier, TOKENS),
        (networks.sequential_cnn, IMAGES),
        (ConvRecurrent, SERIES),
    ]:
        model = networks.randomised(make()).eval()
        taps = tuple(_trace(model, x).taps().values())
        probe = Probe(model, taps)
        with torch.no_grad():
            with probe.reading() as before:
                model(x)
            for wanted, tap in enumerate(taps):
                seen = {}

                def change(j, h, wanted=wanted, seen=seen):
                    seen[j] = h
                    return h + 1 if j == wanted else h

                with probe.reading(None, change) as after:
                    model(x)
                assert len(seen[wanted]) == len(x)
                torch.testing.assert_close(after[tap.name], before[tap.name] + 1)


def test_features_survive_what_the_network_does_in_place():
    model = networks.randomised(nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)))
    with torch.no_grad(), Probe(model, [Tap("0", "0")]).reading() as found:
        model(ROWS)
    assert torch.equal(found["0"], model[0](ROWS))
    assert bool((found["0"] < 0).any())


def test_unwrapping():
    inner = networks.sequential_cnn()
    assert unwrap(inner) is inner
    assert unwrap(nn.DataParallel(nn.DataParallel(inner))) is inner


def test_layers_without_a_tensor():
    with pytest.raises(ValueError, match="layer 'x' returned str without any floating-point tensor"):
        Tap("x", "x").read("nothing", nn.Identity())
    with pytest.raises(TypeError, match="only recurrent layers"):
        hidden_state((ROWS, ROWS), nn.Identity(), 0)
    with pytest.raises(ValueError, match="layer 'x': unknown pooling"):
        Tap("x", "x", pooling="mean").read(ROWS, nn.Identity())


def test_a_tap_reads_what_a_hook_of_the_user_made_of_the_output() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).eval()
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    hooked = Probe(model, [Tap("0", "0")])
    with torch.no_grad(), hooked.reading() as found:
        model(ROWS)
        torch.testing.assert_close(found["0"], 2 * model[0].forward(ROWS))


@pytest.mark.parametrize("name", ["encoder.layers.0.linear2", "encoder.layers.1.norm2"])
def test_parts_of_a_transformer_are_read_though_it_knows_a_short_cut(name: str) -> None:
    """In evaluation mode and without gradients its layers skip their parts unless these have hooks."""
    model = networks.TransformerClassifier().eval()
    probe = Probe(model, [Tap(name, name)])
    with torch.no_grad(), probe.reading() as found:
        model(TOKENS)
    assert found[name].shape == (2, 8)


def test_a_module_that_runs_twice_is_counted_anew_in_every_pass() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(6, 3)).eval()
    probe = Probe(model, [Tap("first", "0"), Tap("second", "0", call=2)])
    with torch.no_grad():
        before = shared(ROWS)
        for _ in range(2):
            with probe.reading() as found:
                model(ROWS)
            torch.testing.assert_close(found["first"], before)
            torch.testing.assert_close(found["second"], shared(before.relu()))
