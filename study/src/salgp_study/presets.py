"""What is run, and how much of it: the studies by name, and five presets of effort.

``smoke`` runs everything on made data in seconds; ``exact`` takes small networks and fits every Gaussian
process exactly to 200 samples, with 512 inducing rows beside it, and ``exact-all`` to all validation samples;
``cpu`` takes a few epochs on the real data; ``paper`` takes the paper's numbers. All real ones but ``paper``
read the centre 64 x 64 of each radar chip, a quarter of the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PRESETS", "STUDIES", "Experiment", "Preset", "list_studies"]


@dataclass(frozen=True)
class Experiment:
    """One network on one data set, and the methods compared on it.

    Args:
        dataset: ``mstar``, ``spcc`` or ``plasticc``.
        backbone: name of the network.
        protocol: which split of the data.
        fraction: share of the training data used.
        poolings: how feature maps become vectors.
        groups: groups of methods; None for those of the preset.
        fit_on: splits the calibrators are fitted on, each in turn: ``train``, ``validation`` or ``both``.
        arguments: of the backbone, beyond the preset's.
        label_smoothing: of the training.
    """

    dataset: str
    backbone: str
    protocol: str = "paper"
    fraction: float = 1.0
    poolings: tuple[str, ...] = ("avg", "max")
    groups: tuple[str, ...] | None = None
    fit_on: tuple[str, ...] = ("validation", "train")
    arguments: Mapping[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class Preset:
    """An amount of effort.

    Args:
        name: of the preset.
        toy: use made-up data instead of the real sets.
        epochs: of each backbone, or of a ``backbone/protocol``.
        arguments: of each backbone, beyond the number of classes.
        n_test: photometric test objects; None for all.
        gp: changes to `salgp.SALGP.paper` of every GP, per data set.
        groups: of methods, where the experiment names none.
        n_calibration: validation samples that calibrators are fitted on at most, a stratified draw.
        pooled: groups that run with every pooling of the experiment; None for all but those that
            `salgp_study.run` runs once.
        deep: arguments of the deep GP.
        max_steps: longest light curve per band.
        size: side of the centre cut out of each radar chip.
        same_steps: with a part of the training data, take more epochs, so that the number of optimiser steps
            stays the same.
        mixed: backbones trained in mixed precision (see `salgp_study.train.Recipe`).
    """

    name: str
    toy: bool
    epochs: Mapping[str, int]
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    n_test: int | None = None
    gp: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: tuple[str, ...] = (
        "conventional",
        "ml",
        "hl",
        "single",
        "dropped",
        "sum",
        "coregionalised",
        "architectures",
        "class",
        "feature",
        "concat",
        "subsets",
        "red",
        "deep",
        "evidence",
    )
    n_calibration: int | None = None
    pooled: tuple[str, ...] | None = None
    deep: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 128
    size: int = 128
    same_steps: bool = False
    mixed: tuple[str, ...] = ()


_MAIN = ("conventional", "single", "ml", "hl")
"""Groups of methods run on a variant of a network."""


def _curves(dataset: str, protocol: str) -> Experiment:
    return Experiment(dataset, "rnn", protocol, poolings=("none",))


STUDIES: Mapping[str, tuple[str, tuple[Experiment, ...]]] = {
    "mstar-convnet": ("MSTAR, ConvNet: table and figures of the paper", (Experiment("mstar", "convnet"),)),
    "mstar-aconvnet": ("MSTAR, AConvNet: table and figures of the paper", (Experiment("mstar", "aconvnet"),)),
    "mstar-resnet18": (
        "MSTAR, ResNet-18: table and figures of the paper",
        (Experiment("mstar", "resnet18"),),
    ),
    "mstar-soc": (
        "MSTAR, ConvNet, standard operating condition: train on 17 degrees, test on 15 and 30",
        (Experiment("mstar", "convnet", "soc"),),
    ),
    "mstar-soc-aconvnet": (
        "MSTAR, AConvNet: train on 17 degrees, test on 15 and 30",
        (Experiment("mstar", "aconvnet", "soc"),),
    ),
    "mstar-soc-resnet18": (
        "MSTAR, ResNet-18: train on 17 degrees, test on 15 and 30",
        (Experiment("mstar", "resnet18", "soc"),),
    ),
    "mstar-soc-smoothed": (
        "MSTAR, ConvNet trained with label smoothing .1: train on 17 degrees, test on 15 and 30",
        (Experiment("mstar", "convnet", "soc", groups=_MAIN, label_smoothing=0.1),),
    ),
    "mstar-soc-aconvnet-1x1": (
        "MSTAR, AConvNet with a last convolution of 1 x 1: train on 17 degrees, test on 15 and 30",
        (Experiment("mstar", "aconvnet", "soc", groups=_MAIN, arguments={"head": "1x1"}),),
    ),
    "mstar-soc-resnet18-preactivation": (
        "MSTAR, ResNet-18 tapped before the last ReLU: train on 17 degrees, test on 15 and 30",
        (Experiment("mstar", "resnet18", "soc", groups=_MAIN, arguments={"pre_activation": True}),),
    ),
    "mstar-adam": (
        "MSTAR, ConvNet, train on 17 degrees: the paper's own optimiser and starting points",
        (Experiment("mstar", "convnet", "soc", poolings=("avg",), groups=("adam",)),),
    ),
    "mstar-fractions": (
        "MSTAR, AConvNet, conventional methods with 100, 50, 25 and 10 % of the training "
        "data: the reliability grid",
        tuple(
            Experiment(
                "mstar",
                "aconvnet",
                fraction=f,
                poolings=("avg",),
                groups=("conventional", "ml", "hl"),
                fit_on=("validation",),
            )
            for f in (1.0, 0.5, 0.25, 0.1)
        ),
    ),
    "spcc-rnn": (
        "SPCC, recurrent network: spectroscopic training set, photometric test set",
        (_curves("spcc", "spectroscopic"),),
    ),
    "plasticc-rnn": (
        "PLAsTiCC, recurrent network: the paper's protocol, for whoever has the full set",
        (_curves("plasticc", "paper"),),
    ),
}
"""Study name -> what it is, its experiments."""

PRESETS: Mapping[str, Preset] = {
    "smoke": Preset(
        "smoke",
        toy=True,
        epochs={"convnet": 2, "aconvnet": 2, "resnet18": 1, "rnn": 2},
        arguments={
            "convnet": {"size": 32},
            "aconvnet": {"size": 32},
            "resnet18": {"width": 4},
            "rnn": {"hidden": 4},
        },
        gp={name: {"max_steps": 4, "n_inducing": 32} for name in ("mstar", "spcc", "plasticc")},
        deep={"steps": 3},
    ),
    "cpu": Preset(
        "cpu",
        toy=False,
        epochs={"convnet": 12, "convnet/soc": 30, "aconvnet": 8, "resnet18": 5, "rnn": 20},
        arguments={"convnet": {"size": 64}, "aconvnet": {"size": 64}, "rnn": {"hidden": 16}},
        n_test=4000,
        size=64,
        max_steps=24,
        same_steps=True,
        deep={"steps": 200},
    ),
    "paper": Preset(
        "paper",
        toy=False,
        epochs={"convnet": 100, "aconvnet": 100, "resnet18": 50, "rnn": 100},
        arguments={"rnn": {"hidden": 32}},
        n_test=25_000,
        deep={"steps": 2000},
        mixed=("convnet", "aconvnet", "resnet18"),
    ),
    "exact": Preset(
        "exact",
        toy=False,
        epochs={"convnet": 12, "convnet/soc": 20, "aconvnet": 8, "resnet18": 5, "rnn": 40},
        arguments={"convnet": {"size": 64}, "aconvnet": {"size": 64}, "rnn": {"hidden": 32}},
        n_test=5000,
        size=64,
        groups=(
            "conventional",
            "single",
            "ml",
            "hl",
            "sum",
            "one-start",
            "prior",
            "coregionalised",
            "additive",
            "architectures",
            "class",
            "inducing",
            "subsets",
            "deep",
        ),
        pooled=("single", "ml", "hl"),
        deep={"steps": 2000},
        n_calibration=200,
    ),
    "exact-all": Preset(
        "exact-all",
        toy=False,
        epochs={"convnet": 20, "aconvnet": 20, "resnet18": 5, "rnn": 40},
        arguments={"convnet": {"size": 64}, "aconvnet": {"size": 64}, "rnn": {"hidden": 32}},
        n_test=5000,
        size=64,
        gp={name: {"refine_steps": 40} for name in ("mstar", "spcc", "plasticc")},
        groups=(
            "conventional",
            "single",
            "ml",
            "hl",
            "sum",
            "prior",
            "coregionalised",
            "additive",
            "architectures",
            "class",
            "inducing",
        ),
        pooled=("single", "ml", "hl"),
    ),
}
"""Preset name -> preset."""


def list_studies() -> dict[str, str]:
    """Every study's name and what it is.

    Example:
        >>> "mstar-convnet" in list_studies()
        True
    """
    return {name: what for name, (what, _) in STUDIES.items()}
