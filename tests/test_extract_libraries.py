"""Classifiers of other libraries, built from small configurations with random weights."""

from __future__ import annotations

import pytest
import torch

import salgp

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(1, 50, (4, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [1] * 9, [1] * 2 + [0] * 7])
LABELS = torch.tensor([0, 1, 2, 0])


def _image_batch() -> dict[str, torch.Tensor]:
    return {"pixel_values": IMAGES, "labels": LABELS}


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def test_hugging_face_resnet(transformers):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 2, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    features, labels = salgp.extract(model, [_image_batch()])
    assert features.widths == {f"resnet.encoder.stages.{i}": d for i, d in enumerate([8, 8, 16, 16])}
    assert torch.equal(labels, LABELS)
    with torch.no_grad():
        torch.testing.assert_close(features.logits, model.eval()(IMAGES).logits)
        final = model.resnet(IMAGES).last_hidden_state
    torch.testing.assert_close(features.layers["resnet.encoder.stages.3"], final.mean((2, 3)))


def test_hugging_face_vit(transformers):
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    model = transformers.ViTForImageClassification(config).train()
    features, _ = salgp.extract(model, [(IMAGES, LABELS)])
    first, _ = salgp.extract(model, [_image_batch()], reader=salgp.Reader(pooling="first-token"))
    with torch.no_grad():
        output = model.eval()(IMAGES, output_hidden_states=True)
    torch.testing.assert_close(features.logits, output.logits)
    assert len(features.layers) == 3
    for name, hidden, token in zip(
        features.layer_names, output.hidden_states[1:], first.layers.values(), strict=True
    ):
        torch.testing.assert_close(features.layers[name], hidden.mean(1))
        torch.testing.assert_close(token, hidden[:, 0])


def test_hugging_face_bert_leaves_padding_out(transformers):
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    features, labels = salgp.extract(model, [batch])
    assert features.layer_names == ("bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler")
    assert torch.equal(labels, LABELS)
    with torch.no_grad():
        output = model.eval()(IDS, MASK, output_hidden_states=True)
    torch.testing.assert_close(features.logits, output.logits)
    for name, hidden in zip(features.layer_names, output.hidden_states[1:], strict=False):
        expected = torch.stack([h[: int(m.sum())].mean(0) for h, m in zip(hidden, MASK, strict=True)])
        torch.testing.assert_close(features.layers[name], expected)


def test_hugging_face_albert_runs_one_block_many_times(transformers):
    config = transformers.AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    features, _ = salgp.extract(
        transformers.AlbertForSequenceClassification(config), [{"input_ids": IDS, "attention_mask": MASK}]
    )
    shared = "albert.encoder.albert_layer_groups.0"
    assert features.layer_names[:3] == (shared, f"{shared}@2", f"{shared}@3")


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_timm(name):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model(name, num_classes=3)
    features, _ = salgp.extract(
        model, [torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))]
    )
    assert len(features.layers) == (4 if name == "resnet18" else 12)
    assert features.n_classes == 3
