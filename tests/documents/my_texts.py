"""A stand-in for a text project of a reader: tiny models with their tokenizers, for the documents."""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = {
    0: "eggs bread soup lunch cook dinner",
    1: "rent bank loan pay card bill",
    2: "train hotel flight visa ticket luggage",
}
FILLERS = ["where", "is", "my", "two", "please", "the", "a", "now", "help", "with", "today"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def sentences(n: int, seed: int) -> tuple[list[str], list[int]]:
    chance = random.Random(seed)
    texts, labels = [], []
    for _ in range(n):
        label = chance.randrange(3)
        topic = label if chance.random() < 0.85 else chance.randrange(3)
        words = [chance.choice(WORDS[topic].split()), *chance.sample(FILLERS, chance.randint(2, 6))]
        texts.append(" ".join(chance.sample(words, len(words))))
        labels.append(label)
    return texts, labels


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = [*FILLERS, *" ".join(WORDS.values()).split(), *"abcdefghijklmnopqrstuvwxyz"]
    pieces = [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    known = {word: k for k, word in enumerate(dict.fromkeys([*SPECIAL, *words, *pieces]))}
    made = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", known["[SEP]"]), ("[CLS]", known["[CLS]"]))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **names)


def trained(texts: list[str], labels: list[int]) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes: Any = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    network = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=3, **sizes))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(15):
        for i in range(0, len(texts), 50):
            made = tokenizer(texts[i : i + 50], padding=True, return_tensors="pt")
            loss = network(**made, labels=torch.tensor(labels[i : i + 50])).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval()


tokenizer = word_tokenizer()
train, calibration, test = sentences(300, 1), sentences(200, 2), sentences(200, 3)
model = trained(*train)

_characters = {c: k for k, c in enumerate("\n abcdefghijklmnopqrstuvwxyz,.:")}
language_tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(_characters, [])))
language_model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(_characters),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        bos_token_id=0,
        eos_token_id=0,
    )
)
