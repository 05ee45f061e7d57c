"""Predictions kept in the cache of a study: how they are stored, and how a record finds its own again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from salgp.features import Features, load_features
from salgp.io import read_tensors
from salgp.prediction import LayerTerms, Prediction
from salgp_study.methods import Method, rows_of_prediction
from salgp_study.scores import join_predictions

__all__ = ["is_cached", "pack_prediction", "read_prediction", "unpack_prediction"]


def is_cached(out: str | os.PathLike[str], record: Mapping[str, Any]) -> bool:
    """Are the predictions of a record still there?"""
    return (Path(out) / "cache" / f"predictions-{record['cache']['predictions']}.safetensors").is_file()


def read_prediction(
    out: str | os.PathLike[str], record: Mapping[str, Any]
) -> tuple[Prediction, Tensor, Tensor]:
    """The prediction a record scored, the true labels, and the network's own confidence, read from
    the cache.
    """
    cache, keys = Path(out) / "cache", record["cache"]
    tests = (
        [t for t in record["sizes"] if t not in ("train", "validation")]
        if record["test"] == "pooled"
        else [record["test"]]
    )
    tensors, _ = read_tensors(cache / f"predictions-{keys['predictions']}.safetensors")
    parts, labels, confidence = [], [], []
    for test in tests:
        features, y = load_features(
            cache / f"features-{keys['train']}" / f"{keys['view']}-{test}.safetensors"
        )
        assert y is not None
        stem, _, row = record["method"].rpartition(" ")
        stacked = row == "G" or (row[:1] == "L" and row[1:].isdigit())
        method = Method(stem, "", per_layer=True) if stacked else Method(record["method"], "")
        parts.append(
            rows_of_prediction(
                method, unpack_prediction(tensors, test, features), features, record["rest_temperature"]
            )[record["method"]]
        )
        labels.append(y)
        confidence.append(features.confidence)
    return join_predictions(parts), torch.cat(labels), torch.cat(confidence)


def pack_prediction(prediction: Prediction) -> dict[str, Tensor]:
    """The tensors of a prediction, ready to be stored."""
    terms = prediction.layers
    parts = {
        "probs": prediction.probs,
        "confidence": prediction.confidence,
        "std": prediction.std,
        "novelty": prediction.novelty,
    }
    parts |= {"lower": prediction.lower, "upper": prediction.upper, "clipped": prediction.clipped}
    if terms is not None and terms.scale == "confidence" and not terms.additive:
        parts |= {"layers.mean": terms.mean, "layers.std": terms.std}
    return {name: x for name, x in parts.items() if x is not None}


def unpack_prediction(tensors: Mapping[str, Tensor], test: str, features: Features) -> Prediction:
    """The prediction on a test set, from the stored tensors and the features it was made on."""
    part = {name.removeprefix(f"{test}/"): x for name, x in tensors.items() if name.startswith(f"{test}/")}
    mean = part.get("layers.mean")
    terms = None if mean is None else LayerTerms(features.layer_names, mean, part.get("layers.std"))
    std, lower, upper, novelty = (part.get(name) for name in ("std", "lower", "upper", "novelty"))
    return Prediction(
        features.label,
        part["probs"],
        part["confidence"],
        std,
        lower,
        upper,
        terms,
        novelty,
        part.get("clipped"),
    )
