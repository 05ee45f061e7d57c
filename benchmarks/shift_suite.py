"""The data of the shift benchmark: networks, calibration data with perturbed copies, and shifted test sets.

Every case gives features as files in a cache folder, so that methods are compared on the same numbers and a
second run costs nothing. Perturbations used for fitting (`salgp.network.perturb.KINDS`) and corruptions used
for testing are disjoint:

| case | fitted on copies with | tested on |
|---|---|---|
| digits CNN | noise, gain, affine, mixup, layer noise | blur, speckle, low resolution, occlusion |
| tabular MLP (digit pixels) | noise, gain, mixup, layer noise | slanted writing; missing values, gain |
| MSTAR ConvNet, AConvNet, ResNet-18 | noise, gain, affine, mixup, layer noise | 30 deg; 17 deg corrupted |
| SPCC BiGRU | flux noise, lost epochs, dimming, stretch, layer noise | photometric set, unknown types |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset

from salgp.features import Features, load_features
from salgp.network.extract import extract
from salgp.network.perturb import FAMILIES
from salgp.network.reader import Choice
from salgp.network.rehearsal import rehearse

SEVERITIES = (0.4, 0.8)
Corruption = Callable[[Tensor, float, torch.Generator], Tensor]


@dataclass
class Case:
    """A trained network and its data; ``tests`` maps a name to its kind (``in`` or ``shift``) and samples."""

    name: str
    seed: int
    network: nn.Module
    train: TensorDataset
    calibration: TensorDataset
    tests: dict[str, tuple[str, TensorDataset]]
    perturb: str = "auto"
    layers: tuple[str, ...] | str = "auto"
    corrupted: tuple[TensorDataset, dict[str, Corruption]] | None = None
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Cached:
    """Features and labels of one case."""

    name: str
    seed: int
    train: tuple[Features, Tensor]
    calibration: tuple[Features, Tensor]
    tests: dict[str, tuple[str, Features, Tensor]]


def cached(key: str, seed: int, cache: Path, data: Path) -> Cached:
    """Features of the case called ``key``; computed and stored where they are not yet."""
    folder = cache / f"{key}-s{seed}"
    if not (folder / "done").is_file():
        _store(CASES[key](seed, cache, data), folder)
    tests = {
        p.stem.split("~", 2)[2]: (p.stem.split("~", 2)[1], *load_features(p))
        for p in sorted(folder.glob("test~*.safetensors"))
    }
    return Cached(
        key,
        seed,
        load_features(folder / "train.safetensors"),
        load_features(folder / "calibration.safetensors"),
        tests,
    )


def _store(case: Case, folder: Path) -> None:
    choice = Choice(layers=case.layers)

    def keep(name: str, data: TensorDataset) -> None:
        features, labels = extract(case.network, DataLoader(data, 128), layers=case.layers)
        features.save(folder / f"{name}.safetensors", labels)

    keep("train", case.train)
    _, features, labels = rehearse(
        case.network, DataLoader(case.calibration, 128), choice, case.perturb, seed=case.seed
    )
    features.save(folder / "calibration.safetensors", labels)
    for name, (kind, samples) in case.tests.items():
        keep(f"test~{kind}~{name}", samples)
    generator = torch.Generator().manual_seed(case.seed + 1)
    for name, corrupt in (case.corrupted[1] if case.corrupted else {}).items():
        x, *rest = case.corrupted[0].tensors
        for severity in SEVERITIES:
            keep(f"test~shift~{name} {severity}", TensorDataset(corrupt(x, severity, generator), *rest))
    (folder / "done").touch()


def blur(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    return FAMILIES["blur"](x, torch.full((len(x),), severity), generator)


def speckle(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Multiplicative gamma noise of variance ``1.5 severity^2``."""
    shape = 1.0 / (1.5 * severity**2)
    draw = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator))).gamma(
        shape, 1 / shape, tuple(x.shape)
    )
    low = x.amin()
    return low + (x - low) * torch.as_tensor(draw).to(x)


def low_resolution(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    size = max(2, round(x.shape[-1] * (1 - 0.85 * severity)))
    return interpolate(interpolate(x, size=(size, size), mode="area"), size=x.shape[-2:], mode="nearest")


def occlusion(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """A square of ``0.5 severity`` of the width set to the smallest value, at a random place."""
    h, side = x.shape[-1], round(0.5 * severity * x.shape[-1])
    corner = torch.randint(h - side + 1, (len(x), 2), generator=generator)
    grid = torch.arange(h)
    rows = (grid >= corner[:, :1]) & (grid < corner[:, :1] + side)
    columns = (grid >= corner[:, 1:]) & (grid < corner[:, 1:] + side)
    return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], float(x.amin()))


def missing_values(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.6 * severity, 0.0)


def feature_gain(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    return x * torch.exp(0.8 * severity * torch.randn(x.shape, generator=generator))


IMAGE_CORRUPTIONS: dict[str, Corruption] = {
    "blur": blur,
    "speckle": speckle,
    "low resolution": low_resolution,
    "occlusion": occlusion,
}
TABULAR_CORRUPTIONS: dict[str, Corruption] = {"missing values": missing_values, "feature gain": feature_gain}


def _fit(network: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(32):
            optimiser.zero_grad()
            cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return network.eval()


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def _digits(seed: int, cache: Path, data: Path) -> Case:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(digits.images / 16.0, dtype=torch.float32)[order, None]
    y = torch.tensor(digits.target)[order]
    blocks = [
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU()),
    ]
    network = _fit(
        _seeded(lambda: nn.Sequential(*_again(blocks), nn.Linear(64, 10)), seed), x[:500], y[:500], 25, seed
    )
    test = TensorDataset(x[800:], y[800:])
    layers = ("0", "1", "2", "3")
    return Case(
        "digits",
        seed,
        network,
        TensorDataset(x[:500], y[:500]),
        TensorDataset(x[500:800], y[500:800]),
        {"test": ("in", test)},
        layers=layers,
        corrupted=(test, IMAGE_CORRUPTIONS),
    )


def _tabular(seed: int, cache: Path, data: Path) -> Case:
    """Pixels as a table; trained on the 60 % most upright digits of each class, tested on the slanted ones
    too.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    slant = _slant(digits.images, digits.target)
    far = torch.tensor(np.abs(slant) > np.quantile(np.abs(slant), 0.6))
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    x = (x - x[~far].mean(dim=0)) / (x[~far].std(dim=0) + 0.1)
    y = torch.tensor(digits.target)
    near = (~far).nonzero()[:, 0]
    near = near[torch.randperm(len(near), generator=torch.Generator().manual_seed(seed))]
    a, b, t = near[:450], near[450:700], near[700:]
    blocks = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in ((64, 64), (64, 64), (64, 32))]
    network = _fit(
        _seeded(lambda: nn.Sequential(*_again(blocks), nn.Linear(32, 10)), seed), x[a], y[a], 40, seed
    )
    test = TensorDataset(x[t], y[t])
    tests = {"test": ("in", test), "slanted": ("shift", TensorDataset(x[far], y[far]))}
    return Case(
        "tabular",
        seed,
        network,
        TensorDataset(x[a], y[a]),
        TensorDataset(x[b], y[b]),
        tests,
        layers=("0", "1", "2"),
        corrupted=(test, TABULAR_CORRUPTIONS),
    )


def _again(blocks: list[nn.Sequential]) -> Iterator[nn.Module]:
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.reset_parameters()
        yield block


def _slant(images: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Shear of each digit from its second moments, less the median of its class."""
    rows, columns = np.mgrid[:8, :8]
    mass = images.sum((1, 2))
    dx = columns - ((images * columns).sum((1, 2)) / mass)[:, None, None]
    dy = rows - ((images * rows).sum((1, 2)) / mass)[:, None, None]
    slant = (images * dx * dy).sum((1, 2)) / (images * dy**2).sum((1, 2))
    return slant - np.array([np.median(slant[target == k]) for k in range(10)])[target]


def _mstar(study: str) -> Callable[[int, Path, Path], Case]:
    def build(seed: int, cache: Path, data: Path) -> Case:
        from salgp_study.run import open_runs

        run = next(iter(open_runs(study, "cpu", (seed,), cache / "study", data)))
        sets = run.splits.all
        rows = torch.randperm(len(sets["17"]), generator=torch.Generator().manual_seed(seed))[:700]
        sub = TensorDataset(*(t[rows] for t in sets["17"].tensors))
        tests = {"17 deg": ("in", sets["17"]), "30 deg": ("shift", sets["30"])}
        return Case(
            study,
            seed,
            run.network,
            sets["train"],
            sets["validation"],
            tests,
            layers=tuple(run.network.taps),
            corrupted=(sub, IMAGE_CORRUPTIONS),
        )

    return build


def _spcc(seed: int, cache: Path, data: Path) -> Case:
    """A third of the spectroscopic validation objects is kept for testing in domain."""
    from salgp_study.run import open_runs

    run = next(iter(open_runs("spcc-rnn", "cpu", (seed,), cache / "study", data)))
    sets = run.splits.all
    order = torch.randperm(len(sets["validation"]), generator=torch.Generator().manual_seed(seed))
    cut = 2 * len(order) // 3
    near, held = (
        TensorDataset(*(t[rows] for t in sets["validation"].tensors)) for rows in (order[:cut], order[cut:])
    )
    tests = {"spectroscopic": ("in", held), "photometric": ("shift", sets["photometric"])}
    return Case(
        "spcc-rnn", seed, run.network, sets["train"], near, tests, "light-curves", tuple(run.network.taps)
    )


CASES: dict[str, Callable[[int, Path, Path], Case]] = {
    "digits": _digits,
    "tabular": _tabular,
    "mstar-convnet": _mstar("mstar-convnet"),
    "mstar-aconvnet": _mstar("mstar-aconvnet"),
    "mstar-resnet18": _mstar("mstar-resnet18"),
    "spcc-rnn": _spcc,
}
