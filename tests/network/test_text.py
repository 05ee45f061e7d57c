"""Tokens and words disturbed: special tokens and padding stay, the mask follows, the tokenizer is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.network.batches import Batch
from salgp.network.inputs import first_tokens, real_tokens
from salgp.network.perturb import FAMILIES, KINDS
from salgp.network.reader import Reader
from salgp.network.rehearsal import rehearse
from salgp.network.text import Coder, Tokens, coder_for

START, END, PAD = 1, 2, 0
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def texts(n: int = 48, width: int = 12) -> tuple[Tensor, Tensor]:
    """Start, ordinary tokens from 3 on, end, padding."""
    g = torch.Generator().manual_seed(0)
    ids = torch.full((n, width), PAD)
    for i in range(n):
        length = 4 + i % (width - 5)
        ids[i, 0], ids[i, length + 1] = START, END
        ids[i, 1 : length + 1] = torch.randint(3, 30, (length,), generator=g)
    return ids, (ids != PAD).long()


class Bag(nn.Module):
    """Mean of embeddings over the mask, and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.hidden, self.head = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask[..., None].float()
        mean = (self.embed(input_ids) * weight).sum(dim=1) / weight.sum(dim=1)
        return self.head(self.hidden(mean).relu())


def test_special_tokens_are_seen_from_the_data() -> None:
    ids, mask = texts()
    for found in (Tokens.of([ids[:20], ids[20:]], [mask[:20], mask[20:]]), Tokens.of([ids], [None])):
        assert set(found.special.tolist()) == {START, END, PAD}
        assert found.padding == PAD
        assert min(found.words.tolist()) >= 3
        assert not found.left
    left = Tokens.of([ids.flip(1)], [mask.flip(1)])
    assert left.left


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["token-drop", "token-swap", "token-replace"])
def test_tokens_keep_their_frame(name: str, left: bool) -> None:
    ids, mask = texts()
    ids, mask = (ids.flip(1), mask.flip(1)) if left else (ids, mask)
    family = FAMILIES[name].on(Tokens.of([ids], [mask]))
    g = torch.Generator().manual_seed(0)
    assert torch.equal(family(ids, torch.zeros(len(ids)), g), ids)
    new = family(ids, torch.full((len(ids),), 0.8), g)
    assert not torch.equal(new, ids)
    for before, after in zip(ids.tolist(), new.tolist(), strict=True):
        old, now = ([t for t in row if t != PAD] for row in (before, after))
        first, last = (END, START) if left else (START, END)
        assert (now[0], now[-1]) == (first, last)
        real = now if left else now + [PAD] * (len(after) - len(now))
        assert after == ([PAD] * (len(after) - len(now)) + now if left else real)  # no hole inside
        if name == "token-swap":
            assert sorted(old) == sorted(now)
        if name == "token-drop":
            rest = iter(old)
            assert all(token in rest for token in now)  # same order, fewer of them
        if name == "token-replace":
            assert len(now) == len(old)


def test_a_text_without_a_frame_never_loses_all_its_tokens() -> None:
    """A network that is shown nothing but padding may answer NaN."""
    ids = torch.cat([torch.arange(1, 241).view(80, 3), torch.zeros(80, 5, dtype=torch.long)], dim=1)
    family = FAMILIES["token-drop"].on(Tokens.of([ids], [ids != 0]))
    new = family(ids, torch.full((80,), 1.5), torch.Generator().manual_seed(0))
    assert bool((new != ids).any())
    assert bool((new != 0).any(dim=1).all())


def test_no_token_for_nothing_and_no_mask() -> None:
    ids = torch.randint(3, 30, (20, 6), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = torch.arange(20) + 40  # no run at the end
    family = FAMILIES["token-drop"].on(Tokens.of([ids], [None]))
    new = family(ids, torch.ones(20), torch.Generator().manual_seed(0))
    assert family.spread.padding is None
    assert new.shape == ids.shape
    assert set(new.unique().tolist()) <= set(ids.unique().tolist())


@pytest.mark.parametrize("marks_padding", [False, True], ids=["marks-tokens", "marks-padding"])
@pytest.mark.parametrize("named", [True, False])
def test_the_mask_follows_the_tokens(named: bool, marks_padding: bool) -> None:
    """Whichever of the two a network's masks mark: the tokens that count, or padding, as PyTorch's do."""
    ids, real = texts()
    mask = ~real.bool() if marks_padding else real
    labels = torch.arange(len(ids)) % 3
    item: Any = {"input_ids": ids, "attention_mask": mask, "labels": labels} if named else (ids, mask, labels)
    batch = Batch.of(item)
    assert first_tokens(batch)[0] == ("input_ids" if named else 0)
    assert torch.equal(real_tokens(batch, ids), real.bool())
    assert torch.equal(real_tokens(Batch((ids[:1, :4], mask[:1, :4])), ids[:1, :4]), torch.ones(1, 4) > 0)
    seen: list[tuple[Tensor, Tensor]] = []

    class Watching(Bag):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            counts = ~attention_mask.bool() if marks_padding else attention_mask.bool()
            seen.append((input_ids, counts))
            return super().forward(input_ids, counts)

    found = rehearse(Watching(), [item], Reader(layers=("hidden",)), ["token-drop"])
    assert found.rehearsal.families == ("token-drop",)
    assert len(found.features) == 2 * len(ids)
    for tokens, counts in seen:
        assert torch.equal(counts, tokens != PAD)
    assert any(int(counts.sum()) < int(real.sum()) for _, counts in seen)


def coder() -> Coder:
    """One token per letter, frame included."""

    def decode(ids: Tensor) -> list[str]:
        return ["".join(LETTERS[t - 3] for t in row if t > 2) for row in ids.tolist()]

    def encode(lines: list[str], width: int) -> dict[str, Tensor]:
        rows = [
            [START, *(LETTERS.index(c) + 3 for c in line[: width - 2] if c in LETTERS), END] for line in lines
        ]
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "unused": ids}

    return Coder(decode, encode)


@pytest.mark.parametrize("name", [n for n in KINDS["text"] if FAMILIES[n].text])
@pytest.mark.parametrize("named", [True, False])
def test_texts_are_written_anew(name: str, named: bool) -> None:
    lines = [f"set an alarm for {w} in the morning" for w in ("six", "seven", "eight", "nine")] * 10
    made = coder().encode(lines, 48)
    ids, mask, labels = made["input_ids"], made["attention_mask"], torch.arange(40) % 3
    item: Any = {"input_ids": ids, "attention_mask": mask, "labels": labels} if named else (ids, mask, labels)
    seen: list[Tensor] = []

    class Watching(Bag):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            seen.append(input_ids)
            assert torch.equal(attention_mask.bool(), input_ids != PAD)
            return super().forward(input_ids, attention_mask)

    rehearse(Watching(), [item], Reader(layers=("hidden",)), [name], tokenizer=coder())
    copy = seen[-1]
    assert copy.shape == ids.shape
    changed = (copy != ids).any(dim=1)
    assert float(changed.double().mean()) > 0.2
    words = {word for line in coder().decode(copy) for word in line.split()}
    known = {word for line in lines for word in line.split()}
    if name in ("words-dropped", "words-swapped"):
        assert words <= known
    else:
        assert not words <= known


def test_auto_uses_the_tokenizer_where_there_is_one() -> None:
    ids, mask = texts()
    labels = torch.arange(len(ids)) % 3
    loader = [{"input_ids": ids, "attention_mask": mask, "labels": labels}]
    with_text = rehearse(Bag(), loader, Reader(), tokenizer=coder()).rehearsal
    assert with_text.families == KINDS["text"]
    assert rehearse(Bag(), loader, Reader()).rehearsal.families == KINDS["tokens"]
    features, _ = salgp.extract(Bag(), loader, perturb="auto", tokenizer=coder())
    assert len(features) == len(ids) * (1 + len(KINDS["text"]))
    with pytest.raises(ValueError, match="changes the text: pass tokenizer="):
        rehearse(Bag(), loader, Reader(), ["typos"])
    with pytest.raises(ValueError, match="needs tokens"):
        rehearse(nn.Linear(4, 3), [(torch.zeros(8, 4), labels[:8])], Reader(()), ["token-drop"])
    with pytest.raises(TypeError, match="Hugging Face tokenizer"):
        coder_for("bert")


def test_a_hugging_face_tokenizer_is_taken_as_it_is() -> None:
    class Like:
        def __call__(self, lines: list[str], **options: Any) -> dict[str, Tensor]:
            assert options["padding"] == "max_length"
            return coder().encode(lines, options["max_length"])

        def batch_decode(self, ids: Tensor, skip_special_tokens: bool) -> list[str]:
            assert skip_special_tokens
            return coder().decode(ids)

    ids, _ = texts()
    both = coder_for(Like())
    assert both.decode(ids) == coder().decode(ids)
    assert torch.equal(both.encode(["abc"], 6)["input_ids"], coder().encode(["abc"], 6)["input_ids"])
