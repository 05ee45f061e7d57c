"""`extract` on every family of networks, every kind of batch and output; the network is byte-identical
afterwards.
"""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

import salgp
from salgp.logits import as_logits
from salgp.network.reader import Reader, read_batches
from salgp.network.taps import raw_logits
from salgp_study.backbones import build_backbone

N = 10
LABELS = torch.arange(N) % 3


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _loader(x: Tensor, batch_size: int = 4) -> DataLoader:
    return DataLoader(TensorDataset(x, LABELS), batch_size=batch_size)


def _snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
        "grad_ids": [id(p.grad) for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "placement": [(p.device, p.dtype, id(p)) for p in [*model.parameters(), *model.buffers()]],
        "modes": [m.training for m in model.modules()],
        "hooks": [
            {k: dict(v) for k, v in vars(m).items() if "hooks" in k and isinstance(v, dict)}
            for m in model.modules()
        ],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def _assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert a.numpy().tobytes() == b.numpy().tobytes()
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            _assert_same(a[k], b[k])
    else:
        assert a == b


FAMILIES = {
    "sequential": (networks.sequential_cnn, _random(N, 1, 16, 16)),
    "functional": (networks.FunctionalCNN, _random(N, 1, 16, 16)),
    "residual": (networks.ResidualNet, _random(N, 1, 64, 64)),
    "gru": (networks.GRUClassifier, _random(N, 7, 5)),
    "time-first": (lambda: networks.GRUClassifier(batch_first=False), _random(N, 7, 5)),
    "transformer": (networks.TransformerClassifier, _random(N, 7, 8)),
    "reused": (networks.ReusedNet, _random(N, 6)),
    "parallel": (lambda: nn.DataParallel(networks.sequential_cnn()), _random(N, 1, 16, 16)),
    **{
        kind: (lambda kind=kind: networks.Wrapped(kind), _random(N, 6))
        for kind in ("tuple", "list", "dict", "dataclass")
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    make, x = FAMILIES[family]
    model = networks.randomised(make()).eval()
    features, labels = salgp.extract(model, _loader(x))
    with torch.no_grad():
        torch.testing.assert_close(features.logits, raw_logits(model(x)))
    assert torch.equal(labels, LABELS)
    assert features.layers
    assert all(bool(torch.isfinite(v).all()) and v.shape[1] > 1 for v in features.layers.values())
    whole, _ = salgp.extract(model, [x])
    for name, value in features.layers.items():
        torch.testing.assert_close(value, whole.layers[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_network_is_byte_identical_afterwards(family):
    make, x = FAMILIES[family]
    model = networks.randomised(make()).train()
    raw_logits(model(x)).sum().backward()
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    list(model.modules())[-1].eval()  # partly in evaluation mode
    other = list(model.modules())[1].register_forward_hook(lambda *_: None)
    before = _snapshot(model)
    salgp.extract(model, DataLoader(TensorDataset(x, LABELS), batch_size=4, shuffle=True))
    _assert_same(_snapshot(model), before)
    other.remove()


def test_the_network_is_restored_after_an_error():
    model = networks.sequential_cnn().train()
    before = _snapshot(model)
    for layers in ("auto", ["nothing"]):
        with pytest.raises((RuntimeError, KeyError)):
            salgp.extract(
                model,
                [torch.zeros(2, 1, 16, 16) if layers != "auto" else torch.zeros(2, 3, 16, 16)],
                reader=salgp.Reader(layers=layers),
            )
    stream = read_batches(model, [torch.zeros(2, 1, 16, 16), torch.zeros(2, 3, 16, 16)], Reader())
    next(stream)
    _assert_same(_snapshot(model), before)
    with pytest.raises(RuntimeError):
        next(stream)
    _assert_same(_snapshot(model), before)


def test_a_model_in_training_mode_gives_the_features_of_evaluation_mode():
    x = _random(N, 1, 16, 16)
    model = networks.randomised(networks.sequential_cnn())
    trained, _ = salgp.extract(model.train(), _loader(x))
    evaluated, _ = salgp.extract(model.eval(), _loader(x))
    assert torch.equal(trained.logits, evaluated.logits)
    assert all(torch.equal(trained.layers[k], evaluated.layers[k]) for k in evaluated.layers)


def test_features_are_those_of_the_modules_themselves():
    x = _random(N, 1, 16, 16)
    model = networks.randomised(networks.FunctionalCNN()).eval()
    features, _ = salgp.extract(
        model, _loader(x), reader=salgp.Reader(pooling={"conv1": "channel-max", "conv2": "flatten"})
    )
    with torch.no_grad():
        first = model.conv1(x)
        second = model.conv2(first.relu())
    torch.testing.assert_close(features.layers["conv1"], first.amax(1).flatten(1))
    torch.testing.assert_close(features.layers["conv2"], second.flatten(1))
    assert bool((features.layers["fc1"] < 0).any())  # taken before the activation that overwrites it


def test_reused_modules_are_numbered():
    x = _random(N, 6)
    model = networks.randomised(networks.ReusedNet()).eval()
    features, _ = salgp.extract(model, _loader(x), reader=salgp.Reader(layers=["block"]))
    assert features.layer_names == ("block", "block@2", "block@3")
    with torch.no_grad():
        once = model.block(model.stem(x))
        torch.testing.assert_close(features.layers["block"], once)
        torch.testing.assert_close(features.layers["block@2"], model.block(once))
    only, _ = salgp.extract(model, _loader(x), reader=salgp.Reader(layers=["block@2"]))
    assert torch.equal(only.layers["block@2"], features.layers["block@2"])


def test_recurrent_layers():
    x = _random(N, 7, 5)
    model = networks.randomised(networks.GRUClassifier()).eval()
    features, _ = salgp.extract(model, _loader(x), reader=salgp.Reader(layers=["auto", "gru.2"]))
    assert features.widths == {"gru.0": 12, "gru.1": 12, "gru.2": 12, "gru": 12}
    with torch.no_grad():
        output, hidden = model.gru(x)
    torch.testing.assert_close(features.layers["gru"], output.amax(1))
    torch.testing.assert_close(features.layers["gru.1"], torch.cat([hidden[2], hidden[3]], dim=1))
    last, _ = salgp.extract(
        model, _loader(x), reader=salgp.Reader(layers="gru", pooling={"gru": "time-last"})
    )
    torch.testing.assert_close(last.layers["gru"], output[:, -1])
    time_first = networks.GRUClassifier(batch_first=False)
    time_first.load_state_dict(model.state_dict())
    other, _ = salgp.extract(time_first, _loader(x), reader=salgp.Reader(layers=["auto", "gru.2"]))
    for name, value in features.layers.items():
        torch.testing.assert_close(other.layers[name], value)


def test_sequences_of_several_lengths():
    class Packing(networks.GRUClassifier):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.fc(self.gru(packed)[1][-1].repeat(1, 2))

    x, lengths = _random(4, 7, 5), torch.tensor([7, 2, 5, 1])
    model = networks.randomised(Packing(num_layers=1)).eval()
    features, labels = salgp.extract(
        model, [(x, lengths, torch.tensor([0, 1, 2, 0]))], reader=salgp.Reader(layers=["gru", "gru.0"])
    )
    assert labels.tolist() == [0, 1, 2, 0]
    for i, length in enumerate(lengths):
        with torch.no_grad():
            output, hidden = model.gru(x[i : i + 1, :length])
        torch.testing.assert_close(features.layers["gru"][i], output[0].amax(0))
        torch.testing.assert_close(features.layers["gru.0"][i], torch.cat([hidden[0, 0], hidden[1, 0]]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [True, False])
def test_attention_masks_keep_padding_out(train):
    x, mask = _random(3, 7, 8), torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [1] * 5 + [0] * 2])
    model = networks.randomised(networks.TransformerClassifier()).train(train)
    features, _ = salgp.extract(model, [{"x": x, "attention_mask": mask}])
    with torch.no_grad():
        torch.testing.assert_close(features.logits, model.eval()(x, mask))
    short, _ = salgp.extract(model, [{"x": x[1:2, :3]}])
    for name, value in short.layers.items():
        torch.testing.assert_close(features.layers[name][1], value[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype):
    x = _random(N, 1, 16, 16)
    model = networks.randomised(networks.sequential_cnn())
    reference, _ = salgp.extract(model, _loader(x))
    features, _ = salgp.extract(copy.deepcopy(model).to(dtype), _loader(x))
    expected = dtype if dtype == torch.float64 else torch.float32
    assert {features.logits.dtype, *(v.dtype for v in features.layers.values())} == {expected}
    for name, value in reference.layers.items():
        torch.testing.assert_close(features.layers[name].float(), value, rtol=0.1, atol=0.1)
    cast, _ = salgp.extract(model, _loader(x), reader=salgp.Reader(dtype=torch.float64))
    assert {cast.logits.dtype, *(v.dtype for v in cast.layers.values())} == {torch.float64}


def test_kinds_of_batches():
    x = _random(N, 6)
    model = networks.randomised(networks.Wrapped("tensor"))
    expected, _ = salgp.extract(model, [(x, LABELS)])
    for batch in (
        [x, LABELS],
        {"x": x, "labels": LABELS},
        UserDict(x=x, label=LABELS),
        ({"x": x}, LABELS),
        (x, LABELS.tolist()),
        (x, LABELS[:, None]),
    ):
        features, labels = salgp.extract(model, [batch])
        assert torch.equal(features.logits, expected.logits)
        assert torch.equal(labels, LABELS)
    for batch in (x, (x,), {"x": x}):
        assert salgp.extract(model, [batch])[1] is None
    with pytest.raises(ValueError, match="only one of them has labels"):
        salgp.extract(model, [(x, LABELS), x])
    with pytest.raises(TypeError, match="integer class indices"):
        salgp.extract(model, [(x, LABELS.float() + 0.5)])
    with pytest.raises(TypeError, match=r"got a tuple; put one batch into a list.*\[\(x, y\)\]"):
        salgp.extract(model, (x, LABELS))
    with pytest.raises(TypeError, match=r"got a tuple; put one batch into a list.*\[\(x, y\)\]"):
        salgp.extract(model, (["one text", "another"], [0, 1]))
    several = [DataLoader(TensorDataset(x, LABELS))] * 2
    with pytest.raises(TypeError, match="gave a DataLoader in place of a batch"):
        salgp.extract(model, several)


def test_nothing_to_extract():
    with pytest.raises(ValueError, match="the loader gave no batch"):
        salgp.extract(networks.Wrapped("tensor"), [])
    with pytest.raises(ValueError, match="empty tuple"):
        salgp.extract(networks.Wrapped("tensor"), [()])
    with pytest.raises(TypeError, match="loader must yield batches, got a Tensor"):
        salgp.extract(networks.Wrapped("tensor"), _random(N, 6))


def test_no_layers_at_all():
    features, _ = salgp.extract(networks.Wrapped("tensor"), [_random(N, 6)], reader=salgp.Reader(layers=[]))
    assert features.layer_names == ()


def test_outputs_without_logits():
    with pytest.raises(ValueError, match=r"returned dict without 'logits' \(it has scores\); pass reader="):
        salgp.extract(networks.Wrapped("nameless"), [_random(N, 6)])
    features, _ = salgp.extract(
        networks.Wrapped("nameless"),
        [_random(N, 6)],
        reader=salgp.Reader(forward=lambda model, batch: model(batch)["scores"]),
    )
    assert features.logits.shape == (N, 3)
    for output in (None, "text", (torch.tensor([1]),), [torch.zeros(2, 3, 4)]):
        with pytest.raises(ValueError, match="found no logits"):
            raw_logits(output)
    with pytest.raises(ValueError, match=r"expected logits .* got \(2, 3, 4\): .* by position"):
        as_logits(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"got \(10, 1, 3\)"):
        salgp.extract(networks.Wrapped("tensor"), [_random(N, 1, 6)], reader=salgp.Reader(layers=[]))


@pytest.mark.parametrize(("kind", "at"), [("scores first", 0), ("scores last", 1)])
@pytest.mark.parametrize("layers", ["auto", []])
def test_which_of_a_tuple_are_the_scores_is_not_guessed(kind, at, layers):
    model, x = networks.randomised(networks.Wrapped(kind)), _random(N, 6)
    shapes = [r"\(n, 3\)", r"\(n, 8\)"][:: 1 if at == 0 else -1]
    says = rf"a tuple in which 2 tensors could be .* \[0\] {shapes[0]} .* \[1\] {shapes[1]}"
    with pytest.raises(ValueError, match=says + r".*forward=lambda model, batch: model\(batch\[0\]\)\[1\]"):
        salgp.extract(model, [(x, LABELS)], reader=salgp.Reader(layers=layers))
    reader = salgp.Reader(layers=layers, forward=lambda network, batch: network(batch[0])[at])
    features, _ = salgp.extract(model, [(x, LABELS)], reader=reader)
    torch.testing.assert_close(features.logits, model(x)[at].detach())


def test_a_tuple_with_one_tensor_of_scores_is_plain():
    z, hidden, loss = _random(N, 3), _random(N, 5, 8), torch.tensor(1.0)
    answers = ((z, hidden), (loss, z), [z, (hidden, hidden)], (z, LABELS), (None, z))
    assert all(raw_logits(answer) is z for answer in answers)
    assert raw_logits((loss, z[:, 0])).shape == (N,)
    for other in (z, z[:, :1], z[:, 0]):  # of a binary network any of them could be the scores
        for answer in ((z, other), [other, z]):
            with pytest.raises(ValueError, match="2 tensors could be the class scores"):
                raw_logits(answer)


@pytest.mark.parametrize("kind", ["binary", "column"])
def test_binary_networks(kind):
    model = networks.randomised(networks.Wrapped(kind, 1))
    x = _random(N, 6)
    features, _ = salgp.extract(model, [x])
    z = model(x).detach().reshape(-1)
    torch.testing.assert_close(features.logits, torch.stack([torch.zeros(N), z], dim=1))
    torch.testing.assert_close(features.probs[:, 1], torch.sigmoid(z))
    assert features.layer_names == ("body",)


def test_what_the_output_means_is_said_and_not_guessed():
    x = _random(N, 6)
    logits, _ = salgp.extract(networks.randomised(networks.Wrapped("tensor")), [x])
    for kind in ("probabilities", "log-probabilities"):
        features, _ = salgp.extract(networks.randomised(networks.Wrapped(kind)), [x], output=kind)
        torch.testing.assert_close(features.probs, logits.probs)
    raw, _ = salgp.extract(networks.randomised(networks.Wrapped("probabilities")), [x], output="logits")
    torch.testing.assert_close(raw.logits, logits.probs)  # taken for logits, as was said
    with pytest.raises(ValueError, match="the rows are not distributions"):
        salgp.extract(networks.randomised(networks.Wrapped("tensor")), [x], output="probabilities")
    with pytest.raises(ValueError, match="output must be one of"):
        salgp.extract(networks.Wrapped("tensor"), [x], output="softmax")
    hard = as_logits(torch.tensor([[1.0, 0.0]]), "probabilities")
    assert bool(torch.isfinite(hard).all())
    torch.testing.assert_close(
        as_logits(torch.tensor([0.25]), "probabilities").exp(), torch.tensor([[0.75, 0.25]])
    )
    torch.testing.assert_close(
        as_logits(torch.tensor([[0.25]]).log(), "log-probabilities").exp(), torch.tensor([[0.75, 0.25]])
    )


def test_random_state_is_handed_back_but_advances_within():
    drawn: list[float] = []

    def batches():
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            yield torch.zeros(2, 6)

    model = networks.Wrapped("tensor")
    state = torch.get_rng_state()
    stream = read_batches(model, batches(), Reader())
    for _ in stream:
        assert torch.equal(torch.get_rng_state(), state)
    assert len(set(drawn)) == 3
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_are_read_one_by_one():
    read: list[int] = []

    def batches():
        for i in range(5):
            read.append(i)
            yield torch.zeros(2, 6)

    stream = read_batches(networks.Wrapped("tensor"), batches(), Reader())
    next(stream)
    assert read == [0]
    next(stream)
    assert read == [0, 1]


def test_two_streams_over_one_model():
    x = _random(N, 1, 16, 16)
    model = networks.randomised(networks.sequential_cnn()).train()
    whole, _ = salgp.extract(model, _loader(x))
    a = read_batches(model, _loader(x), Reader())
    b = read_batches(model, _loader(x, 3), Reader(layers=["11"]))
    first = [next(stream).features for stream in (a, b, a, b)]
    assert all(m.training for m in model.modules())
    torch.testing.assert_close(
        torch.cat([first[0].layers["11"], first[2].layers["11"]]), whole.layers["11"][:8]
    )
    torch.testing.assert_close(
        torch.cat([first[1].layers["11"], first[3].layers["11"]]), whole.layers["11"][:6]
    )


def test_inputs_of_varying_size():
    model = networks.randomised(networks.GRUClassifier(num_layers=1))
    batches = [_random(2, 7, 5), _random(2, 4, 5)]
    features, _ = salgp.extract(model, batches)
    assert len(features) == 4
    with pytest.raises(
        ValueError,
        match="layer 'gru' is 84 wide in the first batch and 48 in batch 2; inputs of varying size need",
    ):
        salgp.extract(model, batches, reader=salgp.Reader(pooling="flatten"))


def test_layers_that_run_only_sometimes():
    class Fickle(networks.Wrapped):
        def forward(self, x: Tensor) -> object:
            return self.head(self.body(x) if bool(x.sum() > 0) else torch.zeros(len(x), 8))

    with pytest.raises(ValueError, match="layer 'body' did not run in this forward pass"):
        salgp.extract(Fickle("tensor"), [torch.ones(2, 6), -torch.ones(2, 6)])


def test_progress_bar_changes_nothing(capsys):
    model, x = networks.randomised(networks.Wrapped("tensor")), _random(N, 6)
    shown, _ = salgp.extract(model, _loader(x), progress=True)
    assert "reading the network" in capsys.readouterr().err
    assert torch.equal(shown.logits, salgp.extract(model, _loader(x))[0].logits)


def test_a_device_that_is_named():
    model, x = networks.randomised(networks.Wrapped("tensor")), _random(N, 6)
    assert torch.equal(
        salgp.extract(model, [x], reader=salgp.Reader(device="cpu"))[0].logits,
        salgp.extract(model, [x])[0].logits,
    )


@pytest.mark.parametrize("name", ["convnet", "aconvnet", "resnet18"])
def test_backbones_of_the_study(name):
    """The automatic choice finds the layers the study names."""
    model = build_backbone(name)
    features, _ = salgp.extract(model, [_random(2, 1, 128, 128)])
    assert features.layer_names == model.taps
