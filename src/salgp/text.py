"""Language models as classifiers: a causal model, its tokenizer, labels and a template (experimental).

A `Prompt` takes raw texts. Each is put into the template, and the logits are those of the labels' first
tokens at the last position. It is an ordinary classifier, so `salgp.calibrate`, reports, rules and monitors
take it as any other; augmented samples perturb the text and never the template.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from salgp.network.augment.text import common_start
from salgp.network.frozen_copy import frozen_copy
from salgp.network.layers import MAX_LAYERS, thinned

__all__ = ["Prompt"]

PROBES = ("a", "Zu", "7 or 8", "...")
"""Texts that begin in different ways: the tokens before all of them belong to the template."""


Rows = list[list[int]]
"""Tokens of each prompt."""


class Prompt(nn.Module):
    """A classifier of texts made of a causal language model.

    Args:
        model: a causal language model of Hugging Face, with an output layer over its vocabulary.
        tokenizer: of the model.
        labels: the answers; their first tokens must differ.
        template: with ``{text}`` and, where they are to be listed, ``{labels}``. It should not end in a
            space, which belongs to the answer.

    Example:
        >>> import transformers, tokenizers
        >>> letters = {c: k for k, c in enumerate(" abcdefghijklmnopqrstuvwxyz:?")}
        >>> characters = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
        >>> tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters)
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        >>> config = transformers.LlamaConfig(vocab_size=29, num_hidden_layers=2, **sizes)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> task = Prompt(model, tokenizer, labels=["yes", "no"], template="is {text} good?")
        >>> task(["rain", "more rain"]).shape
        torch.Size([2, 2])
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, labels: Sequence[str], template: str) -> None:
        super().__init__()
        if template.count("{text}") != 1:
            raise ValueError(f"template must hold {{text}} once, where the text goes; got {template!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.template = template
        filled = template.replace("{labels}", ", ".join(self.labels))
        self._before, self._after = filled.split("{text}")
        self._adds_special = not _begins_with_special(self._before, tokenizer)
        self.label_tokens = self._first_tokens()
        self._prefix = _Prefix(model, common_start(list(map(self._tokens, PROBES))))

    @property
    def salgp_classes(self) -> tuple[str, ...]:
        """Names of the classes, by number."""
        return self.labels

    @property
    def salgp_layers(self) -> tuple[str, ...]:
        """The model's blocks, at most so many as the automatic choice takes: what calibration reads."""
        for name, module in self.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1:
                return thinned([f"{name}.{k}" for k in range(len(module))], MAX_LAYERS)
        raise ValueError(f"found no stack of blocks in {type(self.model).__name__}; say layers=...")

    def extra_repr(self) -> str:
        """Labels and template; they are part of what the classifier is."""
        return f"labels={list(self.labels)}, template={self.template!r}"

    def forward(self, texts: Sequence[str] | str) -> Tensor:
        """Logits ``(n, c)`` of the labels for raw texts."""
        given = [texts] if isinstance(texts, str) else texts
        rows = [self._tokens(text) for text in given]
        if not rows:
            raise ValueError("expected at least one text, got none")
        inputs = self._inputs(rows)
        taken = inspect.signature(self.model.forward).parameters
        known = {name: x for name, x in inputs.items() if name in taken}
        output = self.model(**known)
        return output.logits[:, -1, list(self.label_tokens)]

    def _inputs(self, rows: Rows) -> dict[str, Any]:
        """All that a causal model may be given for prompts; the model takes some of it."""
        start = len(self._prefix.ids)
        cached = start > 0 and all(row[:start] == self._prefix.ids for row in rows)
        start = start if cached else 0
        device = next(self.model.parameters()).device
        ids, real = _left_padded([row[start:] for row in rows], device)
        before = real.new_ones(len(rows), start)
        mask = torch.cat([before, real], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions[:, start:],
            "past_key_values": self._prefix.cache(len(rows)) if cached else None,
            "logits_to_keep": 1,
        }

    def _tokens(self, text: str, answer: str = "") -> list[int]:
        prompt = f"{self._before}{text}{self._after}{answer}"
        return list(self.tokenizer(prompt, add_special_tokens=self._adds_special)["input_ids"])

    def _first_tokens(self) -> tuple[int, ...]:
        """First token of each label behind the template."""
        self._check_end()
        if not self._after[-1:].isspace():
            behind_space = self._answers(" ")
            base = len(self._tokens("a"))
            if set(behind_space) != set(self._tokens("a", " ")[base:]):
                return _different(behind_space, self.labels)
            self._after += " "  # the space is a token by itself, and part of the prompt
        return _different(self._answers(""), self.labels)

    def _answers(self, space: str) -> list[int]:
        """The token behind the template, for each label."""
        base = self._tokens("a")
        end = len(base)
        answers = []
        for label in self.labels:
            row = self._tokens("a", space + label)
            if row[:end] != base or len(row) == end:
                raise ValueError(
                    f"label {label!r} changes the last token of the template; end the template with a word "
                    f"or a sign, not with a space"
                )
            answers.append(row[end])
        return answers

    def _check_end(self) -> None:
        end = self._after.rstrip()
        written = any(end.endswith(token) for token in self.tokenizer.all_special_tokens)
        last = self._tokens("a")[-1]
        if last in self.tokenizer.all_special_ids and not written:
            raise ValueError("the tokenizer puts a special token behind every text; a causal one does not")


class _Prefix:
    """Keys and values of the tokens that all prompts begin with, computed once for the model's weights."""

    def __init__(self, model: nn.Module, ids: list[int]) -> None:
        self.model, self.ids = model, ids
        self._made: tuple[Any, Any] | None = None

    def cache(self, n: int) -> Any:
        """A key-value cache for n prompts; a pass writes into it, so every pass gets its own."""
        weights = [(p.data_ptr(), p._version) for p in self.model.parameters()]
        if self._made is None or self._made[0] != weights:
            self._made = weights, self._computed()
        cache = copy.deepcopy(self._made[1])
        cache.batch_repeat_interleave(n)
        return cache

    @torch.no_grad()
    def _computed(self) -> Any:
        device = next(self.model.parameters()).device
        ids = torch.tensor([self.ids], device=device)
        return frozen_copy(self.model)(input_ids=ids, use_cache=True).past_key_values


def _different(tokens: list[int], labels: tuple[str, ...]) -> tuple[int, ...]:
    """The tokens; refused where they do not tell the labels apart."""
    if len(labels) < 2:
        raise ValueError(f"a classifier needs at least two labels, got {list(labels)}")
    first: dict[int, str] = {}
    for token, label in zip(tokens, labels, strict=True):
        if token in first:
            raise ValueError(
                f"labels {first[token]!r} and {label!r} begin with the same token, which "
                f"cannot tell them apart; use other words, or letters such as A, B, C"
            )
        first[token] = label
    return tuple(tokens)


def _left_padded(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens ``(n, T)`` that all end at the last place, and 1 where they are real."""
    each = [torch.tensor(row, dtype=torch.long) for row in rows]
    ids = pad_sequence(each, batch_first=True, padding_side="left")
    real = pad_sequence(list(map(torch.ones_like, each)), batch_first=True, padding_side="left")
    return ids.to(device), real.to(device)  # one transfer each, however many prompts


def _begins_with_special(text: str, tokenizer: Any) -> bool:
    """Has the user written the special tokens, as a chat template does?"""
    return any(text.startswith(token) for token in tokenizer.all_special_tokens)
