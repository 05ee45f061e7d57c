"""What is found on one pass: which layers lead to the logits, and where a sequence is read."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.network.batches import Batch
from salgp.network.layers import Flow, trace
from salgp.network.reader import Reader

VOCABULARY = 50
IDS = torch.randint(3, VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([9, 4, 7, 2, 9, 5])
RIGHT = (torch.arange(9)[None] < LENGTHS[:, None]).long()


def causal(n_layers: int = 3) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_labels=3,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(config).eval()


def padded(left: bool) -> dict[str, Tensor]:
    """The same texts, with padding on one side."""
    ids = torch.where(RIGHT.bool(), IDS, 0)
    if not left:
        return {"input_ids": ids, "attention_mask": RIGHT}
    rolled = torch.stack([row.roll(9 - int(k)) for row, k in zip(ids, LENGTHS, strict=True)])
    return {"input_ids": rolled, "attention_mask": RIGHT.flip(1)}


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_causal_model_is_read_at_its_last_real_token(left: bool) -> None:
    model, batch = causal(), padded(left)
    features, _ = salgp.extract(model, [batch])
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    last = torch.full((6,), 8) if left else LENGTHS - 1
    for name, state in zip(features.layer_names[:2], states[1:3], strict=True):
        assert name.startswith("model.layers.")
        torch.testing.assert_close(features.layers[name], state[torch.arange(6), last])


def test_with_a_key_value_cache_padding_is_not_read() -> None:
    """The mask then covers the cached tokens too, and is wider than what the layers give."""
    model, batch = causal(), padded(left=False)
    prefix = torch.arange(3, 8)[None].expand(6, 5)
    together = {
        "input_ids": torch.cat([prefix, batch["input_ids"]], dim=1),
        "attention_mask": torch.cat([torch.ones_like(prefix), RIGHT], dim=1),
    }
    expected, _ = salgp.extract(model, [together])

    def cached(network: Any, item: dict[str, Tensor]) -> Tensor:
        past = network.model(input_ids=prefix[: len(item["input_ids"])], use_cache=True).past_key_values
        positions = torch.arange(5, 14)[None].expand(len(item["input_ids"]), 9)
        out = network.model(**item, past_key_values=past, position_ids=positions)
        last = item["attention_mask"][:, 5:].sum(dim=1) - 1
        return network.score(out.last_hidden_state[torch.arange(len(last)), last])

    names = [f"model.layers.{k}@2" for k in range(3)]
    with_cache = {"input_ids": batch["input_ids"], "attention_mask": together["attention_mask"]}
    features, _ = salgp.extract(
        model, [with_cache], reader=salgp.Reader(forward=cached, layers=names, pooling="time-last")
    )
    for k, name in enumerate(names):
        torch.testing.assert_close(
            features.layers[name], expected.layers[f"model.layers.{k}"], atol=1e-5, rtol=0
        )


def test_a_mask_by_position_is_read_by_the_name_the_network_has_for_it() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            weight = attention_mask[..., None].float()
            return self.head((self.embed(input_ids) * weight).sum(1) / weight.sum(1))

    batch = padded(left=False)
    labels = torch.arange(6) % 3
    by_place = (batch["input_ids"], batch["attention_mask"], labels)
    model = Pooled()
    placed, _ = salgp.extract(model, [by_place], reader=salgp.Reader(layers="embed"))
    named, _ = salgp.extract(model, [batch], reader=salgp.Reader(layers="embed"))
    assert torch.equal(placed.layers["embed"], named.layers["embed"])


def test_encoders_are_read_by_the_mean() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    reader = Reader().resolved(
        transformers.BertForSequenceClassification(config), Batch(keywords=padded(False))
    )
    assert {tap.pooling for tap in reader.taps or ()} == {"auto"}


def test_a_deep_model_is_resolved_in_a_pass_for_each_block() -> None:
    """And then read in a single one."""
    model = causal(20)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    reader = Reader().resolved(model, Batch(keywords=padded(left=False)))
    assert len(passes) <= 24
    assert len(reader.taps or ()) == 12
    assert all(tap.leads for tap in reader.taps or ())
    assert {tap.pooling for tap in reader.taps or ()} == {"time-last"}
    passes.clear()
    reader.read(model, Batch(keywords=padded(left=False)))
    assert len(passes) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_behind_no_grad_and_layers_that_lead_nowhere(frozen: bool) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.lost, self.head = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.one(x).relu_()
            x = self.two(x).relu_()
            self.lost(x)
            return self.head(x)

    model = Split().requires_grad_(not frozen)
    reader = Reader(layers=["one", "two", "lost"]).resolved(model, Batch((torch.randn(8, 4),)))
    assert {tap.name: tap.leads for tap in reader.taps or ()} == {"one": True, "two": True, "lost": False}
    assert all(p.grad is None for p in model.parameters())


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.act(self.one(x)))


class TwoStages(nn.Module):
    """Two blocks of one kind with something between them: a stack all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.leave = Stage(6), nn.Linear(6, 4), Stage(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.leave(self.down(self.enter(x))))


def test_two_blocks_of_one_kind_are_a_stack() -> None:
    features, _ = salgp.extract(TwoStages(), [torch.randn(8, 6)])
    assert list(features.layers) == ["enter", "leave"]


def test_named_and_unnamed_inputs_of_a_call() -> None:
    x, mask = torch.zeros(2, 6), torch.ones(2, 1)
    network = nn.Bilinear(6, 1, 3)
    both = Batch.given((x,), {"input2": mask}, network)
    assert both.as_made is x
    assert dict(both.keywords) == {"input2": mask}
    assert Batch.given((), {"input1": x, "input2": mask}, network).as_made == {"input1": x, "input2": mask}


def test_the_network_is_let_go_with_what_was_found_on_it() -> None:
    """Not only when Python looks for cycles: a copy may hold gigabytes."""

    def run(network: nn.Module) -> Any:
        return network(torch.ones(2, 6))

    model = TwoStages()
    found = trace(model, run)
    gc.disable()
    try:
        flow = Flow(model, found, run)
        assert all(map(flow, found.taps().values()))
        left = weakref.ref(flow)
        del flow
        assert left() is None
    finally:
        gc.enable()
