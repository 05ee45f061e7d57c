"""Outputs of a trained network for a data set of tensors, for tests of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["accuracy", "predict_logits"]


@torch.no_grad()
def predict_logits(network: nn.Module, data: TensorDataset, batch: int = 256) -> Tensor:
    """Logits ``(n, c)`` of all samples, in order."""
    parts = zip(*(x.split(batch) for x in data.tensors[:-1]), strict=True)
    return torch.cat([network(*inputs) for inputs in parts])


def accuracy(network: nn.Module, data: TensorDataset) -> float:
    """Share of samples whose label the network predicts; an unknown class (-1) never is."""
    return float((predict_logits(network, data).argmax(dim=1) == data.tensors[-1]).double().mean())
