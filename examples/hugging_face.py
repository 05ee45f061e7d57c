"""Calibrate a Hugging Face sequence classifier; batches are the usual dictionaries.

The model here is tiny and untrained so that the example runs anywhere; put yours in its place.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import salgp

torch.manual_seed(0)
config = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=3,
)
model = BertForSequenceClassification(config)

batches = []
for _ in range(8):
    tokens = torch.randint(0, 60, (16, 12))
    batches.append(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.randint(0, 3, (16,))}
    )

classifier = salgp.calibrate(model, batches)
prediction = classifier({k: v for k, v in batches[0].items() if k != "labels"})
print("layers read:", ", ".join(classifier.calibrator.layer_widths_))
print(
    "confidence:",
    [f"{c:.2f} ± {s:.2f}" for c, s in zip(prediction.confidence[:4], prediction.std[:4], strict=True)],
)
