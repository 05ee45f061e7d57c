"""Training of the classifiers: Adam, step schedule, cross entropy; resumable after every epoch.

Each epoch draws its order and its dropout masks from a stream seeded by ``(seed, epoch)``, so a run that was
killed and continued gives the same weights as one that never stopped. The caller's random state is left as it
was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from salgp.io import read_tensors, write_json, write_tensors

__all__ = ["Recipe", "load_weights", "seeded", "train_network"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained; the defaults are the paper's.

    Args:
        epochs: passes over the training set.
        learning_rate: of Adam.
        batch: samples per step.
        step: epochs between learning-rate drops.
        gamma: factor of each drop.
        label_smoothing: share of the target spread over all classes.
        seed: of the weights, the order and the dropout.
        mixed: multiply in half precision (bfloat16) with channels last in memory: the forward pass, and the
            backward pass through it. Loss, weights and Adam stay in single precision, and the trained
            network is an ordinary single-precision one.
    """

    epochs: int = 100
    learning_rate: float = 5e-4
    batch: int = 32
    step: int = 100
    gamma: float = 0.1
    label_smoothing: float = 0.0
    seed: int = 0
    mixed: bool = False


def train_network(
    build: Callable[[], nn.Module],
    data: TensorDataset,
    recipe: Recipe,
    folder: str | os.PathLike[str],
    progress: Progress | None = None,
) -> nn.Module:
    """Train a network, or continue, or just load it when ``folder`` holds the finished weights.

    Args:
        build: makes the untrained network; called with the recipe's seed.
        data: tensors of inputs, then the labels.
        recipe: epochs, learning rate and so on.
        folder: receives ``weights.safetensors`` and ``train.json``, and while it trains
            ``checkpoint.safetensors``.
        progress: called with a line after each epoch.

    Returns:
        The trained network in evaluation mode.

    Example:
        >>> import tempfile
        >>> x, y = torch.eye(4).repeat(8, 1), torch.arange(32) % 4
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net = train_network(
        ...         lambda: nn.Linear(4, 4), TensorDataset(x, y), Recipe(epochs=30, learning_rate=0.1), folder
        ...     )
        >>> bool((net(x).argmax(dim=1) == y).all())
        True
    """
    where = Path(folder)
    with seeded(recipe.seed):
        network = build()
    if (where / "weights.safetensors").is_file():
        return load_weights(network, where)
    network.to(memory_format=_memory_format(recipe))  # type: ignore[call-overload]
    optimiser = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate, fused=recipe.mixed)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, recipe.step, recipe.gamma)
    history = _resume(network, optimiser, schedule, where / "checkpoint.safetensors")
    for epoch in range(len(history), recipe.epochs):
        with seeded(recipe.seed * 100_003 + epoch + 1):
            history.append(_train_epoch(network, optimiser, data, recipe))
        schedule.step()
        if progress:
            progress(f"epoch {epoch + 1}/{recipe.epochs}: loss {history[-1]:.4f}")
        _checkpoint(network, optimiser, schedule, history, where / "checkpoint.safetensors")
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    write_json(where / "train.json", {"recipe": asdict(recipe), "loss": history, "n_train": len(data)})
    write_tensors(where / "weights.safetensors", network.state_dict(), {"format": "salgp-weights"})
    (where / "checkpoint.safetensors").unlink(missing_ok=True)
    return network.eval()


def load_weights(network: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Fill ``network`` with the weights of a finished training run and put it into evaluation mode."""
    tensors, _ = read_tensors(Path(folder) / "weights.safetensors")
    network.load_state_dict(tensors)
    return network.eval()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under its own random stream, and give the caller's back afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _train_epoch(
    network: nn.Module, optimiser: torch.optim.Optimizer, data: TensorDataset, recipe: Recipe
) -> float:
    network.train()
    device = next(network.parameters()).device
    total = 0.0
    for *inputs, labels in _batches(data, torch.randperm(len(data)), recipe.batch):
        if len(labels) < 2:
            continue  # batch normalisation has no variance of a single sample
        optimiser.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.mixed):
            logits = network(*(_laid_out(x.to(device), recipe) for x in inputs)).float()
        loss = nn.functional.cross_entropy(logits, labels.to(device), label_smoothing=recipe.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total += float(loss.detach()) * len(labels)
    return total / len(data)


def _memory_format(recipe: Recipe) -> torch.memory_format:
    return torch.channels_last if recipe.mixed else torch.contiguous_format


def _laid_out(x: Tensor, recipe: Recipe) -> Tensor:
    """Images in the memory format of the weights; anything else as it is."""
    return x.contiguous(memory_format=_memory_format(recipe)) if x.ndim == 4 else x


def _batches(data: TensorDataset, order: Tensor, batch: int) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        yield tuple(x[rows] for x in data.tensors)


def _checkpoint(network: nn.Module, optimiser: Any, schedule: Any, history: list[float], path: Path) -> None:
    tensors = {f"network/{name}": x for name, x in network.state_dict().items()}
    for i, moments in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser/{i}/{name}": x for name, x in moments.items()}
    rates = [group["lr"] for group in optimiser.param_groups]
    plain = {"schedule": schedule.state_dict(), "rates": rates, "history": history}
    write_tensors(path, tensors, {"format": "salgp-checkpoint", "plain": json.dumps(plain)})


def _resume(network: nn.Module, optimiser: Any, schedule: Any, path: Path) -> list[float]:
    if not path.is_file():
        return []
    tensors, metadata = read_tensors(path)
    plain = json.loads(metadata["plain"])
    network.load_state_dict({name: tensors[f"network/{name}"] for name in network.state_dict()})
    state = optimiser.state_dict()
    state["state"] = {i: _moments(tensors, i, x) for i, x in enumerate(network.parameters())}
    for group, rate in zip(state["param_groups"], plain["rates"], strict=True):
        group["lr"] = rate
    optimiser.load_state_dict(state)
    schedule.load_state_dict(plain["schedule"])
    return [float(loss) for loss in plain["history"]]


def _moments(tensors: Mapping[str, Tensor], i: int, parameter: Tensor) -> dict[str, Tensor]:
    """What Adam remembers of parameter ``i``, in memory as the parameter is: a fused step relies on it."""
    start = f"optimiser/{i}/"
    found = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    like = torch.empty_like(parameter, device="cpu")
    return {name: like.clone().copy_(x) if x.shape == like.shape else x for name, x in found.items()}
