"""Language models as classifiers: a causal model, its tokenizer, labels and a template (experimental).

A `Prompt` takes raw texts. Each is put into the template, and the logits are those of the labels' first
tokens at the last position. It is an ordinary classifier, so `salgp.calibrate`, reports, rules and monitors
take it as any other; augmented samples perturb the text and never the template.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        self._special = tuple(tokenizer.all_special_tokens)  # a chat template may have written them
        self._adds_special = not self._before.startswith(self._special)
        self.label_tokens = self._first_tokens()
        self._prefix = _Prefix(model, common_start(map(self._tokens, PROBES)))

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
        rows = list(map(self._tokens, given))
        if not rows:
            raise ValueError("expected at least one text, got none")
        taken = inspect.signature(self.model.forward).parameters
        known = {name: x for name, x in self._inputs(rows).items() if name in taken}
        return self.model(**known).logits[:, -1, list(self.label_tokens)]

    def _inputs(self, rows: Rows) -> dict[str, Any]:
        """All that a causal model may be given for prompts; the model takes some of it."""
        start = len(self._prefix.ids)
        if any(row[:start] != self._prefix.ids for row in rows):
            start = 0
        device = next(self.model.parameters()).device
        ids, real = _left_padded([row[start:] for row in rows], device)
        before = real.new_ones(len(rows), start)
        mask = torch.cat([before, real], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions[:, start:],
            "past_key_values": self._prefix.cache(len(rows)) if start else None,
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
        return _different(self._answers(), self.labels)

    def _answers(self, space: str = "") -> list[int]:
        """The token behind the template, for each label."""
        base = self._tokens("a")
        end = len(base)
        rows = [self._tokens("a", space + label) for label in self.labels]
        for label, row in zip(self.labels, rows, strict=True):
            if row[:end] != base or len(row) == end:
                raise ValueError(
                    f"label {label!r} changes the last token of the template; end the template with a word "
                    f"or a sign, not with a space"
                )
        return [row[end] for row in rows]

    def _check_end(self) -> None:
        written = self._after.rstrip().endswith(self._special)
        if self._tokens("a")[-1] in self.tokenizer.all_special_ids and not written:
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


def _left_padded(rows: Rows, device: torch.device) -> Tensor:
    """Tokens ``(n, T)`` that all end at the last place, and 1 where they are real."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    real = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.LongTensor([ids, real]).to(device)  # one transfer, however many prompts
