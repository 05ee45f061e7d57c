"""A causal language model as a classifier: tiny random weights, one token per character."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import salgp
from salgp.decide import choose_threshold
from salgp.text import Prompt

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz,:?"
TEMPLATE = "topics: {labels}.\nsentence: {text}\ntopic:"
LABELS = ["money", "food", "travel"]


def characters() -> Any:
    """Lets every character be a token; what it does not know is left out."""
    known = {c: k for k, c in enumerate(CHARACTERS)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE(known, []))
    )


def language_model(kind: str = "Llama") -> Any:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    }
    extra = {"intermediate_size": 32} if kind == "Llama" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(CHARACTERS), bos_token_id=0, eos_token_id=0, **sizes, **extra
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def sentences(n: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    words = ["pay", "rent", "bread", "soup", "train", "hotel", "now", "please", "the", "a"]
    return [" ".join(chance.choice(words) for _ in range(chance.randint(2, 6))) for _ in range(n)]


def task(**options: Any) -> Prompt:
    return Prompt(language_model(), characters(), labels=LABELS, template=TEMPLATE, **options)


def labelled(prompt: Prompt, n: int, seed: int) -> tuple[list[str], Tensor]:
    """Texts with the label that the model gives, and another one for a quarter of them."""
    texts = sentences(n, seed)
    with torch.no_grad():
        label = torch.cat([prompt.eval()(texts[i : i + 50]).argmax(dim=1) for i in range(0, n, 50)])
    wrong = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.25
    return texts, torch.where(wrong, (label + 1) % 3, label)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_logits_are_those_of_the_first_tokens_at_the_last_position(kind: str) -> None:
    """Padding and the cached prefix change nothing."""
    model, tokenizer = language_model(kind).eval(), characters()
    prompt = Prompt(model, tokenizer, labels=LABELS, template=TEMPLATE)
    texts = ["pay rent", "a", "please pay the train and the hotel"]
    with torch.no_grad():
        found = prompt(texts)
        for row, text in zip(found, texts, strict=True):
            whole = TEMPLATE.replace("{labels}", "money, food, travel").replace("{text}", text) + " "
            ids = torch.tensor([tokenizer(whole)["input_ids"]])
            expected = model(ids).logits[0, -1, [CHARACTERS.index(label[0]) for label in LABELS]]
            torch.testing.assert_close(row, expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(prompt(texts[1])[0], found[1], atol=2e-4, rtol=1e-4)
        assert len(prompt._prefix.ids) > 30
        given: list[int] = []
        inputs = model.get_input_embeddings()
        hook = inputs.register_forward_hook(lambda module, ids, found: given.append(ids[0].shape[1]))
        prompt(texts[1:2])
        hook.remove()
        whole = TEMPLATE.replace("{labels}", "money, food, travel").replace("{text}", "a") + " "
        assert given == [len(tokenizer(whole)["input_ids"]) - len(prompt._prefix.ids)]
        model.get_output_embeddings().weight.mul_(2)
        model.get_input_embeddings().weight.mul_(3)
        changed = prompt(texts)
        prompt._prefix.ids = []  # without the cache
        torch.testing.assert_close(changed, prompt(texts), atol=1e-4, rtol=1e-4)


def test_layers_are_read_at_the_last_token() -> None:
    prompt, texts = task(), sentences(40)
    features, _ = salgp.extract(prompt, [texts])
    assert features.layer_names == tuple(f"model.model.layers.{k}" for k in range(3))
    model, tokenizer = prompt.model.eval(), characters()
    for i in (0, 39):
        whole = TEMPLATE.replace("{labels}", "money, food, travel").replace("{text}", texts[i]) + " "
        with torch.no_grad():
            ids = torch.tensor([tokenizer(whole)["input_ids"]])
            states = model(ids, output_hidden_states=True).hidden_states
        for name, state in zip(features.layer_names[:2], states[1:3], strict=True):
            torch.testing.assert_close(features.layers[name][i], state[0, -1], atol=2e-4, rtol=1e-3)


def test_augmented_samples_change_the_text_and_nothing_else() -> None:
    seen: list[str] = []

    class Watched(transformers.PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(text)
            return super().__call__(text, **options)

    tokenizer = Watched(tokenizer_object=characters().backend_tokenizer)
    prompt = Prompt(language_model(), tokenizer, labels=LABELS, template=TEMPLATE)
    texts, labels = labelled(prompt, 40, 1)
    seen.clear()
    features, _ = salgp.extract(prompt, [(texts, labels)], perturb=["typos", "words-dropped", "layer-noise"])
    assert len(features) == 160
    before, after = TEMPLATE.replace("{labels}", "money, food, travel").split("{text}")
    assert all(text.startswith(before) and text.endswith(after + " ") for text in seen)
    inside = {text[len(before) : -len(after) - 1] for text in seen}
    assert len(inside - set(texts)) > 60


def test_calibrate_report_decide_monitor_and_load(tmp_path: Path) -> None:
    prompt = task()
    calibration, test = labelled(prompt, 120, 1), labelled(prompt, 90, 2)
    classifier = salgp.calibrate(prompt, [calibration], reference=[labelled(prompt, 90, 3)])
    assert set(classifier.augmentation.families) >= {"typos", "words-dropped", "layer-noise"}
    prediction = classifier.predict([test])
    assert torch.equal(prediction.label, classifier(test[0]).label)
    assert torch.equal(prediction.label, classifier.predict([test[0]]).label)
    page = classifier.report([test], tmp_path / "report.html").read_text()
    assert "<html" in page
    rule = choose_threshold(prediction, test[1], error=0.5)
    assert len(rule(prediction)) == 90
    monitor = salgp.Monitor.start(prediction)
    monitor.feed(prediction)
    classifier.save(tmp_path / "saved")
    again = salgp.load(tmp_path / "saved", task())
    torch.testing.assert_close(again(test[0][:5]).confidence, prediction.confidence[:5], atol=2e-4, rtol=0)
    other = Prompt(language_model(), characters(), labels=LABELS, template="sentence: {text}?")
    with pytest.raises(ValueError, match="another network"):
        salgp.load(tmp_path / "saved", other)


def test_labels_that_all_share_a_token_with_the_space_are_told_so() -> None:
    """The token is no space: it is what " cat" and " cow" begin with."""
    known = {c: k for k, c in enumerate([*CHARACTERS, " c"])}
    model = tokenizers.models.BPE(known, [(" ", "c")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    with pytest.raises(ValueError, match="'cat' and 'cow' begin with the same token"):
        Prompt(language_model(), tokenizer, labels=["cat", "cow"], template="{text} is about")


@pytest.mark.parametrize(
    ("labels", "template", "match"),
    [
        (["food", "flights"], TEMPLATE, "same token"),
        (["food"], TEMPLATE, "two labels"),
        (LABELS, "topic:", "{text} once"),
    ],
)
def test_what_cannot_work_is_refused(labels: list[str], template: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Prompt(language_model(), characters(), labels=labels, template=template)


def test_the_model_stays_as_it_was() -> None:
    prompt = task()
    prompt.model.train()
    before = {name: value.clone() for name, value in prompt.model.state_dict().items()}
    salgp.calibrate(prompt, [labelled(prompt, 60, 1)], method="temperature")
    assert all(torch.equal(before[name], value) for name, value in prompt.model.state_dict().items())
    assert all(p.grad is None for p in prompt.parameters())


def test_labels_may_be_names_of_classes(tmp_path: Path) -> None:
    prompt = task()
    texts, labels = labelled(prompt, 60, 1)
    names = [LABELS[k] for k in labels.tolist()]
    by_name = salgp.calibrate(prompt, [(texts, names)], method="temperature")
    by_number = salgp.calibrate(prompt, [(texts, labels)], method="temperature")
    assert torch.equal(by_name(texts[:3]).confidence, by_number(texts[:3]).confidence)
    page = by_name.report([(texts, names)], tmp_path / "report.html").read_text()
    assert any(name in page for name in LABELS)
    by_name.save(tmp_path / "saved")
    assert salgp.load(tmp_path / "saved", prompt).extract([(texts, names)])[1].tolist() == labels.tolist()
    with pytest.raises(ValueError, match="'sport' is none of the classes"):
        salgp.calibrate(prompt, [(texts, ["sport", *names[1:]])], method="temperature")
