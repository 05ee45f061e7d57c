"""Tokens and words disturbed: special tokens and padding stay, the mask follows, the tokenizer is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.network.augment.families import FAMILIES, KINDS, perturbed_batch, real_tokens
from salgp.network.augment.text import (
    Tokens,
    lose_words,
    misspell,
    retokenize,
    rewrite,
    swap_words,
    unknown_words,
)
from salgp.network.batches import Batch
from salgp.network.extract import read_calibration_data
from salgp.network.reader import Reader

START, END, PAD = 1, 2, 0
LETTERS = "abcdefghijklmnopqrstuvwxyz \n"


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


@pytest.mark.parametrize("name", ["token-drop", "token-swap", "token-replace"])
def test_no_copy_of_a_text_at_the_least_strength(name: str) -> None:
    ids, mask = texts()
    unlike = 3 + (torch.arange(10) + torch.arange(len(ids))[:, None]) % 20  # no token beside its equal
    ids[:, 1:-1] = torch.where(mask[:, 2:].bool(), unlike, ids[:, 1:-1])
    family = FAMILIES[name].on(Tokens.of([ids], [mask]))
    new = family(ids, torch.full((len(ids),), 0.01), torch.Generator().manual_seed(0))
    assert bool((new != ids).any(dim=1).all())


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
    assert batch.tokens[0] == ("input_ids" if named else 0)
    assert torch.equal(real_tokens(batch, ids), real.bool())
    assert torch.equal(real_tokens(Batch((ids[:1, :4], mask[:1, :4])), ids[:1, :4]), torch.ones(1, 4) > 0)
    seen: list[tuple[Tensor, Tensor]] = []

    class Masked(Bag):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            counts = ~attention_mask.bool() if marks_padding else attention_mask.bool()
            seen.append((input_ids, counts))
            return super().forward(input_ids, counts)

    found = read_calibration_data(Masked(), [item], Reader(layers=("hidden",)), ["token-drop"])
    assert found.augmentation.families == ("token-drop",)
    assert len(found.features) == 2 * len(ids)
    for tokens, counts in seen:
        assert torch.equal(counts, tokens != PAD)
    assert any(int(counts.sum()) < int(real.sum()) for _, counts in seen)


class Letters:
    """A tokenizer with one token per letter; as much of Hugging Face's interface as is needed."""

    all_special_ids = (PAD, START, END)
    model_max_length = 60

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[t - 3] for t in ids if t > 2)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [LETTERS.index(c) + 3 for c in text if c in LETTERS]


def framed(lines: list[str], width: int, before: str = "", after: str = "") -> dict[str, Tensor]:
    """Start, template and line, end, padding."""
    rows = [[START, *Letters().encode(before + line + after, False), END] for line in lines]
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


HOURS = ("six", "seven", "eight", "nine")
LINES = [f"{verb} me at {hour} in the {verb}" for verb in ("set", "wake") for hour in HOURS] * 5
LINES = [line if i % 2 else f"{line} now" for i, line in enumerate(LINES)]
WORD_FAMILIES = [n for n in KINDS["text"] if FAMILIES[n].text]


def seen_by(item: Any, name: str, tokenizer: Any = None) -> dict[str, Tensor]:
    """The last augmented batch that a network is given."""
    seen: list[dict[str, Tensor]] = []

    class Watching(Bag):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            seen.append({"input_ids": input_ids, "attention_mask": attention_mask})
            return super().forward(input_ids, attention_mask)

    read_calibration_data(Watching(), [item], Reader(("hidden",), tokenizer=tokenizer), [name])
    return seen[-1]


@pytest.mark.parametrize("name", WORD_FAMILIES)
@pytest.mark.parametrize("named", [True, False])
def test_texts_are_written_anew(name: str, named: bool) -> None:
    made, labels = framed(LINES, 48), torch.arange(40) % 3
    item: Any = {**made, "labels": labels} if named else (*made.values(), labels)
    new = seen_by(item, name, Letters())
    assert torch.equal(new["attention_mask"].bool(), new["input_ids"] != PAD)
    lines = [Letters().decode(row) for row in new["input_ids"].tolist()]
    assert not set(lines) & set(LINES)
    words = {word for line in lines for word in line.split()}
    known = {word for line in LINES for word in line.split()}
    assert (words <= known) == (name in ("words-dropped", "words-swapped"))
    assert all(row[0] == START for row in new["input_ids"].tolist())
    assert all(END in row for row in new["input_ids"].tolist())


@pytest.mark.parametrize("name", [*WORD_FAMILIES, "token-drop", "token-swap", "token-replace"])
def test_a_template_around_the_text_stays(name: str) -> None:
    """Nothing is cut off at the end, and the list of options stays as it was."""
    before, after = "choose a b\n", "\nthe answer is"
    made, labels = framed(LINES, 64, before, after), torch.arange(40) % 3
    new = seen_by({**made, "labels": labels}, name, Letters())
    for row, mask in zip(new["input_ids"].tolist(), new["attention_mask"].tolist(), strict=True):
        assert sum(mask) <= 64
        text = Letters().decode(row[: sum(mask)])
        assert text.startswith(before)
        assert text.endswith(after)


@pytest.mark.parametrize(("own_limit", "added"), [(31, 4), (40, 8), (10**30, 4)])
def test_a_text_that_gets_too_long_is_changed_less_and_not_cut(own_limit: int, added: int) -> None:
    """It may be as wide as its batch, or as the tokenizer's own limit where that is larger."""

    def longer(text: str, strength: float, chance: Any) -> str:
        return "x" * round(8 * strength) + text

    tokenizer, text = Letters(), "wake me at six in the hours"
    tokenizer.model_max_length = own_limit
    ids = torch.tensor([tokenizer.encode(text, False) + [PAD] * 4])
    tokens = Tokens(torch.tensor([PAD]), ids[ids != PAD], PAD)
    g = torch.Generator().manual_seed(0)
    new, real, _ = retokenize(ids, ids != PAD, tokens, tokenizer, longer, torch.ones(1), g)
    assert tokenizer.decode(new[real].tolist()) == "x" * added + text


def test_types_of_tokens_follow_their_words() -> None:
    first, second = framed(LINES, 40), framed(LINES[::-1], 40)
    rows, types = [], []
    for a, b in zip(first["input_ids"].tolist(), second["input_ids"].tolist(), strict=True):
        left, right = [t for t in a if t != PAD], [t for t in b[1:] if t != PAD]
        rows.append([*left, *right, *[PAD] * (100 - len(left) - len(right))])
        types.append([*[0] * len(left), *[1] * len(right), *[0] * (100 - len(left) - len(right))])
    ids = torch.tensor(rows)
    batch = Batch.of({"input_ids": ids, "attention_mask": ids != PAD, "token_type_ids": torch.tensor(types)})
    g = torch.Generator().manual_seed(0)
    new = perturbed_batch(batch, FAMILIES["words-dropped"], torch.full((40,), 0.8), g, Letters()).keywords
    for row, kind in zip(new["input_ids"].tolist(), new["token_type_ids"].tolist(), strict=True):
        assert row.count(END) == 2
        at = row.index(END)
        assert set(kind[: at + 1]) == {0}
        assert set(kind[at + 1 : row.index(END, at + 1) + 1]) == {1}


def test_a_real_end_token_that_is_also_padding_stays() -> None:
    """Many language models fill up with the token that ends a turn."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 30, (40, 12), generator=g)
    lengths = torch.arange(40) % 5 + 7
    mask = (torch.arange(12)[None] < lengths[:, None]).long()
    ids[:, 3] = END
    ids = torch.where(mask.bool(), ids, END)
    for name in ("token-drop", "token-swap", "token-replace"):
        family = FAMILIES[name].on(Tokens.of([ids], [mask]))
        batch = Batch.of({"input_ids": ids, "attention_mask": mask})
        new = perturbed_batch(batch, family, torch.full((40,), 1.0), g, None).keywords
        real = new["attention_mask"].bool()
        assert bool(((new["input_ids"] == END) & real).any(dim=1).all())
        assert bool((new["input_ids"][~real] == END).all())
        assert (name == "token-drop") == (int(real.sum()) < int(mask.sum()))


@pytest.mark.parametrize("strength", [0.01, 0.5, 2.0])
@pytest.mark.parametrize("change", [misspell, lose_words, swap_words, unknown_words])
def test_words_change_and_line_breaks_stay(change: Any, strength: float) -> None:
    texts = ["Options: a, b\n\nWhat is it?\n", "one word more", "yes", "7", "a a a"] * 20
    g = torch.Generator().manual_seed(0)
    for old, new in zip(texts, rewrite(texts, change, torch.full((100,), strength), g), strict=True):
        assert new != old
        assert new.strip()
        assert new.count("\n") == old.count("\n")
        if change is swap_words and len(set(old.split())) > 1:
            assert sorted(new.split()) == sorted(old.split())
    assert rewrite(texts, change, torch.zeros(100), g) == texts


def test_auto_uses_the_tokenizer_where_there_is_one() -> None:
    ids, mask = texts()
    labels = torch.arange(len(ids)) % 3
    loader = [{"input_ids": ids, "attention_mask": mask, "labels": labels}]
    with_text = read_calibration_data(Bag(), loader, Reader(tokenizer=Letters()), "auto").augmentation
    assert with_text.families == KINDS["text"]
    assert read_calibration_data(Bag(), loader, Reader(), "auto").augmentation.families == KINDS["tokens"]
    features, _ = salgp.extract(Bag(), loader, perturb="auto", reader=Reader(tokenizer=Letters()))
    assert len(features) == len(ids) * (1 + len(KINDS["text"]))
    with pytest.raises(ValueError, match="tokenizer="):
        read_calibration_data(Bag(), loader, Reader(), ["typos"])
    with pytest.raises(ValueError, match="needs tokens"):
        read_calibration_data(nn.Linear(4, 3), [(torch.zeros(8, 4), labels[:8])], Reader(()), ["token-drop"])
    with pytest.raises(TypeError, match="Hugging Face tokenizer"):
        Reader(tokenizer="bert")


def test_a_hugging_face_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "ship",
        "sails",
        "plane",
        "flies",
        "far",
        "fast",
        "a",
        "b",
        "c",
        "d",
        "e",
    ]
    (tmp_path / "vocab.txt").write_text(
        "\n".join([*words, *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")])
    )
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=16)
    lines = ["the ship sails far", "the plane flies fast"] * 4
    made = tokenizer(lines, padding=True, return_tensors="pt")
    batch = Batch.of({**made, "labels": torch.arange(8) % 3})
    g = torch.Generator().manual_seed(0)
    for name in WORD_FAMILIES:
        new = perturbed_batch(batch, FAMILIES[name], torch.ones(8), g, tokenizer).keywords
        assert bool((new["input_ids"][:, 0] == tokenizer.cls_token_id).all())
        assert bool((new["input_ids"] == tokenizer.sep_token_id).any(dim=1).all())
        assert new["input_ids"].shape == new["attention_mask"].shape == new["token_type_ids"].shape
        assert new["input_ids"].shape[1] <= 16
        texts = tokenizer.batch_decode(new["input_ids"], skip_special_tokens=True)
        assert all(a != b for a, b in zip(texts, lines, strict=True))
