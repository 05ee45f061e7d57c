"""Small jobs for the tests of `salgp.store`: importable by name, so that other processes can run them and be
killed.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from salgp.calibrators.gp.salgp import SALGP
from salgp.features import Features
from salgp.io.files import LOCK
from salgp.store.extraction import extract_to_store
from salgp.store.scoring import score
from salgp.store.store import FeatureStore, write_store

LAYERS, WIDTH, CLASSES = 3, 6, 4


def samples(n: int, seed: int = 0) -> tuple[Features, Tensor]:
    """Features of a latent variable seen through every layer, with over-confident logits and labels drawn
    from flatter ones.
    """
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1234)
    h = torch.randn(n, 3, generator=g)
    layers = {}
    for i in range(LAYERS):
        layers[f"layer{i}"] = torch.relu(
            h @ torch.randn(3, WIDTH, generator=fixed) + 0.3 * torch.randn(n, WIDTH, generator=g)
        )
    logits = 2.0 * h @ torch.randn(3, CLASSES, generator=fixed)
    return Features(logits, layers), torch.multinomial((0.5 * logits).softmax(1), 1, generator=g)[:, 0]


def small_store(folder: Path, n: int = 2000, rows: int = 300, dtype: str = "float32") -> FeatureStore:
    """A store of `samples`."""
    return write_store([samples(n)], folder, rows=rows, dtype=dtype)


def evidence_stores(folder: Path, n: int = 600, rows: int = 250) -> tuple[FeatureStore, FeatureStore]:
    """Calibration data with two copies of every sample, and a training set."""
    clean, labels = samples(n, seed=1)
    parts = []
    for family in range(3):
        g = torch.Generator().manual_seed(family)
        shaken = {k: x + 0.3 * family * torch.randn(x.shape, generator=g) for k, x in clean.layers.items()}
        logits = clean.logits + 0.3 * family * torch.randn(clean.logits.shape, generator=g)
        origin = (torch.arange(n), torch.full((n,), family), torch.full((n,), 0.5 * family))
        parts.append((Features(logits, shaken, *origin), labels))
    reference = write_store([samples(3 * n, seed=2)], folder / "reference", rows=rows)
    return write_store(parts, folder / "calibration", rows=rows), reference


def small_calibrator(covariance: str = "sum") -> SALGP:
    """A calibrator that is fitted in a moment."""
    return SALGP(covariance=covariance, n_inducing=24, max_steps=5, inference="inducing")


def network() -> nn.Sequential:
    """A seeded classifier of ``(n, 5)`` inputs."""
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return model


def loader(n_batches: int = 40, part: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches of different sizes."""
    g = torch.Generator().manual_seed(7 + part)
    return [
        (torch.randn(10 + i % 3, 5, generator=g), torch.randint(3, (10 + i % 3,), generator=g))
        for i in range(n_batches)
    ]


def part_loader(part: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of one of several parts."""
    return loader(4, part)


def slow_part_loader(part: int) -> list[tuple[Tensor, Tensor]]:
    """The same, so slowly that a node may die meanwhile."""
    time.sleep(1.0)
    return part_loader(part)


def extract_job(folder: str) -> None:
    """Extract into ``folder/out``."""
    torch.set_num_threads(1)
    extract_to_store(network(), loader(), f"{folder}/out", rows=20)


def score_job(folder: str) -> None:
    """Score ``folder/store`` with ``folder/calibrator`` into ``folder/out``."""
    torch.set_num_threads(1)
    score(f"{folder}/store", f"{folder}/calibrator", f"{folder}/out", layers=True, workers=2)


JOBS = {"extract": extract_job, "score": score_job}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


def score_and_die_once(marker: str, *piece: object) -> object:
    """Score a shard; the worker that comes first is killed in the middle of it."""
    import os
    import signal

    from salgp.store.scoring import score_shard

    if not Path(marker).exists():
        Path(marker).write_text(str(os.getpid()))
        Path(str(piece[2]), ".part-torn.parquet.0123456789ab.part").write_bytes(b"half a file")
        os.kill(os.getpid(), signal.SIGKILL)
    return score_shard(*piece)  # type: ignore[arg-type]
